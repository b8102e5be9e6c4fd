"""What a user may choose about an engine process, and the figures that follow from it.

`EngineConfig` is the wish, `ResolvedConfig` what runs. `EngineConfig.resolve` is pure: memory and cores are arguments.
Settings that cannot fit are refused here, before a weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from harness.errors import CapacityError, UsageError
from harness.ledger import TOKENS_PER_BLOCK, Ledger, gib, kv_cache_bytes, runtime_reserve
from harness.manifest import EngineManifest
from harness.runtime.scheduler import SchedulerConfig

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Everything an engine process is started with; no value is left open."""

    engine_dir: Path
    deterministic: bool
    kv_cache_bytes: int
    num_threads: int
    scheduler: SchedulerConfig

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.scheduler.max_model_len


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; None means "choose for me".

    Args:
        engine_dir: folder with `manifest.json`.
        deterministic: f32 execution and KV instead of the fast mode.
        kv_cache_bytes: memory for KV blocks.
        max_model_len: longest prompt and answer together, in tokens; None is the engine's own limit.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; longer prompts are computed in chunks of it.
        num_threads: threads of the engine; None is one for each physical core.
        max_waiting: most requests in the queue; further ones are refused.
        prefix_cache: reuse the KV of equal prefixes.

    Raises:
        UsageError: a value is out of range.
    """

    engine_dir: Path
    deterministic: bool = False
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = SchedulerConfig.max_num_seqs
    max_num_batched_tokens: int = SchedulerConfig.max_num_batched_tokens
    num_threads: int | None = None
    max_waiting: int = SchedulerConfig.max_waiting
    prefix_cache: bool = SchedulerConfig.prefix_cache

    def __post_init__(self) -> None:
        for name in ("kv_cache_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_flag(name)} is {value}", "allowed: 1 or more")
        self._scheduler(2 if self.max_model_len is None else self.max_model_len)  # checks the rest

    def resolve(self, manifest: EngineManifest, *, available_bytes: int, num_cores: int) -> ResolvedConfig:
        """Fill in what was left open.

        The KV cache gets what `max_num_seqs` sequences of `max_model_len` tokens would need, but at most half of the
        memory left beside weights and reserve.

        Raises:
            UsageError: `max_model_len` is more than the engine was built for.
            CapacityError: weights, or one sequence of `max_model_len` tokens, do not fit.
        """
        max_model_len = self.max_model_len or manifest.max_model_len
        if max_model_len > manifest.max_model_len:
            raise UsageError(
                f"--max-model-len {max_model_len} is more than this engine's limit",
                f"allowed: up to {manifest.max_model_len}",
            )
        ledger = Ledger(
            memory_bytes=available_bytes,
            weights_bytes=manifest.weight_bytes(),
            reserve_bytes=runtime_reserve(available_bytes),
            kv_bytes_per_token=manifest.kv.bytes_per_token["deterministic" if self.deterministic else "fast"],
        )
        return ResolvedConfig(
            engine_dir=self.engine_dir,
            deterministic=self.deterministic,
            kv_cache_bytes=self._kv_cache_bytes(ledger, max_model_len),
            num_threads=self.num_threads or num_cores,
            scheduler=self._scheduler(max_model_len),
        )

    def _scheduler(self, max_model_len: int) -> SchedulerConfig:
        try:
            return SchedulerConfig(
                max_model_len=max_model_len,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_waiting=self.max_waiting,
                prefix_cache=self.prefix_cache,
            )
        except ValueError as error:
            seen, _, allowed = str(error).partition("; ")
            name, _, value = seen.partition(" ")
            raise UsageError(f"{_flag(name)} {value}", allowed) from None

    def _kv_cache_bytes(self, ledger: Ledger, max_model_len: int) -> int:
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
        chosen = self.kv_cache_bytes or min(self.max_num_seqs * one_sequence, left // 2)
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
    renamed = {"kv_cache_bytes": "kv_cache_memory", "num_threads": "threads"}
    return "--" + renamed.get(name, name).replace("_", "-")
