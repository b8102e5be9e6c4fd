"""The engines that a report measures, whatever runs them: opened, loaded for text, and configured as they serve.

Text is measured through the inner seam (`Executor`) in this process, tasks and speed through the outer one in an engine
process. What an engine needs of its arch is here and nowhere else in the report.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.errors import CapacityError, QualityError
from harness.ledger import gib
from harness.machine import available_memory_bytes, num_usable_cores
from harness.manifest import EngineManifest, read_manifest
from harness.nvml import devices
from harness.runtime.config import EngineConfig, ResolvedConfig
from harness.runtime.executor import TOKENS_PER_BLOCK, Executor

_LONGEST_CONTEXT = 16384  # of tasks: more takes memory and time, and no task asks for it
_MOST_SEQUENCES = 16
_COMPILED_FACTOR = 2.0  # a compiled model beside its file, while both are in memory


@dataclass(frozen=True, kw_only=True)
class MeasuredEngine:
    """An engine and what its manifest says."""

    path: Path
    manifest: EngineManifest


def open_measured(path: Path) -> MeasuredEngine:
    """An engine that can be measured here and whose files are whole.

    Raises:
        HarnessError: it cannot; says why.
    """
    manifest = read_manifest(path)
    if manifest.gpu is None:
        from harness.runtime.openvino_engine import open_engine

        return MeasuredEngine(path=path, manifest=open_engine(path))
    from harness.runtime.tensorrt_llm import load

    if manifest.gpu.num_ranks > 1:
        raise QualityError(
            f"{path} runs on {manifest.gpu.num_ranks} GPUs, a report measures engines of one",
            "measure the same checkpoint built without --tp and --pp: the weights are the same",
        )
    if not manifest.gpu.context_logits:
        raise QualityError(
            f"{path} gives no logits of prompts, by which text is measured",
            "build it again with --context-logits, measure that, and serve this one",
        )
    engine = MeasuredEngine(path=path, manifest=manifest)
    load.open_engine(serving_config(engine))
    return engine


def serving_config(engine: MeasuredEngine) -> ResolvedConfig:
    """How an engine is served for tasks and speed."""
    manifest = engine.manifest
    gpu = manifest.gpu
    wished = EngineConfig(
        engine_dir=engine.path,
        max_model_len=min(manifest.max_model_len, _LONGEST_CONTEXT),
        max_num_seqs=_MOST_SEQUENCES if gpu is None else min(_MOST_SEQUENCES, gpu.max_batch_size),
    )
    return wished.resolve(manifest, available_bytes=_available(manifest), num_cores=num_usable_cores())


@contextmanager
def text_executor(engine: MeasuredEngine, window_tokens: int, num_windows: int) -> Iterator[Executor]:
    """An engine in fast mode with room for so many windows side by side, for as long as the block runs."""
    manifest = engine.manifest
    blocks = num_windows * -(-window_tokens // TOKENS_PER_BLOCK) + 1
    kv_cache_bytes = blocks * TOKENS_PER_BLOCK * manifest.kv.bytes_per_token["fast"]
    if manifest.gpu is None:
        from harness.runtime.openvino_executor import OpenVinoExecutor

        yield OpenVinoExecutor(
            engine.path,
            manifest,
            deterministic=False,
            kv_cache_bytes=kv_cache_bytes,
            num_threads=num_usable_cores(),
        )
        return
    from harness.runtime.tensorrt_llm.context_logits import load_context_logits

    wished = EngineConfig(
        engine_dir=engine.path,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=min(manifest.max_model_len, window_tokens + 1),
        prefix_cache=False,
    )
    config = wished.resolve(manifest, available_bytes=_available(manifest), num_cores=num_usable_cores())
    executor = load_context_logits(config, manifest)
    try:
        yield executor
    finally:
        executor.close()


def check_memory(*engines: MeasuredEngine) -> None:
    """Refuse engines that do not fit side by side.

    Raises:
        CapacityError: how much they need, and how much there is.
    """
    needed = int(sum(engine.manifest.weight_bytes() for engine in engines) * _COMPILED_FACTOR)
    available = min(_available(engine.manifest) for engine in engines)
    if needed > available:
        raise CapacityError(
            f"an engine beside its baseline needs about {gib(needed)}, {gib(available)} of memory is available",
            "measure on a machine with more, or beside a smaller --baseline, such as the int8 engine",
        )


def machine(manifest: EngineManifest) -> str:
    """What an engine was measured on, for people."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux
        pass
    host = f"{model}, {num_usable_cores()} cores, {gib(psutil.virtual_memory().total)} of memory"
    if manifest.gpu is None:
        return host
    device = devices()[0]
    return f"{device.name}, {gib(device.total_bytes)}, driver {device.driver_version}; {host}"


def _available(manifest: EngineManifest) -> int:
    """Bytes that an engine may take: of the host, or of its GPU."""
    return available_memory_bytes() if manifest.gpu is None else devices()[0].free_bytes
