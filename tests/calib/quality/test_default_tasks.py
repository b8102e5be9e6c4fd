"""The items of the default suite: valid, made by their rules, and answered rightly by right answers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.calib.quality.items import (
    Answer,
    ContainsItem,
    InstructionsItem,
    Item,
    JsonFieldsItem,
    JsonSchemaItem,
    MultipleChoiceItem,
    PythonItem,
    ShortAnswerItem,
)
from harness.calib.quality.suite import load_suite
from harness.calib.quality.tasks import Task, read_tasks

ROOT = Path(__file__).parents[3]
FILES = ROOT / "calib" / "suites" / "tasks"
NOT_MADE = {"human_eval"}


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return read_tasks(load_suite())


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """scripts/suite_items/make.py, which lies outside of the package."""

    folder = ROOT / "scripts" / "suite_items"
    monkeypatch.syspath_prepend(folder)
    names = {path.stem for path in folder.glob("*.py")}
    assert not names & sys.modules.keys()
    yield importlib.import_module("make")
    for name in names:
        sys.modules.pop(name, None)


def test_committed_items_are_those_that_are_made(make: Any) -> None:
    made = {name: make.as_lines(items) for name, items in make.made().items()}
    assert made == {path.stem: path.read_text("utf-8") for path in FILES.glob("*.jsonl") if path.stem not in NOT_MADE}


def test_every_file_is_used_and_named_with_its_licence(tasks: list[Task]) -> None:
    files = {path.name for path in FILES.glob("*.jsonl")}
    assert files == {Path(task.entry.file).name for task in tasks}
    readme = (FILES / "README.md").read_text("utf-8")
    counts = {Path(task.entry.file).name: len(task.items) for task in tasks}
    for name, number in counts.items():
        assert f"| `{name}` | {number} |" in readme
    assert "OpenAI" in (FILES / "LICENSE-human-eval.txt").read_text("utf-8")


def test_tasks_are_large_enough_to_show_a_drop(tasks: list[Task]) -> None:
    assert {task.entry.layer for task in tasks} == {"tasks", "adversarial"}
    for task in tasks:
        assert len(task.items) >= (100 if task.entry.layer == "tasks" else 24), task.entry.name


def test_no_item_is_asked_twice(tasks: list[Task]) -> None:
    for task in tasks:
        asked = [(item.question(), item.prefix(), getattr(item, "needle", "")) for item in task.items]
        assert len(set(asked)) == len(asked), task.entry.name


def test_right_answers_score_in_full(tasks: list[Task]) -> None:
    """Empty input has no one right answer, and instructions are tested by kind. Of code a third is run."""
    code = [item for task in tasks for item in task.items if task.runs_code]
    items = [item for task in tasks for item in task.items if not task.runs_code] + code[::3]
    scored = [(item, right) for item in items if (right := _right_answer(item)) is not None]
    with ThreadPoolExecutor(2) as pool:
        scores = list(pool.map(lambda pair: pair[0].score(pair[1]), scored))
    wrong = [(item.id, score) for (item, _), score in zip(scored, scores, strict=True) if score.value != 1]
    assert wrong == []
    assert len(scored) > 0.8 * len(items)


def test_an_empty_answer_scores_nothing(tasks: list[Task]) -> None:
    for task in tasks:
        for item in task.items:
            if not isinstance(item, MultipleChoiceItem | PythonItem):
                assert item.score(Answer(prompt="?")).value == 0, (task.entry.name, item.id)


def _right_answer(item: Item) -> Answer | None:
    text: str | None = None
    match item:
        case JsonFieldsItem():
            text = json.dumps(item.expected, ensure_ascii=False)
        case ShortAnswerItem():
            text = item.answers[0]
        case PythonItem():
            text = "\n" + item.solution
        case MultipleChoiceItem():
            logprobs = tuple(-1.0 if index == item.correct else -9.0 for index in range(len(item.choices)))
            return Answer(prompt="?", choice_logprobs=logprobs)
        case ContainsItem():
            text = f"It is {' and '.join(item.expected)}."
        case JsonSchemaItem():
            text = json.dumps(_instance(item.schema))
        case InstructionsItem() if item.instructions[0].__struct_config__.tag == "json":
            text = json.dumps(dict.fromkeys(item.instructions[0].keys, "x"))  # type: ignore[union-attr]
        case _:
            return None
    return Answer(prompt="?", text=text)


def _instance(schema: dict[str, Any]) -> Any:
    """The one value that a schema of these items allows."""
    if "const" in schema:
        return schema["const"]
    if schema["type"] == "array":
        return [_instance(part) for part in schema["prefixItems"]]
    return {name: _instance(part) for name, part in schema["properties"].items()}
