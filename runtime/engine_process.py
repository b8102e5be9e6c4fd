"""The engine's own process: load the engine with its backend, then turn the loop of its core.

It is started by `process_backend` with its `ResolvedConfig` as one line of JSON on stdin, and speaks `wire` over a
ZeroMQ pair. Stdin and the pair stay open as long as the parent lives: the end of either is how this process learns that
it is alone, and exits. (Under `mpirun` stdin does not end.) It owns no HTTP and no text. SIGINT is left to the parent,
for Ctrl-C reaches the whole process group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import zmq

from harness.errors import HarnessError, OverloadedError, RequestError
from harness.runtime import wire
from harness.runtime.backend import BackendStats
from harness.runtime.config import ResolvedConfig
from harness.runtime.request import Request, TokenChunk

logger = logging.getLogger(__name__)


class Core(Protocol):
    """An engine as its loop drives it: `EngineCore` over our own scheduler, `TrtllmCore` over TensorRT-LLM's."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it is invalid, or asks for what this engine cannot do.
            OverloadedError: the queue is full.
        """

    def cancel(self, request_id: str) -> TokenChunk | None:
        """End a request; its last chunk, or None if there is none of that id."""

    def step(self) -> list[TokenChunk]:
        """Go on with the work, for some milliseconds at most where nothing comes of it.

        Raises:
            HarnessError, RuntimeError: the engine failed, and cannot go on.
        """

    def stats(self) -> BackendStats:
        """Current counts."""


Load = Callable[[ResolvedConfig], Core]


def load(config: ResolvedConfig) -> Core:
    """Check, load and warm up the engine of `config` with the backend it was built for.

    Raises:
        HarnessError: it cannot be run; says why.
    """
    # each backend's library is large, and only one is installed on many machines
    if config.gpu is not None:
        from harness.runtime.tensorrt_llm.load import load_tensorrt_llm

        return load_tensorrt_llm(config)
    from harness.runtime.openvino_engine import load_openvino

    return load_openvino(config)


def serve(core: Core, socket: zmq.Socket[bytes]) -> None:
    """Work until the process is told to end. Blocks without a timer while there is nothing to do."""
    while True:
        socket.poll(0 if core.has_work else None)
        chunks: list[TokenChunk] = []
        rejections: list[wire.Rejection] = []
        while socket.poll(0):
            _handle(wire.decode_to_engine(socket.recv()), core, chunks, rejections)
        if core.has_work:
            chunks += core.step()
        socket.send(wire.encode(wire.Update(stats=core.stats(), chunks=chunks, rejections=rejections)))


def _handle(message: wire.ToEngine, core: Core, chunks: list[TokenChunk], rejections: list[wire.Rejection]) -> None:
    if isinstance(message, wire.Cancel):
        last = core.cancel(message.request_id)
        if last is not None:
            chunks.append(last)
        return
    try:
        core.add_request(message.request)
    except (RequestError, OverloadedError) as error:
        rejections.append(wire.Rejection(message.request.request_id, wire.ErrorInfo.pack(error)))


def run(load_core: Load, address: str) -> None:
    """Read the config from stdin, load with `load_core`, report to `address`, and serve.

    Returns only when loading failed and the parent has been told.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = wire.decode_config(sys.stdin.buffer.readline())
    parent = threading.Thread(target=_exit_with_stdin, args=(address,), daemon=True)
    parent.start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)  # never block: the parent may be slow, the engine must not be
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    threading.Thread(target=_exit_with_connection, args=(monitor, address), daemon=True).start()
    socket.connect(address)
    try:
        core = load_core(config)
    except HarnessError as error:
        socket.send(wire.encode(wire.LoadFailed(wire.ErrorInfo.pack(error))))
        parent.join()  # the parent ends this process once it has read the reason
        return
    socket.send(wire.encode(wire.Ready(core.stats())))
    serve(core, socket)


def run_or_exit(load_core: Load, address: str) -> None:
    """`run`, where a failure ends the process at once: what has failed could hang in its own destruction."""
    try:
        run(load_core, address)
    except Exception:
        logger.exception("the engine failed")
        logging.shutdown()
        os._exit(1)


def _exit_with_stdin(address: str) -> None:
    # the descriptor and not sys.stdin, whose lock would be in the way of the interpreter's own exit
    while os.read(0, 4096):
        pass
    _exit_alone(address)


def _exit_with_connection(monitor: zmq.Socket[bytes], address: str) -> None:
    monitor.recv_multipart()  # the one event that it was made for
    _exit_alone(address)


def _exit_alone(address: str) -> None:
    socket_path = address.removeprefix("ipc://")
    with contextlib.suppress(OSError):  # a parent that was killed left its private folder behind
        os.unlink(socket_path)
        os.rmdir(os.path.dirname(socket_path))
    os._exit(1)


def main() -> None:
    """Entry point of the process, whose arguments are ADDRESS and LOG_LEVEL."""
    address, log_level = sys.argv[1:]
    set_up_logging(log_level)
    run_or_exit(load, address)


def set_up_logging(level: str) -> None:
    """Log to stderr, from `level` on what is ours."""
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    logging.getLogger("harness").setLevel(level)
