"""One completion from parsed body to answer: prompt, request to the backend, text, usage, metrics.

Knows the backend by its seam alone, and HTTP only as far as the answer's form goes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import json

from harness.errors import HarnessError, OverloadedError, RequestError
from harness.runtime.backend import Backend
from harness.runtime.reasoning import ReasoningSplitter
from harness.runtime.request import FinishReason, Request
from harness.runtime.server.api_error import ShuttingDownError, UnknownModelError, describe
from harness.runtime.server.flush import FlushPolicy, coalesce
from harness.runtime.server.metrics import Metrics, RequestRecord
from harness.runtime.server.openai_shapes import ChatShape, CompletionShape, Json, usage
from harness.runtime.server.protocol import ChatCompletionRequest, CompletionRequest
from harness.runtime.text_stream import Delta, TextStream
from harness.tokenizer import Tokenizer

_NUM_ENCODERS = 2  # prompts encoded at once: each may take a hundred times its size, and the cores are the engine's


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request that passed all checks of the server, ready to be submitted."""

    endpoint: str
    started: float
    request: Request
    stream: TextStream
    shape: ChatShape | CompletionShape
    includes_usage: bool

    def usage(self) -> Json:
        """Token counts so far."""
        return usage(len(self.request.prompt_token_ids), self.stream)


def cache_salt(credential: str, salt: str) -> str:
    """What separates this client's KV blocks from others'. A client chooses a part of it, never all of it."""
    if not credential and not salt:
        return ""
    return hashlib.sha256(f"{len(credential)}:{credential}{salt}".encode()).hexdigest()


