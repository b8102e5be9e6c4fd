"""Opens an engine for a GPU: everything that can be refused is, then TensorRT-LLM loads it and it is warmed up.

An engine is bound to the releases it was built with and to one compute capability. TensorRT finds out after it has read
gigabytes, and says it in its own words; this module looks at the manifest and the driver first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from harness.arch import check_device, resolve_arch
from harness.errors import CapacityError, DeviceError, EngineError
from harness.ledger import gib
from harness.machine import available_memory_bytes
from harness.manifest import EngineManifest, GpuPart, read_manifest, verify_files
from harness.nvml import GpuDevice, devices
from harness.runtime.config import GpuConfig, ResolvedConfig
from harness.runtime.request import FinishReason, Request, SamplingParams
from harness.runtime.scheduler import SchedulerConfig
from harness.runtime.tensorrt_llm.core import TrtllmCore
from harness.runtime.tensorrt_llm.executor_config import executor_config
from harness.runtime.tensorrt_llm.request_mapping import RequestMapper

_BACKEND = "tensorrt-llm"
_BOUND_TO = ("tensorrt_llm", "tensorrt")
_WARM_UP_SALT = "warm-up"  # no tenant's: theirs are hexadecimal digests
_WARM_UP_S = 600.0
_MEMORY_IS_READ_EVERY_S = 1.0


def load_tensorrt_llm(config: ResolvedConfig) -> TrtllmCore:
    """Check and load the engine of `config`, and run a few tokens through it.

    Raises:
        HarnessError: it cannot be run; says why.
    """
    manifest, visible = open_engine(config)
    return start(config, manifest, visible)


def open_engine(config: ResolvedConfig) -> tuple[EngineManifest, list[GpuDevice]]:
    """The manifest of an engine that these devices can run and whose files are whole, and the devices it will take.

    Raises:
        EngineError: built for something else, or not whole; names both sides.
        DeviceError: there is no such GPU.
        CapacityError: the host has not the memory that its cache shall have.
    """
    manifest = read_manifest(config.engine_dir)
    if manifest.backend != _BACKEND or manifest.gpu is None or config.gpu is None:
        raise EngineError(f"engine {manifest.engine_id} was built for {manifest.backend}", "start the server again")
    check_versions(manifest)
    used = check_devices(manifest, manifest.gpu, devices())
    available = available_memory_bytes()
    if config.gpu.host_cache_bytes > available:
        raise CapacityError(
            f"--host-cache-memory is {gib(config.gpu.host_cache_bytes)}, {gib(available)} of memory is available",
            f"give less than {available >> 20}MiB",
        )
    verify_files(config.engine_dir, manifest)
    return manifest, used


def check_versions(manifest: EngineManifest) -> None:
    """Refuse an engine of other releases than those installed.

    Raises:
        EngineError: names both.
    """
    for package in _BOUND_TO:
        built_with, installed = manifest.versions.get(package), installed_version(package)
        if built_with != installed:
            raise EngineError(
                f"engine {manifest.engine_id} was built with {package} {built_with}, installed is {installed}",
                f"install {package}=={built_with}, or rebuild the engine with harness-build",
            )


def installed_version(package: str) -> str | None:
    """Release of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_devices(manifest: EngineManifest, gpu: GpuPart, visible: list[GpuDevice]) -> list[GpuDevice]:
    """The devices that the ranks of an engine will take: the first of those visible.

    Raises:
        DeviceError: they are of another arch.
        EngineError: there are fewer than ranks.
    """
    if len(visible) < gpu.num_ranks:
        raise EngineError(
            f"engine {manifest.engine_id} was built for {gpu.num_ranks} GPUs (tp {gpu.tp_size}, pp {gpu.pp_size}), "
            f"{len(visible)} visible here",
            f"make {gpu.num_ranks} visible, or rebuild with --tp {len(visible)}",
        )
    check_device(resolve_arch(manifest.arch), visible, built=True)
    return visible[: gpu.num_ranks]


