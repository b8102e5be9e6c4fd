"""The plots of the quality page, from the report's parts. How a plot is drawn is in `svg`."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from harness.calib.quality import svg
from harness.calib.quality.report import DomainResult, EngineRow, GateResult, Interval, PositionKl, TaskResult
from harness.calib.quality.svg import LEFT, RIGHT, WIDTH, Scale
from harness.calib.quality.wording import Format, limit, nats, signed_percent, signed_points

_ROW, _TOP = 36, 34
_SIDE = 10  # left and right of plots without a vertical axis
_MOST_BEYOND = 3.0  # times the widest limit: a broken engine must not press the limits into one line


@dataclass(frozen=True, kw_only=True)
class LayerPoint:
    """A value at a layer, or the median of several with the least and the greatest; `label` is its mark's."""

    layer: int
    value: float
    low: float
    high: float
    label: str


def perplexity_changes(domains: Sequence[DomainResult], gates: Iterable[GateResult]) -> Markup:
    """Change of each domain's perplexity with its interval, between the limits of its gate."""
    rows = [
        _Row(d.domain, d.perplexity_change, noise=abs(d.noise_perplexity_change), written=signed_percent)
        for d in domains
    ]
    limits = _limits(gates, "perplexity change", sign=1)
    return _interval_plot("perplexity-plot", "Perplexity change by domain", rows, limits)


def task_differences(name: str, tasks: Sequence[TaskResult], gates: Iterable[GateResult]) -> Markup:
    """Difference of each task's score with its interval; the band is what so few items cannot show."""
    rows = [
        _Row(t.name, t.difference, noise=t.detectable_difference, written=signed_points)
        for t in tasks
        if t.skipped is None
    ]
    limits = _limits(gates, "score drop", sign=-1, places=[t.name for t in tasks])
    return _interval_plot(f"{name}-plot", "Difference of task scores", rows, limits)


KL_SHAPES = {"noise floor": "cross", "median": "ring", "mean": "disc", "P90": "triangle", "P99": "square"}


def kl_by_domain(domains: Sequence[DomainResult], gates: Iterable[GateResult]) -> Markup:
    """Noise floor, median, mean, P90 and P99 of each domain, on a logarithmic scale."""
    limits = _limits(gates, "KL divergence", sign=1)
    values = [
        dict(zip(KL_SHAPES, (d.noise_kl, d.kl_median, d.kl_mean.value, d.kl_p90, d.kl_p99), strict=True))
        for d in domains
    ]
    every = [*(v for row in values for v in row.values()), *(at for _, at in limits)]
    # far below the rest only how small it is matters
    floor = max((v for v in every if math.isfinite(v)), default=1.0) / 1e5
    scale = svg.log_scale([max(v, floor) for v in every], _SIDE, WIDTH - _SIDE)
    bottom = _TOP + _ROW * len(domains)
    parts = [svg.horizontal_axis(scale, _TOP, bottom, _short), *_limit_lines(limits, scale, bottom, nats)]
    for number, (domain, row) in enumerate(zip(domains, values, strict=True)):
        y = _TOP + _ROW * number
        parts += _row_text(y, domain.domain, f"mean {nats(domain.kl_mean.value)}")
        parts += [
            svg.mark(scale(value), y + 24, KL_SHAPES[name], f"{domain.domain}, {name}: {nats(value)}")
            for name, value in row.items()
            if math.isfinite(value)
        ]
    said = (
        f"{d.domain}: mean {nats(d.kl_mean.value)}, P99 {nats(d.kl_p99)}, noise {nats(d.noise_kl)}" for d in domains
    )
    return svg.figure("kl-plot", "KL divergence by domain", "; ".join(said), bottom + 20, parts)


def kl_by_position(positions: Sequence[PositionKl]) -> Markup:
    """Mean and P90 along the window; stretches stand side by side, however long each is."""
    top, bottom = 14, 150
    y = svg.linear_scale([0.0, *(p.mean for p in positions), *(p.p90 for p in positions)], bottom, top)
    step = (RIGHT - LEFT) / len(positions)
    xs = [round(LEFT + step * (number + 0.5), 1) for number in range(len(positions))]
    parts = [svg.vertical_axis(y, _short)]
    every = math.ceil(len(positions) / 8)
    for x, position in list(zip(xs, positions, strict=True))[::every]:
        parts.append(svg.text(x, bottom + 14, str(position.start), anchor="middle", kind="tick"))
    parts.append(svg.text(RIGHT, bottom + 28, "first token of each stretch", anchor="end", kind="tick"))
    for name, shape, values in (
        ("P90", "triangle", [p.p90 for p in positions]),
        ("mean", "disc", [p.mean for p in positions]),
    ):
        drawn = [(x, y(v), v, p) for x, v, p in zip(xs, values, positions, strict=True) if math.isfinite(v)]
        path = " ".join(f"{px} {py}" for px, py, _, _ in drawn)
        parts.append(Markup('<path class="trend {}" d="M{}"/>').format(shape, path) if drawn else Markup(""))
        parts += [svg.mark(px, py, shape, f"tokens {p.start} to {p.end}, {name}: {nats(v)}") for px, py, v, p in drawn]
    said = (f"tokens {p.start} to {p.end}: mean {nats(p.mean)}, P90 {nats(p.p90)}" for p in positions)
    return svg.figure("position-plot", "KL divergence by position", "; ".join(said), bottom + 34, parts)


