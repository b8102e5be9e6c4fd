"""One answer from parsed body to JSON: prompts, requests to the backend, text, usage, metrics.

Knows the backend by its seam alone, and HTTP only as far as the answer's form goes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from msgspec import json

from harness.errors import HarnessError, OverloadedError, RequestError
from harness.runtime.backend import Backend
from harness.runtime.request import FinishReason, Request
from harness.runtime.server.api_error import ShuttingDownError, UnknownModelError, describe
from harness.runtime.server.flush import FlushPolicy, coalesce
from harness.runtime.server.metrics import Metrics, RequestRecord
from harness.runtime.server.openai_shapes import ChatShape, CompletionShape, Json, usage
from harness.runtime.server.prompt_encoder import PromptEncoder
from harness.runtime.server.protocol import MAX_PROMPTS, ChatCompletionRequest, CompletionRequest
from harness.runtime.text_stream import Delta, TextStream
from harness.tokenizer import Tokenizer

_MOST_REPORTS_AT_ONCE = 256  # tokens with log-probabilities: some milliseconds
_NUM_ENCODERS = 2  # prompts encoded at once: each may take a hundred times its size, and the cores are the engine's


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One prompt of a body that passed all checks of the server, ready to be submitted."""

    endpoint: str
    started: float
    request: Request
    stream: TextStream


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
        max_active: most prompts at once, from the first look at one until its answer has been taken.
        max_prompts: most of one body; further limited by `MAX_PROMPTS`.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        model: str,
        max_model_len: int,
        max_active: int,
        max_prompts: int = MAX_PROMPTS,
        flush_policy: FlushPolicy | None = None,
    ) -> None:
        self.backend = backend
        self.model = model
        self.max_model_len = max_model_len
        self.metrics = Metrics(model)
        self.is_draining = False
        self.num_active = 0
        self._max_active = max_active
        self._max_prompts = min(max_prompts, MAX_PROMPTS)
        self._tokenizer = tokenizer
        self._flush_policy = flush_policy or FlushPolicy()
        self._encoder = PromptEncoder(tokenizer, max_model_len)
        self._encoders = ThreadPoolExecutor(_NUM_ENCODERS, thread_name_prefix="encode")

    async def answer(
        self, endpoint: str, body: ChatCompletionRequest | CompletionRequest, credential: str
    ) -> AsyncGenerator[bytes, None]:
        """The JSON of the whole answer, or server-sent events where the body asks for a stream.

        An error after the first event is an event, too. The prompts are active, and waited for by a drain, until this
        generator has ended.

        Raises:
            HarnessError: it is refused, or failed before there was anything to send.
        """
        started = time.monotonic()
        num_prompts = 1 if isinstance(body, ChatCompletionRequest) else len(body.prompts())
        self._count_active(num_prompts)
        try:
            if self.is_draining:
                raise ShuttingDownError("the server is shutting down", "send the request to another one")
            if num_prompts > self._max_prompts:
                raise RequestError(
                    f"prompt has {num_prompts} entries; allowed: {self._max_prompts}",
                    param="prompt",
                    code="invalid_value",
                )
            if self.num_active > self._max_active:
                raise OverloadedError(
                    f"{self._max_active} requests are allowed in the server at once", "try again after a while"
                )
            try:
                completions = await self._prepare(endpoint, body, credential, started)
            except asyncio.CancelledError:
                elapsed = time.monotonic() - started
                self.metrics.record(
                    RequestRecord(endpoint=endpoint, status=499, finish_reason="cancelled", e2e=elapsed)
                )
                raise
            make_shape = ChatShape if isinstance(body, ChatCompletionRequest) else CompletionShape
            answer_id = completions[0].request.request_id
            shape = make_shape(request_id=answer_id, model=self.model, tokenizer=self._tokenizer)
            if not body.stream:
                yield await self._whole(shape, completions)
                return
            async with aclosing(self._events(shape, completions[0], includes_usage=body.includes_usage)) as events:
                async for event in events:
                    yield event
        finally:
            self._count_active(-num_prompts)

    def _count_active(self, change: int) -> None:
        self.num_active += change
        self.metrics.active.set(self.num_active)

    async def _prepare(
        self, endpoint: str, body: ChatCompletionRequest | CompletionRequest, credential: str, started: float
    ) -> list[Completion]:
        if body.model != self.model:
            raise UnknownModelError(f"the model {body.model!r} is not served here", f"served: {self.model!r}")
        # a long prompt takes a while to encode; the threads of `tokenizers` leave the event loop alone
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._encoders, self._encoder.encode, body)
        salt, wanted, answer_id = cache_salt(credential, body.cache_salt), body.wanted_tokens(), uuid.uuid4().hex
        completions = []
        for index, prompt in enumerate(prompts):
            room = self.max_model_len - len(prompt.token_ids)
            request = Request(
                request_id=f"{answer_id}-{index}" if index else answer_id,
                prompt_token_ids=prompt.token_ids,
                sampling=body.sampling_params(room if wanted is None else min(wanted, room)),
                cache_salt=salt,
                priority=body.priority,
            )
            stream = TextStream(self._tokenizer, stop=body.stop, splitter=prompt.splitter, echo=prompt.echo)
            completions.append(Completion(endpoint=endpoint, started=started, request=request, stream=stream))
        return completions

    async def _whole(self, shape: ChatShape | CompletionShape, completions: Sequence[Completion]) -> bytes:
        tasks = [asyncio.ensure_future(self._joined(completion)) for completion in completions]
        try:
            deltas = await asyncio.gather(*tasks)
        finally:  # where one failed, the others are of no use
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return json.encode(await _made(deltas, lambda: shape.whole(deltas, _usage(completions))))

    async def _joined(self, completion: Completion) -> Delta:
        async with aclosing(self._deltas(completion)) as deltas:
            return Delta.join([delta async for delta in deltas])

    async def _events(
        self, shape: ChatShape | CompletionShape, completion: Completion, *, includes_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        has_begun = False
        label = completion.request.request_id
        async with (
            aclosing(self._deltas(completion)) as deltas,
            aclosing(coalesce(deltas, self._flush_policy, label)) as flushed,
        ):
            try:
                async for delta in flushed:
                    objects = [await _made([delta], partial(shape.chunk, delta))]
                    if not has_begun and (opening := shape.opening()) is not None:
                        objects.insert(0, opening)
                    has_begun = True
                    if includes_usage:
                        objects = [{**piece, "usage": None} for piece in objects]
                        if delta.finish_reason is not None:
                            objects.append(shape.closing(_usage([completion])))
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


async def _made(deltas: Sequence[Delta], make: Callable[[], Json]) -> Json:
    """What `make` makes of deltas: on a thread where it takes so long that other streams would pause."""
    is_long = sum(len(delta.reports) for delta in deltas) > _MOST_REPORTS_AT_ONCE
    return await asyncio.to_thread(make) if is_long else make()


def _usage(completions: Sequence[Completion]) -> Json:
    return usage(
        num_prompt_tokens=sum(len(completion.request.prompt_token_ids) for completion in completions),
        num_completion_tokens=sum(completion.stream.num_completion_tokens for completion in completions),
        num_cached_tokens=sum(completion.stream.num_cached_tokens for completion in completions),
    )


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
