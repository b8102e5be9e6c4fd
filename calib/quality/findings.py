"""The answer of a report in words, and where to look: what stands out, and which part of the page shows it.

A gate says that an engine lost too much; these point at what lost it: a module whose weights are much further from the
baseline's than its kind's, the domain and the tasks that suffer most. They decide nothing.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from harness.calib.quality.report import EngineRow, GateResult, ModuleError, QualityReport
from harness.calib.quality.wording import count, nats, number_of, percent, signed_points

_OUTLIER = 2.0  # times the median of its kind and precision
_FEWEST_ALIKE = 4  # modules that make a median
_LEAST_ERROR = 0.002  # below it, modules are stored alike but for rounding
_STANDS_OUT = 1.25  # times the divergence of all domains together
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What stands out: a name as the report has it, the rest of the sentence, and the id of the part of the page."""

    subject: str
    text: str
    anchor: str


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A module whose weights are far off beside the median of its kind and precision."""

    module: ModuleError
    usual: float


def rows_of(report: QualityReport) -> tuple[EngineRow, EngineRow]:
    """The engine that is judged, and its baseline, which may be itself."""
    roles = {row.role: row for row in reversed(report.table)}
    return roles["engine"], roles.get("baseline", roles["engine"])


def answer(report: QualityReport) -> tuple[str, str]:
    """May the engine ship: the answer in a few words, and how the gates decided."""
    counts = Counter(gate.verdict for gate in report.gates)
    of_all = number_of(len(report.gates), "gate")
    if report.verdict == "pass":
        return "Yes", f"All {of_all} passed." if len(report.gates) != 1 else "The only gate passed."
    warned = f"{count(counts['warn'])} {'warns' if counts['warn'] == 1 else 'warn'}"
    if report.verdict == "warn":
        return "Yes, but look at the warnings first", f"None of {of_all} failed, {warned}."
    return "No", f"{count(counts['fail'])} of {of_all} failed{f', {warned}' if counts['warn'] else ''}."


def kind_of(module: str) -> str:
    """What a module is, whichever its layer and expert: `mlp.experts.*.up_proj`."""
    return re.sub(r"\bexperts\.\d+\.", "experts.*.", re.sub(r"^model\.layers\.\d+\.", "", module))


def outliers(weights: Iterable[ModuleError]) -> list[Outlier]:
    """Modules more than twice as far off as the median of their kind and precision, the worst first.

    A kind of fewer than four modules is held against all modules of its precision.
    """
    alike: dict[tuple[str, str], list[ModuleError]] = defaultdict(list)
    same_precision: dict[str, list[ModuleError]] = defaultdict(list)
    for module in weights:
        alike[kind_of(module.module), module.precision].append(module)
        same_precision[module.precision].append(module)
    found = []
    for (_, precision), modules in alike.items():
        others = modules if len(modules) >= _FEWEST_ALIKE else same_precision[precision]
        if len(others) < _FEWEST_ALIKE:
            continue
        usual = max(statistics.median(m.relative_error for m in others), _LEAST_ERROR)
        found += [Outlier(module=m, usual=usual) for m in modules if m.relative_error > _OUTLIER * usual]
    return sorted(found, key=lambda outlier: -outlier.module.relative_error / outlier.usual)


def anchor_of(report: QualityReport, gate: GateResult) -> str:
    """Id of the part of the page that shows what a gate looked at."""
    if gate.gate == "chat template":
        return "compared"
    if gate.gate == "weight error":
        return "weights"
    is_task = gate.gate == "score drop"
    names = [task.name for task in report.tasks] if is_task else [domain.domain for domain in report.text.domains]
    if gate.where in names:
        return f"{'task' if is_task else 'domain'}-{names.index(gate.where)}"
    return "tasks" if is_task else "text"


def findings(report: QualityReport) -> list[Finding]:
    """What stands out, weights first: they are nearest to a cause."""
    return [*_of_weights(report), *_of_text(report), *_of_tasks(report)]


def _of_weights(report: QualityReport) -> list[Finding]:
    found = outliers(report.weights)
    listed = [
        Finding(
            subject=outlier.module.module,
            text=f"its weights are {percent(outlier.module.relative_error)} off the baseline's, where "
            f"{percent(outlier.usual)} is usual for its kind at {outlier.module.precision}",
            anchor="weights",
        )
        for outlier in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        text = f"more than twice as far off as usual, beside the {number_of(_SHOWN, 'module')} above"
        listed.append(Finding(subject=f"{count(len(found) - _SHOWN)} more modules", text=text, anchor="weights"))
    return listed


def _of_text(report: QualityReport) -> list[Finding]:
    domains = list(enumerate(report.text.domains))
    broken = [
        Finding(
            subject=domain.domain,
            text=f"the engine's logits are NaN or infinite at {number_of(domain.num_non_finite, 'position')}",
            anchor=f"domain-{number}",
        )
        for number, domain in domains
        if domain.num_non_finite
    ]
    number, worst = max(domains, key=lambda numbered: numbered[1].kl_mean.value)
    passed = all(gate.verdict == "pass" for gate in report.gates if gate.gate != "score drop")
    if passed or worst.kl_mean.value <= _STANDS_OUT * report.text.overall.kl_mean.value:
        return broken
    overall = report.text.overall.kl_mean.value
    text = f"has the greatest KL divergence: {nats(worst.kl_mean.value)}, {nats(overall)} overall"
    return [*broken, Finding(subject=worst.domain, text=text, anchor=f"domain-{number}")]


def _of_tasks(report: QualityReport) -> list[Finding]:
    # of many tasks one seems to lose by chance: the gates know how many there are
    fired = {gate.where for gate in report.gates if gate.gate == "score drop" and gate.verdict != "pass"}
    lost = [(task.difference, number, task.name) for number, task in enumerate(report.tasks) if task.name in fired]
    return [
        Finding(
            subject=name,
            text=f"scores {signed_points(difference.value)} beside the baseline",
            anchor=f"task-{number}",
        )
        for difference, number, name in sorted(lost, key=lambda each: each[0].value)[:_SHOWN]
    ]
