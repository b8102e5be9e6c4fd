"""OpenAI's response objects: whole answers, stream chunks, usage, log-probabilities, errors.

Plain dictionaries, because they go straight into JSON. DeepSeek's `prompt_cache_hit_tokens` and
`prompt_cache_miss_tokens` stand beside OpenAI's `prompt_tokens_details`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.runtime.request import TokenLogprob
from harness.runtime.text_stream import Delta, TokenReport
from harness.tokenizer import Tokenizer

Json = dict[str, Any]


def usage(*, num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> Json:
    """Token counts of one answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "prompt_cache_hit_tokens": num_cached_tokens,
        "prompt_cache_miss_tokens": num_prompt_tokens - num_cached_tokens,
    }


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """The body of every answer that is not 200."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, kw_only=True)
class ChatShape:
    """Objects of one answer of `/v1/chat/completions`."""

    request_id: str
    model: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        """The answer in one piece, a choice for each delta."""
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def _choice(self, index: int, delta: Delta) -> Json:
        message = {"role": "assistant", "content": delta.content}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        return {"index": index, "message": message, "logprobs": self._logprobs(delta), **_finish(delta)}

    def opening(self) -> Json:
        """The first chunk: the role, no text yet."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def chunk(self, delta: Delta) -> Json:
        """A piece of the answer."""
        part = {}
        if delta.reasoning:
            part["reasoning_content"] = delta.reasoning
        if delta.content:
            part["content"] = delta.content
        choice = {"index": 0, "delta": part, "logprobs": self._logprobs(delta), **_finish(delta)}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def closing(self, usage: Json) -> Json:
        """The last chunk of a stream that includes usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _head(self, kind: str) -> Json:
        return {"id": f"chatcmpl-{self.request_id}", "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, delta: Delta) -> Json | None:
        if not delta.reports:
            return None
        content = []
        for report in delta.reports:
            assert report.logprob is not None, "only an echoed prompt begins without one"
            top = [self._token(token_id, logprob) for token_id, logprob in report.logprob.top]
            content.append({**self._token(report.token_id, report.logprob.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> Json:
        token = self.tokenizer.token_bytes(token_id)
        return {"token": token.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(token)}


@dataclass(frozen=True, kw_only=True)
class CompletionShape:
    """Objects of one answer of `/v1/completions`."""

    request_id: str
    model: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        """The answer in one piece, a choice for each delta."""
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self._head(), "choices": choices, "usage": usage}

    def opening(self) -> Json | None:
        """Nothing: the first chunk is the first text."""
        return None

    def chunk(self, delta: Delta) -> Json:
        """A piece of the answer."""
        return {**self._head(), "choices": [self._choice(0, delta)]}

    def closing(self, usage: Json) -> Json:
        """The last chunk of a stream that includes usage."""
        return {**self._head(), "choices": [], "usage": usage}

    def _choice(self, index: int, delta: Delta) -> Json:
        logprobs = self._logprobs(delta.reports)
        return {"index": index, "text": delta.content, "logprobs": logprobs, **_finish(delta)}

    def _head(self) -> Json:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _logprobs(self, reports: Sequence[TokenReport]) -> Json | None:
        if not reports:
            return None
        tokens = [self.tokenizer.token_bytes(report.token_id) for report in reports]
        return {
            "tokens": [_name(token) for token in tokens],
            "bytes": [list(token) for token in tokens],
            "token_logprobs": [None if r.logprob is None else _finite(r.logprob.logprob) for r in reports],
            "top_logprobs": [None if r.logprob is None else self._top(r.logprob) for r in reports],
            "text_offset": [report.text_offset for report in reports],
        }

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        return {_name(self.tokenizer.token_bytes(token_id)): _finite(value) for token_id, value in logprob.top}


def _name(token: bytes) -> str:
    # keys of an object must differ, so bytes that are no text are spelled out
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity; OpenAI's value for it


def _finish(delta: Delta) -> Json:
    return {"finish_reason": None if delta.finish_reason is None else delta.finish_reason.value}
