"""A suite: which text and tasks an engine is measured on, how answers are decoded, and the gates it has to pass.

Owns the form of a suite's YAML file and of the JSON lines files it names, and their checks. `default.yaml` in
`calib/suites` is the one used unless a user gives another. Paths in a suite are relative to its file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from harness.errors import SuiteError

DEFAULT_SUITE = Path(__file__).resolve().parent.parent / "suites" / "default.yaml"
_MOST_BYTES = 64 << 20  # of one file
_MOST_NAMED = 5  # faults in one message

Limit = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(_Part):
    """Above `warn` a gate warns, above `fail` it fails; `why` goes into the report."""

    warn: Limit
    fail: Limit
    why: str = ""

    @model_validator(mode="after")
    def _warns_first(self) -> Limits:
        if self.warn > self.fail:
            raise PydanticCustomError("limits", "warn is above fail, so that nothing ever warns")
        return self


class Shares(Limits):
    """Limits on a share: 0.02 is 2 %."""

    warn: Share
    fail: Share


class SmallModels(_Part):
    """Limits of models below so many parameters."""

    below_parameters: Annotated[int, Field(gt=0)]
    perplexity_change: Shares


class Gates(_Part):
    """Limits on what an engine may lose beside its baseline; fractions, KL in nats a token.

    Without `small_models` the limits of `perplexity_change` are for models of all sizes.
    """

    perplexity_change: Shares
    small_models: SmallModels | None = None
    kl_divergence: Limits
    weight_error: Shares
    task_drop: Shares
    adversarial_drop: Shares


class TextAmount(_Part):
    """How much text of each domain is measured."""

    windows: Annotated[int, Field(ge=1, le=4096)]
    tokens: Annotated[int, Field(ge=32, le=8192)]


class Text(_Part):
    """Held-out text: files by domain, of JSON lines with `text`, or of plain text."""

    domains: dict[str, str]
    quick: TextAmount
    full: TextAmount


class Example(_Part):
    """A turn of the user and the answer wished for, shown before every item of a task."""

    prompt: str
    answer: str


class TaskEntry(_Part):
    """A task as a suite names it: a JSON lines file and how its answers are scored."""

    name: str
    layer: Literal["tasks", "adversarial"]
    description: str
    source: str  # where the items are from, and their licence
    file: str
    scorer: str
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    stop: list[Annotated[str, Field(min_length=1)]] = []
    examples: list[Example] = []


class Decoding(_Part):
    """How answers are decoded, on both sides alike.

    A reasoning model may reason for `max_reasoning_tokens` before each answer; with 0 it is made to answer at once.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 0
    max_reasoning_tokens: Annotated[int, Field(ge=0, le=1 << 16)] = 0


class Speed(_Part):
    """What speed is measured on: one prompt, and as many tokens after it."""

    prompt_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    generated_tokens: Annotated[int, Field(ge=2, le=65536)] = 256
    rounds: Annotated[int, Field(ge=1, le=100)] = 3


class SuiteFile(_Part):
    """All of a suite's YAML file."""

    version: Literal[1]
    name: str
    gates: Gates
    text: Text
    decoding: Decoding = Decoding()
    speed: Speed = Speed()
    system_prompts: list[str] = []  # files
    tasks: list[TaskEntry] = []

    @model_validator(mode="after")
    def _names_are_their_own(self) -> SuiteFile:
        twice = [name for name, times in Counter(task.name for task in self.tasks).items() if times > 1]
        if twice:
            raise PydanticCustomError("names", "two tasks are named {name}", {"name": repr(twice[0])})
        return self


