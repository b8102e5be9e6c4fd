"""Fills one recipe into one quantized checkpoint, or finds it filled: folder, id, record.

Owns what a checkpoint's folder holds beside the weights, and which recipes a portable one allows. Needs torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from harness.calib.calibration_set import CalibrationSet
from harness.calib.decoder import check_finite
from harness.calib.overlap import save_ngrams
from harness.calib.quantize_model import (
    CHECKPOINT_FOLDER,
    ModelQuantizer,
    QuantizedModel,
    checkpoint_id,
    library_versions,
    working_folder,
)
from harness.calib.sensitivity import OnProgress
from harness.calib.set_report import as_json
from harness.calib.units import is_portable_int4, portable_recipe
from harness.checkpoint_record import (
    NGRAMS_NAME,
    RECORD_NAME,
    SENSITIVITY_NAME,
    CheckpointRecord,
    LossPart,
    read_record,
)
from harness.errors import CalibrationError, RecipeError
from harness.manifest import CalibrationSetPart, ModelPart, RecipePart, describe_files
from harness.recipe import (
    Precision,
    Recipe,
    decoder_bits_per_weight,
    dump_recipe,
    in_decoder,
    is_routed_expert,
    model_bits_per_weight,
    num_linear_parameters,
)
from harness.weight_source import WeightSource, some

Target = Literal["portable", "cpu"]
Optimize = Literal["decode", "prefill"]

RECIPE_NAME, SET_REPORT_NAME = "recipe.yaml", "calibration-set.json"


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


def fit_recipe(calibration: Calibration, recipe: Recipe) -> Recipe:
    """What can be stored of a recipe; says where its groups do not divide a layer's inputs.

    Raises:
        RecipeError: `target` does not allow what it asks for.
    """
    spec = calibration.source.spec
    fitted = portable_recipe(recipe, spec) if calibration.target == "portable" else recipe
    resolved = fitted.resolve(spec)
    if calibration.target == "portable":
        check_portable(resolved)
    replaced: dict[tuple[Precision, Precision], list[str]] = {}
    for name, precision in resolved.items():
        if precision != recipe.precision_of(name):
            replaced.setdefault((recipe.precision_of(name), precision), []).append(name)
    for (asked, precision), names in replaced.items():
        calibration.say(f"{some(names)}: {precision} instead of {asked}, so that groups divide the inputs")
    return fitted


class CheckpointMaker:
    """Fills recipes and completes the folders."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.content_hash = calibration.source.fingerprint()
        self._checked = False

    def check_weights(self) -> None:
        """Read all weights once before the hours are spent.

        Raises:
            CalibrationError: a value is not finite; names the tensor.
        """
        if not self._checked:
            check_finite(self.calibration.source)
        self._checked = True

    def make(self, recipe: Recipe, sensitivity: Sequence[Mapping[str, object]] = ()) -> Made:
        """The checkpoint of one recipe, made or found; `sensitivity` is stored beside, where the recipe came of one."""
        c = self.calibration
        recipe = fit_recipe(c, recipe)
        resolved = recipe.resolve(c.source.spec)
        linears = {name: precision for name, precision in resolved.items() if in_decoder(name)}
        layers = {name: str(precision) for name, precision in linears.items()}
        identity = checkpoint_id(self.content_hash, c.calibration_set.fingerprint, layers, c.target)
        folder = c.engines_dir / c.source.name / f"quantized-{identity}"
        working = folder.with_name(f".quantizing-{identity}")
        if (folder / RECORD_NAME).is_file():
            record = _read_record(folder, identity)
            c.say(f"quantized checkpoint found in {folder}")
            shutil.rmtree(working, ignore_errors=True)  # a run was killed after its last step but one
            return self._told(folder, record)
        with working_folder(working) as work:
            complete = work / CHECKPOINT_FOLDER
            if (folder / RECORD_NAME).is_file():  # another run was faster
                shutil.rmtree(work, ignore_errors=True)
                return self._told(folder, _read_record(folder, identity))
            if not (complete / RECORD_NAME).is_file():  # where a killed run had it ready, it need only be moved
                self.check_weights()
                done = ModelQuantizer(c.source, c.calibration_set, linears, work, c.device).run(c.on_progress)
                self._write_evidence(done.folder, sensitivity)
                self._complete(identity, recipe, resolved, done)
            record = _read_record(complete, identity)
            if folder.exists():  # without a record it is no checkpoint
                shutil.rmtree(folder)
            complete.rename(folder)
            shutil.rmtree(work, ignore_errors=True)
        c.say(f"quantized checkpoint written to {folder}")
        return self._told(folder, record)

    def _write_evidence(self, folder: Path, sensitivity: Sequence[Mapping[str, object]]) -> None:
        """What a quality report needs of the calibration: which text was seen, and what the search knew."""
        save_ngrams(folder / NGRAMS_NAME, self.calibration.calibration_set.samples)
        if sensitivity:
            text = json.dumps(list(sensitivity), indent=1) + "\n"
            (folder / SENSITIVITY_NAME).write_text(text, encoding="utf-8")

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

    def _told(self, folder: Path, record: CheckpointRecord) -> Made:
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
        return Made(folder=folder, loss=loss)

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
                content_hash=self.content_hash,
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
class Made:
    """A checkpoint's folder and what it lost on the held-out samples."""

    folder: Path
    loss: LossPart


def _read_record(folder: Path, identity: str) -> CheckpointRecord:
    record = read_record(folder)
    if record.checkpoint_id != identity:
        raise CalibrationError(
            f"{folder} holds another checkpoint: {record.checkpoint_id}, these inputs give {identity}",
            "move it away or remove it, then give the same command again",
        )
    return record


def check_portable(resolved: Mapping[str, Precision]) -> None:
    """Check that transformers, vLLM, SGLang and every arch read what a recipe asks for.

    Raises:
        RecipeError: a precision that some of them do not read; names the module.
    """
    experts = {str(p): name for name, p in resolved.items() if is_routed_expert(name)}
    if len(experts) > 1:
        raise RecipeError(
            f"routed experts of several precisions ({', '.join(sorted(experts))}): other servers read one scheme",
            "give all experts of all layers one precision, or --for cpu",
        )
    for name, precision in resolved.items():
        if not in_decoder(name):
            continue
        if precision.dtype == "int4" and not is_portable_int4(precision):
            raise RecipeError(
                f"{name} is {precision}, which not every arch and server reads (int4-g128 and int4-g64 are)",
                "change the recipe, or give --for cpu for a checkpoint that is lowered to cpu alone",
            )
        if precision.int8_activations and is_routed_expert(name):
            raise RecipeError(f"{name} is {precision}: routed experts cannot have int8 activations", "give them int8")