def executor_api() -> Any:
    """The module `tensorrt_llm.bindings.executor`; importing it takes a while, and the GPU's libraries.

    Raises:
        EngineError: it cannot be imported.
    """
    try:
        from tensorrt_llm.bindings import executor
    except ImportError as error:  # of a library that it needs, too
        raise EngineError(f"tensorrt_llm cannot be imported: {error}", "see harness-build doctor") from error
    return executor


def make_executor(api: Any, config: ResolvedConfig, engine: GpuPart, gpu: GpuConfig) -> Any:
    """Load the engine's file of this process's rank; of several, all are loaded together.

    Raises:
        EngineError: TensorRT-LLM cannot; what it said.
    """
    try:
        settings = executor_config(api, engine, gpu, config.scheduler)
        return api.Executor(config.engine_dir, api.ModelType.DECODER_ONLY, settings)
    except RuntimeError as error:
        raise EngineError(f"TensorRT-LLM cannot load the engine: {error}", "its log above says more") from error


def start(config: ResolvedConfig, manifest: EngineManifest, used: list[GpuDevice]) -> TrtllmCore:
    """Load a checked engine, and warm it up.

    Raises:
        EngineError: TensorRT-LLM cannot load it, or fails at the first tokens.
    """
    assert manifest.gpu is not None
    assert config.gpu is not None
    api = executor_api()
    executor = make_executor(api, config, manifest.gpu, config.gpu)
    mapper = RequestMapper(
        api=api,
        vocab_size=manifest.model.vocab_size,
        eos_token_ids=manifest.tokenizer.eos_token_ids,
        has_lookahead=manifest.gpu.lookahead is not None,
    )

    def core() -> TrtllmCore:
        return TrtllmCore(
            executor,
            mapper,
            config.scheduler,
            max_prompt_len=max_prompt_len(manifest.gpu, config.scheduler),
            tokens_per_block=manifest.kv.tokens_per_block,
            gpu_memory=memory_of([device.index for device in used]),
        )

    warm_up(core(), num_tokens=manifest.kv.tokens_per_block)
    return core()  # another, so that warming up is not in its counts


def max_prompt_len(engine: GpuPart | None, limits: SchedulerConfig) -> int:
    """Longest prompt: without chunks it must fit one step."""
    assert engine is not None
    if engine.chunked_context:
        return engine.max_input_len
    return min(engine.max_input_len, limits.max_num_batched_tokens)


def warm_up(core: TrtllmCore, num_tokens: int) -> None:
    """Complete one short request, so that the first client does not pay for what the executor does once.

    Raises:
        EngineError: it fails, or takes ten minutes.
    """
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    core.add_request(
        Request(request_id="warm-up", prompt_token_ids=[0] * num_tokens, sampling=sampling, cache_salt=_WARM_UP_SALT)
    )
    deadline = time.monotonic() + _WARM_UP_S
    while core.has_work:
        for chunk in core.step():
            if chunk.finish_reason is FinishReason.ERROR:
                raise EngineError(f"the engine fails at its first tokens: {chunk.error}", "its log above says more")
        if time.monotonic() > deadline:
            raise EngineError(f"the engine gave no token in {_WARM_UP_S:.0f} s", "its log above may say why")


def memory_of(indices: list[int]) -> Callable[[], tuple[int, int]]:
    """Reads bytes in use and in all of some visible devices, once a second at most, for the driver takes its time."""
    read_at, figures = float("-inf"), (0, 0)

    def read() -> tuple[int, int]:
        nonlocal read_at, figures
        if time.monotonic() - read_at >= _MEMORY_IS_READ_EVERY_S:
            read_at = time.monotonic()
            with suppress(DeviceError):  # the last figures stand; a GPU that is gone makes itself known otherwise
                visible = devices()
                figures = (
                    sum(visible[index].used_bytes for index in indices),
                    sum(visible[index].total_bytes for index in indices),
                )
        return figures

    return read
