"""What calibration decides about: every linear once, what is fused together, named as recipes name it."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest

from harness.calib.units import by_input, decision_units, layer_modules, layer_of
from harness.recipe import Precision, decoder_bits_per_weight, fused_groups, linear_shapes
from harness.spec import ModelSpec

SpecOf = Callable[[str], ModelSpec]


@pytest.fixture(params=[False, True], ids=["experts by layer", "experts together"])
def experts_together(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _decoder_linears(spec: ModelSpec) -> list[str]:
    return [m for m in linear_shapes(spec) if m not in ("model.embed_tokens", "lm_head")]


def test_every_decoder_linear_is_in_one_unit(family: str, experts_together: bool, spec_of: SpecOf) -> None:
    spec = spec_of(family)
    units = decision_units(spec, experts_together=experts_together)
    members = [module for unit in units for module in unit.modules]
    assert sorted(members) == sorted(_decoder_linears(spec))
    assert len({unit.name for unit in units}) == len(units)
    shapes = linear_shapes(spec)
    assert [shape for unit in units for shape in unit.shapes] == [shapes[module] for module in members]


def test_what_lowering_fuses_is_in_one_unit(family: str, experts_together: bool, spec_of: SpecOf) -> None:
    spec = spec_of(family)
    unit_of = {m: unit.name for unit in decision_units(spec, experts_together=experts_together) for m in unit.modules}
    for group in fused_groups(spec):
        assert len({unit_of[module] for module in group}) == 1


def test_patterns_of_a_unit_match_its_modules_and_no_others(
    family: str, experts_together: bool, spec_of: SpecOf
) -> None:
    spec = spec_of(family)
    for unit in decision_units(spec, experts_together=experts_together):
        matched = [m for m in linear_shapes(spec) if any(fnmatchcase(m, pattern) for pattern in unit.patterns)]
        assert matched == list(unit.modules)


def test_units_have_names_that_a_reader_understands(spec_of: SpecOf) -> None:
    llama = [unit.name for unit in decision_units(spec_of("llama"), experts_together=False)]
    assert llama[:4] == [
        "model.layers.0.self_attn.q+k+v",
        "model.layers.0.self_attn.o",
        "model.layers.0.mlp.gate+up",
        "model.layers.0.mlp.down",
    ]
    v2 = "v2 query latent, groups, yarn"
    by_layer = [unit.name for unit in decision_units(spec_of(v2), experts_together=False)]
    assert by_layer[5:11] == [
        "model.layers.1.self_attn.q_a+kv_a_proj_with_mqa",
        "model.layers.1.self_attn.q_b",
        "model.layers.1.self_attn.o",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.shared_experts.gate+up",
        "model.layers.1.mlp.shared_experts.down",
    ]
    together = [unit for unit in decision_units(spec_of(v2), experts_together=True) if ".experts." in unit.modules[0]]
    assert [(unit.name, unit.layers) for unit in together] == [("experts of all layers", frozenset({1, 2}))]


@pytest.mark.parametrize("precision", ["int4-g128", "int4-g32-zp", "int8"])
def test_bits_of_units_are_those_of_the_recipe(
    precision: str, family: str, experts_together: bool, spec_of: SpecOf
) -> None:
    spec, parsed = spec_of(family), Precision.parse(precision)
    units = decision_units(spec, experts_together=experts_together)
    resolved = {module: parsed.fit(shape[1]) for module, shape in linear_shapes(spec).items()}
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
