"""The server over an engine for a GPU: HTTP, the engine process and its supervision are real, the executor is not."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.manifest import EngineManifest
from harness.runtime.config import ResolvedConfig
from harness.runtime.process_backend import ProcessBackend
from harness.runtime.server.serve import listen, serve
from harness.runtime.server.service import CompletionService
from harness.tokenizer import Tokenizer

ENGINE = Path(__file__).with_name("fake_engine.py")
PROMPT = list(range(100))

Start = Callable[..., Any]


class Server:
    """A client of a running server, and its backend."""

    def __init__(self, client: httpx.AsyncClient, backend: ProcessBackend) -> None:
        self.client = client
        self.backend = backend

    async def complete(self, prompt: list[int], key: str = "", **fields: Any) -> httpx.Response:
        body = {"model": "gpu", "prompt": prompt, "max_tokens": 5, "temperature": 0, **fields}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def num_cached(self, prompt: list[int], key: str = "") -> int:
        answer = (await self.complete(prompt, key)).json()
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    async def metric(self, name: str) -> float:
        found = re.search(rf"^harness_{name}{{.*}} (.*)$", (await self.client.get("/metrics")).text, re.MULTILINE)
        assert found, name
        return float(found[1])

    async def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(1000):
            if await condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it never came to be")

    async def is_ready(self) -> bool:
        return (await self.client.get("/ready")).status_code == 200


@pytest.fixture
def gpu_server(
    gpu_engine: Callable[..., Path],
    gpu_manifest: Callable[..., EngineManifest],
    resolve: Callable[..., ResolvedConfig],
    byte_tokenizer: Tokenizer,
) -> Start:
    """Starts a server."""

    @asynccontextmanager
    async def start(**fields: Any) -> AsyncIterator[Server]:
        config = resolve(gpu_manifest(), gpu_engine(), **fields)
        backend = ProcessBackend(config, command=(sys.executable, str(ENGINE)))
        service = CompletionService(backend, byte_tokenizer, model="gpu", max_model_len=512, max_active=64)
        with listen("127.0.0.1", 0) as sock:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            serving = asyncio.create_task(serve(sock, backend, service, drain_timeout_s=1))
            try:
                async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                    server = Server(client, backend)
                    await server.until(server.is_ready)
                    yield server
            finally:
                serving.cancel()
                await asyncio.wait({serving})

    return start


def test_answers_reuse_and_figures_reach_the_client(gpu_server: Start, byte_tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with gpu_server() as server:
            answer = (await server.complete(PROMPT)).json()
            assert answer["choices"][0]["text"] == byte_tokenizer.decode([100, 101, 102, 103, 104])
            assert answer["choices"][0]["finish_reason"] == "length"
            # a key is a tenant: the blocks of one are nobody else's
            assert [await server.num_cached(PROMPT, key) for key in ("", "a", "b")] == [96, 0, 0]
            assert [await server.num_cached(PROMPT, key) for key in ("a", "b")] == [96, 96]
            assert await server.metric("prefix_hit_tokens_total") == 3 * 96
            assert await server.metric("engine_generated_tokens_total") == 6 * 5
            assert await server.metric("steps_total") > 30
            assert await server.metric("kv_blocks") == await server.metric("kv_blocks_free") == 64
            assert await server.metric("gpu_memory_used_bytes") == 1 << 30
            assert "harness_kv_blocks_cached" not in (await server.client.get("/metrics")).text
            assert (await server.client.get("/cache/stats")).json()["prefix_hit_tokens"] == 3 * 96

    asyncio.run(main())


def test_refusals_overload_and_disconnects_are_as_on_the_cpu(gpu_server: Start) -> None:
    async def main() -> None:
        async with gpu_server(max_waiting=2) as server:
            refused = await server.complete(PROMPT, logprobs=3)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "logprobs"
            running = []
            for n in range(1, 5):
                running.append(asyncio.create_task(server.complete([n], max_tokens=400, ignore_eos=True)))
                await server.until(lambda n=n: _is(server, "requests_running", n))
            more = [asyncio.create_task(server.complete([9])) for _ in range(9)]
            await server.until(lambda: _is(server, "requests_waiting", 2))
            await server.until(lambda: _num_done(more, 7))
            assert {task.result().status_code for task in more if task.done()} == {429}
            for task in (*running, *more):
                task.cancel()
            await asyncio.wait((*running, *more))
            await server.until(lambda: _is(server, "kv_blocks_free", 64))
            assert await server.metric("requests_running") == await server.metric("requests_waiting") == 0

    asyncio.run(main())


def test_a_dying_executor_is_reported_and_replaced(gpu_server: Start) -> None:
    async def main() -> None:
        async with gpu_server() as server:
            poisoned = await server.complete([259])
            assert poisoned.status_code == 503
            await server.until(server.is_ready)
            assert server.backend.engine_pid is not None
            os.kill(server.backend.engine_pid, signal.SIGKILL)
            await server.until(lambda: _is(server, "engine_restarts_total", 2))
            assert (await server.complete(PROMPT)).status_code == 200

    asyncio.run(main())


async def _is(server: Server, name: str, value: float) -> bool:
    return await server.metric(name) == value


async def _num_done(tasks: list[asyncio.Task[Any]], num: int) -> bool:
    return sum(task.done() for task in tasks) == num
