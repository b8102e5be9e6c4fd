"""The engine in its own process: requests across the border, and what happens when either side dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from harness.errors import CapacityError, EngineDeadError, EngineError, HarnessError, OverloadedError, RequestError
from harness.runtime import wire
from harness.runtime.config import ResolvedConfig
from harness.runtime.process_backend import ProcessBackend
from harness.runtime.request import FinishReason, Request, SamplingParams, TokenChunk
from harness.runtime.scheduler import SchedulerConfig

ENGINE = Path(__file__).with_name("scripted_engine.py")
CONFIG = ResolvedConfig(
    engine_dir=Path("unused"),
    deterministic=True,
    kv_cache_bytes=1,
    num_threads=1,
    scheduler=SchedulerConfig(max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=128, max_waiting=8),
)


def backend_of(behaviour: str) -> ProcessBackend:
    return ProcessBackend(CONFIG, command=(sys.executable, str(ENGINE), behaviour))


@asynccontextmanager
async def running() -> AsyncIterator[ProcessBackend]:
    backend = backend_of("works")
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


def request(name: str, prompt: list[int], max_tokens: int = 5) -> Request:
    return Request(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, temperature=0)
    )


async def collect(backend: ProcessBackend, wanted: Request) -> tuple[list[int], TokenChunk]:
    token_ids: list[int] = []
    async with aclosing(backend.submit(wanted)) as chunks:
        async for chunk in chunks:
            token_ids += chunk.token_ids
    return token_ids, chunk


async def eventually(condition: Callable[[], Any], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_requests_run_together_and_each_gets_its_own_tokens() -> None:
    async def main() -> None:
        async with running() as backend:
            starts = [10, 200, 300, 400, 500, 600]
            results = await asyncio.gather(*(collect(backend, request(f"r{s}", [s])) for s in starts))
            for start, (token_ids, last) in zip(starts, results, strict=True):
                assert token_ids == list(range(start + 1, start + 6))
                assert last.finish_reason is FinishReason.LENGTH
            stats = await backend.stats()
            assert (stats.num_running, stats.num_waiting, stats.generated_tokens_total) == (0, 0, 30)
            assert stats.num_free_blocks == stats.num_blocks == 64

    asyncio.run(main())


def test_refusals_come_back_as_what_they_are() -> None:
    async def main() -> None:
        async with running() as backend:
            with pytest.raises(RequestError):
                await collect(backend, request("unknown", [100_000]))
            with pytest.raises(RequestError):
                await collect(backend, request("empty", []))
            results = await asyncio.gather(
                *(collect(backend, request(f"r{n}", [n], 40)) for n in range(20)), return_exceptions=True
            )
            refused = [r for r in results if isinstance(r, OverloadedError)]
            finished = [r for r in results if isinstance(r, tuple)]
            assert len(refused) + len(finished) == 20
            assert len(refused) >= 5
            assert all(len(token_ids) == 40 for token_ids, _ in finished)

    asyncio.run(main())


def test_closing_early_frees_the_blocks_running_or_queued() -> None:
    async def main() -> None:
        async with running() as backend:
            tasks = [asyncio.create_task(collect(backend, request(f"r{n}", [n], 800))) for n in range(6)]
            await eventually(lambda: backend._stats.num_running == 4)
            await eventually(lambda: backend._stats.num_waiting == 2)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await eventually(lambda: backend._stats.num_running + backend._stats.num_waiting == 0, 1)
            stats = await backend.stats()
            assert stats.num_free_blocks == stats.num_blocks

    asyncio.run(main())


def test_a_killed_engine_is_reported_and_replaced() -> None:
    async def main() -> None:
        async with running() as backend:
            tasks = [asyncio.create_task(collect(backend, request(f"r{n}", [n], 800))) for n in range(2)]
            await eventually(lambda: backend._stats.num_running == 2)
            first_pid = backend.engine_pid
            assert first_pid is not None
            os.kill(first_pid, signal.SIGKILL)
            for task in tasks:
                with pytest.raises(EngineDeadError, match="killed by signal 9"):
                    await asyncio.wait_for(task, 2)
            assert not backend.is_ready
            with pytest.raises(EngineDeadError):
                await collect(backend, request("between", [1]))
            await eventually(lambda: backend.is_ready)
            assert backend.num_restarts == 1
            assert backend.engine_pid != first_pid
            assert (await collect(backend, request("after", [7])))[0] == [8, 9, 10, 11, 12]

    asyncio.run(main())


def test_a_restart_that_fails_is_tried_again_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        backend = backend_of(f"second-fails={tmp_path / 'tally'}")
        await backend.start()
        assert backend.engine_pid is not None
        died = time.monotonic()
        os.kill(backend.engine_pid, signal.SIGKILL)
        await eventually(lambda: backend.num_restarts == 1)
        # half a second before the first try, one second before the next
        assert time.monotonic() - died > 1.5
        assert (await collect(backend, request("after", [7])))[0] == [8, 9, 10, 11, 12]
        await backend.stop()

    asyncio.run(main())
    assert (tmp_path / "tally").read_text() == "|||"
    assert "no room this time" in caplog.text


def test_a_machine_without_processes_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    start_process = asyncio.create_subprocess_exec
    refusals = [OSError("Cannot allocate memory")]

    async def refusing_once(*args: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await start_process(*args, **options)

    async def main() -> None:
        async with running() as backend:
            monkeypatch.setattr(asyncio, "create_subprocess_exec", refusing_once)
            assert backend.engine_pid is not None
            os.kill(backend.engine_pid, signal.SIGKILL)
            await eventually(lambda: backend.num_restarts == 1)
            assert len(list(tmp_path.iterdir())) == 1  # the failed start left no folder
            assert (await collect(backend, request("after", [7])))[0] == [8, 9, 10, 11, 12]

    asyncio.run(main())
    assert "Cannot allocate memory" in caplog.text


def test_a_file_in_the_working_directory_does_not_shadow_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zmq.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)

    async def main() -> None:
        with pytest.raises(EngineError, match="there is no folder unused"):
            await ProcessBackend(CONFIG).start()

    asyncio.run(main())


def test_a_step_that_fails_ends_the_process_not_the_server() -> None:
    async def main() -> None:
        async with running() as backend:
            with pytest.raises(EngineDeadError, match="exit code 1"):
                await collect(backend, request("poison", [998]))
            await eventually(lambda: backend.is_ready)
            assert (await collect(backend, request("after", [7])))[0] == [8, 9, 10, 11, 12]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [("fails", CapacityError, "buy memory"), ("crashes", EngineDeadError, "exit code 3")],
)
def test_a_failure_to_load_is_raised_as_it_was(behaviour: str, kind: type[HarnessError], words: str) -> None:
    async def main() -> None:
        backend = backend_of(behaviour)
        with pytest.raises(kind, match=words):
            await backend.start()
        assert not backend.is_ready
        await backend.stop()

    asyncio.run(main())
    assert not psutil.Process().children()


def test_stop_ends_requests_with_cancelled_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def main() -> None:
        backend = backend_of("works")
        await backend.start()
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        task = asyncio.create_task(collect(backend, request("r", [1], 800)))
        await eventually(lambda: backend._stats.num_running == 1)
        await backend.stop()
        assert (await task)[1].finish_reason is FinishReason.CANCELLED

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
    assert not psutil.Process().children()


def test_cancelling_start_leaves_no_process() -> None:
    async def main() -> None:
        starting = asyncio.create_task(backend_of("hangs").start())
        await eventually(lambda: bool(psutil.Process().children()))
        starting.cancel()
        await asyncio.wait({starting})

    asyncio.run(main())
    assert not psutil.Process().children()


def ignores_ctrl_c(pid: int) -> bool:
    ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.parametrize("behaviour", ["works", "hangs"])
def test_the_engine_ends_with_its_parent_and_ignores_ctrl_c(behaviour: str) -> None:
    # stdin open means that the parent lives
    child = subprocess.Popen(
        [sys.executable, str(ENGINE), behaviour, "ipc:///nowhere", "WARNING"], stdin=subprocess.PIPE
    )
    assert child.stdin is not None
    child.stdin.write(wire.encode_config(CONFIG))
    child.stdin.flush()
    deadline = time.monotonic() + 20
    while not ignores_ctrl_c(child.pid):  # it does from the first line of its own on
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(5) == 1


def test_the_engine_ends_with_the_connection_to_its_parent_too(tmp_path: Path) -> None:
    """Open MPI does not pass on the end of stdin."""
    address = f"ipc://{tmp_path}/engine"
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind(address)
        child = subprocess.Popen([sys.executable, str(ENGINE), "works", address, "WARNING"], stdin=subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(wire.encode_config(CONFIG))
        child.stdin.flush()
        assert isinstance(wire.decode_from_engine(socket.recv()), wire.Ready)
        assert child.poll() is None
    assert child.wait(5) == 1
    child.stdin.close()


def test_an_idle_engine_uses_no_processor_time() -> None:
    async def main() -> None:
        async with running() as backend:
            await collect(backend, request("r", [1]))
            engine = psutil.Process(backend.engine_pid)
            before = sum(engine.cpu_times()[:2])
            await asyncio.sleep(1.0)
            assert sum(engine.cpu_times()[:2]) - before < 0.1

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [RequestError("m", param="p", code="c"), CapacityError("m", "h"), OverloadedError("m"), HarnessError("m", "h")],
)
def test_errors_cross_the_border(error: HarnessError) -> None:
    received = wire.ErrorInfo.pack(error).unpack()
    assert type(received) is type(error)
    assert vars(received) == vars(error)
