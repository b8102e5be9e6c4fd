"""What is asked of a served engine, and what must come back. Each check returns what it found or raises `StepFailed`.

Everything goes over HTTP, as a client would ask; the checks hold for an engine on any arch, so that they are tried out
on a CPU before they judge a GPU. Speed beside another server is `load`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from servers import Server
from steps import Findings, StepFailed

LEAST_EQUAL = 0.5
"""Share of equal first tokens below which an engine is wrong. Two right ones differ where two tokens are nearly as
likely: arithmetic is 16-bit, and on the GPU one scale serves all int8 activations. A wrong layout leaves hardly any."""
MOST_TIME_TOGETHER = 0.7
"""Of the time that the streams would take one after another."""
_HELD_OUT = Path(__file__).resolve().parents[2] / "calib" / "suites" / "held_out"
_FREED_S = 10
_WATCH_S = 0.03
_SPREAD = 0.2  # of the time of a stream, at least, lies between its first and its last event
_WORDS = (300, 4000)  # token ids that are words in every vocabulary here


def texts(count: int = 8) -> list[str]:
    """Beginnings of English text and of code, so many of each."""
    documents = []
    for domain in ("english", "code"):
        lines = (_HELD_OUT / f"{domain}.jsonl").read_text("utf-8").splitlines()[:count]
        documents += [json.loads(line)["text"][:200].rstrip() for line in lines]
    return documents


def token_ids(rng: np.random.Generator, count: int) -> list[int]:
    """A prompt that shares no prefix with another."""
    return [int(token) for token in rng.integers(*_WORDS, count)]


class Api:
    """A client of one server. Asks for greedy completions."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = server.client

    def body(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A request's body."""
        return {"model": self._server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}

    def complete(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """The whole answer.

        Raises:
            StepFailed: the server refuses.
        """
        answer = self._client.post("/v1/completions", json=self.body(prompt, max_tokens, **fields))
        if answer.status_code != 200:
            raise StepFailed(f"the server answered {answer.status_code}: {answer.text[:400]}")
        content: dict[str, Any] = answer.json()
        return content

    def stream(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> Iterator[str]:
        """The data of each event as it comes; closing the iterator closes the connection."""
        body = self.body(prompt, max_tokens, stream=True, **fields)
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise StepFailed(f"the server answered {response.status_code}: {response.read()[:400]!r}")
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

    def metric(self, name: str) -> float | None:
        """A metric without its prefix `harness_`; None where the server has none of that name."""
        found = re.search(rf"^harness_{name}{{.*}} (.*)$", self._client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else None


def answers(server: Server, prompts: Sequence[str], max_tokens: int = 16) -> list[tuple[str, str]]:
    """The first token and the first few of each greedy answer, as text."""
    api = Api(server)
    found = []
    for prompt in prompts:
        first, whole = (api.complete(prompt, n)["choices"][0]["text"] for n in (1, max_tokens))
        found.append((first, whole))
    return found


def compare_answers(seen: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> Findings:
    """Shares of equal first tokens and of equal answers."""
    pairs = list(zip(seen, expected, strict=True))
    found = {
        "equal_first_tokens": round(sum(a[0] == b[0] for a, b in pairs) / len(pairs), 3),
        "equal_answers": round(sum(a[1] == b[1] for a, b in pairs) / len(pairs), 3),
        "prompts": len(pairs),
        "an_answer": seen[0][1],
    }
    if not any(whole.strip() for _, whole in seen):
        raise StepFailed("every answer is empty", found)
    if found["equal_first_tokens"] < LEAST_EQUAL:
        share = f"{found['equal_first_tokens']:.0%}"
        raise StepFailed(f"{share} of the first tokens are equal, less than {LEAST_EQUAL:.0%}", found)
    return found


def in_flight_batching(
    server: Server, *, num_streams: int = 8, num_tokens: int = 256, most_time: float = MOST_TIME_TOGETHER
) -> Findings:
    """Streams that come together are computed together, in less than `most_time` of one after another."""
    api, rng = Api(server), np.random.default_rng(1)
    api.complete(token_ids(rng, 32), 16, ignore_eos=True)
    start = time.perf_counter()
    api.complete(token_ids(rng, 32), num_tokens, ignore_eos=True)
    single = time.perf_counter() - start
    most_running, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal most_running
        while not ended.wait(_WATCH_S):
            most_running = max(most_running, api.metric("requests_running") or 0)

    with ThreadPoolExecutor(num_streams + 1) as pool:
        watching = pool.submit(watch)
        start = time.perf_counter()
        try:
            prompts = [token_ids(rng, 32) for _ in range(num_streams)]
            jobs = [pool.submit(api.complete, prompt, num_tokens, ignore_eos=True) for prompt in prompts]
            for job in jobs:
                job.result()
        finally:
            ended.set()
        together = time.perf_counter() - start
        watching.result()
    found = {
        "streams": num_streams,
        "most_running": most_running,
        "seconds_alone": round(single, 3),
        "seconds_together": round(together, 3),
        "of_one_after_another": round(together / (num_streams * single), 3),
    }
    if most_running < 2:
        raise StepFailed("harness_requests_running never was above 1", found)
    if found["of_one_after_another"] > most_time:
        raise StepFailed("together they took about as long as one after another", found)
    return found


def prefix_reuse(server: Server, *, expected: bool = True, prefix_len: int = 1024) -> Findings:
    """A prompt that begins like an earlier one takes its KV over, another tenant's does not; or nothing is reused."""
    api, rng = Api(server), np.random.default_rng()  # nobody has sent it before
    prefix = token_ids(rng, prefix_len)

    def cached(**fields: Any) -> int:
        usage = api.complete(prefix + token_ids(rng, 16), 8, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    found = {"cold": cached(), "again": cached(), "other_tenant": cached(cache_salt="another")}
    found["other_tenant_again"] = cached(cache_salt="another")
    if found["cold"] or found["other_tenant"]:
        raise StepFailed("tokens were reused that this tenant never sent", found)
    if not expected and any(found.values()):
        raise StepFailed("an engine without reuse reused tokens", found)
    if expected and not (0 < found["again"] <= prefix_len and 0 < found["other_tenant_again"] <= prefix_len):
        raise StepFailed(f"of {prefix_len} tokens sent again, {found['again']} were reused", found)
    return found


def streaming(server: Server) -> Findings:
    """An answer comes in several events, spread over the time it takes."""
    api, rng = Api(server), np.random.default_rng(3)
    api.complete(token_ids(rng, 32), 16)  # what the first request of a shape pays is no part of it
    times, text, last = [], "", ""
    start = time.perf_counter()
    for last in api.stream(token_ids(rng, 32), 256, ignore_eos=True):
        if last != "[DONE]":
            times.append(time.perf_counter() - start)
            text += json.loads(last)["choices"][0]["text"]
    found = {
        "events": len(times),
        "first_s": round(times[0], 4),
        "last_s": round(times[-1], 4),
        "characters": len(text),
    }
    if last != "[DONE]":
        raise StepFailed("the stream did not end with [DONE]", found)
    if len(times) < 3 or not text or times[-1] - times[0] < _SPREAD * times[-1]:
        raise StepFailed("the answer did not come in parts", found)
    return found


def cancellation(server: Server, *, num_tokens: int = 900) -> Findings:
    """A stream whose client goes away ends, and leaves its KV blocks."""
    api, rng = Api(server), np.random.default_rng(4)
    probe = token_ids(rng, 16)

    def free_blocks() -> float | None:
        api.complete(probe, 1)  # a GPU engine's figures are those of its last step
        return api.metric("kv_blocks_free")

    free_blocks()
    free = free_blocks()
    stream = api.stream(token_ids(rng, 64), num_tokens, ignore_eos=True)
    next(stream)
    generated = api.metric("engine_generated_tokens_total") or 0
    stream.close()
    start = time.perf_counter()
    while (left := free_blocks()) != free or api.metric("requests_running"):
        if time.perf_counter() - start > _FREED_S:
            found = {"blocks_free_before": free, "blocks_free_after": left}
            raise StepFailed(f"{_FREED_S} s after its client left, the request still holds something", found)
    more = (api.metric("engine_generated_tokens_total") or 0) - generated
    found = {"seconds": round(time.perf_counter() - start, 3), "blocks_free": free, "tokens_after": more}
    if more >= num_tokens - 8:
        raise StepFailed("it was completed, not cancelled", found)
    return found


def gpu_memory(server: Server) -> Findings:
    """What the engine takes of its GPUs."""
    api = Api(server)
    used, total = api.metric("gpu_memory_used_bytes"), api.metric("gpu_memory_bytes")
    if not used or not total:
        raise StepFailed("harness_gpu_memory_used_bytes is not among the metrics")
    return {
        "used_gib": round(used / 2**30, 2),
        "total_gib": round(total / 2**30, 2),
        "kv_blocks": api.metric("kv_blocks"),
    }
