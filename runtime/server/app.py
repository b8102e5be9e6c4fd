"""The HTTP face: routes, error answers, the limit on bodies. What a completion is, `service` knows."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.errors import HarnessError
from harness.runtime.server.api_error import ApiError, describe
from harness.runtime.server.disconnect import EventStream, until_disconnect
from harness.runtime.server.protocol import MAX_BODY_BYTES, UNION_TAGS, ChatCompletionRequest, CompletionRequest
from harness.runtime.server.service import CompletionService

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CLIENT_CLOSED_REQUEST = 499


def create_app(service: CompletionService) -> FastAPI:
    """The application over `service`, whose backend somebody else starts and stops."""
    app = FastAPI(title="DeepSeek Harness", docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    _add_completions(app, service)
    _add_status(app, service)
    _add_error_handlers(app, service)
    return app


def _add_completions(app: FastAPI, service: CompletionService) -> None:
    async def complete(http: Request, body: ChatCompletionRequest | CompletionRequest) -> Response:
        credential = http.headers.get("authorization", "")
        answer = service.answer(http.url.path, body, credential)
        # of a stream, the first event decides between 200 and an error status
        first = await until_disconnect(http.receive, anext(answer))
        if body.stream:
            return EventStream(first, answer)
        await answer.aclose()
        return Response(first, media_type="application/json")

    @app.post(CHAT)
    async def chat_completions(http: Request, body: ChatCompletionRequest) -> Response:
        return await complete(http, body)

    @app.post(COMPLETIONS)
    async def completions(http: Request, body: CompletionRequest) -> Response:
        return await complete(http, body)


def _add_status(app: FastAPI, service: CompletionService) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": service.model,
            "object": "model",
            "created": created,
            "owned_by": "deepseek-harness",
            "max_model_len": service.max_model_len,
        }
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> Response:
        if service.is_draining:
            return ApiError(status=503, message="the server is shutting down", code="shutting_down").response()
        if not service.backend.is_ready:
            return ApiError(status=503, message="the engine is not loaded", code="engine_unavailable").response()
        return Response('{"status":"ready"}', media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        backend = service.backend
        text = service.metrics.expose(
            await backend.stats(), is_ready=backend.is_ready, num_restarts=backend.num_restarts
        )
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/cache/stats")
    async def cache_stats() -> dict[str, Any]:
        stats = await service.backend.stats()
        queried = stats.prefix_query_tokens_total
        return {
            "num_blocks": stats.num_blocks,
            "num_free_blocks": stats.num_free_blocks,
            "num_cached_blocks": stats.num_cached_blocks,
            "prefix_query_tokens": queried,
            "prefix_hit_tokens": stats.prefix_hit_tokens_total,
            "prefix_hit_rate": stats.prefix_hit_tokens_total / queried if queried else 0.0,
            "evictions": stats.evictions_total,
            "preemptions": stats.preemptions_total,
        }


def _add_error_handlers(app: FastAPI, service: CompletionService) -> None:
    def answer(http: Request, error: ApiError) -> Response:
        # paths are the client's choice: only ours become labels
        endpoint = http.url.path if http.url.path in (CHAT, COMPLETIONS) else "other"
        service.metrics.record_error(endpoint, error.status, error.code)
        return error.response()

    @app.exception_handler(HarnessError)
    async def on_harness_error(http: Request, error: HarnessError) -> Response:
        return answer(http, describe(error))

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(http: Request, error: RequestValidationError) -> Response:
        return answer(http, _describe_invalid(error))

    @app.exception_handler(StarletteHTTPException)
    async def on_http_error(http: Request, error: StarletteHTTPException) -> Response:
        code = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(
            error.status_code
        )
        message = f"{error.detail}: {http.method} {http.url.path}"
        return answer(
            http,
            ApiError(status=error.status_code, message=message, code=code, headers=dict(error.headers or {})),
        )

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(http: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)  # nobody reads it

    @app.exception_handler(Exception)
    async def on_fault(http: Request, error: Exception) -> Response:
        # the traceback goes to the log, not to the client
        return answer(http, ApiError(status=500, message="internal error of the server", code="internal_error"))


def _describe_invalid(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]  # one is enough to go on with
    if first["type"] == "json_invalid":
        return ApiError(status=400, message=f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    path = [str(part) for part in first["loc"][1:] if part not in UNION_TAGS]
    if not path and first["type"] == "model_attributes_type":  # FastAPI parses what is labelled as JSON only
        message = "the body is not a JSON object, or is not sent with Content-Type: application/json"
        return ApiError(status=400, message=message, code="invalid_json")
    named = first.get("ctx", {}).get("param")  # by our own checks, which concern a field of the object at `path`
    param = ".".join([*path, named] if named else path) or None
    message = first["msg"] if named and not path else f"{param or 'body'}: {first['msg']}"
    code = {"not_offered": "unsupported_field", "unknown_field": "unknown_field"}.get(first["type"], "invalid_value")
    return ApiError(status=400, message=message, code=code, param=param)


class BodyLimit:
    """Refuses a request body of more than `max_bytes` while it is being read, whatever its headers say."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)
