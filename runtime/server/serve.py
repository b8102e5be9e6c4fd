"""Serving over HTTP: the socket, the life of the engine beside it, and the orderly end.

The first SIGTERM or Ctrl-C drains: `/ready` and new requests get 503, running ones finish, the listening socket stays
open for both. A second one, or the end of the drain's time, stops at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from types import FrameType

import uvicorn

from harness.errors import HarnessError, UsageError
from harness.runtime.backend import Backend
from harness.runtime.server.app import create_app
from harness.runtime.server.service import CompletionService

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5
_BACKLOG = 1024
# Longer than clients (5 s) and proxies (60 s) keep one: who closes an idle connection first must not be the side that
# cannot know whether a request is on its way.
_KEEP_ALIVE_S = 75


class ListenError(HarnessError):
    """The server cannot listen where it was told to."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        UsageError: the port is out of range.
        ListenError: the address is in use, forbidden, or not of this machine.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"--port is {port}", "allowed: 0 (any free port) to 65535")
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)  # now, so that a second server on this port fails at once
    except OSError as error:
        if sock is not None:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"port {port} on {host} is in use", "stop what uses it, or give another --port") from None
        raise ListenError(
            f"cannot listen on {host}:{port}: {error.strerror}", "give another --host or --port"
        ) from None
    return sock


def uvicorn_config(service: CompletionService) -> uvicorn.Config:
    """How uvicorn serves `service`: quietly, and without the protocols that it does not speak."""
    return uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on the first signal."""

    def __init__(self, config: uvicorn.Config, service: CompletionService, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._drain_deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + self._drain_timeout_s
            self._service.is_draining = True
            logger.info("draining %d requests; once more to stop at once", self._service.num_active)
        else:
            self._drain_deadline = 0.0

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; True ends the server."""
        if self._drain_deadline is not None and not self.should_exit:
            is_late = time.monotonic() > self._drain_deadline
            if is_late and self._service.num_active:
                logger.warning("stopping with %d requests running", self._service.num_active)
                await self._service.backend.stop()
            self.should_exit = is_late or self._service.num_active == 0
        return await super().on_tick(counter)


async def serve(sock: socket.socket, backend: Backend, service: CompletionService, *, drain_timeout_s: float) -> None:
    """Start the backend and serve until told to end; both are stopped on return. Answers 503 while the engine loads.

    Raises:
        HarnessError: the engine cannot be loaded.
    """
    server = DrainingServer(uvicorn_config(service), service, drain_timeout_s)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    starting = asyncio.create_task(backend.start())
    started = time.monotonic()
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            logger.info("ready: engine loaded in %.1f s", time.monotonic() - started)
            await serving
    finally:
        server.should_exit = True
        starting.cancel()
        await asyncio.wait({serving, starting})
        await backend.stop()
