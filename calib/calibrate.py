"""From weights, a calibration set and a goal to a quantized checkpoint: search a recipe, fill it, record what was done.

Finished work is found again by its id: a checkpoint with the same inputs is not made twice, and the sensitivity of a
model on a set is measured once for all budgets. Needs torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from harness.calib.calibration_set import CalibrationSet
from harness.calib.decoder import StreamedDecoder
from harness.calib.quantize_model import (
    CHECKPOINT_FOLDER,
    ModelQuantizer,
    QuantizedModel,
    checkpoint_id,
    library_versions,
    working_folder,
)
from harness.calib.recipe_search import (
    as_recipe,
    bits_per_weight,
    cautious,
    search_assignment,
    smallest_assignment,
    total_harm,
)
from harness.calib.sensitivity import (
    OnProgress,
    estimate_harm,
    measure_divergence,
    measure_output_errors,
    shortlisted,
)
from harness.calib.set_report import as_json
from harness.calib.units import Unit, decision_units, portable_int4
from harness.checkpoint_record import RECORD_NAME, CheckpointRecord, LossPart, read_record
from harness.errors import CalibrationError, RecipeError
from harness.manifest import CalibrationSetPart, ModelPart, RecipePart, describe_files
from harness.recipe import (
    INT8,
    Precision,
    Recipe,
    decoder_bits_per_weight,
    dump_recipe,
    model_bits_per_weight,
    num_linear_parameters,
)
from harness.spec import ModelSpec
from harness.weight_source import WeightSource, some

Target = Literal["portable", "cpu"]
Optimize = Literal["decode", "prefill"]

RECIPE_NAME, SET_REPORT_NAME = "recipe.yaml", "calibration-set.json"
_INT8_ACTIVATIONS = Precision(dtype="int8", int8_activations=True)
_CANDIDATES_FOR_CPU = ("int4-g128", "int4-g128-zp", "int4-g64-zp", "int4-g32-zp", "int8")
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


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The inputs that all steps share.

    `target`: `portable` for a checkpoint that every arch and other servers read, `cpu` for smaller groups and zero
    points. `optimize`: what int8 layers are for, see `int8_reasoning`. `say`: shows a line to the user.
    """

    source: WeightSource
    calibration_set: CalibrationSet
    target: Target
    optimize: Optimize
    device: torch.device
    engines_dir: Path
    on_progress: OnProgress
    say: Callable[[str], None]


def calibrate(calibration: Calibration, goal: Goal) -> Path:
    """Make a quantized checkpoint, or find it made; returns its folder.

    Raises:
        RecipeError: the budget cannot be met, or the recipe is not one that `target` allows.
        CalibrationError: weights or activations are not finite, or another run makes the same checkpoint.
    """
    if goal.recipe is not None:
        return _Maker(calibration).make(goal.recipe).folder
    spec = calibration.source.spec
    units = decision_units(spec, experts_together=calibration.target == "portable")
    candidates = _candidates(calibration.target, spec)
    harm = _sensitivity(calibration, units, candidates)
    feared = cautious(units, harm, spec.num_layers)
    maker = _Maker(calibration)
    if goal.bits is not None:
        assignment = search_assignment(units, candidates, feared, goal.bits)
        calibration.say(f"expected KL divergence {total_harm(candidates, harm, assignment):.4f} nats a token")
        return maker.make(_recipe(f"mixed-{goal.bits:g}-bits", calibration, units, assignment)).folder
    assert goal.max_loss is not None
    return _meet_loss(maker, units, candidates, feared, goal.max_loss)


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
        "outliers are smoothed into the weights (SmoothQuant). The cpu arch quantizes activations either way"
    )


def _candidates(target: Target, spec: ModelSpec) -> list[Precision]:
    """What a search chooses from, the lowest first.

    Raises:
        RecipeError: the model has widths of which `target` allows no int4.
    """
    if target == "cpu":
        return [Precision.parse(text) for text in _CANDIDATES_FOR_CPU]
    lowest = portable_int4(spec)
    _check_portable(Recipe(name="lowest", rules=(("*", lowest),)).resolve(spec))
    return [lowest, INT8]


def _recipe(name: str, calibration: Calibration, units: Sequence[Unit], assignment: Mapping[str, Precision]) -> Recipe:
    """The assignment as a recipe; int8 layers get int8 activations for prefill, experts excepted."""
    if calibration.optimize == "prefill":
        # transformers, vLLM and SGLang read quantized experts only where activations are not
        plain = {unit.name for unit in units if ".experts." in unit.modules[0]}
        assignment = {
            name: _INT8_ACTIVATIONS if precision == INT8 and name not in plain else precision
            for name, precision in assignment.items()
        }
    return as_recipe(name, units, assignment, calibration.source.spec)


