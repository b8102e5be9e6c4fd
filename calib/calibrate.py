"""From weights, a calibration set and a goal to a quantized checkpoint: search a recipe, fill it, record what was done.

Finished work is found again by its id: a checkpoint with the same inputs is not made twice, and the sensitivity of a
model on a set is measured once for all budgets. Needs torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.calib.checkpoint_maker import (
    Calibration,
    CheckpointMaker,
    Optimize,
    Target,
    fit_recipe,
)
from harness.calib.decoder import StreamedDecoder
from harness.calib.quantize_model import library_versions, working_folder
from harness.calib.recipe_search import (
    as_recipe,
    bits_per_weight,
    cautious,
    check_budget,
    search_assignment,
    smallest_assignment,
    total_harm,
)
from harness.calib.sensitivity import (
    SENSITIVITY_VERSION,
    estimate_harm,
    measure_divergence,
    measure_output_errors,
    shortlisted,
)
from harness.calib.units import Unit, decision_units
from harness.errors import CalibrationError, RecipeError
from harness.recipe import INT8, Precision, Recipe, is_routed_expert

_INT8_ACTIVATIONS = Precision(dtype="int8", int8_activations=True)
_CANDIDATES: Mapping[Target, Sequence[str]] = {  # what a search chooses from, the lowest first
    "portable": ("int4-g128", "int8"),
    "cpu": ("int4-g128", "int4-g128-zp", "int4-g64-zp", "int4-g32-zp", "int8"),
}
_ROUNDS = 3  # recipes tried to meet a loss
_CLOSE_ENOUGH = 0.02  # bits per weight: a smaller gain is not worth another round


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the checkpoint should be: a given recipe, a budget, or a loss. Exactly one is set.

    `bits`: mean bits per decoder linear weight, scales included. `max_loss`: rise of perplexity, 0.01 for 1 %.
    """

    recipe: Recipe | None = None
    bits: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.recipe, self.bits, self.max_loss)) != 1:
            raise ValueError("a goal is one of a recipe, bits and max_loss")


def calibrate(calibration: Calibration, goal: Goal) -> Path:
    """Make a quantized checkpoint, or find it made; returns its folder.

    Raises:
        RecipeError: the budget cannot be met, or the recipe is not one that `target` allows.
        CalibrationError: weights or activations are not finite, or another run makes the same checkpoint.
    """
    if goal.recipe is not None:
        return CheckpointMaker(calibration).make(goal.recipe).folder
    spec = calibration.source.spec
    units = decision_units(spec, portable=calibration.target == "portable")
    candidates = [Precision.parse(text) for text in _CANDIDATES[calibration.target]]
    for candidate in candidates:
        fit_recipe(calibration, Recipe(name="candidate", rules=(("model.layers.*", candidate), ("*", INT8))))
    if goal.bits is not None:
        check_budget(units, candidates, goal.bits)  # before hours of measuring
    maker = CheckpointMaker(calibration)
    harm = _sensitivity(maker, units, candidates)
    if goal.bits is not None:
        feared = cautious(units, harm, spec.num_layers)
        assignment = search_assignment(units, candidates, feared, goal.bits)
        calibration.say(f"expected KL divergence {total_harm(candidates, harm, assignment):.4f} nats a token")
        found = _sensitivity_rows(units, candidates, harm, assignment)
        return maker.make(_recipe(f"mixed-{goal.bits:g}-bits", calibration, units, assignment), found).folder
    assert goal.max_loss is not None
    return _meet_loss(maker, units, candidates, harm, goal.max_loss)