def layer_panels(
    name: str, panels: Mapping[str, Sequence[LayerPoint]], shapes: Mapping[str, str], written: Format
) -> list[Markup]:
    """A panel for each kind of module, all on the same scales: layer across, value up, logarithmic.

    Points without a positive value are left out. `shapes` are by label.
    """
    points = [point for panel in panels.values() for point in panel]
    top, bottom = 24, 118
    y = svg.log_scale([v for p in points for v in (p.value, p.low, p.high)], bottom, top)
    last = max((p.layer for p in points), default=0)
    x = Scale(low=0, high=max(last, 1), start=LEFT + 8, end=RIGHT - 8)
    mark_size = min(1.0, max(0.5, (RIGHT - LEFT) / (last + 1) / 10))
    axes = svg.vertical_axis(y, written) + Markup("").join(
        svg.text(x(tick), bottom + 14, f"{tick:g}", anchor="middle", kind="tick")
        for tick in x.ticks(6)
        if tick == int(tick)
    )
    drawn = []
    for number, (kind, panel) in enumerate(panels.items()):
        parts = [svg.text(LEFT, 14, svg.shorten(kind, RIGHT - LEFT), kind="strong"), axes]
        for p in panel:
            if not (p.value > 0 and math.isfinite(p.value)):
                continue
            if p.high > p.low:
                parts.append(svg.line(x(p.layer), y(p.low), x(p.layer), y(p.high), "whisker"))
            said = f"layer {p.layer}, {p.label}: {written(p.value)}"
            said += f" ({written(p.low)} to {written(p.high)})" if p.high > p.low else ""
            parts.append(svg.mark(x(p.layer), y(p.value), shapes[p.label], said, scale=mark_size))
        parts.append(svg.text(RIGHT, bottom + 28, "layer", anchor="end", kind="tick"))
        drawn.append(svg.figure(f"{name}-{number}", kind, _panel_words(panel, written), bottom + 32, parts))
    return drawn


def quality_against_size(rows: Sequence[EngineRow]) -> Markup:
    """KL divergence of each engine beside the baseline, against the bits of all its weights."""
    top, bottom = 16, 190
    measured = [(row, row.kl_mean) for row in rows if row.kl_mean is not None and row.kl_mean.value > 0]
    baselines = [row for row in rows if row.role == "baseline"]
    x = svg.linear_scale([row.engine.bits_per_weight for row in rows], LEFT + 6, RIGHT)
    y = svg.log_scale([v for _, kl in measured for v in (kl.value, kl.high)], bottom, top)
    parts = [svg.vertical_axis(y, _short)]
    parts += [svg.text(x(t), bottom + 14, f"{t:g}", anchor="middle", kind="tick") for t in x.ticks(6)]
    parts.append(svg.text(RIGHT, bottom + 28, "bits per weight, whole model", anchor="end", kind="tick"))
    for row in baselines:
        at = x(row.engine.bits_per_weight)
        parts.append(svg.line(at, top, at, bottom, "warn"))
        parts.append(svg.text(at - 5, bottom - 6, "baseline", anchor="end"))
    taken: list[float] = []
    middle = (top + bottom) / 2
    # from the outside in, so that a name that is in the way of another moves inwards
    for row, kl in sorted(measured, key=lambda each: -abs(y(each[1].value) - middle)):
        at, level = x(row.engine.bits_per_weight), y(kl.value)
        label = level + 4
        while any(abs(label - other) < 13 for other in taken):
            label += 1 if level < middle else -1
        taken.append(label)
        said = f"{row.engine.recipe}: {row.engine.bits_per_weight:.2f} bits, {nats(kl.value)}"
        to_left = at > (LEFT + RIGHT) / 2
        name = svg.shorten(row.engine.recipe, (at - LEFT if to_left else RIGHT - at) - 12)
        kind = "strong" if row.role == "engine" else "label"
        parts.append(svg.line(at, y(kl.low), at, y(kl.high), "whisker"))
        parts.append(svg.mark(at, level, "square" if row.role == "engine" else "ring", said))
        parts.append(
            svg.text(at + (-9 if to_left else 9), label, name, anchor="end" if to_left else "start", kind=kind)
        )
    said_all = (f"{r.engine.recipe}: {r.engine.bits_per_weight:.2f} bits, KL {nats(kl.value)}" for r, kl in measured)
    return svg.figure("size-plot", "KL divergence against bits per weight", "; ".join(said_all), bottom + 34, parts)


