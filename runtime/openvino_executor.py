"""Runs a CPU engine: a paged OpenVINO graph, and KV blocks that we own.

It owns the compiled model and the KV memory and computes exactly what a `SchedulerOutput` says. OpenVINO accepts token
ids and blocks out of range silently, so they are checked here. Keys and values lie in one tensor each a layer,
`(num_blocks, kv_heads, tokens + scales, head)`; their true shapes are read from the compiled model.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from harness.errors import CapacityError, EngineError
from harness.manifest import EngineManifest
from harness.runtime.deterministic import DeterministicSteps, find_row_window
from harness.runtime.executor import ScheduledSequence, SchedulerOutput, StepOutput
from harness.runtime.openvino_core import openvino_core
from harness.runtime.paged_graph import LOGIT_INDICES, to_paged
from harness.runtime.slot_tokens import SlotTokens


class OpenVinoExecutor:
    """A compiled engine with its KV blocks; implements `Executor`.

    Args:
        engine_dir: folder of the engine; its files are taken as verified.
        deterministic: f32 execution and KV, and equal bits whatever is computed beside.
        kv_cache_bytes: memory for KV blocks; as many whole blocks as fit.
        num_threads: inference threads, pinned to cores.

    Raises:
        CapacityError: not one block fits.
        EngineError: OpenVINO cannot compile the model.
    """

    def __init__(
        self,
        engine_dir: Path,
        manifest: EngineManifest,
        *,
        deterministic: bool,
        kv_cache_bytes: int,
        num_threads: int,
    ) -> None:
        settings = manifest.compile_settings["deterministic" if deterministic else "fast"]
        core = openvino_core()
        try:
            model = core.read_model(engine_dir / "model.xml")
            to_paged(model)
            self._compiled = core.compile_model(
                model, "CPU", {**settings, "INFERENCE_NUM_THREADS": num_threads, "ENABLE_CPU_PINNING": True}
            )
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot compile {engine_dir}: {error}", "rebuild the engine") from None
        self._request = self._compiled.create_infer_request()
        self._vocab_size = manifest.model.vocab_size
        self._kv_memory: list[npt.NDArray[np.uint8]] = []  # OpenVINO's tensors do not keep it alive
        self._num_blocks = self._allocate_kv(kv_cache_bytes)
        pairs = manifest.kv.kind == "mla-latent" and not deterministic  # deterministic steps make pairs themselves
        self._slots = SlotTokens(self._num_blocks) if pairs else None
        self._steps: DeterministicSteps | None = None
        if deterministic:
            window = find_row_window(self._compute, vocab_size=self._vocab_size, num_blocks=self._num_blocks)
            self._steps = DeterministicSteps(self._num_blocks, window)

    def _allocate_kv(self, kv_cache_bytes: int) -> int:
        caches = [i for i in self._compiled.inputs if i.get_any_name().startswith(("key_cache.", "value_cache."))]
        block_shapes = [[d.get_length() for d in list(i.get_partial_shape())[1:]] for i in caches]
        sizes = [int(np.prod(s)) * i.get_element_type().size for s, i in zip(block_shapes, caches, strict=True)]
        num_blocks: int = kv_cache_bytes // sum(sizes)
        if num_blocks < 1:
            raise CapacityError(
                f"{kv_cache_bytes} bytes of KV cache hold no block of {sum(sizes)} bytes", "raise --kv-cache-memory"
            )
        for cache, shape, size in zip(caches, block_shapes, sizes, strict=True):
            # zero pages straight from the kernel: no NaN in unused slots, and no memory taken before it is used
            memory = np.frombuffer(mmap.mmap(-1, num_blocks * size), np.uint8)
            self._kv_memory.append(memory)
            tensor = ov.Tensor(memory, ov.Shape([num_blocks, *shape]), cache.get_element_type())
            self._request.set_tensor(cache.get_any_name(), tensor)
        return num_blocks

    @property
    def num_blocks(self) -> int:
        """KV blocks it holds, numbered from 0."""
        return self._num_blocks

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self._vocab_size

    @property
    def compiled_model(self) -> ov.CompiledModel:
        """The compiled graph, for inspection."""
        return self._compiled

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        """Compute one step and write its KV into the blocks named; see `Executor.execute`."""
        _check_range("token id", (t for s in scheduled.sequences for t in s.token_ids), self._vocab_size)
        _check_range("KV block", (b for s in scheduled.sequences for b in s.block_table), self._num_blocks)
        if self._steps is None:
            return StepOutput(logits=self._compute(self._without_lone_tokens(scheduled.sequences)))
        rows = [self._compute(call).copy() for call in self._steps.calls(scheduled.sequences)]
        return StepOutput(logits=np.concatenate(rows))

    def _without_lone_tokens(self, sequences: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """See `slot_tokens`: latent attention is wrong for one query row."""
        if self._slots is None:
            return sequences
        for sequence in sequences:
            self._slots.remember(sequence)
        return [self._slots.two_rows(sequence) for sequence in sequences]

    def _compute(self, sequences: Sequence[ScheduledSequence]) -> npt.NDArray[np.float32]:
        """One call of the model; logits `(num_logit_positions, vocab_size)`, overwritten by the next call."""
        lengths = [len(s.token_ids) for s in sequences]
        starts = [0, *accumulate(lengths)]
        pasts = [s.num_computed_tokens for s in sequences]
        positions = [np.arange(p, p + n, dtype=np.int64) for p, n in zip(pasts, lengths, strict=True)]
        indices = [start + p for start, s in zip(starts, sequences, strict=False) for p in s.logit_positions]
        num_logits = len(indices)
        if self._steps is not None:
            indices = self._steps.fill_logit_rows(indices)
        self._set("input_ids", np.array([t for s in sequences for t in s.token_ids], np.int64))
        self._set("position_ids", np.concatenate(positions))
        self._set("past_lens", np.array(pasts, np.int32))
        self._set("subsequence_begins", np.array(starts, np.int32))
        self._set("block_indices", np.array([b for s in sequences for b in s.block_table], np.int32))
        table_ends = accumulate(len(s.block_table) for s in sequences)
        self._set("block_indices_begins", np.array([0, *table_ends], np.int32))
        self._set("max_context_len", np.array(max(map(sum, zip(pasts, lengths, strict=True))), np.int32))
        self._set(LOGIT_INDICES, np.array(indices, np.int64))
        self._request.infer()
        logits: npt.NDArray[np.float32] = self._request.get_tensor("logits").data
        return logits.reshape(len(indices), self._vocab_size)[:num_logits]

    def _set(self, name: str, values: npt.NDArray[Any]) -> None:
        self._request.set_tensor(name, ov.Tensor(values))


def _check_range(what: str, values: Iterable[int], size: int) -> None:
    for value in values:
        if not 0 <= value < size:
            raise EngineError(
                f"{what} {value} is out of range [0, {size})", "this is a fault of the caller; nothing was computed"
            )