def _meet_loss(
    maker: _Maker,
    units: Sequence[Unit],
    candidates: Sequence[Precision],
    harm: Mapping[str, Sequence[float]],
    max_loss: float,
) -> Path:
    """The smallest checkpoint of a few rounds whose measured rise of perplexity is within the limit."""
    calibration = maker.calibration
    scale, best, best_bits, tried = 1.0, None, float("inf"), set[float]()
    for number in range(_ROUNDS):
        scaled = {name: [h * scale for h in row] for name, row in harm.items()}
        # the log of perplexity rises by about the divergence
        assignment = smallest_assignment(units, candidates, scaled, float(torch.log1p(torch.tensor(max_loss))))
        bits = bits_per_weight(units, assignment)
        if bits in tried or (best is not None and bits > best_bits - _CLOSE_ENOUGH):
            break
        tried.add(bits)
        made = maker.make(_recipe(f"loss-{max_loss * 100:g}-percent", calibration, units, assignment))
        rise = made.loss.perplexity_after / made.loss.perplexity_before - 1
        calibration.say(f"round {number + 1} of {_ROUNDS}: {bits:.3f} bits per weight, perplexity {rise:+.2%}")
        if rise <= max_loss and bits < best_bits:
            best, best_bits = made.folder, bits
        expected = total_harm(candidates, scaled, assignment)
        seen = float(torch.log1p(torch.tensor(max(rise, 1e-4))))
        scale *= min(4.0, max(0.25, seen / max(expected, 1e-9)))
    if best is None:
        raise RecipeError(
            f"no recipe tried keeps the rise of perplexity within {max_loss:.2%}",
            "give a larger --max-loss, a --bits budget near 8, or --precision f16",
        )
    return best


def _sensitivity(
    calibration: Calibration, units: Sequence[Unit], candidates: Sequence[Precision]
) -> dict[str, list[float]]:
    """Harm by unit and candidate, measured or found measured."""
    source, chosen = calibration.source, calibration.calibration_set
    parts = [source.fingerprint(), chosen.fingerprint, [u.name for u in units], list(map(str, candidates))]
    identity = hashlib.sha256(json.dumps([*parts, library_versions()]).encode()).hexdigest()[:12]
    path = calibration.engines_dir / source.name / f"sensitivity-{identity}.json"
    if path.is_file():
        found: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text(encoding="utf-8"))
        calibration.say(f"sensitivity found in {path}")
        return {name: list(by.values()) for name, by in found["harm"].items()}
    decoder = StreamedDecoder(source, calibration.device)
    # of a fixed name, so that what a killed run left is used up by the next
    with working_folder(path.with_name(f".sensitivity-{identity}")) as folder:
        try:
            errors = measure_output_errors(decoder, chosen.samples, units, candidates, folder, calibration.on_progress)
            worst = shortlisted(units, errors, candidates[0])
            divergence = measure_divergence(
                decoder, chosen.samples, worst, candidates[0], errors.second_moments, folder, calibration.on_progress
            )
        finally:
            shutil.rmtree(folder)
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


