"""The quality report as one HTML page, from the report alone.

The page answers from the top down: may this engine ship, what was compared, what the choices are, and then what each
part measured. It fetches nothing and runs no script: it opens from a disk, and its content security policy allows its
own style sheet by hash and nothing else, so that an answer of a model stays text whatever it holds. The layout is in
`page.html.j2` and `page.css`.
"""

from __future__ import annotations

import base64
import hashlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from harness.calib.quality import plots, svg, wording
from harness.calib.quality.findings import anchor_of, answer, findings, kind_of, outliers, rows_of
from harness.calib.quality.plots import LayerPoint
from harness.calib.quality.report import (
    GateResult,
    ModuleError,
    QualityReport,
    TaskItem,
    TaskResult,
    UnitSensitivity,
)
from harness.manifest import BUNDLED_SET

_FOLDER = Path(__file__).parent
_FORMATS = (
    *("count", "percent", "signed_percent", "points", "signed_points", "nats", "decimal"),
    *("size", "duration", "rate", "number_of"),
)
_SEVERITY = ("fail", "warn", "pass")
_WORST_SHOWN = 12  # modules, and units
_PROMPT_CHARS, _ANSWER_CHARS = 1_500, 4_000
_LEAST_ALIKE = 0.2  # share of the shorter answer, for differences to be marked


@dataclass(frozen=True, kw_only=True)
class KindSummary:
    """Weights of one kind of module at one precision."""

    kind: str
    precision: str
    num_modules: int
    median: float
    worst: ModuleError


def render_page(report: QualityReport) -> str:
    """The page of a report, complete."""
    css = (_FOLDER / "page.css").read_text(encoding="utf-8")
    style_hash = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    gates = sorted(report.gates, key=lambda gate: _SEVERITY.index(gate.verdict))
    engine, baseline = rows_of(report)
    return _template().render(
        report=report,
        css=Markup(css),
        style_hash=style_hash,
        answer=answer(report),
        engine=engine,
        baseline=baseline,
        gates=[gate for gate in gates if gate.verdict != "pass"],
        passed=[gate for gate in gates if gate.verdict == "pass"],
        findings=findings(report),
        domains=_domains(report),
        kinds=_kinds(report.weights),
        outliers=outliers(report.weights)[:_WORST_SHOWN],
        weight_panels=_weight_panels(report.weights),
        precisions=svg.legend(_shapes(report.weights)),
        units=sorted(report.sensitivity, key=lambda unit: -max(unit.harm.values(), default=0.0))[:_WORST_SHOWN],
        candidates=_candidates(report.sensitivity),
        unit_panels=_unit_panels(report.sensitivity),
        chosen=svg.legend(_unit_shapes(report.sensitivity)),
        has_speed=any(row.speed for row in report.table),
        can_compare_sizes=sum(row.kl_mean is not None for row in report.table) > 1,
        layers=_task_layers(report.tasks),
        BUNDLED_SET=BUNDLED_SET,
    )


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # every text that the template shows, before it is escaped
        finalize=lambda value: wording.visible(value) if type(value) is str else value,
    )
    formats = {name: getattr(wording, name) for name in _FORMATS}
    environment.filters |= formats
    environment.globals |= formats | {
        "from_to": wording.from_to,
        "gate_format": wording.gate_format,
        "limit": wording.limit,
        "plots": plots,
        "legend": svg.legend,
        "KL_SHAPES": plots.KL_SHAPES,
        "clip_prompt": lambda text: wording.clip(text, _PROMPT_CHARS),
        "side_by_side": side_by_side,
        "changed_first": changed_first,
        "gate_of": _gate_of,
        "anchor_of": anchor_of,
    }
    return environment.get_template("page.html.j2")


def _domains(report: QualityReport) -> list[Any]:
    return [*report.text.domains, report.text.overall] if len(report.text.domains) > 1 else [*report.text.domains]


def _gate_of(report: QualityReport, gate: str, where: str) -> GateResult | None:
    return next((each for each in report.gates if (each.gate, each.where) == (gate, where)), None)


def _shapes(weights: Sequence[ModuleError]) -> dict[str, str]:
    return svg.shapes_of(sorted({module.precision for module in weights if module.layer is not None}))


