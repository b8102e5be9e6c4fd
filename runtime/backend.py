"""The outer seam: all that the server knows of an engine, whatever runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from harness.runtime.request import Request, TokenChunk


class BackendStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine. Counters (`*_total`) only grow while one engine process lives.

    None is what a backend cannot tell. GPU memory is that in use, by whomever, and in all, over the engine's GPUs.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # blocks that no running request holds; cached ones count as free
    num_cached_blocks: int | None = 0  # blocks whose content can be found by hash
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    evictions_total: int | None = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    steps_total: int = 0
    gpu_memory_used_bytes: int | None = None
    gpu_memory_bytes: int | None = None


class Backend(Protocol):
    """An engine that completes requests. Every method may be called from one event loop only."""

    async def start(self) -> None:
        """Load the engine; returns once it answers.

        Raises:
            HarnessError: it cannot be loaded; the message says why.
        """

    @property
    def is_ready(self) -> bool:
        """Whether a request submitted now would be worked on."""

    @property
    def num_restarts(self) -> int:
        """How often a new engine replaced a dead one."""

    def submit(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        """Queue a request. The generator ends after the chunk with a `finish_reason`.

        Closing it early (`aclose`) cancels the request.

        Raises (on first iteration):
            RequestError: the prompt is empty, too long, or names unknown token ids.
            OverloadedError: the queue is full.
            EngineDeadError: the engine process died.
        """

    async def stats(self) -> BackendStats:
        """Current counts."""

    async def stop(self) -> None:
        """Stop at once. Requests still running end with CANCELLED."""
