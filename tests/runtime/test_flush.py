"""When text is sent: the timer's decisions with a clock of the test's own, and the join of deltas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from harness.runtime.request import FinishReason
from harness.runtime.server.flush import FlushPolicy, FlushTimer, coalesce
from harness.runtime.text_stream import Delta


def test_the_first_text_goes_out_at_once_then_four_tokens_are_gathered() -> None:
    timer = FlushTimer(FlushPolicy())
    assert timer.arrived(1, 0.0) == "first"
    timer.flushed()
    assert [timer.arrived(1, 0.01 * n) for n in range(1, 5)] == [None, None, None, "tokens"]
    timer.flushed()
    assert timer.deadline is None


def test_the_oldest_token_waits_100_ms() -> None:
    timer = FlushTimer(FlushPolicy())
    timer.arrived(1, 0.0)
    timer.flushed()
    timer.arrived(1, 1.0)
    timer.arrived(1, 1.05)
    assert timer.deadline == 1.1


def test_after_three_slow_gaps_in_a_row_every_token_goes_out() -> None:
    timer = FlushTimer(FlushPolicy())
    reasons = []
    for now in (0.0, 0.25, 0.5, 0.75, 1.0, 1.05, 1.3):
        reasons.append(timer.arrived(1, now))
        timer.flushed()
    # a fast token ends the row
    assert reasons == ["first", None, None, "slow", "slow", None, None]


async def _emit(*steps: tuple[float, Delta]) -> AsyncGenerator[Delta, None]:
    for pause, delta in steps:
        await asyncio.sleep(pause)
        yield delta


def _token(text: str, finish_reason: FinishReason | None = None) -> Delta:
    return Delta(content=text, num_tokens=1, finish_reason=finish_reason)


def test_quick_tokens_are_joined_and_the_last_comes_with_its_reason() -> None:
    async def run() -> list[Delta]:
        source = _emit(*((0.0, _token(c)) for c in "abcdefg"), (0.0, _token("", FinishReason.STOP)))
        async with aclosing(coalesce(source, FlushPolicy())) as joined:
            return [delta async for delta in joined]

    joined = asyncio.run(run())
    assert [delta.content for delta in joined] == ["a", "bcde", "fg"]
    assert [delta.num_tokens for delta in joined] == [1, 4, 3]
    assert joined[-1].finish_reason is FinishReason.STOP


def test_a_lonely_token_is_sent_when_its_time_is_over() -> None:
    async def run() -> float:
        source = _emit((0.0, _token("a")), (0.0, _token("b")), (30.0, _token("c")))
        async with aclosing(coalesce(source, FlushPolicy())) as joined:
            await anext(joined)
            started = time.monotonic()
            assert (await anext(joined)).content == "b"
            return time.monotonic() - started

    assert 0.08 < asyncio.run(run()) < 5


def test_closing_early_closes_the_source() -> None:
    closed = []

    async def source() -> AsyncGenerator[Delta, None]:
        try:
            yield _token("a")
            await asyncio.sleep(30)
        finally:
            closed.append(True)

    async def run() -> None:
        deltas = source()
        async with aclosing(deltas), aclosing(coalesce(deltas, FlushPolicy(max_delay_s=0.01))) as joined:
            await anext(joined)
            waiting = asyncio.create_task(anext(joined))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.wait({waiting})

    asyncio.run(run())
    assert closed == [True]


def test_each_flush_is_in_the_decision_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "harness.decisions")

    async def run() -> None:
        async with aclosing(coalesce(_emit((0.0, _token("a", FinishReason.STOP))), FlushPolicy(), "r1")) as joined:
            assert [delta async for delta in joined]

    asyncio.run(run())
    lines = [record.message for record in caplog.records if record.name == "harness.decisions"]
    assert lines == ["STREAM request=r1 flush=finished deltas=1"]