def _kinds(weights: Sequence[ModuleError]) -> list[KindSummary]:
    members: dict[tuple[str, str], list[ModuleError]] = defaultdict(list)
    for module in weights:
        members[kind_of(module.module), module.precision].append(module)
    return [
        KindSummary(
            kind=kind,
            precision=precision,
            num_modules=len(modules),
            median=statistics.median(m.relative_error for m in modules),
            worst=max(modules, key=lambda m: m.relative_error),
        )
        for kind in dict.fromkeys(kind for kind, _ in members)
        for (its_kind, precision), modules in members.items()
        if its_kind == kind
    ]


def _weight_panels(weights: Sequence[ModuleError]) -> list[Markup]:
    """One mark for each kind, layer and precision: all experts of a layer are one."""
    alike: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for module in weights:
        if module.layer is not None:
            alike[kind_of(module.module), module.layer, module.precision].append(module.relative_error)
    panels: Mapping[str, list[LayerPoint]] = defaultdict(list)
    for (kind, layer, precision), errors in alike.items():
        point = LayerPoint(
            layer=layer, value=statistics.median(errors), low=min(errors), high=max(errors), label=precision
        )
        panels[kind].append(point)
    widest = max(map(len, panels.values()), default=0)
    panels = {kind: panel for kind, panel in panels.items() if len(panel) > 1 or widest == 1}
    return plots.layer_panels("weights", panels, _shapes(weights), wording.percent)


def _unit_shapes(units: Sequence[UnitSensitivity]) -> dict[str, str]:
    return svg.shapes_of(sorted({unit.chosen for unit in units}))


def _candidates(units: Sequence[UnitSensitivity]) -> list[str]:
    """Precisions that units could have, the most harmful first."""
    total: dict[str, float] = defaultdict(float)
    for unit in units:
        for precision, harm in unit.harm.items():
            total[precision] += harm
    return sorted(total, key=lambda precision: -total[precision])


def _unit_panels(units: Sequence[UnitSensitivity]) -> list[Markup]:
    panels: dict[str, list[LayerPoint]] = defaultdict(list)
    for unit in units:
        harm = max(unit.harm.values(), default=0.0)
        panels[kind_of(unit.unit)].append(
            LayerPoint(layer=unit.layer, value=harm, low=harm, high=harm, label=unit.chosen)
        )
    return plots.layer_panels("units", panels, _unit_shapes(units), wording.nats)


def _task_layers(tasks: Sequence[TaskResult]) -> list[tuple[str, str, list[tuple[int, TaskResult]]]]:
    numbered = list(enumerate(tasks))
    layers = (("tasks", "Everyday tasks"), ("adversarial", "Long tail and adversarial inputs"))
    found = [(key, title, [each for each in numbered if each[1].layer == key]) for key, title in layers]
    return [layer for layer in found if layer[2]]


def changed_first(items: Sequence[TaskItem]) -> list[TaskItem]:
    """Items in the order in which they matter: what the engine lost, what it gained, what scores alike."""

    def rank(item: TaskItem) -> tuple[int, float]:
        change = item.score - item.score_baseline
        return (0 if change < 0 else 1 if change > 0 else 2, change)

    return sorted(items, key=rank)


def side_by_side(answer: str, other: str) -> tuple[Markup, Markup]:
    """Two answers, cut to a length that can be read, with what differs marked where most is alike."""
    answer, other = (wording.clip(text, _ANSWER_CHARS) for text in (answer, other))
    shorter = min(len(answer), len(other))
    start = _num_alike(answer, other)
    end = _num_alike(answer[start:][::-1], other[start:][::-1])
    if start + end < _LEAST_ALIKE * shorter or not shorter:
        start = end = 0
    return _marked(answer, start, end), _marked(other, start, end)


def _num_alike(text: str, other: str) -> int:
    """Characters at the beginning of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def _marked(answer: str, start: int, end: int) -> Markup:
    if not answer.strip():
        return Markup("<em>{}</em>").format("empty" if not answer else f"white space only: {answer!r}")
    if start + end == 0:
        return Markup("{}").format(wording.visible(answer))
    stop = len(answer) - end
    parts = (wording.visible(part) for part in (answer[:start], answer[start:stop], answer[stop:]))
    return Markup("{}<mark>{}</mark>{}").format(*parts)
