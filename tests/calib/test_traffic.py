"""Dirty logs: what is kept, what is left out and said, and what never depends on the order of the lines."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.calib import traffic as module
from harness.calib.traffic import read_traffic
from harness.errors import CalibrationError

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
HELLO_TURNS = (("user", "hello"),)


def log(tmp_path: Path, *lines: Any, name: str = "traffic.jsonl") -> Path:
    path = tmp_path / name
    raw = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def turns_of(path: Path) -> set[tuple[tuple[str, str], ...]]:
    return {request.turns for request in read_traffic([path]).requests}


@pytest.mark.parametrize(
    "line",
    [
        HELLO,
        HELLO | {"model": "m", "temperature": 0, "stream": True},
        {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": HELLO},
        {"timestamp": 1, "request": {"headers": {}, "body": json.dumps(HELLO)}},
        {"body": json.dumps(HELLO)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"text": "hello"}]}
            ]
        },
        {
            "messages": [
                {"role": "User", "content": "hello"},
                {"role": "assistant", "content": None, "tool_calls": [{}]},
            ]
        },
        {"messages": [{"role": "user", "content": "hello"}, None, 5, {"content": "no role"}, {"role": "user"}]},
    ],
)
def test_a_chat_request_is_found_wherever_it_lies(tmp_path: Path, line: dict[str, Any]) -> None:
    assert turns_of(log(tmp_path, line)) == {HELLO_TURNS}


def test_turns_keep_their_roles_and_answers(tmp_path: Path) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w"}}]},
        {"role": "tool", "content": '{"degrees": 20}', "tool_call_id": "1"},
        {"role": "assistant", "content": "20 degrees."},
    ]
    (turns,) = turns_of(log(tmp_path, {"messages": messages}))
    assert turns == (
        ("system", "Be brief."),
        ("user", "weather?"),
        ("tool", '{"degrees": 20}'),
        ("assistant", "20 degrees."),
    )


def test_completions_and_plain_lines_are_text(tmp_path: Path) -> None:
    path = log(tmp_path, {"prompt": "once"}, {"prompt": ["two", "three"]}, {"text": "four"})
    assert turns_of(path) == {(("text", word),) for word in ("once", "two", "three", "four")}


def test_a_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes("first\r\nline\r\n\r\n  \n第二段\nend".encode())
    assert turns_of(path) == {(("text", "first\r\nline"),), (("text", "第二段\nend"),)}
    path.write_text("one document\nof two lines\n")
    assert turns_of(path) == {(("text", "one document\nof two lines"),)}


def test_bad_lines_are_counted_and_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        HELLO,
        b'{"messages": [{"role": "user", "con',
        b"",
        b"[1, 2]",
        b'"just a string"',
        {"prompt": [1, 2, 3]},
        {"messages": [{"role": "system", "content": "only a system turn"}]},
        b"[" * 100_000,
        {"choices": []},
        b"\x00\x00\x00",
        {"prompt": "kept"},
    )
    read = read_traffic([path])
    assert {r.turns for r in read.requests} == {HELLO_TURNS, (("text", "kept"),)}
    assert read.num_bad_lines == len(read.bad_lines) == 7
    assert [line.split(":")[1] for line in read.bad_lines] == ["2", "4", "5", "6", "7", "8", "9"]
    assert read.bad_lines[0].startswith("traffic.jsonl:2: not JSON")


def test_broken_encodings_are_kept(tmp_path: Path) -> None:
    gbk = b'{"prompt": "' + "中文".encode("gbk") + b' rest"}'
    path = log(tmp_path, gbk, b'{"prompt": "half \\ud83d a character"}', b'\xef\xbb\xbf{"prompt": "marked"}')
    read = read_traffic([path])
    texts = sorted(r.turns[0][1] for r in read.requests)
    assert texts[0] == "half \ufffd a character"
    assert texts[1] == "marked"
    assert texts[2].endswith("rest")
    assert "\ufffd" in texts[2]
    assert (read.num_bad_lines, read.num_broken_encodings) == (0, 2)
    for text in texts:
        text.encode()  # nothing is left that a tokenizer would refuse


def test_utf_16_of_a_windows_shell_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shell.log"
    path.write_bytes('{"prompt": "größe 大小"}\r\n'.encode("utf-16"))
    assert turns_of(path) == {(("text", "größe 大小"),)}


def test_compressed_logs_are_read_and_a_cut_one_as_far_as_it_goes(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [{"prompt": f"request {i} {rng.random()}"} for i in range(5000)]
    whole = gzip.compress(log(tmp_path, *lines).read_bytes())
    path = tmp_path / "traffic.jsonl.gz"
    path.write_bytes(whole)
    assert read_traffic([path]).num_requests == 5000
    path.write_bytes(whole[: len(whole) // 2])
    read = read_traffic([path])
    assert 1000 < read.num_requests < 5000
    assert "the compressed file ends early" in read.bad_lines[-1]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_read_whole(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    content = pack(log(tmp_path, *({"prompt": f"request {i}"} for i in range(5000))).read_bytes())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    read = read_traffic([pipe])
    writer.join()
    assert (read.num_requests, read.num_bad_lines) == (5000, 0)


def test_a_line_without_end_costs_no_more_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_CHARS", 1000)
    path = log(tmp_path, {"prompt": "a" * 5000}, HELLO, {"prompt": "b" * 990})
    read = read_traffic([path])
    assert {r.turns for r in read.requests} == {HELLO_TURNS}
    assert read.bad_lines == (
        "traffic.jsonl:1: longer than 1000 characters",
        "traffic.jsonl:3: longer than 1000 characters",
    )


def test_duplicates_are_counted_whatever_their_spaces(tmp_path: Path) -> None:
    lines = [{"prompt": "the  same"}, {"prompt": "the same\n"}, {"prompt": "the same"}, {"prompt": "another"}]
    read = read_traffic([log(tmp_path, *lines)])
    assert (read.num_requests, read.num_duplicates) == (4, 2)
    assert {(r.turns[0][1], r.count) for r in read.requests} == {("the  same", 3), ("another", 1)}
    reverse = read_traffic([log(tmp_path, *lines[::-1])])
    assert reverse.requests == read.requests


@pytest.mark.parametrize(("max_requests", "max_chars"), [(50, 1 << 30), (10_000, 2000)])
def test_what_is_kept_of_a_large_log_depends_on_the_seed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_requests: int, max_chars: int
) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", max_requests)
    monkeypatch.setattr(module, "MAX_TOTAL_CHARS", max_chars)
    rng = random.Random(1)
    lines = [{"prompt": f"{i} " + "x" * rng.choice((1, 10, 300))} for i in range(400)]
    lines += lines[:100]
    kept = read_traffic([log(tmp_path, *lines)])
    assert len(kept.requests) <= max_requests
    assert sum(r.num_chars for r in kept.requests) <= max_chars
    assert len(kept.requests) >= 10
    for _ in range(3):
        rng.shuffle(lines)
        first, second = log(tmp_path, *lines[:77], name="a"), log(tmp_path, *lines[77:], name="b")
        assert read_traffic([first, second]).requests == kept.requests
    other = read_traffic([log(tmp_path, *lines)], seed=1)
    assert {r.turns for r in other.requests} != {r.turns for r in kept.requests}


@pytest.mark.parametrize("content", [b"", b"\n\n", b"not json\n", b"\xff\xfe", b"\x1f\x8b"])
def test_nothing_usable_is_an_error_that_says_what_a_line_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match='--calib a file with one JSON object per line that has "messages"'):
        read_traffic([path])


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(CalibrationError, match="cannot be read"):
            read_traffic([path])
