"""A scripted backend behind a real HTTP server, with a tokenizer whose tokens are single bytes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from harness.errors import HarnessError
from harness.runtime.backend import BackendStats
from harness.runtime.request import FinishReason, Request, TokenChunk, TokenLogprob
from harness.runtime.server.serve import DrainingServer, listen, uvicorn_config
from harness.runtime.server.service import CompletionService
from harness.tokenizer import Tokenizer, TokenizerFiles

MODEL = "scripted"
MAX_MODEL_LEN = 128
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

Script = Callable[[Request], AsyncIterator[TokenChunk]]


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """256 tokens of one byte each, in the order of GPT-2's alphabet, then <bos>, <eos>, <think>, </think>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    files = TokenizerFiles(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=chat_template,
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
        add_bos=True,
    )
    return Tokenizer(files, {})


class ScriptedBackend:
    """A `Backend` that plays a script for each request and notes what happened to it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.is_ready = True
        self.num_restarts = 0
        self.requests: list[Request] = []
        self.closed_early: list[str] = []
        self.num_running = 0

    async def start(self) -> None:
        """Nothing to load."""

    async def submit(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        self.num_running += 1
        is_over = False
        try:
            async for chunk in self.script(request):
                is_over = chunk.finish_reason is not None
                yield chunk
        except HarnessError:
            is_over = True
            raise
        finally:
            self.num_running -= 1
            if not is_over:
                self.closed_early.append(request.request_id)

    async def stats(self) -> BackendStats:
        return BackendStats(
            num_running=self.num_running, num_blocks=8, prefix_query_tokens_total=10, prefix_hit_tokens_total=4
        )

    async def stop(self) -> None:
        self.is_ready = False


@dataclass
class ScriptedServer:
    """A running server and what stands behind it."""

    backend: ScriptedBackend
    service: CompletionService
    uvicorn_server: DrainingServer
    client: httpx.Client
    url: str
    defaults: dict[str, Any] = field(default_factory=lambda: {"model": MODEL})

    def chat(self, **body: Any) -> httpx.Response:
        body = {**self.defaults, "messages": [{"role": "user", "content": "Hi"}], **body}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={**self.defaults, "prompt": "Hi", **body})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream; checks its form and its end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    datas = [block.removeprefix("data: ") for block in blocks]
    if datas[-1] == "[DONE]":
        datas.pop()
    else:
        assert "error" in datas[-1]
    return [json.loads(data) for data in datas]


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return make_tokenizer()


def prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    """What the scripts report on a prompt: of its token number n the log-probability is -n."""
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    later = list(enumerate(request.prompt_token_ids))[1:]
    return [None, *(TokenLogprob(logprob=-n, top=[(i, -n)][:num_top]) for n, i in later)]


@pytest.fixture(scope="session")
def answer(byte_tokenizer: Tokenizer) -> Callable[..., Script]:
    """Makes a script that answers with a text, byte by byte. It reports on the prompt where that is asked for."""

    def make(
        text: str | bytes,
        *,
        finish: FinishReason = FinishReason.STOP,
        pause: float = 0.0,
        num_cached: int = 0,
        before: float = 0.0,
        error: str | None = None,
        logprobs: bool = False,
    ) -> Script:
        data = text.encode() if isinstance(text, str) else text
        byte_ids = {byte_tokenizer.token_bytes(i): i for i in range(256)}
        ids = [byte_ids[bytes([byte])] for byte in data]

        async def script(request: Request) -> AsyncIterator[TokenChunk]:
            await asyncio.sleep(before)
            prompt_report = prompt_logprobs(request)
            for token_id in ids if request.sampling.max_tokens else []:
                report = [TokenLogprob(logprob=-0.5, top=[(token_id, -0.5), (255, float("-inf"))])]
                yield TokenChunk(
                    request_id=request.request_id,
                    token_ids=[token_id],
                    num_cached_tokens=num_cached,
                    logprobs=report if logprobs else None,
                    prompt_logprobs=prompt_report,
                )
                prompt_report = None
                await asyncio.sleep(pause)
            yield TokenChunk(
                request_id=request.request_id, prompt_logprobs=prompt_report, finish_reason=finish, error=error
            )

        return script

    return make


@contextmanager
def servers() -> Iterator[Callable[..., ScriptedServer]]:
    """Starts servers over scripted backends; all end with the block."""
    started: list[tuple[ScriptedServer, threading.Thread]] = []

    def start(script: Script, *, tokenizer: Tokenizer | None = None, drain: float = 5, **limits: int) -> ScriptedServer:
        backend = ScriptedBackend(script)
        limits = {"max_model_len": MAX_MODEL_LEN, "max_active": 32} | limits
        service = CompletionService(backend, tokenizer or make_tokenizer(), model=MODEL, **limits)
        sock = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = DrainingServer(uvicorn_config(service), service, drain)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        running = ScriptedServer(backend, service, server, httpx.Client(base_url=url, timeout=20), url)
        started.append((running, thread))
        return running

    yield start
    for running, thread in started:
        running.client.close()
        running.uvicorn_server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture
def scripted_server() -> Iterator[Callable[..., ScriptedServer]]:
    """Starts servers of one test."""
    with servers() as start:
        yield start


@pytest.fixture(scope="session")
def shared_server(answer: Callable[..., Script]) -> Iterator[ScriptedServer]:
    """One server for all tests that leave nothing behind; it answers `Hello.`"""
    with servers() as start:
        yield start(answer("Hello."))


@pytest.fixture
def plain_server(shared_server: ScriptedServer) -> ScriptedServer:
    """The shared server, its notes wiped."""
    shared_server.backend.requests.clear()
    shared_server.backend.closed_early.clear()
    return shared_server


@pytest.fixture
def read_events() -> Callable[[httpx.Response], list[dict[str, Any]]]:
    """Parses a stream."""
    return events


@pytest.fixture
def tokenizer_with_template() -> Callable[[str | None], Tokenizer]:
    """Makes a byte tokenizer with another chat template."""
    return make_tokenizer
