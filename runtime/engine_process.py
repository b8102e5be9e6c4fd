"""The engine's own process: load, check, warm up, then turn the loop of the engine core.

It is started by `process_backend` with its `ResolvedConfig` as one line of JSON on stdin, and speaks `wire` over a
ZeroMQ pair. Stdin stays open as long as the parent lives: its end is how this process learns that it is alone, and
exits. It owns no HTTP and no text. SIGINT is left to the parent, for Ctrl-C reaches the whole process group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import openvino
import zmq

from harness.arch import CPU
from harness.errors import EngineError, HarnessError, OverloadedError, RequestError
from harness.manifest import EngineManifest, read_manifest, verify_files
from harness.runtime import wire
from harness.runtime.config import ResolvedConfig
from harness.runtime.engine_core import EngineCore
from harness.runtime.executor import TOKENS_PER_BLOCK, Executor, ScheduledSequence, SchedulerOutput
from harness.runtime.openvino_executor import OpenVinoExecutor
from harness.runtime.request import TokenChunk

logger = logging.getLogger(__name__)

Load = Callable[[ResolvedConfig], EngineCore]


def check_runnable(manifest: EngineManifest, installed_openvino: str) -> None:
    """Refuse an engine that this runtime cannot run as it was built.

    Raises:
        EngineError: built for another arch, or with another release of OpenVINO; shows both.
    """
    if manifest.arch != CPU.name or manifest.backend != CPU.backend:
        raise EngineError(
            f"engine {manifest.engine_id} was built for {manifest.arch} ({manifest.backend}), this runtime runs "
            f"{CPU.name} ({CPU.backend})",
            f"rebuild it with: harness-build --model MODEL --arch {CPU.name}",
        )
    built_with = manifest.versions.get("openvino")
    if built_with != installed_openvino:
        raise EngineError(
            f"engine {manifest.engine_id} was built with openvino {built_with}, installed is {installed_openvino}",
            "rebuild the engine with harness-build, or install the release it was built with",
        )


def open_engine(engine_dir: Path) -> EngineManifest:
    """The manifest of an engine that this runtime can run and whose files are whole.

    Raises:
        EngineError: it is not such an engine; says why.
    """
    manifest = read_manifest(engine_dir)
    check_runnable(manifest, openvino.get_version())
    verify_files(engine_dir, manifest)
    return manifest


def load(config: ResolvedConfig) -> EngineCore:
    """Check and load the engine of `config`, and run a few tokens through it.

    Raises:
        HarnessError: it cannot be run; says why.
    """
    manifest = open_engine(config.engine_dir)
    executor = OpenVinoExecutor(
        config.engine_dir,
        manifest,
        deterministic=config.deterministic,
        kv_cache_bytes=config.kv_cache_bytes,
        num_threads=config.num_threads,
    )
    warm_up(executor)
    return EngineCore(executor, config.scheduler, manifest.tokenizer.eos_token_ids)


def warm_up(executor: Executor) -> None:
    """Compute one block of tokens and one decode step, so that the first request does not pay for compilation.

    Writes into blocks 0 and 1, which belong to nobody yet.
    """
    for start, num_tokens in ((0, TOKENS_PER_BLOCK), (TOKENS_PER_BLOCK, 1)):
        sequence = ScheduledSequence(
            request_id="warm-up",
            token_ids=[0] * num_tokens,
            num_computed_tokens=start,
            block_table=list(range(start // TOKENS_PER_BLOCK + 1)),
            logit_positions=[num_tokens - 1],
        )
        if start // TOKENS_PER_BLOCK < executor.num_blocks:
            executor.execute(SchedulerOutput(sequences=[sequence]))


def serve(core: EngineCore, socket: zmq.Socket[bytes]) -> None:
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


def _handle(
    message: wire.ToEngine, core: EngineCore, chunks: list[TokenChunk], rejections: list[wire.Rejection]
) -> None:
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
    parent = threading.Thread(target=_exit_with_parent, args=(address,), daemon=True)
    parent.start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)  # never block: the parent may be slow, the engine must not be
    socket.connect(address)
    try:
        core = load_core(config)
    except HarnessError as error:
        socket.send(wire.encode(wire.LoadFailed(wire.ErrorInfo.pack(error))))
        parent.join()  # the parent ends this process once it has read the reason
        return
    socket.send(wire.encode(wire.Ready(core.stats())))
    serve(core, socket)


def _exit_with_parent(address: str) -> None:
    # the descriptor and not sys.stdin, whose lock would be in the way of the interpreter's own exit
    while os.read(0, 4096):
        pass
    socket_path = address.removeprefix("ipc://")
    with contextlib.suppress(OSError):  # a parent that was killed left its private folder behind
        os.unlink(socket_path)
        os.rmdir(os.path.dirname(socket_path))
    os._exit(1)


def main() -> None:
    """Entry point of the process, whose arguments are ADDRESS and LOG_LEVEL."""
    address, log_level = sys.argv[1:]
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    logging.getLogger("harness").setLevel(log_level)
    run(load, address)
