"""What a program of a model can do, and what it cannot."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from harness.calib.quality import code_execution
from harness.calib.quality.code_execution import run_program, why_not
from harness.errors import QualityError


def test_programs_can_be_run_here() -> None:
    assert why_not() is None


@pytest.mark.parametrize(
    "program",
    [
        "assert sorted({3, 1, 2}) == [1, 2, 3]",
        "import collections, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, math, re\n"
        "import random; random.random(); datetime.datetime.now(); hashlib.md5(b'x').hexdigest()",
        "print('x' * 100000)",
        "import sys; sys.stdin.read()",
        "def f(n): return n and f(n - 1)\nf(500)",
        "try:\n    open('new', 'w')\nexcept OSError: pass\nelse: raise AssertionError",
    ],
)
def test_what_passes(program: str) -> None:
    assert run_program(program) == ""


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("assert 1 == 2, 'not equal'", "AssertionError: not equal"),
        ("x =", "SyntaxError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "status 0"),
        ("import os; os._exit(3)", "status 3"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import os\nfor _ in range(50): os.open('/dev/null', os.O_RDONLY)", "Too many open files"),
    ],
)
def test_what_fails(program: str, says: str) -> None:
    assert says in run_program(program)


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socketpair()",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.chdir('/')",
        "import os; os.open('new', os.O_RDONLY | os.O_CREAT)",
        "import os; os.memfd_create('x')",
    ],
)
def test_what_the_kernel_refuses(attempt: str) -> None:
    assert "Operation not permitted" in run_program(attempt)


def test_no_thread_is_started() -> None:
    assert "can't start new thread" in run_program("import threading; threading.Thread(target=print).start()")


def test_files_stay_as_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    for attempt in ("open(p, 'w')", "open(p, 'a')", "os.remove(p)", "os.rename(p, p + '2')", "os.truncate(p, 0)",
                    "os.chmod(p, 0)", "os.symlink(p, p + '2')", "os.mkdir(p + '2')", "os.utime(p)",
                    "shutil.rmtree(os.path.dirname(p))"):  # fmt: skip
        assert "PermissionError" in run_program(f"import os, shutil\np = {str(kept)!r}\n{attempt}"), attempt
    assert kept.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [kept]


def test_a_listening_neighbour_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        assert run_program(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_limit_cannot_be_raised() -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))"
    assert "not allowed to raise" in run_program(program)


def test_an_endless_program_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_execution, "CPU_SECONDS", 1)
    started = time.monotonic()
    assert run_program("while True: pass") == "did not end within 1 s"
    assert time.monotonic() - started < 20


def test_a_sleeping_program_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_execution, "WALL_SECONDS", 1)
    assert "did not end" in run_program("import time; time.sleep(99)")
    # one that will not hear of it is killed from outside
    monkeypatch.setattr(code_execution, "GRACE_SECONDS", 0.5)
    stubborn = "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: time.sleep(9)"
    assert run_program(stubborn) == "did not end"


def test_nothing_of_the_caller_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    program = "import os, sys\nraise KeyError(os.environ, os.getcwd(), os.listdir('.'), sys.argv, __name__)"
    said = run_program(program)
    assert "API_TOKEN" not in said
    assert "program-" in said
    assert "[]" in said  # the folder is empty
    assert run_program("import tasks").startswith("ModuleNotFoundError")


def test_sets_have_the_same_order_in_every_run() -> None:
    program = "raise ValueError(list({'one', 'two', 'three', 'four', 'five'}))"
    assert len({run_program(program) for _ in range(3)}) == 1


def test_a_verdict_cannot_be_forged_by_writing_it() -> None:
    program = (
        "import os\nfor fd in range(3, 32):\n    try: os.write(fd, b'0' * 32)\n    except OSError: pass\nos._exit(0)"
    )
    assert run_program(program)


def test_a_flood_of_output_is_cut() -> None:
    program = (
        "import os\nfor fd in range(1, 32):\n    try: os.write(fd, b'x' * 10**6)\n    except OSError: pass\nos._exit(0)"
    )
    assert len(run_program(program)) <= 300


def test_without_the_library_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "sandbox.py"
    source = Path(code_execution.sandbox.__file__).read_text("utf-8")
    broken.write_text(source.replace('"libseccomp.so.2"', '"libnothere.so"'), encoding="utf-8")
    monkeypatch.setattr(code_execution.sandbox, "__file__", str(broken))
    with pytest.raises(QualityError, match=r"libnothere(.|\n)*install libseccomp"):
        run_program("pass")
