"""Two engines' answers beside each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness.calib.quality.items import SCORERS, Answer, Item
from harness.calib.quality.suite import TaskEntry
from harness.calib.quality.task_comparison import MAX_DIFFERING, MAX_SHOWN_CHARS, compare_task
from harness.calib.quality.tasks import Task


def make_task(scorer: str, *items: dict[str, Any]) -> Task:
    entry = TaskEntry(name="t", layer="tasks", description="d", source="s", file="f", scorer=scorer)
    made: tuple[Item, ...] = tuple(
        msgspec.convert({"id": str(number), "prompt": "?", **fields}, SCORERS[scorer])
        for number, fields in enumerate(items)
    )
    return Task(entry=entry, items=made, haystacks={})


def says(*texts: str, **fields: Any) -> list[Answer]:
    return [Answer(prompt="?", text=text, **fields) for text in texts]


EXPECTED = [{"expected": [str(number)]} for number in range(4)]


def test_scores_are_paired_by_item() -> None:
    task = make_task("contains", *EXPECTED)
    result = compare_task(task, says("0", "1", "2", "no"), says("0", "no", "no", "3"))
    assert (result.num_items, result.score, result.score_baseline) == (4, 0.5, 0.75)
    assert result.difference.value == -0.25
    assert result.difference.low <= -0.25 <= result.difference.high
    assert result.detectable_difference > 0
    assert result.skipped is None
    assert [(item.id, item.score, item.score_baseline) for item in result.differing] == [
        ("1", 0, 1),
        ("2", 0, 1),
        ("3", 1, 0),
    ]


def test_equal_answers_differ_in_nothing() -> None:
    task = make_task("contains", *EXPECTED)
    result = compare_task(task, says(*"0123"), says(*"0123"))
    assert (result.difference.value, result.difference.low, result.difference.high) == (0, 0, 0)
    assert (result.num_differing, result.differing) == (0, [])


def test_changed_scores_come_first_and_texts_are_cut() -> None:
    task = make_task("contains", *({"expected": ["yes"]} for _ in range(60)))
    baseline = says(*["yes"] * 60)
    engine = says(*["yes!"] * 59, "x" * 9999)
    result = compare_task(task, baseline, engine)
    assert (result.num_differing, len(result.differing)) == (60, MAX_DIFFERING)
    first, second, *_ = result.differing
    assert (first.id, first.score, second.score) == ("59", 0, 1)
    assert len(first.answer) < MAX_SHOWN_CHARS + 60
    assert "8499 characters" in first.answer


def test_what_did_not_fit_on_one_side_counts_on_neither() -> None:
    task = make_task("contains", *EXPECTED)
    too_long = Answer(prompt="?", finish="too_long")
    result = compare_task(task, says(*"0123"), [*says(*"012"), too_long])
    assert (result.num_items, result.score, result.score_baseline) == (3, 1, 1)
    (metric,) = result.metrics
    assert (metric.name, metric.value, metric.baseline) == ("items_too_long", 1, 1)
    nothing = compare_task(task, [too_long] * 4, [too_long] * 4)
    assert nothing.skipped
    assert "context" in nothing.skipped


def test_logits_that_are_not_finite_score_nothing_and_are_counted() -> None:
    task = make_task("multiple_choice", *[{"choices": ["a", "b"], "correct": 0}] * 2)
    fine = Answer(prompt="?", choice_logprobs=(-1.0, -2.0))
    result = compare_task(task, [fine, fine], [fine, Answer(prompt="?", finish="error")])
    assert (result.score, result.score_baseline) == (0.5, 1)
    metrics = {metric.name: metric for metric in result.metrics}
    assert (metrics["non_finite"].value, metrics["non_finite"].baseline) == (0.5, 0)
    (differing,) = result.differing
    assert (differing.answer, differing.answer_baseline) == ("(not finite)", "a")
    assert "not finite" in differing.remark


def test_likelihoods_that_choose_the_same_do_not_differ() -> None:
    task = make_task("multiple_choice", {"choices": ["a", "b"], "correct": 0})
    result = compare_task(
        task,
        [Answer(prompt="?", choice_logprobs=(-1.0, -2.0))],
        [Answer(prompt="?", choice_logprobs=(-1.1, -2.0))],
    )
    assert result.num_differing == 0


def test_metrics_are_means_on_each_side() -> None:
    task = make_task("json_fields", {"expected": {"a": 1}}, {"expected": {"a": 1}})
    result = compare_task(task, says('{"a": 1}', '{"a": 1}'), says('{"a": 1}', 'So: {"a": 1}', finish="length"))
    metrics = {metric.name: (metric.value, metric.baseline) for metric in result.metrics}
    assert metrics == {"format_validity": (0.5, 1), "cut_off": (1, 0)}
    assert (result.score, result.difference.value) == (1, 0)


@pytest.mark.parametrize("answers", [([], []), (says("\n    return 1"), [])])
def test_a_task_without_answers_was_skipped(answers: tuple[list[Answer], list[Answer]]) -> None:
    code = {"header": "def f():\n", "entry_point": "f", "tests": "assert f() == 1"}
    result = compare_task(make_task("python_tests", code), *answers)
    assert (result.num_items, result.score, result.score_baseline) == (1, 0, 0)
    assert result.skipped
    assert "--allow-code-execution" in result.skipped


def test_programs_are_run_on_both_sides() -> None:
    code = {"header": "def f():\n", "entry_point": "f", "tests": "assert f() == 1"}
    result = compare_task(make_task("python_tests", code), says("\n    return 1"), says("\n    return 2"))
    assert (result.score, result.score_baseline) == (0, 1)
    assert result.differing[0].remark.startswith("AssertionError")