class CompletionService:
    """Completes requests on one backend.

    Args:
        model: the name served; requests must give it.
        max_model_len: longest prompt and answer together, in tokens.
        max_active: most requests at once, from the first look at one until its answer has been taken.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        model: str,
        max_model_len: int,
        max_active: int,
        flush_policy: FlushPolicy | None = None,
    ) -> None:
        self.backend = backend
        self.model = model
        self.max_model_len = max_model_len
        self.metrics = Metrics(model)
        self.is_draining = False
        self.num_active = 0
        self._max_active = max_active
        self._tokenizer = tokenizer
        self._flush_policy = flush_policy or FlushPolicy()
        self._encoders = ThreadPoolExecutor(_NUM_ENCODERS, thread_name_prefix="encode")

    async def answer(
        self, endpoint: str, body: ChatCompletionRequest | CompletionRequest, credential: str
    ) -> AsyncGenerator[bytes, None]:
        """The JSON of the whole answer, or server-sent events where the body asks for a stream.

        An error after the first event is an event, too. The request is active, and waited for by a drain, until this
        generator has ended.

        Raises:
            HarnessError: it is refused, or failed before there was anything to send.
        """
        started = time.monotonic()
        self._count_active(1)
        try:
            if self.is_draining:
                raise ShuttingDownError("the server is shutting down", "send the request to another one")
            if self.num_active > self._max_active:
                raise OverloadedError(
                    f"{self._max_active} requests are in the server, the most allowed", "try again after a while"
                )
            try:
                completion = await self._prepare(endpoint, body, credential, started)
            except asyncio.CancelledError:
                elapsed = time.monotonic() - started
                self.metrics.record(
                    RequestRecord(endpoint=endpoint, status=499, finish_reason="cancelled", e2e=elapsed)
                )
                raise
            if not body.stream:
                yield await self._whole(completion)
                return
            async with aclosing(self._events(completion)) as events:
                async for event in events:
                    yield event
        finally:
            self._count_active(-1)

    def _count_active(self, change: int) -> None:
        self.num_active += change
        self.metrics.active.set(self.num_active)

    async def _prepare(
        self, endpoint: str, body: ChatCompletionRequest | CompletionRequest, credential: str, started: float
    ) -> Completion:
        if body.model != self.model:
            raise UnknownModelError(f"the model {body.model!r} is not served here", f"served: {self.model!r}")
        # a long prompt takes a while to encode; the threads of `tokenizers` leave the event loop alone
        loop = asyncio.get_running_loop()
        token_ids, splitter, echo = await loop.run_in_executor(self._encoders, self._encode, body)
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise self._too_long(f"{len(token_ids)} tokens", body)
        wanted = body.wanted_tokens()
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling=body.sampling_params(room if wanted is None else min(wanted, room)),
            cache_salt=cache_salt(credential, body.cache_salt),
        )
        shape: ChatShape | CompletionShape
        if isinstance(body, ChatCompletionRequest):
            shape = ChatShape(request_id=request.request_id, model=self.model, tokenizer=self._tokenizer)
        else:
            shape = CompletionShape(
                request_id=request.request_id, model=self.model, tokenizer=self._tokenizer, echo=echo
            )
        return Completion(
            endpoint=endpoint,
            started=started,
            request=request,
            stream=TextStream(self._tokenizer, stop=body.stop, splitter=splitter),
            shape=shape,
            includes_usage=body.includes_usage,
        )

    def _encode(
        self, body: ChatCompletionRequest | CompletionRequest
    ) -> tuple[list[int], ReasoningSplitter | None, str]:
        if isinstance(body, ChatCompletionRequest):
            prompt = self._tokenizer.render_chat([message.as_template_input() for message in body.messages])
            return self._encode_text(prompt, body), ReasoningSplitter.for_prompt(prompt), ""
        given = body.only_prompt()
        if not given:
            raise RequestError(
                "prompt is empty; allowed: a text or a list of token ids", param="prompt", code="empty_prompt"
            )
        if isinstance(given, str):
            return self._encode_text(given, body), None, given if body.echo else ""
        if len(given) >= self.max_model_len:
            raise self._too_long(f"{len(given)} tokens", body)
        return given, None, self._tokenizer.decode(given) if body.echo else ""

    def _encode_text(self, text: str, body: ChatCompletionRequest | CompletionRequest) -> list[int]:
        # seconds and gigabytes go into encoding what a body may hold, so text that cannot fit is not encoded
        least = len(text) // self._tokenizer.max_token_chars
        if least > self.max_model_len:
            raise self._too_long(f"{len(text)} characters, at least {least} tokens", body)
        return self._tokenizer.encode(text)

    def _too_long(self, size: str, body: ChatCompletionRequest | CompletionRequest) -> RequestError:
        return RequestError(
            f"the prompt has {size}; this server's context is {self.max_model_len} tokens, prompt and answer together",
            param="messages" if isinstance(body, ChatCompletionRequest) else "prompt",
            code="context_length_exceeded",
        )

    async def _whole(self, completion: Completion) -> bytes:
        async with aclosing(self._deltas(completion)) as deltas:
            parts = [delta async for delta in deltas]
        return json.encode(completion.shape.whole(Delta.join(parts), completion.usage()))

    async def _events(self, completion: Completion) -> AsyncGenerator[bytes, None]:
        shape, has_begun = completion.shape, False
        label = completion.request.request_id
        async with (
            aclosing(self._deltas(completion)) as deltas,
            aclosing(coalesce(deltas, self._flush_policy, label)) as flushed,
        ):
            try:
                async for delta in flushed:
                    objects = [shape.chunk(delta)]
                    if not has_begun and (opening := shape.opening()) is not None:
                        objects.insert(0, opening)
                    has_begun = True
                    if completion.includes_usage:
                        objects = [{**piece, "usage": None} for piece in objects]
                        if delta.finish_reason is not None:
                            objects.append(shape.closing(completion.usage()))
                    events = b"".join(_event(json.encode(piece)) for piece in objects)
                    yield events + (_event(b"[DONE]") if delta.finish_reason is not None else b"")
            except HarnessError as error:
                if not has_begun:
                    raise
                answer = describe(error)
                self.metrics.record_error(completion.endpoint, 200, answer.code)
                yield _event(answer.body())

    async def _deltas(self, completion: Completion) -> AsyncGenerator[Delta, None]:
        first_token: float | None = None
        outcome: tuple[int, str] | None = (499, "cancelled")  # unless something else happens
        try:
            async with (
                aclosing(self.backend.submit(completion.request)) as chunks,
                aclosing(completion.stream.follow(chunks)) as deltas,
            ):
                async for delta in deltas:
                    if first_token is None:
                        first_token = time.monotonic()
                    if delta.finish_reason is FinishReason.CANCELLED:  # we never cancel what we still read
                        raise ShuttingDownError("the server was stopped before the answer was complete")
                    if delta.finish_reason is not None:
                        outcome = (200, delta.finish_reason.value)
                    yield delta
        except HarnessError:
            outcome = None  # counted where it is answered
            raise
        finally:
            if outcome is not None:
                self._record(completion, outcome, first_token)

    def _record(self, completion: Completion, outcome: tuple[int, str], first_token: float | None) -> None:
        status, finish_reason = outcome
        self.metrics.record(
            RequestRecord(
                endpoint=completion.endpoint,
                status=status,
                finish_reason=finish_reason,
                e2e=time.monotonic() - completion.started,
                ttft=None if first_token is None else first_token - completion.started,
                num_prompt_tokens=len(completion.request.prompt_token_ids),
                num_cached_tokens=completion.stream.num_cached_tokens,
                num_completion_tokens=completion.stream.num_completion_tokens,
            )
        )


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
