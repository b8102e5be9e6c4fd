"""The command line of `harness-run`: sizes, the choice of an engine, refusals before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.runtime.cli import find_engine, parse_size
from harness.runtime.server.serve import ListenError, listen


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("512MB", 512 * 10**6), ("1.5g", 15 * 10**8), ("64 KiB", 64 << 10), ("100", 100), ("7b", 7)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "1XB", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="2GiB"):
        parse_size(text)


def _engine(engines: Path, name: str) -> Path:
    folder = engines / "model" / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_the_only_engine_is_taken_and_several_are_listed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="harness-build"):
        find_engine(None, tmp_path)
    (tmp_path / "model" / "quantized-1").mkdir(parents=True)
    first = _engine(tmp_path, "cpu-1")
    assert find_engine(None, tmp_path) == first
    second = _engine(tmp_path, "cpu-2")
    with pytest.raises(UsageError) as caught:
        find_engine(None, tmp_path)
    assert str(first) in caught.value.hint
    assert str(second) in caught.value.hint
    assert find_engine(second, tmp_path) == second


def test_a_port_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()
    with pytest.raises(ListenError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1", 0)
    with pytest.raises(UsageError, match="65535"):
        listen("127.0.0.1", 70000)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["server"], 2, "no engine under ./engines"),
        (["server", "--engine", "nowhere"], 1, "there is no folder nowhere"),
        (["server", "--kv-cache-memory", "lots", "--engine", "x"], 2, "'lots' is not a size"),
        (["server", "--log-level", "loud"], 2, "allowed: debug"),
        (["chat", "--prompt", "Hi"], 2, "no engine under ./engines"),
        (["server", "--no-such-flag"], 2, "--no-such-flag"),
        (["server", "--engine", "x", "--host-cache-memory", "lots"], 2, "'lots' is not a size"),
        (["server", "--engine", "x", "--scheduling-policy", "fair"], 2, "allowed: guaranteed-no-evict"),
        (["server", "--engine", "x", "--gpu-memory-fraction", "1.5"], 2, "--gpu-memory-fraction is 1.5"),
        (["server", "--drain-timeout", "nan"], 2, "--drain-timeout"),
        (["chat", "--temperature", "nan"], 2, "temperature"),
        (["chat", "--max-tokens", "3000000000"], 2, "max_tokens is 3000000000; allowed: [1, "),
    ],
)
def test_mistakes_are_told_without_a_traceback(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    command = [sys.executable, "-c", "from harness.runtime.cli import main; main()", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_is_for_our_own_lines() -> None:
    code = (
        "import logging, harness.runtime.cli as cli; cli._set_up_logging('debug'); "
        "assert logging.getLogger('harness.decisions').isEnabledFor(logging.DEBUG); "
        "assert not logging.getLogger('asyncio').isEnabledFor(logging.INFO)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_is_quick_to_import() -> None:
    code = (
        "import sys, harness.runtime.cli; "
        "heavy = {'openvino', 'fastapi', 'uvicorn', 'tokenizers', 'numpy', 'zmq'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
