"""Speed under load: streams at once, beside another server on the same engine, in rounds that take turns.

Prompts are random token ids, so that no prefix is shared and both servers compute all of it. A stream's times are taken
where its bytes arrive; no event is parsed meanwhile, since both would wait for this client then.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np
from checks import token_ids
from servers import Server
from steps import Findings, StepFailed

PROMPT, ANSWER = 128, 128  # tokens of a stream


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement: tokens of all answers a second; medians over its streams of first token and later tokens."""

    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float


def measure(server: Server, rng: np.random.Generator, *, concurrency: int, num_tokens: int = ANSWER) -> Sample:
    """So many streams at once.

    Raises:
        StepFailed: a stream was refused, or ended early.
    """
    prompts = [token_ids(rng, PROMPT) for _ in range(concurrency)]
    return asyncio.run(_measure(server, prompts, num_tokens))


def compare(
    ours: Server, theirs: Server, *, concurrencies: Sequence[int], rounds: int, num_tokens: int = ANSWER
) -> Findings:
    """Both servers by concurrency: medians over rounds, ratios (ours to theirs) as medians of the rounds' own.

    One round before those counted warms up; who comes first changes from round to round.
    """
    rng = np.random.default_rng(0)
    samples: dict[int, list[tuple[Sample, Sample]]] = {concurrency: [] for concurrency in concurrencies}
    for number in range(rounds + 1):
        for concurrency in concurrencies:
            order = (ours, theirs) if number % 2 else (theirs, ours)
            by_url = {s.url: measure(s, rng, concurrency=concurrency, num_tokens=num_tokens) for s in order}
            if number:
                samples[concurrency].append((by_url[ours.url], by_url[theirs.url]))
    return {str(concurrency): _summary(pairs) for concurrency, pairs in samples.items()}


def _summary(pairs: Sequence[tuple[Sample, Sample]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for figure in ("tokens_per_s", "ttft_ms", "tpot_ms"):
        values = [(getattr(a, figure), getattr(b, figure)) for a, b in pairs]
        ratios = [a / b for a, b in values]
        summary[figure] = {
            "ours": round(statistics.median(a for a, _ in values), 2),
            "theirs": round(statistics.median(b for _, b in values), 2),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
        }
    return {**summary, "samples": [[asdict(a), asdict(b)] for a, b in pairs]}


async def _measure(server: Server, prompts: Sequence[list[int]], num_tokens: int) -> Sample:
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        start = time.perf_counter()
        times = await asyncio.gather(*(_stream(client, server, prompt, num_tokens) for prompt in prompts))
        seconds = time.perf_counter() - start
    return Sample(
        tokens_per_s=len(prompts) * num_tokens / seconds,
        ttft_ms=1000 * statistics.median(first for first, _ in times),
        tpot_ms=1000 * statistics.median((end - first) / (num_tokens - 1) for first, end in times),
    )


async def _stream(client: httpx.AsyncClient, server: Server, prompt: list[int], num_tokens: int) -> tuple[float, float]:
    """Seconds to the first bytes and to the end."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, last = 0.0, b""
    start = time.perf_counter()
    async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        async for part in response.aiter_bytes():
            first = first or time.perf_counter() - start
            last = (last + part)[-800:]
    end = time.perf_counter() - start
    if f'"completion_tokens":{num_tokens}'.encode() not in last.replace(b" ", b""):
        raise StepFailed(f"a stream of {server.key} did not end with {num_tokens} tokens: {last.decode()[-300:]}")
    return first, end
