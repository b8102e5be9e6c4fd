"""Errors as HTTP answers: one table from our tree of errors to a status, a type and a code."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import Response
from msgspec import json

from harness.errors import EngineDeadError, HarnessError, InvalidLogitsError, OverloadedError, RequestError
from harness.runtime.server.openai_shapes import error_body

_RETRY_SOON = {"Retry-After": "1"}
_RETRY_LATER = {"Retry-After": "5"}
# longer than any text of ours; what is over it quotes a name or a value out of a body of megabytes
_MAX_MESSAGE_CHARS = 1000
_MAX_PARAM_CHARS = 200


class UnknownModelError(HarnessError):
    """The request names a model that is not served here."""


class ShuttingDownError(HarnessError):
    """The server drains: running requests end, new ones are refused."""


@dataclass(frozen=True, kw_only=True)
class ApiError:
    """What a client is told about an error."""

    status: int
    message: str
    code: str | None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """OpenAI's error type."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(self.body(), status_code=self.status, headers=self.headers, media_type="application/json")

    def body(self) -> bytes:
        """The JSON alone, for a stream that has begun."""
        message = _quotable(self.message, _MAX_MESSAGE_CHARS)
        param = None if self.param is None else _quotable(self.param, _MAX_PARAM_CHARS)
        return json.encode(error_body(message, self.kind, param=param, code=self.code))


def _quotable(text: str, max_chars: int) -> str:
    """Text that may quote what a client sent, which need be neither short nor encodable. Its ends are kept: the last
    words say what to do."""
    if len(text) > max_chars:
        text = f"{text[: max_chars // 2]} [...] {text[-max_chars // 2 :]}"
    return text.encode(errors="replace").decode()


def describe(error: HarnessError) -> ApiError:
    """The answer to an error of our tree."""
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    match error:
        case RequestError():
            return ApiError(status=400, message=error.message, code=error.code, param=error.param)
        case UnknownModelError():
            return ApiError(status=404, message=message, code="model_not_found", param="model")
        case OverloadedError():
            return ApiError(status=429, message=message, code="overloaded", headers=_RETRY_SOON)
        case EngineDeadError():
            return ApiError(status=503, message=message, code="engine_unavailable", headers=_RETRY_LATER)
        case InvalidLogitsError():
            return ApiError(status=500, message=message, code="invalid_logits")
        case ShuttingDownError():
            return ApiError(status=503, message=message, code="shutting_down", headers=_RETRY_LATER)
        case _:
            return ApiError(status=500, message=message, code="internal_error")
