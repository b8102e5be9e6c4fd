"""What crosses the border between the server's process and an engine's: msgpack of these structs, over one ZeroMQ pair.
Before it, the config, as one line of JSON on the engine's stdin.

The engine answers with one `Update` for each turn of its loop, however many requests it concerns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness import errors
from harness.errors import HarnessError, RequestError
from harness.runtime.backend import BackendStats
from harness.runtime.config import ResolvedConfig
from harness.runtime.request import Request, TokenChunk


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error of our tree, so that it is raised on the other side as what it was."""

    kind: str
    message: str
    hint: str = ""
    param: str | None = None
    code: str | None = None

    @classmethod
    def pack(cls, error: HarnessError) -> ErrorInfo:
        """Describe `error`."""
        kind = type(error).__name__
        if isinstance(error, RequestError):
            return cls(kind=kind, message=error.message, param=error.param, code=error.code)
        return cls(kind=kind, message=error.message, hint=error.hint)

    def unpack(self) -> HarnessError:
        """The error described."""
        if self.kind == RequestError.__name__:
            return RequestError(self.message, param=self.param, code=self.code)
        kind: Any = getattr(errors, self.kind, HarnessError)
        error: HarnessError = kind(self.message, self.hint)
        return error


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a request and free its blocks."""

    request_id: str


class Rejection(msgspec.Struct, frozen=True):
    """A request that was not queued."""

    request_id: str
    error: ErrorInfo


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded and warm."""

    stats: BackendStats


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot be loaded."""

    error: ErrorInfo


class Update(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What one turn of the engine's loop brought, and its counts after it."""

    stats: BackendStats
    chunks: list[TokenChunk] = []
    rejections: list[Rejection] = []


ToEngine = Submit | Cancel
FromEngine = Ready | LoadFailed | Update

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def encode_config(config: ResolvedConfig) -> bytes:
    """`config` as a line of JSON."""
    return msgspec.json.encode(config, enc_hook=str) + b"\n"


def decode_config(line: bytes) -> ResolvedConfig:
    """The config that `encode_config` wrote."""
    return msgspec.json.decode(line, type=ResolvedConfig, dec_hook=_decode_path)


def _decode_path(kind: type, value: Any) -> Any:
    assert kind is Path
    return Path(value)
