"""What a user may choose about an engine process, and the figures that follow from it.

`EngineConfig` is the wish, `ResolvedConfig` what runs. `EngineConfig.resolve` is pure: memory and cores are arguments.
Settings that cannot fit are refused here, before a weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from harness.errors import CapacityError, UsageError
from harness.ledger import KV_BLOCK_TOKENS, gib, kv_cache_bytes, runtime_reserve
from harness.manifest import EngineManifest

_MIB = 1 << 20
_LEAST = {"kv_cache_bytes": 1, "max_model_len": 2, "max_num_seqs": 1, "num_threads": 1, "max_waiting": 1}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Everything an engine process is started with; no value is left open."""

    engine_dir: Path
    deterministic: bool
    kv_cache_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    max_waiting: int
    prefix_cache: bool


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; None means "choose for me".

    Args:
        engine_dir: folder with `manifest.json`.
        deterministic: exact mode (f32 execution and KV) instead of the fast one.
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
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    num_threads: int | None = None
    max_waiting: int = 256
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}", f"allowed: {least} or more")
        least = KV_BLOCK_TOKENS + self.max_num_seqs
        if self.max_num_batched_tokens < least:
            raise UsageError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}",
                f"allowed: {least} or more (a token for each of {self.max_num_seqs} sequences, and one KV block)",
            )

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
        return ResolvedConfig(
            engine_dir=self.engine_dir,
            deterministic=self.deterministic,
            kv_cache_bytes=self._kv_cache_bytes(manifest, max_model_len, available_bytes),
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_threads=self.num_threads or num_cores,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
        )

    def _kv_cache_bytes(self, manifest: EngineManifest, max_model_len: int, available_bytes: int) -> int:
        per_token = manifest.kv.bytes_per_token["deterministic" if self.deterministic else "fast"]
        one_sequence = kv_cache_bytes(kv_bytes_per_token=per_token, length=max_model_len)
        weights = manifest.weight_bytes()
        left = available_bytes - weights - runtime_reserve(available_bytes)
        if left < kv_cache_bytes(kv_bytes_per_token=per_token, length=1):
            raise CapacityError(
                f"the weights need {gib(weights)}, {gib(available_bytes)} of memory is available",
                "free memory, or build the model with a smaller precision: harness-build --precision int4",
            )
        if self.kv_cache_bytes is not None and self.kv_cache_bytes > left:
            raise CapacityError(
                f"--kv-cache-memory {_mib(self.kv_cache_bytes)} is more than the {gib(left)} left of "
                f"{gib(available_bytes)} available memory after weights ({gib(weights)}) and reserve",
                f"give --kv-cache-memory {left // _MIB}MiB or less",
            )
        chosen = self.kv_cache_bytes or min(self.max_num_seqs * one_sequence, left // 2)
        if chosen < one_sequence:
            longest = chosen // (per_token * KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
            raise CapacityError(
                f"one sequence of {max_model_len} tokens needs {gib(one_sequence)} of KV cache, {gib(chosen)} is there",
                f"give --max-model-len {longest}"
                + (f", or --kv-cache-memory {_mib(one_sequence)}" if one_sequence <= left else ""),
            )
        return chosen


def _mib(num_bytes: int) -> str:
    return f"{math.ceil(num_bytes / _MIB)}MiB"
