"""Fills a recipe: streams a model through the quantizer one layer at a time, and goes on where a killed run stopped.

Each layer is shown the outputs of the quantized layers before it (GPTQ's own order), quantized, and run again for the
next one. Finished layers lie in a folder inside a working folder beside the checkpoint's place, and beside it what only
the run needs: the hidden states behind the last layer, and how far it is. Needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

import harness
from harness.calib.activations import Activations
from harness.calib.calibration_set import CalibrationSet
from harness.calib.checkpoint import finish_folder, in_16_bits, shard_name, stored_tensors, write_shard
from harness.calib.decoder import Experts, StreamedDecoder, bfloat16_products, linear_of
from harness.calib.measure import Comparison, compare_logits, perplexity
from harness.calib.quantizer import QuantizedMatrix, quantize_matrix
from harness.calib.sensitivity import OnProgress
from harness.calib.smoothing import smooth_layer
from harness.calib.statistics import LayerStatistics
from harness.calib.units import by_input, layer_modules
from harness.checkpoint_record import STATISTICS_NAME, LossPart
from harness.errors import CalibrationError
from harness.folder_lock import lock_folder
from harness.recipe import F16, Precision, in_decoder
from harness.weight_source import WeightSource

QUANTIZER_VERSION = 1
"""Part of every checkpoint's id. To be raised when the same inputs give other integers."""

_WIDEN_TO = 512  # tokens that each expert is shown at least
_LOSS_VALUES = 300_000_000  # logits that the loss is measured on, at most
_LOGITS_HELD = 50_000_000  # of them in memory at a time, those of the baseline included
CHECKPOINT_FOLDER, _PROGRESS_NAME = "checkpoint", "progress.json"  # in the working folder


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """A finished folder (all but its record), the loss on the held-out samples, and experts that got no token."""

    folder: Path
    loss: LossPart
    unreached_experts: list[str]


def library_versions() -> dict[str, str]:
    """What decides the integers beside the inputs."""
    libraries = {name: version(name) for name in ("compressed-tensors", "llmcompressor", "torch", "transformers")}
    return {"harness": harness.__version__, "quantizer": str(QUANTIZER_VERSION), **libraries}


