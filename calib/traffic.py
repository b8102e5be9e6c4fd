"""Reads logged traffic: one request per line as servers and proxies log them, or plain text.

Owns the forms of a log line, what is done with dirty ones, and the bounds on what is kept in memory. Which requests are
calibrated on is decided in `calibration_set`.

A log may be larger than memory. Of all distinct requests those with the smallest hash of seed and content are kept (a
bottom-k sample): a uniform draw that depends on neither the order of the lines nor the order of the files.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import heapq
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from harness.errors import CalibrationError

MAX_LINE_CHARS = 8 << 20
MAX_REQUESTS = 2048
MAX_TOTAL_CHARS = 256 << 20
MAX_BAD_LINES_NAMED = 20
# where proxies and batch files put the request itself
ENVELOPES = ("body", "request", "params", "payload", "data")
TEXT_SUFFIXES = (".txt", ".md")
ROLES = {"developer": "system", "human": "user", "ai": "assistant", "function": "tool"}


@dataclass(frozen=True, kw_only=True)
class TrafficRequest:
    """One request. `turns` are `(role, text)`; a completion or plain text is one turn of role `text`.

    `count` tells how often the same text came, `key` is its place in the draw.
    """

    turns: tuple[tuple[str, str], ...]
    key: int = 0
    count: int = 1

    @property
    def is_chat(self) -> bool:
        """Whether the request goes through the chat template."""
        return self.turns[0][0] != "text"

    @property
    def num_chars(self) -> int:
        """Characters in all turns."""
        return sum(len(text) for _, text in self.turns)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What was read. `requests` are distinct, in the order of their keys; `bad_lines` name the first lines left out."""

    requests: tuple[TrafficRequest, ...]
    num_requests: int
    num_duplicates: int
    num_bad_lines: int
    num_broken_encodings: int
    bad_lines: tuple[str, ...]


def read_traffic(paths: Sequence[Path], *, seed: int = 0) -> Traffic:
    """Read files of traffic, at most 2048 distinct requests and 256 Mi characters of them kept.

    Raises:
        CalibrationError: a file cannot be opened, or no line of any file is a request.
    """
    sample = _Sample(seed=seed)
    bad: list[str] = []
    num_bad = num_broken = 0
    for path in paths:
        for number, item in _items(path):
            if isinstance(item, str):
                num_bad += 1
                if len(bad) < MAX_BAD_LINES_NAMED:
                    bad.append(f"{path.name}:{number}: {item}")
                continue
            num_broken += any("\ufffd" in text for request in item for _, text in request)
            for turns in item:
                sample.add(turns)
    if not sample.num_requests:
        found = f"; the first faults: {'; '.join(bad[:3])}" if bad else "; they are empty"
        raise CalibrationError(
            f"no request found in {', '.join(map(str, paths))}{found}",
            'give --calib a file with one JSON object per line that has "messages", "prompt" or "text", or a .txt file',
        )
    return Traffic(
        requests=sample.requests(),
        num_requests=sample.num_requests,
        num_duplicates=sample.num_duplicates,
        num_bad_lines=num_bad,
        num_broken_encodings=num_broken,
        bad_lines=tuple(bad),
    )


def read_text(path: Path) -> str:
    """A whole text file, decoded as traffic is; line ends become `\\n`.

    Raises:
        OSError: it cannot be read.
    """
    raw = path.read_bytes()
    return io.TextIOWrapper(io.BytesIO(raw), encoding=_encoding(raw), errors="replace").read()


@dataclass(kw_only=True)
class _Sample:
    """The distinct requests of the smallest keys whose number and characters stay within the bounds."""

    seed: int
    num_requests: int = 0
    num_duplicates: int = 0
    _kept: dict[int, TrafficRequest] = field(default_factory=dict)
    _largest_first: list[int] = field(default_factory=list)  # keys negated, as a heap
    _num_chars: int = 0
    _limit: int = 1 << 128  # the smallest key ever left out; taking in what lies past it would make the order matter

    def add(self, turns: Sequence[tuple[str, str]]) -> None:
        self.num_requests += 1
        content = json.dumps([self.seed, [(role, " ".join(text.split())) for role, text in turns]])
        key = int.from_bytes(hashlib.blake2b(content.encode(), digest_size=16).digest(), "big")
        request = TrafficRequest(turns=tuple(turns), key=key)
        known = self._kept.get(key)
        if known is not None:
            self.num_duplicates += 1
            # of two spellings that differ in spaces alone, the same one whatever came first
            turns = min(known.turns, request.turns)
            self._kept[key] = TrafficRequest(turns=turns, key=key, count=known.count + 1)
            self._num_chars += self._kept[key].num_chars - known.num_chars
        elif key < self._limit:
            self._kept[key] = request
            self._num_chars += request.num_chars
            heapq.heappush(self._largest_first, -key)
        while len(self._kept) > MAX_REQUESTS or (self._num_chars > MAX_TOTAL_CHARS and len(self._kept) > 1):
            self._limit = -heapq.heappop(self._largest_first)
            self._num_chars -= self._kept.pop(self._limit).num_chars

    def requests(self) -> tuple[TrafficRequest, ...]:
        return tuple(self._kept[key] for key in sorted(self._kept))