class _Maker:
    """Fills recipes and completes the folders."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._content_hash = calibration.source.fingerprint()

    def make(self, recipe: Recipe) -> _Made:
        """The checkpoint of one recipe, made or found."""
        c = self.calibration
        resolved = recipe.resolve(c.source.spec)
        if c.target == "portable":
            _check_portable(resolved)
        layers = {name: str(precision) for name, precision in resolved.items()}
        identity = checkpoint_id(self._content_hash, c.calibration_set.fingerprint, layers, c.target)
        folder = c.engines_dir / c.source.name / f"quantized-{identity}"
        if (folder / RECORD_NAME).is_file():
            c.say(f"quantized checkpoint found in {folder}")
            return self._told(folder, read_record(folder))
        self._tell_fitted(recipe, resolved)
        linears = {name: p for name, p in resolved.items() if name.startswith("model.layers.")}
        with working_folder(folder.with_name(f".quantizing-{identity}")) as work:
            complete = work / CHECKPOINT_FOLDER
            if not (complete / RECORD_NAME).is_file():  # where a killed run had it ready, it need only be moved
                done = ModelQuantizer(c.source, c.calibration_set, linears, work, c.device).run(c.on_progress)
                self._complete(identity, recipe, resolved, done)
            record = read_record(complete)
            if folder.exists():  # without a record it is no checkpoint
                shutil.rmtree(folder)
            complete.rename(folder)
            shutil.rmtree(work)
        c.say(f"quantized checkpoint written to {folder}")
        return self._told(folder, record)

    def _complete(self, identity: str, recipe: Recipe, resolved: dict[str, Precision], done: QuantizedModel) -> None:
        """Add recipe, report and record to a folder. The record comes last, and whole."""
        (done.folder / RECIPE_NAME).write_text(dump_recipe(recipe), encoding="utf-8")
        report = json.dumps(as_json(self.calibration.calibration_set.report), indent=1, ensure_ascii=False)
        (done.folder / SET_REPORT_NAME).write_text(report + "\n", encoding="utf-8")
        record = self._record(identity, recipe, resolved, done)
        text = json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False)
        temporary = done.folder.with_name(RECORD_NAME)  # outside: the record lists all files inside
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(done.folder / RECORD_NAME)

    def _tell_fitted(self, recipe: Recipe, resolved: Mapping[str, Precision]) -> None:
        fitted: dict[tuple[Precision, Precision], list[str]] = {}
        for name, precision in resolved.items():
            if precision != recipe.precision_of(name):
                fitted.setdefault((recipe.precision_of(name), precision), []).append(name)
        for (asked, precision), names in fitted.items():
            self.calibration.say(f"{asked} does not divide the inputs of {some(names)}: {precision} there")

    def _told(self, folder: Path, record: CheckpointRecord) -> _Made:
        loss = record.loss
        self.calibration.say(
            f"on {loss.num_tokens:,} held-out tokens of the set: perplexity {loss.perplexity_before:.3f} -> "
            f"{loss.perplexity_after:.3f} ({loss.perplexity_after / loss.perplexity_before - 1:+.2%}), "
            f"KL divergence {loss.kl_divergence:.5f} nats a token"
        )
        if record.unreached_experts:
            names = ", ".join(record.unreached_experts[:8])
            more = f" and {len(record.unreached_experts) - 8} more" if len(record.unreached_experts) > 8 else ""
            self.calibration.say(
                f"warning: no token of the set was routed to {names}{more}; they were calibrated on the tokens that "
                "came nearest. Give --calib traffic that is wider, if production's is"
            )
        return _Made(folder=folder, loss=loss)

    def _record(
        self, identity: str, recipe: Recipe, resolved: dict[str, Precision], done: QuantizedModel
    ) -> CheckpointRecord:
        c = self.calibration
        spec = c.source.spec
        return CheckpointRecord(
            checkpoint_id=identity,
            model=ModelPart(
                name=c.source.name,
                architecture=spec.architecture,
                content_hash=self._content_hash,
                num_parameters=num_linear_parameters(spec),
                num_layers=spec.num_layers,
                vocab_size=spec.vocab_size,
                max_position_embeddings=spec.max_position_embeddings,
            ),
            method="gptq",
            calibration_set=CalibrationSetPart(
                label=c.calibration_set.label,
                fingerprint=c.calibration_set.fingerprint,
                num_samples=len(c.calibration_set.samples),
                num_tokens=c.calibration_set.num_tokens,
                system_prompt_share=c.calibration_set.system_prompt_share,
            ),
            recipe=RecipePart(
                name=recipe.name,
                layers={name: str(precision) for name, precision in resolved.items()},
                bits_per_weight=model_bits_per_weight(spec, resolved),
                decoder_bits_per_weight=decoder_bits_per_weight(spec, resolved),
            ),
            target=c.target,
            optimize=c.optimize,
            loss=done.loss,
            unreached_experts=done.unreached_experts,
            versions=library_versions(),
            files=describe_files(done.folder),
        )


@dataclass(frozen=True, kw_only=True)
class _Made:
    folder: Path
    loss: LossPart


def _check_portable(resolved: Mapping[str, Precision]) -> None:
    experts = {str(p): name for name, p in resolved.items() if ".mlp.experts." in name}
    if len(experts) > 1:
        raise RecipeError(
            f"routed experts of several precisions ({', '.join(sorted(experts))}): other servers read one scheme",
            "give all experts of all layers one precision, or --for cpu",
        )
    for name, precision in resolved.items():
        if not name.startswith("model.layers."):
            continue
        if precision.dtype == "int4" and (not precision.symmetric or precision.group_size not in (64, 128)):
            raise RecipeError(
                f"{name} is {precision}, which not every arch and server reads (int4-g128 and int4-g64 are)",
                "change the recipe, or give --for cpu for a checkpoint that is lowered to cpu alone",
            )
        if precision.int8_activations and ".mlp.experts." in name:
            raise RecipeError(f"{name} is {precision}: routed experts cannot have int8 activations", "give them int8")
