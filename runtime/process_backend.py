"""The outer seam over an engine in a process of its own: starts it, routes its chunks, starts it again when it dies.

Owns the child process, its socket (in a private folder) and one queue for each running request. The engine itself is
`engine_process`, what is said between the two `wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence

import zmq
import zmq.asyncio

from harness.errors import EngineDeadError, HarnessError
from harness.runtime import wire
from harness.runtime.backend import BackendStats
from harness.runtime.config import ResolvedConfig
from harness.runtime.request import FinishReason, Request, TokenChunk

logger = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S = 0.5
LONGEST_RESTART_DELAY_S = 30.0
_OF_MPI = ("OMPI_", "PMIX_", "PRTE_")
_STOP_TIMEOUT_S = 5.0


def engine_command(config: ResolvedConfig) -> tuple[str, ...]:
    """How the process of an engine is started: alone, or by MPI a process for each GPU it is divided over."""
    num_ranks = 1 if config.gpu is None else config.gpu.num_ranks
    module = "engine_process" if num_ranks == 1 else "tensorrt_llm.ranks"
    # not -m, which in Python 3.10 always looks in the working directory first, where a file may be named like a module
    code = f"import sys; sys.path[:] = filter(None, sys.path); from harness.runtime.{module} import main; main()"
    if num_ranks == 1:
        return (sys.executable, "-c", code)
    # containers run as root, which Open MPI refuses unless told otherwise
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    # each rank has many threads, and Open MPI would bind them to one core
    return ("mpirun", *root, "--bind-to", "none", "-n", str(num_ranks), sys.executable, "-c", code)


class ProcessBackend:
    """A `Backend` whose engine runs in a supervised child process.

    Args:
        config: settings of the engine.
        command: how the child is started, if not by `engine_command`; the socket's address and the log level are
            appended.
        log_level: of the child, whose log goes to this process's stderr.
    """

    def __init__(
        self, config: ResolvedConfig, *, command: Sequence[str] | None = None, log_level: str = "WARNING"
    ) -> None:
        self._config = config
        self._command = engine_command(config) if command is None else command
        self._log_level = log_level
        self._child: _Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._queues: dict[str, asyncio.Queue[TokenChunk | HarnessError]] = {}
        self._stats = BackendStats()
        self._num_restarts = 0

    @property
    def is_ready(self) -> bool:
        """Whether an engine is loaded and alive."""
        return self._child is not None

    @property
    def num_restarts(self) -> int:
        """See `Backend.num_restarts`."""
        return self._num_restarts

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._child.process.pid if self._child else None

    async def start(self) -> None:
        """Start the process and wait until the engine is loaded.

        Raises:
            HarnessError: the error with which loading failed.
        """
        self._child = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(self._child))

    async def submit(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        """See `Backend.submit`."""
        child = self._child
        if child is None:
            raise EngineDeadError("the engine is not running", "it is being started; try again shortly")
        queue: asyncio.Queue[TokenChunk | HarnessError] = asyncio.Queue()
        assert request.request_id not in self._queues, "request ids are unique"
        self._queues[request.request_id] = queue
        is_over = False
        try:
            child.send(wire.Submit(request))
            while not is_over:
                item = await queue.get()
                if isinstance(item, HarnessError):
                    is_over = True
                    raise item
                is_over = item.finish_reason is not None
                yield item
        finally:
            del self._queues[request.request_id]
            if not is_over and self._child is not None:
                self._child.send(wire.Cancel(request.request_id))

    async def stats(self) -> BackendStats:
        """Counts after the engine's last step; all zero while there is no engine."""
        return self._stats

    async def stop(self) -> None:
        """End the process. Requests still running end with CANCELLED."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        child, self._child = self._child, None
        for request_id, queue in self._queues.items():
            queue.put_nowait(TokenChunk(request_id=request_id, finish_reason=FinishReason.CANCELLED))
        if child is not None:
            await child.close()

    async def _launch(self) -> _Child:
        child = await _Child.spawn(self._command, self._config, self._log_level)
        try:
            while True:
                message = await child.receive()
                if isinstance(message, wire.Ready):
                    self._stats = message.stats
                    return child
                if isinstance(message, wire.LoadFailed):
                    raise message.error.unpack()
                if message is None:
                    raise EngineDeadError(f"the engine process {child.describe_exit()} while loading", child.hint())
        except BaseException:  # cancelled, too: no child may be left behind
            await child.close()
            raise

    async def _supervise(self, child: _Child) -> None:
        delay = FIRST_RESTART_DELAY_S
        while True:
            started = time.monotonic()
            while (message := await child.receive()) is not None:
                if isinstance(message, wire.Update):
                    self._route(message)
            self._bury(child)
            await child.close()
            if time.monotonic() - started > LONGEST_RESTART_DELAY_S:
                delay = FIRST_RESTART_DELAY_S
            child, delay = await self._restart(delay)
            self._num_restarts += 1
            self._child = child

    async def _restart(self, delay: float) -> tuple[_Child, float]:
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RESTART_DELAY_S)
            try:
                child = await self._launch()
            except HarnessError as error:
                logger.error("the engine cannot be started again, next try in %.1f s: %s", delay, error)
            except Exception:  # the machine's doing: no memory, processes or files left; it may have some later
                logger.exception("the engine cannot be started again, next try in %.1f s", delay)
            else:
                logger.warning("a new engine process is ready")
                return child, delay

    def _route(self, update: wire.Update) -> None:
        self._stats = update.stats
        for chunk in update.chunks:
            if queue := self._queues.get(chunk.request_id):  # else closed by the reader a moment ago
                queue.put_nowait(chunk)
        for rejection in update.rejections:
            if queue := self._queues.get(rejection.request_id):
                queue.put_nowait(rejection.error.unpack())

    def _bury(self, child: _Child) -> None:
        self._child = None
        self._stats = BackendStats()
        message = f"the engine process {child.describe_exit()}"
        logger.error("%s; %d requests end with an error. %s", message, len(self._queues), child.hint())
        for queue in self._queues.values():
            queue.put_nowait(EngineDeadError(message, "a new one is being started; send the request again"))


class _Child:
    """One engine process and the socket to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: zmq.asyncio.Socket,
        resources: contextlib.ExitStack,
    ) -> None:
        self.process = process
        self._socket = socket
        self._resources = resources
        self._exited = asyncio.ensure_future(process.wait())

    @classmethod
    async def spawn(cls, command: Sequence[str], config: ResolvedConfig, log_level: str) -> _Child:
        with contextlib.ExitStack() as resources:
            folder = tempfile.mkdtemp(prefix="harness-")  # mode 0700: nobody else can reach the socket
            resources.callback(shutil.rmtree, folder, ignore_errors=True)
            context = zmq.asyncio.Context()
            resources.callback(context.destroy, linger=0)  # its socket, too
            address = f"ipc://{folder}/engine"
            socket = context.socket(zmq.PAIR)
            socket.set_hwm(0)
            socket.bind(address)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    address,
                    log_level,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    # a child with MPI of its own must not take itself for a rank of this process's
                    env={name: value for name, value in os.environ.items() if not name.startswith(_OF_MPI)},
                )
            except FileNotFoundError:
                hint = "an engine divided over several GPUs is started by Open MPI: install it, or see your PATH"
                raise EngineDeadError(f"the engine cannot be started: there is no {command[0]}", hint) from None
            assert process.stdin is not None
            process.stdin.write(wire.encode_config(config))
            return cls(process, socket, resources.pop_all())

    def send(self, message: wire.ToEngine) -> None:
        # without a high-water mark a send never waits, so the future is done already
        self._socket.send(wire.encode(message))

    async def receive(self) -> wire.FromEngine | None:
        """The next message; None once the process is dead."""
        received = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({received, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            return wire.decode_from_engine(received.result()) if received.done() else None
        finally:
            received.cancel()

    def describe_exit(self) -> str:
        code = self.process.returncode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def hint(self) -> str:
        if self.process.returncode == -9:
            return "signal 9 often means out of memory: lower --kv-cache-memory"
        return "its own log above says why"

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(asyncio.shield(self._exited), _STOP_TIMEOUT_S)
            except asyncio.TimeoutError:
                self.process.kill()
        await self._exited
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._resources.close()
