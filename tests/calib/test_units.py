"""What calibration decides about: every linear once, what is fused together, named as recipes name it."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest

from harness.calib.units import Unit, by_input, decision_units, layer_modules, layer_of, portable_recipe
from harness.recipe import Precision, Recipe, decoder_bits_per_weight, fused_groups, linear_shapes
from harness.spec import ModelSpec

SpecOf = Callable[[str], ModelSpec]


@pytest.fixture(params=[False, True], ids=["experts by layer", "experts together"])
def portable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _decoder_linears(spec: ModelSpec) -> list[str]:
    return [m for m in linear_shapes(spec) if m not in ("model.embed_tokens", "lm_head")]


def test_every_decoder_linear_is_in_one_unit(family: str, portable: bool, spec_of: SpecOf) -> None:
    spec = spec_of(family)
    units = decision_units(spec, portable=portable)
    members = [module for unit in units for module in unit.modules]
    assert sorted(members) == sorted(_decoder_linears(spec))
    assert len({unit.name for unit in units}) == len(units)
    shapes = linear_shapes(spec)
    assert [shape for unit in units for shape in unit.shapes] == [shapes[module] for module in members]


def test_what_lowering_fuses_is_in_one_unit(family: str, portable: bool, spec_of: SpecOf) -> None:
    spec = spec_of(family)
    unit_of = {m: unit.name for unit in decision_units(spec, portable=portable) for m in unit.modules}
    for group in fused_groups(spec):
        assert len({unit_of[module] for module in group}) == 1


def test_patterns_of_a_unit_match_its_modules_and_no_others(family: str, portable: bool, spec_of: SpecOf) -> None:
    spec = spec_of(family)
    for unit in decision_units(spec, portable=portable):
        matched = [m for m in linear_shapes(spec) if any(fnmatchcase(m, pattern) for pattern in unit.patterns)]
        assert matched == list(unit.modules)


def test_units_have_names_that_a_reader_understands(spec_of: SpecOf) -> None:
    llama = [unit.name for unit in decision_units(spec_of("llama"), portable=False)]
    assert llama[:4] == [
        "model.layers.0.self_attn.q+k+v",
        "model.layers.0.self_attn.o",
        "model.layers.0.mlp.gate+up",
        "model.layers.0.mlp.down",
    ]
    v2 = "v2 query latent, groups, yarn"
    by_layer = [unit.name for unit in decision_units(spec_of(v2), portable=False)]
    assert by_layer[5:11] == [
        "model.layers.1.self_attn.q_a+kv_a_proj_with_mqa",
        "model.layers.1.self_attn.q_b",
        "model.layers.1.self_attn.o",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.shared_experts.gate+up",
        "model.layers.1.mlp.shared_experts.down",
    ]
    together = [unit for unit in decision_units(spec_of(v2), portable=True) if ".experts." in unit.modules[0]]
    assert [(unit.name, unit.layers) for unit in together] == [("experts of all layers", frozenset({1, 2}))]


@pytest.mark.parametrize("precision", ["int4-g128", "int4-g32-zp", "int8"])
def test_bits_of_units_are_those_of_the_recipe(precision: str, family: str, portable: bool, spec_of: SpecOf) -> None:
    spec, parsed = spec_of(family), Precision.parse(precision)
    units = decision_units(spec, portable=portable)
    recipe = Recipe(name="r", rules=(("*", parsed),))
    resolved = (portable_recipe(recipe, spec) if portable else recipe).resolve(spec)
    mean = sum(unit.bits(parsed) for unit in units) / sum(unit.num_weights for unit in units)
    assert mean == pytest.approx(decoder_bits_per_weight(spec, resolved), abs=6e-5)


def test_modules_of_a_layer_are_its_own(family: str, spec_of: SpecOf) -> None:
    spec = spec_of(family)
    by_layer = [layer_modules(spec, number) for number in range(spec.num_layers)]
    assert [m for modules in by_layer for m in modules] == _decoder_linears(spec)
    assert [{layer_of(m) for m in modules} for modules in by_layer] == [{0}, {1}, {2}]


def test_modules_that_share_an_input_are_of_one_width(family: str, spec_of: SpecOf) -> None:
    """That they see the same values is tested where values flow, in test_statistics."""
    spec = spec_of(family)
    shapes = linear_shapes(spec)
    for modules in by_input(_decoder_linears(spec)).values():
        assert len({shapes[module][1] for module in modules}) == 1
        assert len({module.rpartition(".")[0] for module in modules}) == 1


def unit_of_widths(*widths: int, portable: bool = True) -> Unit:
    names = tuple(f"model.layers.0.mlp.experts.{n}.up_proj" for n in range(len(widths)))
    return Unit(name="u", modules=names, patterns=names, shapes=tuple((8, w) for w in widths), portable=portable)


@pytest.mark.parametrize(
    ("widths", "asked", "expected"),
    [
        ((256, 128), "int4-g128", "int4-g128"),
        ((192, 64), "int4-g128", "int4-g128"),  # each module falls to 64 by itself
        ((256, 192), "int4-g128", "int4-g64"),
        ((256, 96), "int4-g128", "int8"),
        ((256, 99), "int4-g64", "int8"),
        ((96,), "int4-g128", "int8"),
        ((96,), "int4-g32", "int4-g32"),  # not portable as it was asked for: that is refused elsewhere
        ((99,), "f16", "f16"),
    ],
)
def test_a_portable_unit_gets_what_its_inputs_allow(widths: tuple[int, ...], asked: str, expected: str) -> None:
    precision = Precision.parse(asked)
    assert str(unit_of_widths(*widths).fit(precision)) == expected
    assert unit_of_widths(*widths, portable=False).fit(precision) == precision


def test_a_recipe_that_fits_stays_as_it_is_written(family: str, spec_of: SpecOf) -> None:
    spec = spec_of(family)
    asked = Recipe(name="r", rules=(("*.0.*", Precision.parse("int8-a8")), ("*", Precision.parse("int4-g32-zp"))))
    assert portable_recipe(asked, spec) == asked
