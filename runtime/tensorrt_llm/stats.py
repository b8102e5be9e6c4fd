"""Counts of the executor, as `BackendStats`: from the JSON of its iterations, and from each request's own figures.

Fields are named as in the JSON of TensorRT-LLM 1.2.1; one that is missing or of another type is an error. What the
executor does not tell, how many blocks are cached and how many were evicted, is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from harness.runtime.backend import BackendStats


class KvCacheStats(msgspec.Struct, frozen=True, rename="camel"):
    """Blocks of the KV cache on the GPU; free ones may hold content that can be found."""

    max_num_blocks: int
    free_num_blocks: int
    tokens_per_block: int


class InflightBatchingStats(msgspec.Struct, frozen=True, rename="camel"):
    """Requests of one iteration; paused ones gave their blocks up and are computed again."""

    num_scheduled_requests: int
    num_paused_requests: int


class IterationStats(msgspec.Struct, frozen=True, rename="camel"):
    """One iteration of the executor."""

    kv_cache_stats: KvCacheStats | None
    inflight_batching_stats: InflightBatchingStats | None


_decode = msgspec.json.Decoder(IterationStats).decode


class StatsCollector:
    """Adds up what one executor reports.

    Args:
        has_prefix_cache: whether prompts are looked up at all.
        gpu_memory: bytes in use and in all; called for each snapshot.
    """

    def __init__(self, *, has_prefix_cache: bool, gpu_memory: Callable[[], tuple[int, int]]) -> None:
        self._has_prefix_cache = has_prefix_cache
        self._gpu_memory = gpu_memory
        self._kv = KvCacheStats(max_num_blocks=0, free_num_blocks=0, tokens_per_block=0)
        self._num_scheduled = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_hit_tokens = 0
        self._num_generated_tokens = 0

    def add_iterations(self, iterations: Iterable[Any]) -> None:
        """Account for `IterationStats` objects of the executor.

        Raises:
            msgspec.ValidationError: they are not as those of 1.2.1.
        """
        for iteration in iterations:
            stats = _decode(iteration.to_json_str())
            self._num_steps += 1
            if stats.kv_cache_stats is not None:
                self._kv = stats.kv_cache_stats
            if stats.inflight_batching_stats is not None:
                self._num_scheduled = stats.inflight_batching_stats.num_scheduled_requests
                self._num_preemptions += stats.inflight_batching_stats.num_paused_requests

    def add_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Account for a request's prompt, when its first tokens come."""
        self._num_prompt_tokens += num_tokens
        self._num_hit_tokens += num_cached_tokens

    def add_generated(self, num_tokens: int) -> None:
        """Account for tokens delivered."""
        self._num_generated_tokens += num_tokens

    def snapshot(self, num_alive: int) -> BackendStats:
        """Current counts, with `num_alive` requests in the executor. Those that its last iteration did not schedule
        wait."""
        num_running = min(self._num_scheduled, num_alive)
        used, total = self._gpu_memory()
        return BackendStats(
            num_running=num_running,
            num_waiting=num_alive - num_running,
            num_blocks=self._kv.max_num_blocks,
            num_free_blocks=self._kv.free_num_blocks,
            num_cached_blocks=None,
            prefix_query_tokens_total=self._num_prompt_tokens if self._has_prefix_cache else 0,
            prefix_hit_tokens_total=self._num_hit_tokens,
            evictions_total=None,
            preemptions_total=self._num_preemptions,
            prompt_tokens_total=self._num_prompt_tokens,
            generated_tokens_total=self._num_generated_tokens,
            steps_total=self._num_steps,
            gpu_memory_used_bytes=used,
            gpu_memory_bytes=total,
        )