def torch_device(name: str) -> torch.device:
    """The device that `--calib-device` names; `auto` is the GPU where there is one.

    Raises:
        CalibrationError: `cuda`, and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise CalibrationError("torch sees no CUDA device", "--calib-device cpu, or install torch for CUDA")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def int8_reasoning(optimize: Optimize) -> str:
    """Why int8 layers are what they are, in a sentence."""
    if optimize == "decode":
        return (
            "int8 layers are weight-only: a decoded token is bound by reading weights, and int8 activations would save "
            "no bytes of them (--optimize prefill for long prompts and large batches)"
        )
    return (
        "int8 layers are weight + activation: prefill is bound by multiplications, which are cheaper between integers; "
        "outliers are smoothed into the weights (SmoothQuant). The cpu arch quantizes activations either way; the loss "
        "printed below is of the weights alone"
    )


def _recipe(name: str, calibration: Calibration, units: Sequence[Unit], assignment: Mapping[str, Precision]) -> Recipe:
    """The assignment as a recipe; int8 layers get int8 activations for prefill, experts excepted."""
    assignment = {unit.name: unit.fit(assignment[unit.name]) for unit in units}
    if calibration.optimize == "prefill":
        # transformers, vLLM and SGLang read quantized experts only where activations are not
        plain = {unit.name for unit in units if is_routed_expert(unit.modules[0])}
        assignment = {
            name: _INT8_ACTIVATIONS if precision == INT8 and name not in plain else precision
            for name, precision in assignment.items()
        }
    return as_recipe(name, units, assignment, calibration.source.spec)


def _sensitivity_rows(
    units: Sequence[Unit],
    candidates: Sequence[Precision],
    harm: Mapping[str, Sequence[float]],
    assignment: Mapping[str, Precision],
) -> list[dict[str, object]]:
    """What the search knew, for whoever reads a report: nats a token by unit and candidate, and what was chosen."""
    return [
        {
            "unit": unit.name,
            "layer": min(unit.layers),
            "chosen": str(unit.fit(assignment[unit.name])),
            "harm": dict(zip(map(str, candidates), harm[unit.name], strict=True)),
        }
        for unit in units
    ]


def _meet_loss(
    maker: CheckpointMaker,
    units: Sequence[Unit],
    candidates: Sequence[Precision],
    harm: Mapping[str, Sequence[float]],
    max_loss: float,
) -> Path:
    """The smallest checkpoint of a few rounds whose measured rise of perplexity is within the limit."""
    calibration = maker.calibration
    feared = cautious(units, harm, calibration.source.spec.num_layers)
    scale, best, best_bits, tried = 1.0, None, float("inf"), set[float]()
    for number in range(_ROUNDS):
        scaled = {name: [h * scale for h in row] for name, row in feared.items()}
        # the log of perplexity rises by about the divergence
        assignment = smallest_assignment(units, candidates, scaled, math.log1p(max_loss))
        if number == _ROUNDS - 1 and best is None:
            assignment = {unit.name: max(candidates, key=unit.bits) for unit in units}
        bits = bits_per_weight(units, assignment)
        if bits in tried or (best is not None and bits > best_bits - _CLOSE_ENOUGH):
            break
        tried.add(bits)
        made = maker.make(
            _recipe(f"loss-{max_loss * 100:g}-percent", calibration, units, assignment),
            _sensitivity_rows(units, candidates, harm, assignment),
        )
        rise = made.loss.perplexity_after / made.loss.perplexity_before - 1
        calibration.say(f"round {number + 1} of {_ROUNDS}: {bits:.3f} bits per weight, perplexity {rise:+.2%}")
        if rise <= max_loss and bits < best_bits:
            best, best_bits = made.folder, bits
        expected = total_harm(candidates, scaled, assignment)
        seen = math.log1p(max(rise, 1e-4))
        scale *= min(4.0, max(0.25, seen / max(expected, 1e-9)))
    if best is None:
        raise RecipeError(
            f"not even the highest candidates keep the rise of perplexity within {max_loss:.2%}",
            "give a larger --max-loss, more --calib traffic to measure on, or --precision f16",
        )
    return best


def _sensitivity(
    maker: CheckpointMaker, units: Sequence[Unit], candidates: Sequence[Precision]
) -> dict[str, list[float]]:
    """Harm by unit and candidate, measured or found measured."""
    calibration = maker.calibration
    source, chosen = calibration.source, calibration.calibration_set
    parts = [
        SENSITIVITY_VERSION,
        maker.content_hash,
        chosen.fingerprint,
        [u.name for u in units],
        list(map(str, candidates)),
    ]
    identity = hashlib.sha256(json.dumps([*parts, library_versions()]).encode()).hexdigest()[:12]
    path = calibration.engines_dir / source.name / f"sensitivity-{identity}.json"
    found = _read_harm(path, units, candidates)
    if found is None:
        # of a fixed name, so that what a killed run left is used up by the next
        work = path.with_name(f".sensitivity-{identity}")

        def waiting() -> None:
            calibration.say(f"another run measures the same sensitivity (it is at work in {work}): waiting for it")

        with working_folder(work, waiting) as folder:
            try:
                found = _read_harm(path, units, candidates)  # by the run that was waited for
                if found is None:
                    maker.check_weights()
                    return _measure_harm(calibration, units, candidates, folder, path)
            finally:
                shutil.rmtree(folder)
    calibration.say(f"sensitivity found in {path}")
    return found


def _measure_harm(
    calibration: Calibration, units: Sequence[Unit], candidates: Sequence[Precision], work: Path, path: Path
) -> dict[str, list[float]]:
    """Harm by unit and candidate, measured in a working folder and kept in the file `path`."""
    decoder, samples = StreamedDecoder(calibration.source, calibration.device), calibration.calibration_set.samples
    errors = measure_output_errors(decoder, samples, units, candidates, work, calibration.on_progress)
    worst = shortlisted(units, errors, candidates[0])
    divergence = measure_divergence(
        decoder, samples, worst, candidates[0], errors.second_moments, work, calibration.on_progress
    )
    harm = estimate_harm(units, candidates, errors, divergence)
    content = {
        "output_error": errors.relative,
        "kl_divergence_at_lowest": divergence,
        "harm": {name: dict(zip(map(str, candidates), row, strict=True)) for name, row in harm.items()},
    }
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return harm


def _read_harm(path: Path, units: Sequence[Unit], candidates: Sequence[Precision]) -> dict[str, list[float]] | None:
    """Harm that was measured before; None where nothing whole is there, so that it is measured again."""
    try:
        harm = json.loads(path.read_text(encoding="utf-8"))["harm"]
        return {unit.name: [float(harm[unit.name][str(c)]) for c in candidates] for unit in units}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
