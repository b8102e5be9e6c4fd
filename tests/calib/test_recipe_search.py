"""The search for a recipe, against every assignment there is, and its way through a recipe file and back."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from harness.calib.recipe_search import (
    Assignment,
    as_recipe,
    bits_per_weight,
    cautious,
    search_assignment,
    smallest_assignment,
    total_harm,
)
from harness.calib.units import Unit, decision_units
from harness.errors import RecipeError
from harness.recipe import INT8, Precision, dump_recipe, linear_shapes, load_recipe
from harness.spec import ModelSpec

_CANDIDATES = [Precision.parse(text) for text in ("int4-g128", "int4-g32", "int4-g32-zp", "int8")]
_STEP = 1 / 20_000  # the budget's resolution, of what it leaves to spend

Harm = dict[str, list[float]]
Array = npt.NDArray[np.float64]


def _unit(number: int, out: int, inner: int) -> Unit:
    module = f"model.layers.{number}.mlp.down_proj"
    return Unit(name=module, modules=(module,), patterns=(module,), shapes=((out, inner),))


def _instance(seed: int) -> tuple[list[Unit], Harm]:
    """Six units of random sizes; more bits do not always harm less."""
    random = np.random.default_rng(seed)
    units = [_unit(i, int(random.integers(16, 400)), int(random.choice([64, 96, 128, 256]))) for i in range(6)]
    harm = {
        u.name: (10 ** random.uniform(-3, 0) * np.array([1, 0.5, 0.4, 0.01]) * random.uniform(0.5, 1.5, 4))
        for u in units
    }
    return units, {name: row.tolist() for name, row in harm.items()}


def _all_assignments(units: list[Unit], harm: Harm) -> tuple[Array, Array]:
    """Bits per weight and harm of every assignment there is."""
    every = np.array(list(itertools.product(range(len(_CANDIDATES)), repeat=len(units))))
    bits = np.array([[unit.bits(candidate) for candidate in _CANDIDATES] for unit in units])
    rows = np.arange(len(units))
    total = np.array(list(harm.values()))[rows, every].sum(axis=1)
    return bits[rows, every].sum(axis=1) / sum(unit.num_weights for unit in units), total


@pytest.mark.parametrize("seed", range(4))
def test_search_finds_the_best_of_all_assignments(seed: int) -> None:
    units, harm = _instance(seed)
    all_bits, all_harm = _all_assignments(units, harm)
    least = all_bits.min()
    previous = np.inf
    for budget in np.linspace(least, 8.2, 12):
        found = search_assignment(units, _CANDIDATES, harm, budget)
        bits, reached = bits_per_weight(units, found), total_harm(_CANDIDATES, harm, found)
        # each unit's cost is rounded up to a step, so the search is exact for a budget between these two
        rounding = len(units) * _STEP * (budget - least)
        assert bits <= budget + 1e-9
        assert reached >= all_harm[all_bits <= budget + 1e-9].min() - 1e-12
        assert reached <= all_harm[all_bits <= budget - rounding + 1e-9].min() + 1e-12
        assert reached <= previous
        previous = reached


def test_the_least_budget_is_met_and_less_is_refused_with_it() -> None:
    units, harm = _instance(0)
    least = bits_per_weight(units, {unit.name: _CANDIDATES[0] for unit in units})
    assert bits_per_weight(units, search_assignment(units, _CANDIDATES, harm, least)) == least
    with pytest.raises(RecipeError, match=r"4\.01 bits per weight cannot be met") as refusal:
        search_assignment(units, _CANDIDATES, harm, 4.01)
    named = re.search(r"at least ([\d.]+)", str(refusal.value))
    assert named is not None
    assert float(named[1]) == pytest.approx(least, abs=1e-3)
    # what the message asks for is enough
    assert bits_per_weight(units, search_assignment(units, _CANDIDATES, harm, float(named[1]))) <= float(named[1])


def test_more_than_enough_gives_each_unit_what_harms_it_least() -> None:
    units, harm = _instance(1)
    found = search_assignment(units, _CANDIDATES, harm, 16.0)
    assert found == {name: _CANDIDATES[int(np.argmin(row))] for name, row in harm.items()}


def test_the_first_and_the_last_layer_come_first() -> None:
    units = [_unit(number, 64, 128) for number in range(4)]
    candidates = [_CANDIDATES[0], INT8]
    harm = {unit.name: [h, 0.0] for unit, h in zip(units, (1.0, 1.9, 1.7, 0.9), strict=True)}
    feared = cautious(units, harm, num_layers=4)
    assert feared == {unit.name: [h, 0.0] for unit, h in zip(units, (2.0, 1.9, 1.7, 1.8), strict=True)}
    # enough for one int8 unit, then for two
    low, high = units[0].bits(candidates[0]), units[0].bits(INT8)
    for num_high, expected in ((1, [0]), (2, [0, 1]), (3, [0, 1, 3])):
        budget = (num_high * high + (4 - num_high) * low) / (4 * units[0].num_weights) + 0.01
        found = search_assignment(units, candidates, feared, budget)
        assert [n for n, unit in enumerate(units) if found[unit.name] == INT8] == expected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.02, 0.2, 0.7])
def test_smallest_assignment_meets_the_limit_with_the_fewest_bits(seed: int, share: float) -> None:
    units, harm = _instance(seed)
    all_bits, all_harm = _all_assignments(units, harm)
    limit = all_harm.min() + share * (all_harm[all_bits.argmin()] - all_harm.min())
    found = smallest_assignment(units, _CANDIDATES, harm, limit)
    assert total_harm(_CANDIDATES, harm, found) <= limit
    assert bits_per_weight(units, found) <= all_bits[all_harm <= limit].min() + 0.003


def test_smallest_assignment_at_the_ends() -> None:
    units = [_unit(number, 64, 128) for number in range(7)]
    harm = {unit.name: [1.0, 0.5, 0.4, 0.1] for unit in units}
    assert set(smallest_assignment(units, _CANDIDATES, harm, 100.0).values()) == {_CANDIDATES[0]}
    for limit in (0.0, 0.7001):  # out of reach, and within that of the highest alone
        assert set(smallest_assignment(units, _CANDIDATES, harm, limit).values()) == {INT8}


def _random_assignment(units: list[Unit], seed: int) -> Assignment:
    random = np.random.default_rng(seed)
    return {unit.name: _CANDIDATES[int(random.integers(4))] for unit in units}


@pytest.mark.parametrize("portable", [False, True])
def test_a_recipe_file_gives_the_assignment_back(
    family: str, portable: bool, spec_of: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    spec = spec_of(family)
    units = decision_units(spec, portable=portable)
    shapes = linear_shapes(spec)
    for seed in range(4):
        assignment = _random_assignment(units, seed)
        file = tmp_path / "recipe.yaml"
        file.write_text(dump_recipe(as_recipe("mixed-4.5-bits", units, assignment, spec)))
        recipe = load_recipe(file)
        expected = {m: assignment[unit.name].fit(shapes[m][1]) for unit in units for m in unit.modules}
        expected["model.embed_tokens"] = INT8
        if not spec.tie_word_embeddings:
            expected["lm_head"] = INT8
        assert recipe.name == "mixed-4.5-bits"
        assert recipe.resolve(spec) == expected
        assert recipe.unused_rules(spec) == []


def test_the_commonest_precision_is_the_rule_and_the_rest_exceptions(spec_of: Callable[[str], ModelSpec]) -> None:
    spec = spec_of("llama tied, all biases")
    units = decision_units(spec, portable=True)
    assignment = {unit.name: INT8 if ".q+k+v" in unit.name else _CANDIDATES[0] for unit in units}
    rules = as_recipe("r", units, assignment, spec).rules
    assert rules[0] == ("model.embed_tokens", INT8)
    assert rules[1:4] == tuple((f"model.layers.0.self_attn.{kind}_proj", INT8) for kind in "qkv")
    assert rules[-1] == ("*", _CANDIDATES[0])
    assert len(rules) == 1 + 3 * 3 + 1