@dataclass(frozen=True)
class _Row:
    label: str
    interval: Interval
    noise: float
    written: Format


_Limit = tuple[str, float]


def _interval_plot(name: str, title: str, rows: Sequence[_Row], limits: Sequence[_Limit]) -> Markup:
    bottom = _TOP + _ROW * len(rows)
    ends = [v for r in rows for v in (r.interval.low, r.interval.high, r.interval.value, -r.noise, r.noise)]
    reach = max((abs(at) for _, at in limits), default=math.inf) * _MOST_BEYOND
    scale = svg.linear_scale(
        [0.0, *(at for _, at in limits), *(min(max(v, -reach), reach) for v in ends)], _SIDE, WIDTH - _SIDE
    )
    written = rows[0].written
    parts = [svg.horizontal_axis(scale, _TOP, bottom, _axis_words(written))]
    parts.append(svg.line(scale(0), _TOP, scale(0), bottom, "axis"))
    parts += _limit_lines(limits, scale, bottom, written)
    for number, row in enumerate(rows):
        parts += _interval_row(row, _TOP + _ROW * number, scale)
    said = (
        f"{r.label}: {written(r.interval.value)}, {written(r.interval.low)} to {written(r.interval.high)}" for r in rows
    )
    return svg.figure(name, title, "; ".join(said), bottom + 20, parts)


def _interval_row(row: _Row, top: float, scale: Scale) -> Iterator[Markup]:
    value, low, high = row.interval.value, row.interval.low, row.interval.high
    y = top + 24
    band = '<rect class="band" x="{}" y="{}" width="{}" height="12"/>'
    if math.isfinite(row.noise):
        yield Markup(band).format(scale(-row.noise), y - 6, round(scale(row.noise) - scale(-row.noise), 1))
    yield from _row_text(top, row.label, row.written(value))
    if not all(map(math.isfinite, (value, low, high))):
        return
    yield svg.line(scale(low), y, scale(high), y, "whisker")
    for end in (low, high):
        if scale.low <= end <= scale.high:
            yield svg.line(scale(end), y - 4, scale(end), y + 4, "whisker")
    said = f"{row.label}: {row.written(value)}, {row.written(low)} to {row.written(high)}"
    if scale.low <= value <= scale.high:
        yield svg.mark(scale(value), y, "disc", said)
    else:  # beyond the plot: an arrow
        yield Markup('<path class="arrow" d="{}"/>').format(_arrow(scale(value), y, 1 if value > scale.high else -1))


def _arrow(x: float, y: float, direction: int) -> str:
    return f"M{x - 8 * direction} {y - 6}L{x} {y}L{x - 8 * direction} {y + 6}z"


def _row_text(top: float, label: str, value: str) -> list[Markup]:
    room = WIDTH - 2 * _SIDE - svg.width_of(value) - 8
    return [
        svg.text(_SIDE, top + 13, svg.shorten(label, room)),
        svg.text(WIDTH - _SIDE, top + 13, value, anchor="end", kind="strong"),
    ]


def _limits(gates: Iterable[GateResult], name: str, *, sign: int, places: Sequence[str] | None = None) -> list[_Limit]:
    """Limits of the gates of this name, as the report has them; all places of a gate share theirs."""
    found: dict[_Limit, None] = {}
    for gate in gates:
        if gate.gate == name and (places is None or gate.where in places):
            found |= {(kind, sign * at): None for kind, at in (("warn", gate.warn), ("fail", gate.fail)) if at}
    return list(found)


def _limit_lines(limits: Sequence[_Limit], scale: Scale, bottom: float, written: Format) -> Iterator[Markup]:
    for kind, at in limits:
        x, y = scale(at), 10 if kind == "fail" else 23
        words = f"{kind}s beyond {limit(at, written)}"
        half = svg.width_of(words) / 2
        yield svg.line(x, y + 3, x, bottom, kind)
        yield svg.text(min(max(x, half + 2), WIDTH - half - 2), y, words, anchor="middle", kind="tick")


def _panel_words(panel: Sequence[LayerPoint], written: Format) -> str:
    values: dict[str, list[LayerPoint]] = defaultdict(list)
    for point in panel:
        values[point.label].append(point)
    said = []
    for label, points in values.items():
        worst = max(points, key=lambda p: p.high)
        median = statistics.median(p.value for p in points)
        said.append(f"{label}: median {written(median)}, greatest {written(worst.high)} at layer {worst.layer}")
    return "; ".join(said)


def _short(value: float) -> str:
    return f"{value:.3g}" if value == 0 or abs(value) >= 0.0001 else f"{value:.0e}".replace("e-0", "e-")


def _axis_words(written: Format) -> Format:
    if written is signed_points:
        return lambda share: f"{share * 100:+.3g}".replace("-", "\u2212") if share else "0"
    return lambda share: f"{share * 100:+.3g} %".replace("-", "\u2212") if share else "0"