def checkpoint_id(content_hash: str, set_fingerprint: str, precisions: Mapping[str, str], target: str) -> str:
    """12 hex digits from weights, calibration set, what it is for, versions, and the precisions of decoder linears.

    Embeddings and `lm_head` are stored in 16 bits whatever a recipe says of them.
    """
    parts = [content_hash, set_fingerprint, dict(precisions), target, library_versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def working_folder(folder: Path, on_busy: Callable[[], None] | None = None) -> Iterator[Path]:
    """A folder that is kept when the block fails, so that the next run goes on from it; locked against a second run.

    `on_busy`: called where another run is at work, which is then waited for.

    Raises:
        CalibrationError: another run is at work on the same checkpoint, and there is no `on_busy`.
    """
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        if on_busy is None:
            raise CalibrationError(
                f"another run makes the same checkpoint (it is at work in {folder})",
                "wait for it, then give the same command again, which finds the checkpoint made; or stop that run",
            ) from None
        on_busy()
        lock = lock_folder(folder, wait=True)
    try:
        yield folder
    finally:
        os.close(lock)


class ModelQuantizer:
    """One run of the quantizer over all layers.

    Args:
        precisions: precision of every decoder linear, fitted to its inputs.
        work: the working folder; what a former run left in it is used. The checkpoint grows in `work / "checkpoint"`.

    Raises:
        CalibrationError: no held-out sample has two tokens.
    """

    def __init__(
        self,
        source: WeightSource,
        calibration_set: CalibrationSet,
        precisions: Mapping[str, Precision],
        work: Path,
        device: torch.device,
    ) -> None:
        self._source = source
        self._decoder = StreamedDecoder(source, device)
        self._precisions = precisions
        self._work = work
        self._folder = work / CHECKPOINT_FOLDER
        self._folder.mkdir(exist_ok=True)
        self._num_layers = source.spec.num_layers
        # with too little traffic for a part of its own, the loss is that of samples that were calibrated on
        self._measured = calibration_set.held_out or calibration_set.samples[:8]
        if all(len(ids) < 2 for ids in self._measured):
            raise CalibrationError(
                "the held-out samples are of one token each: none tells how well the next is predicted",
                "give --calib longer traffic",
            )
        self._sequences = [*calibration_set.samples, *self._measured]
        self._num_samples = len(calibration_set.samples)
        capability = torch.cuda.get_device_name() if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        self._computed_on = [device.type, capability, torch.get_num_threads()]

    def run(self, on_progress: OnProgress) -> QuantizedModel:
        """Quantize what is not done yet and complete the folder.

        Raises:
            CalibrationError: a weight or an activation is not finite.
        """
        progress = self._progress()
        if progress["finished"] == 0:
            self._embed()
        for number in range(progress["finished"], self._num_layers):
            on_progress("quantizing", number, self._num_layers)
            progress = self._layer(number, progress)
        on_progress("quantizing", self._num_layers, self._num_layers)
        self._write_rest()
        loss = self._loss()
        finish_folder(self._folder, self._source, self._precisions)
        self._join_statistics()
        return QuantizedModel(folder=self._folder, loss=loss, unreached_experts=progress["unreached_experts"])

    def _progress(self) -> dict[str, Any]:
        nothing = {"finished": 0, "unreached_experts": [], "computed_on": self._computed_on}
        try:
            progress: dict[str, Any] = json.loads((self._work / _PROGRESS_NAME).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return nothing
        # another machine rounds otherwise: what it left is not gone on from
        return progress if progress.get("computed_on") == self._computed_on else nothing

    def _states(self, kind: str, boundary: int) -> Activations:
        sequences = self._measured if kind == "baseline" else self._sequences
        path = self._work / f"{kind}-states-{boundary}"
        return Activations(path, [len(ids) for ids in sequences], self._source.spec.hidden_size)

    def _embed(self) -> None:
        quantized, baseline = self._states("quantized", 0), self._states("baseline", 0)
        for i, ids in enumerate(self._sequences):
            hidden = self._decoder.embed(ids)
            quantized.write(i, hidden)
            if i >= self._num_samples:
                baseline.write(i - self._num_samples, hidden)

    def _layer(self, number: int, progress: dict[str, Any]) -> dict[str, Any]:
        prefix = f"model.layers.{number}."
        precisions = {m: self._precisions[m] for m in layer_modules(self._source.spec, number)}
        before, after = self._states("quantized", number), self._states("quantized", number + 1)
        with self._decoder.layer(number) as layer:
            self._advance(layer, "baseline", number)
            with bfloat16_products(), LayerStatistics(layer, list(precisions)) as seen:
                unreached = self._observe(layer, before, prefix)
            smooth_layer(layer, prefix, precisions, seen)
            tensors: dict[str, torch.Tensor] = {}
            for key, modules in by_input(list(precisions)).items():
                tensors |= _quantize(layer, modules, precisions[modules[0]], seen.hessians[key])
            self._write_layer(number, layer, prefix, tensors, seen)
            for i in range(len(self._sequences)):
                # what statistics come from may be rounded, what the loss comes from may not
                with bfloat16_products() if i < self._num_samples else nullcontext():
                    after.write(i, self._decoder.run(layer, before.read(i)))
        after.flush()
        unreached = progress["unreached_experts"] + unreached
        progress = {"finished": number + 1, "unreached_experts": unreached, "computed_on": self._computed_on}
        temporary = self._work / f".{_PROGRESS_NAME}"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(progress, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._work / _PROGRESS_NAME)
        for kind in ("quantized", "baseline"):
            (self._work / f"{kind}-states-{number}").unlink()
        return progress

    def _advance(self, layer: nn.Module, kind: str, number: int) -> None:
        before, after = self._states(kind, number), self._states(kind, number + 1)
        for i in range(len(self._measured)):
            after.write(i, self._decoder.run(layer, before.read(i)))
        after.flush()

    def _observe(self, layer: nn.Module, states: Activations, prefix: str) -> list[str]:
        """Run the samples through a layer; returns the experts that none of their tokens was sent to."""
        experts = next((m for m in layer.modules() if isinstance(m, Experts)), None)
        if experts is not None:
            experts.reset()
        for i in range(self._num_samples):
            if experts is not None:
                experts.widen_to = _WIDEN_TO * (i + 1) // self._num_samples
            if not torch.isfinite(self._decoder.run(layer, states.read(i))).all():
                raise CalibrationError(
                    f"{prefix.rstrip('.')} computes NaN or infinite values on calibration sample {i}",
                    "check the weights; a model that overflows in float32 cannot be served",
                )
        if experts is None:
            return []
        experts.widen_to = 0
        return [f"{prefix}mlp.experts.{e}" for e, n in enumerate(experts.num_routed) if n == 0]

    def _write_layer(
        self, number: int, layer: nn.Module, prefix: str, tensors: dict[str, torch.Tensor], seen: LayerStatistics
    ) -> None:
        for name, values in [*layer.named_parameters(), *layer.named_buffers()]:
            module = f"{prefix}{name}".removesuffix(".weight")
            if self._precisions.get(module, F16).dtype == "f16":
                tensors[prefix + name] = in_16_bits(values.detach().cpu())
        write_shard(self._folder / shard_name(number + 1, self._num_layers + 1), tensors)
        maxima = {f"{key}.input_maxima": values for key, values in seen.input_maxima.items()}
        maxima |= {f"{module}.output_maxima": values for module, values in seen.output_maxima.items()}
        write_shard(self._work / f"layer-statistics-{number:05d}", maxima)

    def _write_rest(self) -> None:
        names = [n for n in sorted(self._source.names()) if not in_decoder(n)]
        tensors = {name: in_16_bits(torch.from_numpy(self._source.read(name))) for name in names}
        write_shard(self._folder / shard_name(self._num_layers + 1, self._num_layers + 1), tensors)

    def _join_statistics(self) -> None:
        joined: dict[str, torch.Tensor] = {}
        for path in sorted(self._work.glob("layer-statistics-*")):
            joined |= load_file(path)
        write_shard(self._folder / STATISTICS_NAME, joined)

    def _loss(self) -> LossPart:
        baseline, quantized = self._states("baseline", self._num_layers), self._states("quantized", self._num_layers)
        vocab_size = self._source.spec.vocab_size
        total = sum(len(ids) - 1 for ids in self._measured)
        step = max(1, -(-total // max(64, _LOSS_VALUES // vocab_size)))
        kept = [slice(0, len(ids) - 1, step) for ids in self._measured]
        base = torch.cat([baseline.read(i)[0, rows] for i, rows in enumerate(kept)])
        own = torch.cat([quantized.read(self._num_samples + i)[0, rows] for i, rows in enumerate(kept)])
        targets = np.concatenate([ids[1:][rows] for ids, rows in zip(self._measured, kept, strict=True)])
        # the output matrix is read once for as many positions as memory allows
        batch = max(1, _LOGITS_HELD // (2 * vocab_size))
        parts = []
        for start in range(0, len(targets), batch):
            rows = slice(start, start + batch)
            hidden = torch.cat([base[rows], own[rows]]).to(self._decoder.device)
            before, after = np.split(self._decoder.logits(hidden).numpy(), 2)
            parts.append(compare_logits(before, after, targets[rows]))
        seen = Comparison.join(parts)
        return LossPart(
            perplexity_before=perplexity(seen.baseline_loss),
            perplexity_after=perplexity(seen.loss),
            kl_divergence=float(seen.kl_divergence.mean()),
            num_tokens=len(targets),
        )


def _quantize(
    layer: nn.Module, modules: list[str], precision: Precision, hessian: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Quantize the modules that share an input, as one matrix; their weights in the layer become what is stored."""
    linears = [linear_of(layer, m) for m in modules]
    if precision.dtype == "f16":
        return {}
    weight = torch.cat([linear.weight.detach() for linear in linears])
    whole = quantize_matrix(modules[0], weight, hessian, precision)
    stored: dict[str, torch.Tensor] = {}
    start = 0
    for module, linear in zip(modules, linears, strict=True):
        rows = slice(start, start + linear.weight.shape[0])
        start = rows.stop
        part = QuantizedMatrix(
            precision=precision,
            integers=whole.integers[rows],
            scale=whole.scale[rows],
            zero_point=None if whole.zero_point is None else whole.zero_point[rows],
        )
        with torch.no_grad():
            linear.weight.copy_(part.dequantize())
        stored |= stored_tensors(module, part)
    return stored
