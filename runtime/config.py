"""What a user may choose about an engine process, and the figures that follow from it.

`EngineConfig` is the wish, `ResolvedConfig` what runs. `EngineConfig.resolve` is pure: memory and cores are arguments.
Settings that cannot fit, or do not apply to the engine's backend, are refused here, before a weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from harness.errors import CapacityError, UsageError
from harness.ledger import GPU_KV_FRACTION, TOKENS_PER_BLOCK, Ledger, gib, kv_cache_bytes, runtime_reserve
from harness.manifest import EngineManifest, GpuPart
from harness.runtime.scheduler import SchedulerConfig

_MIB = 1 << 20
_GPU_ONLY = ("gpu_memory_fraction", "host_cache_bytes", "scheduling_policy", "cuda_graphs")
_CPU_ONLY = ("deterministic", "num_threads")

SchedulingPolicy = Literal["guaranteed-no-evict", "max-utilization"]


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """How an engine runs on GPUs.

    Attributes:
        num_ranks: processes, each with a GPU of its own.
        memory_fraction: of the memory that the engine leaves free, for KV.
        max_kv_tokens: most tokens in the KV cache, whatever the fraction allows; None for no other limit.
        host_cache_bytes: memory of the host for KV blocks that the GPUs have no room for, of all ranks; 0 for none.
        scheduling_policy: whether a request starts only when it can be completed, or as soon as it fits, in which case
            it may be paused and computed again.
        cuda_graphs: replay steps that only decode.
    """

    num_ranks: int
    memory_fraction: float
    max_kv_tokens: int | None
    host_cache_bytes: int
    scheduling_policy: SchedulingPolicy
    cuda_graphs: bool


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Everything an engine process is started with; no value is left open.

    On GPUs `kv_cache_bytes` is an estimate, for each of them, and `num_threads` is 0: the threads are the library's.
    """

    engine_dir: Path
    deterministic: bool
    kv_cache_bytes: int
    num_threads: int
    scheduler: SchedulerConfig
    gpu: GpuConfig | None = None

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.scheduler.max_model_len

    def describe(self) -> str:
        """What it takes of the machine, for people."""
        kv_cache = f"{self.kv_cache_bytes / _MIB:.0f} MiB"
        if self.gpu is None:
            return f"KV cache {kv_cache}, {self.num_threads} threads"
        return f"KV cache about {kv_cache} on each of {self.gpu.num_ranks} GPUs"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; None means "choose for me".

    Args:
        engine_dir: folder with `manifest.json`.
        deterministic: f32 execution and KV instead of the fast mode.
        kv_cache_bytes: memory for KV blocks; on each GPU, of an engine for them.
        max_model_len: longest prompt and answer together, in tokens; None is the engine's own limit.
        max_num_seqs: most sequences in one step; None is what a GPU engine was built for, 32 on a CPU.
        max_num_batched_tokens: most tokens in one step; longer prompts are computed in chunks of it. None is what a GPU
            engine was built for, 512 on a CPU.
        num_threads: threads of the engine; None is one for each physical core.
        max_waiting: most requests in the queue; further ones are refused.
        prefix_cache: reuse the KV of equal prefixes.
        gpu_memory_fraction, host_cache_bytes, scheduling_policy, cuda_graphs: see `GpuConfig`; for its engines alone.

    Raises:
        UsageError: a value is out of range.
    """

    engine_dir: Path
    deterministic: bool = False
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_threads: int | None = None
    max_waiting: int = SchedulerConfig.max_waiting
    prefix_cache: bool = SchedulerConfig.prefix_cache
    gpu_memory_fraction: float | None = None
    host_cache_bytes: int | None = None
    scheduling_policy: SchedulingPolicy | None = None
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        for name in ("kv_cache_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_flag(name)} is {value}", "allowed: 1 or more")
        if self.gpu_memory_fraction is not None and not 0 < self.gpu_memory_fraction < 1:
            raise UsageError(
                f"--gpu-memory-fraction is {self.gpu_memory_fraction}", "allowed: more than 0, less than 1"
            )
        if self.scheduling_policy not in (None, *get_args(SchedulingPolicy)):
            raise UsageError(
                f"--scheduling-policy is {self.scheduling_policy!r}",
                f"allowed: {', '.join(get_args(SchedulingPolicy))}",
            )
        self._scheduler(2 if self.max_model_len is None else self.max_model_len)  # checks the rest

    def resolve(self, manifest: EngineManifest, *, available_bytes: int, num_cores: int) -> ResolvedConfig:
        """Fill in what was left open.

        On a CPU the KV cache gets what `max_num_seqs` sequences of `max_model_len` tokens would need, but at most half
        of the memory left beside weights and reserve; on a GPU its fraction of what is left.

        Args:
            available_bytes: memory that can be taken now: of the host, or of the GPU that has the least.
            num_cores: for an engine on the CPU.

        Raises:
            UsageError: a limit is more than the engine was built for, or a setting is not for its backend.
            CapacityError: weights, or one sequence of `max_model_len` tokens, do not fit.
        """
        max_model_len = self.max_model_len or manifest.max_model_len
        if max_model_len > manifest.max_model_len:
            raise UsageError(
                f"--max-model-len {max_model_len} is more than this engine's limit",
                f"allowed: up to {manifest.max_model_len}",
            )
        if manifest.gpu is not None:
            self._refuse(_CPU_ONLY, "a GPU")
            return self._resolve_gpu(manifest, manifest.gpu, max_model_len, available_bytes)
        self._refuse(_GPU_ONLY, "the CPU")
        ledger = Ledger(
            memory_bytes=available_bytes,
            weights_bytes=manifest.weight_bytes(),
            reserve_bytes=runtime_reserve(available_bytes),
            kv_bytes_per_token=manifest.kv.bytes_per_token["deterministic" if self.deterministic else "fast"],
        )
        scheduler = self._scheduler(max_model_len)
        one_sequence = kv_cache_bytes(kv_bytes_per_token=ledger.kv_bytes_per_token, length=max_model_len)
        wanted = min(scheduler.max_num_seqs * one_sequence, ledger.kv_cache_bytes // 2)
        return ResolvedConfig(
            engine_dir=self.engine_dir,
            deterministic=self.deterministic,
            kv_cache_bytes=self._kv_cache_bytes(ledger, max_model_len, wanted),
            num_threads=self.num_threads or num_cores,
            scheduler=scheduler,
        )

    def _resolve_gpu(
        self, manifest: EngineManifest, gpu: GpuPart, max_model_len: int, available_bytes: int
    ) -> ResolvedConfig:
        ledger = Ledger(
            memory_bytes=available_bytes,
            weights_bytes=math.ceil(manifest.weight_bytes() / gpu.num_ranks),
            reserve_bytes=runtime_reserve(available_bytes),
            kv_bytes_per_token=manifest.kv.bytes_per_token["fast"],
        )
        fraction = GPU_KV_FRACTION if self.gpu_memory_fraction is None else self.gpu_memory_fraction
        kv_bytes = self._kv_cache_bytes(ledger, max_model_len, int(ledger.kv_cache_bytes * fraction))
        for name, limit in (("max_num_seqs", gpu.max_batch_size), ("max_num_batched_tokens", gpu.max_num_tokens)):
            if (getattr(self, name) or 0) > limit:
                raise UsageError(
                    f"{_flag(name)} {getattr(self, name)} is more than this engine was built for",
                    f"allowed: up to {limit}",
                )
        return ResolvedConfig(
            engine_dir=self.engine_dir,
            deterministic=False,
            kv_cache_bytes=kv_bytes,
            num_threads=0,
            scheduler=self._scheduler(
                max_model_len,
                max_num_seqs=max(1, min(gpu.max_batch_size, gpu.max_num_tokens - TOKENS_PER_BLOCK)),
                max_num_batched_tokens=gpu.max_num_tokens,
                can_reuse=gpu.prefix_reuse,
            ),
            gpu=GpuConfig(
                num_ranks=gpu.num_ranks,
                memory_fraction=fraction,
                max_kv_tokens=kv_bytes // ledger.kv_bytes_per_token if self.kv_cache_bytes else None,
                host_cache_bytes=self.host_cache_bytes or 0,
                scheduling_policy=self.scheduling_policy or "guaranteed-no-evict",
                cuda_graphs=self.cuda_graphs is not False,
            ),
        )

    def _refuse(self, names: tuple[str, ...], place: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and (name, value) != ("deterministic", False):
                flag = "--no-cuda-graphs" if (name, value) == ("cuda_graphs", False) else _flag(name)
                raise UsageError(f"{flag} is not for this engine, which was built for {place}", "leave it out")

    def _scheduler(
        self,
        max_model_len: int,
        *,
        max_num_seqs: int = SchedulerConfig.max_num_seqs,
        max_num_batched_tokens: int = SchedulerConfig.max_num_batched_tokens,
        can_reuse: bool = True,
    ) -> SchedulerConfig:
        """Limits of the scheduler, with those given where the user left one open."""
        try:
            return SchedulerConfig(
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs if self.max_num_seqs is None else self.max_num_seqs,
                max_num_batched_tokens=(
                    max_num_batched_tokens if self.max_num_batched_tokens is None else self.max_num_batched_tokens
                ),
                max_waiting=self.max_waiting,
                prefix_cache=self.prefix_cache and can_reuse,
            )
        except ValueError as error:
            seen, _, allowed = str(error).partition("; ")
            name, _, value = seen.partition(" ")
            raise UsageError(f"{_flag(name)} {value}", allowed) from None

    def _kv_cache_bytes(self, ledger: Ledger, max_model_len: int, wanted: int) -> int:
        weights, memory, left = gib(ledger.weights_bytes), gib(ledger.memory_bytes), ledger.kv_cache_bytes
        if not ledger.fits(num_sequences=1, length=1):
            raise CapacityError(
                f"the weights need {weights}, {memory} of memory is available",
                "free memory, or build the model with a smaller precision: harness-build --precision int4",
            )
        if self.kv_cache_bytes is not None and self.kv_cache_bytes > left:
            raise CapacityError(
                f"--kv-cache-memory {_mib(self.kv_cache_bytes)} is more than the {gib(left)} left of "
                f"{memory} available memory after weights ({weights}) and reserve",
                f"give --kv-cache-memory {left // _MIB}MiB or less",
            )
        one_block, one_sequence = (
            kv_cache_bytes(kv_bytes_per_token=ledger.kv_bytes_per_token, length=n) for n in (1, max_model_len)
        )
        chosen = self.kv_cache_bytes or wanted
        if chosen < one_sequence:
            longest = chosen // one_block * TOKENS_PER_BLOCK
            fits = ledger.fits(num_sequences=1, length=max_model_len)
            advice = [f"give --max-model-len {longest}"] * (longest > 0)
            advice += [f"give --kv-cache-memory {_mib(one_sequence)}"] * fits
            raise CapacityError(
                f"one sequence of {max_model_len} tokens needs {gib(one_sequence)} of KV cache, {gib(chosen)} is there",
                ", or ".join(advice) or "free memory",
            )
        return chosen


def _mib(num_bytes: int) -> str:
    return f"{math.ceil(num_bytes / _MIB)}MiB"


def _flag(name: str) -> str:
    """The option of the command line that sets a field."""
    renamed = {"kv_cache_bytes": "kv_cache_memory", "host_cache_bytes": "host_cache_memory", "num_threads": "threads"}
    return "--" + renamed.get(name, name).replace("_", "-")
