"""How fast an engine answers and how much memory it takes: one stream alone, as a user of a quiet server sees it.

Rounds of all engines are interleaved, each in an engine process of its own, so that a machine that slows down slows all
of them. The first request of a process is not counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.calib.quality.report import SpeedResult, Spread
from harness.calib.quality.suite import Speed
from harness.runtime.config import ResolvedConfig
from harness.runtime.process_backend import ProcessBackend
from harness.runtime.request import Request, SamplingParams


@dataclass(frozen=True, kw_only=True)
class _Round:
    ttft_s: float
    tpot_s: float
    total_s: float
    peak_memory_bytes: int | None


def measure_speed(
    configs: Mapping[str, ResolvedConfig],
    prompt: Sequence[int],
    wanted: Speed,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, SpeedResult]:
    """Speed of each engine by the keys of `configs`, on one prompt, cut to fit the shortest context.

    `on_round` is called after each round of each engine.

    Raises:
        HarnessError: an engine cannot be loaded, or died.
    """
    shortest = min(config.max_model_len for config in configs.values())
    num_generated = min(wanted.generated_tokens, shortest // 3)
    prompt = list(prompt[: min(wanted.prompt_tokens, shortest - num_generated)])
    rounds: dict[str, list[_Round]] = {name: [] for name in configs}
    for _ in range(wanted.rounds):
        for name, config in configs.items():
            rounds[name].append(asyncio.run(_measure(config, prompt, num_generated)))
            on_round()
    return {name: _summary(measured, len(prompt), num_generated) for name, measured in rounds.items()}


async def _measure(config: ResolvedConfig, prompt: list[int], num_generated: int) -> _Round:
    backend = ProcessBackend(config)
    await backend.start()
    try:
        await _complete(backend, prompt[: len(prompt) // 2], 8, "warm-up")
        started, first, ended = await _complete(backend, prompt, num_generated, "measured")
        return _Round(
            ttft_s=first - started,
            tpot_s=(ended - first) / max(1, num_generated - 1),
            total_s=ended - started,
            peak_memory_bytes=(await backend.stats()).gpu_memory_used_bytes or _peak_memory_bytes(backend.engine_pid),
        )
    finally:
        await backend.stop()


async def _complete(
    backend: ProcessBackend, prompt: list[int], num_tokens: int, name: str
) -> tuple[float, float, float]:
    """Times of the start, the first token and the last; the prompt is not taken from the prefix cache."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    started, first = time.perf_counter(), None
    async for chunk in backend.submit(
        Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, cache_salt=name)
    ):
        if first is None and chunk.token_ids:
            first = time.perf_counter()
    ended = time.perf_counter()
    return started, first or ended, ended


def _peak_memory_bytes(pid: int | None) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # only Linux tells
        return None


def _summary(rounds: Sequence[_Round], prompt_tokens: int, num_generated: int) -> SpeedResult:
    peaks = [r.peak_memory_bytes for r in rounds if r.peak_memory_bytes is not None]
    return SpeedResult(
        prompt_tokens=prompt_tokens,
        generated_tokens=num_generated,
        num_rounds=len(rounds),
        ttft_s=_spread([r.ttft_s for r in rounds]),
        tpot_s=_spread([r.tpot_s for r in rounds]),
        tokens_per_s=_rate(num_generated, [r.total_s for r in rounds]),
        peak_memory_bytes=max(peaks, default=None),
    )


def _rate(num_tokens: int, seconds: Sequence[float]) -> Spread:
    """Tokens a second; the mean is of all rounds together, as those of the times are, so that the figures agree."""
    return Spread(
        mean=num_tokens * len(seconds) / sum(seconds), low=num_tokens / max(seconds), high=num_tokens / min(seconds)
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(mean=float(np.mean(values)), low=min(values), high=max(values))