@dataclass(frozen=True)
class Suite:
    """A suite that was read and checked."""

    path: Path
    content: SuiteFile

    @cached_property
    def sha256(self) -> str:
        """Hash of the YAML file and of all files it names."""
        digest = hashlib.sha256()
        for path in (self.path, *self._files()):
            digest.update(hashlib.sha256(_read(path)).digest())
        return digest.hexdigest()

    def documents(self, domain: str) -> list[str]:
        """Texts of a domain.

        Raises:
            SuiteError: the file cannot be read, or holds none.
        """
        path = self._resolve(self.content.text.domains[domain])
        if path.suffix != ".jsonl":
            texts = [_read_text(path)]
        else:
            texts = [str(line["text"]) for line in read_lines(path, required=("text",))]
        if not any(text.strip() for text in texts):
            raise SuiteError(f"{path} holds no text", "name a file with some, or take the domain out of the suite")
        return texts

    def items(self, task: TaskEntry) -> list[dict[str, Any]]:
        """Items of a task, as written.

        Raises:
            SuiteError: the file cannot be read, an item has no id, or two have the same.
        """
        path = self._resolve(task.file)
        items = list(read_lines(path, required=("id",)))
        seen: set[str] = set()
        for number, item in enumerate(items, 1):
            if str(item["id"]) in seen:
                raise SuiteError(f"{path}, line {number}: the id {item['id']!r} is taken", "give each item its own id")
            seen.add(str(item["id"]))
        if not items:
            raise SuiteError(f"{path} holds no items", "add some, or take the task out of the suite")
        return items

    def system_prompts(self) -> list[str]:
        """Texts of the system prompts that the suite names."""
        return [_read_text(self._resolve(name)) for name in self.content.system_prompts]

    def _resolve(self, name: str) -> Path:
        return self.path.parent / name

    def _files(self) -> Iterator[Path]:
        content = self.content
        names = [*content.text.domains.values(), *content.system_prompts, *(task.file for task in content.tasks)]
        return map(self._resolve, names)


def load_suite(path: Path = DEFAULT_SUITE) -> Suite:
    """Read a suite and look that every file it names is there.

    Raises:
        SuiteError: it cannot be read, is not a valid suite, or names a file that is not there.
    """
    try:
        content = SuiteFile.model_validate(yaml.safe_load(_read_text(path)))
    except yaml.YAMLError as error:
        raise SuiteError(f"{path} is not YAML: {error}", _EXAMPLE) from None
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, e['loc'])) or 'the whole'}: {_reason(e)}" for e in error.errors()[:_MOST_NAMED]]
        left = error.error_count() - len(reasons)
        more = f"; and {left} more" if left else ""
        raise SuiteError(f"{path} is not a valid suite: {'; '.join(reasons)}{more}", _EXAMPLE) from None
    suite = Suite(path, content)
    suite.sha256  # noqa: B018  every file can be read
    return suite


def read_lines(path: Path, required: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Objects of a JSON lines file, each with the fields required.

    Raises:
        SuiteError: names the line that is not such an object.
    """
    # JSON strings may hold other line ends, such as U+2028
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SuiteError(f"{path}, line {number} is not JSON: {error}", "write one object a line") from None
        missing = [name for name in required if not isinstance(item, dict) or name not in item]
        if missing:
            raise SuiteError(f"{path}, line {number} has no {missing[0]!r}", "write one object a line, with that field")
        yield item


_EXAMPLE = f"{DEFAULT_SUITE} is an example, docs/suites.md says what each part holds"


def _reason(error: ErrorDetails) -> str:
    """What is wrong with a value, with the value."""
    given = error["input"]
    if error["type"] == "missing":
        return "it is missing"
    if error["type"] == "extra_forbidden":
        return "a suite has no such part"
    percentage = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", given) if isinstance(given, str) else None
    if percentage:
        return f"{given!r} is not a number; write {float(percentage[1]) / 100:g}"
    said = error["msg"][0].lower() + error["msg"][1:]
    return said if isinstance(given, (dict, list)) else f"{said}, not {given!r}"


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SuiteError(f"{path} has more than {_MOST_BYTES >> 20} MiB", "measure on less")
        return path.read_bytes()
    except OSError as error:
        raise SuiteError(f"{path} cannot be read: {error.strerror}", "paths are relative to the suite's file") from None


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SuiteError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", "convert it") from None