Turns = list[tuple[str, str]]


def _items(path: Path) -> Iterator[tuple[int, list[Turns] | str]]:
    """Line numbers with the requests of the line, or with why it holds none. Blank lines are nothing."""
    is_text = any(suffix in TEXT_SUFFIXES for suffix in path.suffixes[-2:])
    try:
        with _open(path) as file:
            try:
                for number, block in _paragraphs(file) if is_text else _lines(file):
                    if block is None:
                        yield number, f"longer than {MAX_LINE_CHARS} characters"
                    elif is_text:
                        yield number, [[("text", block)]]
                    elif block.strip("\ufeff \t\r\n\x00"):
                        yield number, _parse(block)
            # a log is often cut off in the middle of compression
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                yield 0, f"the compressed file ends early: {error}"
    except OSError as error:
        reason = error.strerror or error
        raise CalibrationError(f"{path} cannot be read: {reason}", "give --calib the file of a request log") from None


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    with path.open("rb") as file:  # once: a pipe cannot be read again
        compressed = file.peek(2)[:2] == b"\x1f\x8b"
        binary: Any = gzip.GzipFile(fileobj=file) if compressed else file
        buffered = io.BufferedReader(binary)
        try:
            start = buffered.peek(2)[:2]
        except (EOFError, zlib.error):
            start = b""
        yield io.TextIOWrapper(buffered, encoding=_encoding(start), errors="replace", newline="\n")


def _encoding(start: bytes) -> str:
    """That of a text that starts so: shells of Windows write UTF-16. What is not UTF-8 either is kept with U+FFFD."""
    return "utf-16" if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _lines(file: TextIO) -> Iterator[tuple[int, str | None]]:
    number = 0
    while line := file.readline(MAX_LINE_CHARS):
        number += 1
        if len(line) < MAX_LINE_CHARS or line.endswith("\n"):
            yield number, line
            continue
        while (rest := file.readline(MAX_LINE_CHARS)) and not rest.endswith("\n"):
            pass
        yield number, None


def _paragraphs(file: TextIO) -> Iterator[tuple[int, str | None]]:
    """Documents of a text file: what stands between blank lines."""
    document: list[str] = []
    start = num_chars = 0
    for number, line in _lines(file):
        if line is None:
            yield number, None
        elif line.strip():
            start = start if document else number
            document.append(line)
            num_chars += len(line)
        if document and (line is None or not line.strip() or num_chars > MAX_LINE_CHARS):
            yield start, "".join(document).strip("\r\n")
            document, num_chars = [], 0
    if document:
        yield start, "".join(document).strip("\r\n")


def _parse(line: str) -> list[Turns] | str:
    try:
        entry = json.loads(line.strip("\ufeff \t\r\n\x00"))
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    for _ in range(len(ENVELOPES)):
        entry = _decoded(entry)
        if not isinstance(entry, Mapping):
            return f"a JSON {type(entry).__name__}, not an object"
        if any(name in entry for name in ("messages", "prompt", "text")):
            break
        inner = next((entry[name] for name in ENVELOPES if entry.get(name)), None)
        if inner is None:
            break
        entry = inner
    return _requests(entry) if isinstance(entry, Mapping) else f"a JSON {type(entry).__name__}, not an object"


def _decoded(entry: Any) -> Any:
    """A body that was logged as a string of JSON, as what it holds."""
    if isinstance(entry, str):
        try:
            return json.loads(entry)
        except (ValueError, RecursionError):
            return entry
    return entry


def _requests(entry: Mapping[str, Any]) -> list[Turns] | str:
    messages = entry.get("messages")
    if isinstance(messages, list):
        turns = [turn for turn in map(_turn, messages) if turn]
        return [turns] if any(role != "system" for role, _ in turns) else "no turn of a user or an assistant with text"
    prompts = entry.get("prompt", entry.get("text"))
    texts = [_clean(text) for text in (prompts if isinstance(prompts, list) else [prompts]) if isinstance(text, str)]
    found: list[Turns] = [[("text", text)] for text in texts if text.strip()]
    return found or 'no "messages", "prompt" or "text" with text in it'


def _turn(message: Any) -> tuple[str, str] | None:
    """Role and text; None for a turn without text, such as a bare tool call or an image.

    A blank system turn stays: the template renders it, and it must not count as a system prompt.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return None
    role = message["role"].lower()
    role = ROLES.get(role, role)
    text = _clean(_content(message.get("content")))
    return (role, text) if text.strip() or role == "system" else None


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: Iterable[Any] = content if isinstance(content, list) else ()
    texts = (part if isinstance(part, str) else part.get("text") for part in parts if isinstance(part, (str, Mapping)))
    return "\n".join(text for text in texts if isinstance(text, str))


def _clean(text: str) -> str:
    # JSON can name halves of characters, which no tokenizer takes
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
