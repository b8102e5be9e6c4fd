"""A task's answers of two engines beside each other: scores, differences, and the items that tell them apart.

Owns pairing and counting. What an answer is worth is `items`', whether a difference is more than chance `paired`'s.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.calib.quality.code_execution import why_not
from harness.calib.quality.items import Answer, Item, MultipleChoiceItem, Score
from harness.calib.quality.paired import bootstrap_mean, detectable_difference
from harness.calib.quality.report import Interval, TaskItem, TaskMetric, TaskResult
from harness.calib.quality.tasks import Task

MAX_DIFFERING = 24
MAX_SHOWN_CHARS = 1500


def compare_task(task: Task, baseline: list[Answer], engine: list[Answer]) -> TaskResult:
    """Score both sides; items that did not fit into the context of one are left out on both.

    Raises:
        QualityError: programs cannot be contained on this machine any more.
    """
    if not (baseline and engine):
        return _skipped(task, why_not() or "it runs programs that the model writes: give --allow-code-execution")
    sides = zip(task.items, baseline, engine, strict=True)
    asked = [(i, b, e) for i, b, e in sides if "too_long" not in (b.finish, e.finish)]
    if not asked:
        return _skipped(task, "no item fits into the context of the model")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = [_Pair(i, b, e, *scores) for (i, b, e), scores in zip(asked, pool.map(_scores, asked), strict=True)]
    differences = np.array([pair.change for pair in pairs])
    differing = sorted((pair for pair in pairs if pair.differs), key=lambda pair: -abs(pair.change))
    return TaskResult(
        **_described(task),
        num_items=len(pairs),
        score=float(np.mean([pair.score.value for pair in pairs])),
        score_baseline=float(np.mean([pair.score_baseline.value for pair in pairs])),
        difference=bootstrap_mean(differences),
        detectable_difference=detectable_difference(differences),
        metrics=_metrics(pairs, num_too_long=len(task.items) - len(pairs)),
        differing=[pair.shown() for pair in differing[:MAX_DIFFERING]],
        num_differing=len(differing),
    )


@dataclass(frozen=True)
class _Pair:
    item: Item
    baseline: Answer
    engine: Answer
    score_baseline: Score
    score: Score

    @property
    def change(self) -> float:
        return self.score.value - self.score_baseline.value

    @property
    def differs(self) -> bool:
        # likelihoods never agree to the last digit: of those only what is chosen counts
        return self.change != 0 or (self.engine.text, self.engine.finish) != (self.baseline.text, self.baseline.finish)

    def shown(self) -> TaskItem:
        return TaskItem(
            id=self.item.id,
            prompt=_cut(self.engine.prompt),
            expected=_cut(self.item.expected_text()),
            answer=_cut(_readable(self.item, self.engine)),
            answer_baseline=_cut(_readable(self.item, self.baseline)),
            score=self.score.value,
            score_baseline=self.score_baseline.value,
            remark=self.score.remark,
        )


def _scores(asked: tuple[Item, Answer, Answer]) -> tuple[Score, Score]:
    item, baseline, engine = asked
    score = _score(item, baseline)
    return score, score if engine == baseline else _score(item, engine)


def _score(item: Item, answer: Answer) -> Score:
    if answer.finish == "error":
        return Score(value=0.0, remark="the logits were not finite")
    return item.score(answer)


def _metrics(pairs: Sequence[_Pair], num_too_long: int) -> list[TaskMetric]:
    names = dict.fromkeys(name for pair in pairs for name in (*pair.score_baseline.metrics, *pair.score.metrics))
    metrics = [
        TaskMetric(
            name=name,
            value=float(np.mean([pair.score.metrics.get(name, 0.0) for pair in pairs])),
            baseline=float(np.mean([pair.score_baseline.metrics.get(name, 0.0) for pair in pairs])),
        )
        for name in names
    ]
    for name, finish in (("cut_off", "length"), ("non_finite", "error")):
        value, baseline = (
            sum(answer.finish == finish for answer in side) / len(pairs)
            for side in ([pair.engine for pair in pairs], [pair.baseline for pair in pairs])
        )
        if value or baseline:
            metrics.append(TaskMetric(name=name, value=value, baseline=baseline))
    if num_too_long:
        metrics.append(TaskMetric(name="items_too_long", value=num_too_long, baseline=num_too_long))
    return metrics


def _readable(item: Item, answer: Answer) -> str:
    if answer.finish == "error":
        return "(not finite)"
    if isinstance(item, MultipleChoiceItem):
        chosen = max(range(len(item.choices)), key=lambda index: answer.choice_logprobs[index])
        return item.choices[chosen].strip()
    return answer.text


def _cut(text: str) -> str:
    """A text short enough to show: its beginning, and a third of the room for its end."""
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    tail = MAX_SHOWN_CHARS // 3
    return f"{text[: MAX_SHOWN_CHARS - tail]}\n[… {len(text) - MAX_SHOWN_CHARS} characters …]\n{text[-tail:]}"


def _described(task: Task) -> dict[str, Any]:
    entry = task.entry
    return entry.model_dump(include={"name", "layer", "description", "source", "scorer"})


def _skipped(task: Task, reason: str) -> TaskResult:
    none = Interval(value=0, low=0, high=0)
    return TaskResult(
        **_described(task),
        num_items=len(task.items),
        score=0,
        score_baseline=0,
        difference=none,
        detectable_difference=0,
        metrics=[],
        differing=[],
        num_differing=0,
        skipped=reason,
    )
