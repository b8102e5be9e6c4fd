"""What a suite may hold, and how a fault in one is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.calib.quality.suite import load_suite
from harness.errors import SuiteError

TASK = {
    "name": "tickets",
    "layer": "tasks",
    "description": "",
    "source": "ours",
    "file": "traffic.txt",
    "scorer": "contains",
}
DOCS = Path(__file__).resolve().parents[3] / "docs" / "suites.md"


@pytest.fixture
def shortest(tmp_path: Path) -> dict[str, Any]:
    """The suite that docs/suites.md calls as short as one can be."""
    match = re.search(r"as short as one can be:\n\n```yaml\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert match is not None
    (tmp_path / "traffic.txt").write_text("Some text.", encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(match[1])
    return content


def written(content: Any, folder: Path) -> Path:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def parts(content: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in content.items():
        found.append((*path, name))
        found += parts(value, (*path, name)) if isinstance(value, dict) else []
    return found


def test_the_shortest_suite_of_the_docs_is_one_and_all_of_it_is_needed(
    shortest: dict[str, Any], tmp_path: Path
) -> None:
    assert load_suite(written(shortest, tmp_path)).content.tasks == []
    for *above, last in parts(shortest):
        if "domains" in above:
            continue
        content = yaml.safe_load(yaml.safe_dump(shortest))
        part = content
        for name in above:
            part = part[name]
        del part[last]
        with pytest.raises(SuiteError, match=rf"{'.'.join([*above, last])}: it is missing"):
            load_suite(written(content, tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"gates": {"task_drop": {"warn": 0.02, "fail": "20%"}}},
            "gates.task_drop.fail: '20%' is not a number; write 0.2",
        ),
        ({"gates": {"task_drop": {"warn": 2, "fail": 20}}}, "task_drop.fail: input should be less than or equal to 1"),
        ({"gates": {"kl_divergence": {"warn": 0.5, "fail": 0.2}}}, "kl_divergence: warn is above fail"),
        ({"tasks": [TASK, TASK]}, "two tasks are named 'tickets'"),
        ({"speed": {"rounds": 0}}, "speed.rounds: input should be greater than or equal to 1, not 0"),
        ({"gate": {}}, "gate: a suite has no such part"),
        ({"tasks": "none"}, "tasks: input should be a valid list, not 'none'"),
    ],
)
def test_a_fault_is_told_with_its_place_and_value(
    change: dict[str, Any], words: str, shortest: dict[str, Any], tmp_path: Path
) -> None:
    gates = shortest["gates"] | change.pop("gates", {})
    with pytest.raises(SuiteError) as refused:
        load_suite(written(shortest | {"gates": gates} | change, tmp_path))
    assert words in str(refused.value)


def test_many_faults_are_counted(shortest: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="and 3 more"):
        load_suite(written(shortest | {f"part{i}": 1 for i in range(8)}, tmp_path))
