"""OpenAI's response objects: whole answers, stream chunks, usage, log-probabilities, errors.

Plain dictionaries, because they go straight into JSON. DeepSeek's `prompt_cache_hit_tokens` and
`prompt_cache_miss_tokens` stand beside OpenAI's `prompt_tokens_details`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.runtime.text_stream import Delta, TextStream, TokenReport
from harness.tokenizer import Tokenizer

Json = dict[str, Any]


def usage(num_prompt_tokens: int, stream: TextStream) -> Json:
    """Token counts of one answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": stream.num_completion_tokens,
        "total_tokens": num_prompt_tokens + stream.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stream.num_cached_tokens},
        "prompt_cache_hit_tokens": stream.num_cached_tokens,
        "prompt_cache_miss_tokens": num_prompt_tokens - stream.num_cached_tokens,
    }


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """The body of every answer that is not 200."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, kw_only=True)
class ChatShape:
    """Objects of `/v1/chat/completions` for one request."""

    request_id: str
    model: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, delta: Delta, usage: Json) -> Json:
        """The answer in one piece."""
        message = {"role": "assistant", "content": delta.content}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(delta), **_finish(delta)}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage}

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
            top = [self._token(token_id, logprob) for token_id, logprob in report.logprob.top]
            content.append({**self._token(report.token_id, report.logprob.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> Json:
        token = self.tokenizer.token_bytes(token_id)
        return {"token": token.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(token)}


@dataclass(frozen=True, kw_only=True)
class CompletionShape:
    """Objects of `/v1/completions` for one request. `echo` is the prompt's text, put before the answer."""

    request_id: str
    model: str
    tokenizer: Tokenizer
    echo: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, delta: Delta, usage: Json) -> Json:
        """The answer in one piece."""
        return {**self._piece(self.echo + delta.content, delta), "usage": usage}

    def opening(self) -> Json | None:
        """The echoed prompt, None without one."""
        return self._piece(self.echo, Delta()) if self.echo else None

    def chunk(self, delta: Delta) -> Json:
        """A piece of the answer."""
        return self._piece(delta.content, delta)

    def closing(self, usage: Json) -> Json:
        """The last chunk of a stream that includes usage."""
        return {**self._head(), "choices": [], "usage": usage}

    def _piece(self, text: str, delta: Delta) -> Json:
        choice = {"index": 0, "text": text, "logprobs": self._logprobs(delta.reports), **_finish(delta)}
        return {**self._head(), "choices": [choice]}

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
            "token_logprobs": [_finite(report.logprob.logprob) for report in reports],
            "top_logprobs": [
                {_name(self.tokenizer.token_bytes(token_id)): _finite(value) for token_id, value in report.logprob.top}
                for report in reports
            ],
            "text_offset": [report.text_offset for report in reports],
        }


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
