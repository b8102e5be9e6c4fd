"""Servers that the checks ask: started on a free port, waited for, and stopped whatever happens.

One GPU holds one engine at a time, unless two are to be compared: `only` stops the others first. Each server has a log
of its own in the report's folder.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from steps import StepFailed, stop

_DRAIN_S = 40  # a server that drains gets this long
_ANSWER_S = 120  # without a byte
ServerCommand = Callable[[int], list[str]]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that is ready: `url`, the name of its model, its log, relative to the report's folder, and a client."""

    key: str
    url: str
    model: str
    log: str
    process: subprocess.Popen[Any]
    client: httpx.Client

    def end(self) -> None:
        """Close the client and stop the process."""
        self.client.close()
        stop(self.process, _DRAIN_S)


class Servers:
    """All servers of a run; a context manager, which stops them at its end.

    Args:
        folder: of the report.
        ready_s: how long one may take to load its engine.
    """

    def __init__(self, folder: Path, *, ready_s: float) -> None:
        self._folder = folder
        self._ready_s = ready_s
        self._running: dict[str, Server] = {}
        self._count = 0

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def only(self, key: str, command: ServerCommand, ready_path: str = "/ready") -> Server:
        """The server of that key, and no other: found running, or started after the others were stopped."""
        found = self._running.get(key)
        if found is not None and found.process.poll() is None and len(self._running) == 1:
            return found
        self.stop()
        return self.beside(key, command, ready_path)

    def beside(self, key: str, command: ServerCommand, ready_path: str = "/ready") -> Server:
        """Start a server beside those that run.

        Args:
            command: what to run, made of the port it is to listen on.
            ready_path: what answers 200 when the server is ready.

        Raises:
            StepFailed: it ended, or was not ready in time.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        argv, url = command(port), f"http://127.0.0.1:{port}"
        self._count += 1
        log = f"logs/server-{self._count:02}-{key}.log"
        with (self._folder / log).open("w", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(argv)}\n")
            file.flush()
            try:
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            except OSError as error:
                raise StepFailed(f"{argv[0]} cannot be run: {error.strerror or error}") from None
        try:
            self._wait(process, f"{url}{ready_path}", log)
            model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        except BaseException:
            stop(process)
            raise
        client = httpx.Client(base_url=url, timeout=_ANSWER_S)
        server = Server(key=key, url=url, model=model, log=log, process=process, client=client)
        self._running[key] = server
        return server

    def stop(self) -> None:
        """Stop all."""
        for key in list(self._running):
            self._running.pop(key).end()

    def _wait(self, process: subprocess.Popen[Any], url: str, log: str) -> None:
        deadline = time.monotonic() + self._ready_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                lines = (self._folder / log).read_text(encoding="utf-8", errors="replace").split("\n")
                last = " / ".join(line.strip() for line in lines[-8:] if line.strip())
                raise StepFailed(f"the server ended with exit code {process.returncode} ({log}): {last}")
            try:
                if httpx.get(url, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise StepFailed(f"the server was not ready in {self._ready_s:.0f} s, see {log}")
