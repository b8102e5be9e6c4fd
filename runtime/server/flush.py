"""When generated text is sent: a small buffer saves writes, and nobody waits for it to fill.

The first text goes out at once. Later text waits for 4 tokens or 100 ms, whichever comes first; when the last three
gaps between tokens each exceeded 200 ms there is nothing to gather, and every token goes out as it comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from harness.runtime.text_stream import Delta

_decisions = logging.getLogger("harness.decisions")


@dataclass(frozen=True, kw_only=True)
class FlushPolicy:
    """The limits of the buffer; times in seconds."""

    max_tokens: int = 4
    max_delay_s: float = 0.1
    slow_gap_s: float = 0.2
    num_slow_gaps: int = 3


class FlushTimer:
    """Decides for one stream. It is told the time and never reads a clock."""

    def __init__(self, policy: FlushPolicy) -> None:
        self._policy = policy
        self._num_tokens = 0
        self._is_first = True
        self._last_arrival = 0.0
        self._slow_gaps = 0
        self._deadline: float | None = None

    @property
    def deadline(self) -> float | None:
        """When what is buffered must go out; None while nothing is."""
        return self._deadline

    def arrived(self, num_tokens: int, now: float) -> str | None:
        """Count tokens into the buffer; the reason to flush at once, or None to wait."""
        if not self._is_first:
            self._slow_gaps = self._slow_gaps + 1 if now - self._last_arrival > self._policy.slow_gap_s else 0
        self._last_arrival = now
        self._num_tokens += num_tokens
        if self._deadline is None:
            self._deadline = now + self._policy.max_delay_s
        if self._is_first:
            return "first"
        if self._num_tokens >= self._policy.max_tokens:
            return "tokens"
        return "slow" if self._slow_gaps >= self._policy.num_slow_gaps else None

    def flushed(self) -> None:
        """Note that the buffer was sent."""
        self._is_first = False
        self._num_tokens = 0
        self._deadline = None


async def coalesce(deltas: AsyncIterator[Delta], policy: FlushPolicy, label: str = "") -> AsyncGenerator[Delta, None]:
    """Join deltas as the policy says. The last one, with its finish reason, goes out as it comes.

    Args:
        label: names the stream in the debug log.
    """
    timer = FlushTimer(policy)
    buffered: list[Delta] = []
    upcoming: asyncio.Task[Delta | None] | None = None
    try:
        while True:
            if upcoming is None:
                upcoming = asyncio.create_task(_next(deltas))
            timeout = None if timer.deadline is None else max(0.0, timer.deadline - time.monotonic())
            await asyncio.wait({upcoming}, timeout=timeout)
            reason: str | None = "delay"
            if upcoming.done():
                delta, upcoming = upcoming.result(), None
                if delta is None:
                    break
                buffered.append(delta)
                reason = timer.arrived(delta.num_tokens, time.monotonic())
                if delta.finish_reason is not None:
                    reason = "finished"
            if reason is not None:
                _decisions.debug("STREAM request=%s flush=%s deltas=%d", label, reason, len(buffered))
                yield Delta.join(buffered)
                buffered = []
                timer.flushed()
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.wait({upcoming})


async def _next(deltas: AsyncIterator[Delta]) -> Delta | None:
    return await anext(deltas, None)
