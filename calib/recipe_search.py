"""The best assignment of precisions to units under a budget of bits: a multiple-choice knapsack, solved by dynamic
programming over the bits spent above the least.

Harm is taken to add up over units, which holds while each is small. The first and the last layer count double: their
inputs vary most between the calibration set and what a server will see.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from harness.calib.units import Unit
from harness.errors import RecipeError
from harness.recipe import INT8, Precision, Recipe
from harness.spec import ModelSpec

_STEPS = 20_000  # resolution of the budget
_OUTER_LAYERS_CAUTION = 2.0

Assignment = dict[str, Precision]
"""Precision by name of unit."""


def bits_per_weight(units: Sequence[Unit], assignment: Mapping[str, Precision]) -> float:
    """Mean bits of the decoder's linear weights, scales and zero points included."""
    return sum(unit.bits(assignment[unit.name]) for unit in units) / sum(unit.num_weights for unit in units)


def cautious(units: Sequence[Unit], harm: Mapping[str, Sequence[float]], num_layers: int) -> dict[str, list[float]]:
    """Harm with that of units in the first and the last layer counted double."""
    outer = {0, num_layers - 1}
    return {
        unit.name: [h * (_OUTER_LAYERS_CAUTION if unit.layers & outer else 1.0) for h in harm[unit.name]]
        for unit in units
    }


def check_budget(units: Sequence[Unit], candidates: Sequence[Precision], bits: float) -> None:
    """Check that a budget can be met at all, which needs no measurement.

    Raises:
        RecipeError: not even the lowest candidates meet it; says the least that can be.
    """
    least = bits_per_weight(units, {unit.name: min(candidates, key=unit.bits) for unit in units})
    if bits < least - 1e-6:
        needed = math.ceil(least * 1000) / 1000  # rounded up: it is to be given back
        raise RecipeError(
            f"{bits:g} bits per weight cannot be met: this model needs at least {needed:g}",
            "give --bits that much or more, or a --recipe with per-channel int4 and --for cpu",
        )


def search_assignment(
    units: Sequence[Unit], candidates: Sequence[Precision], harm: Mapping[str, Sequence[float]], bits: float
) -> Assignment:
    """The assignment of least total harm with at most `bits` per weight.

    Args:
        harm: by unit, one number for each candidate.

    Raises:
        RecipeError: not even the lowest candidates meet the budget.
    """
    check_budget(units, candidates, bits)
    cost = np.array([[unit.bits(candidate) for candidate in candidates] for unit in units])
    least = cost.min(axis=1)
    spare = bits * sum(unit.num_weights for unit in units) - least.sum()
    # one step of the budget is one column; what a choice costs above the least is rounded up, so the budget holds
    width = max(spare, 1.0) / _STEPS
    steps = np.ceil((cost - least[:, None]) / width - 1e-9).astype(np.int64)
    total = np.zeros(_STEPS + 1)
    chosen = np.zeros((len(units), _STEPS + 1), np.int16)
    for row, unit in enumerate(units):
        best = np.full(_STEPS + 1, np.inf)
        for column, step in enumerate(steps[row]):
            if step > _STEPS:
                continue
            offered = np.full(_STEPS + 1, np.inf)
            offered[step:] = total[: _STEPS + 1 - step] + harm[unit.name][column]
            better = offered < best
            best[better], chosen[row, better] = offered[better], column
        total = best
    assignment, left = {}, _STEPS
    for row in range(len(units) - 1, -1, -1):
        column = int(chosen[row, left])
        assignment[units[row].name] = candidates[column]
        left -= int(steps[row, column])
    return {unit.name: assignment[unit.name] for unit in units}


def smallest_assignment(
    units: Sequence[Unit], candidates: Sequence[Precision], harm: Mapping[str, Sequence[float]], limit: float
) -> Assignment:
    """The assignment of fewest bits whose total harm is at most `limit`; the highest if none is."""
    low = bits_per_weight(units, {unit.name: min(candidates, key=unit.bits) for unit in units})
    # a little more than the highest takes, for costs are rounded up in the search
    high = 0.1 + bits_per_weight(units, {unit.name: max(candidates, key=unit.bits) for unit in units})
    for _ in range(12):
        middle = (low + high) / 2
        found = search_assignment(units, candidates, harm, middle)
        if total_harm(candidates, harm, found) <= limit:
            high = middle
        else:
            low = middle
    return search_assignment(units, candidates, harm, high)


def total_harm(
    candidates: Sequence[Precision], harm: Mapping[str, Sequence[float]], assignment: Mapping[str, Precision]
) -> float:
    """Sum over all units."""
    return sum(harm[name][candidates.index(precision)] for name, precision in assignment.items())


def as_recipe(name: str, units: Sequence[Unit], assignment: Mapping[str, Precision], spec: ModelSpec) -> Recipe:
    """The assignment as rules: embeddings and output int8, the units off the commonest precision, then that one."""
    weights: Counter[Precision] = Counter()
    for unit in units:
        weights[assignment[unit.name]] += unit.num_weights
    usual = weights.most_common(1)[0][0]
    rules = [("model.embed_tokens", INT8)]
    if not spec.tie_word_embeddings:
        rules.append(("lm_head", INT8))
    rules += [
        (pattern, assignment[unit.name])
        for unit in units
        if assignment[unit.name] != usual
        for pattern in unit.patterns
    ]
    return Recipe(name=name, rules=(*rules, ("*", usual)))
