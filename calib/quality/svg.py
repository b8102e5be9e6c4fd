"""Scales, marks and axes of the plots, as inline SVG.

A plot is drawn for a narrow screen and grows with its column. Colours are CSS variables of the page, and no plot needs
them: marks differ by shape, lines by dashes. Every plot has a title and a description that says what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from harness.calib.quality.wording import Format, limit, visible

WIDTH = 340
LEFT, RIGHT = 46, WIDTH - 12  # of what a plot with a vertical axis draws in
_CHAR = 6.2  # width of a character, about

# Filled and hollow shapes in turn, so that neighbours in a legend differ twice.
MARKS = {
    "triangle": "M0-5.2 5 4H-5z",
    "ring": "M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0-8.4 0z",
    "square": "M-4-4H4V4H-4z",
    "kite": "M0-5.6 5.6 0 0 5.6-5.6 0z",
    "cross": "M-4-4 4 4M4-4-4 4",
    "disc": "M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0-8.4 0z",
    "plus": "M0-5V5M-5 0H5",
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values from `low` to `high` on pixels from `start` to `end`; values beyond are put at the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values, at most about so many."""
        return _log_ticks(self.low, self.high, most) if self.log else _linear_ticks(self.low, self.high, most)


def linear_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """A scale that holds all values and a little room."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
    return Scale(low=0.0 if low == 0 else low - room, high=high + room, start=start, end=end)


def log_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """A logarithmic scale that holds all positive values, half a decade at the least."""
    finite = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    low, high = min(finite) / 1.25, max(finite) * 1.25
    short = max(0.0, 0.5 - math.log10(high / low)) / 2
    return Scale(low=low / 10**short, high=high * 10**short, start=start, end=end, log=True)


def figure(name: str, title: str, description: str, height: float, parts: Iterable[Markup]) -> Markup:
    """A plot as one image: `name` is unique in the page, title and description are for who does not see it."""
    return Markup(
        '<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name}-title {name}-desc">'
        '<title id="{name}-title">{title}</title><desc id="{name}-desc">{description}</desc>{parts}</svg>'
    ).format(
        width=WIDTH,
        height=round(height),
        name=name,
        title=visible(title),
        description=visible(description),
        parts=Markup("").join(parts),
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", kind: str = "label") -> Markup:
    """A line of text. `kind` is its class: `label`, `tick` or `strong`."""
    drawn = '<text x="{}" y="{}" text-anchor="{}" class="{}">{}</text>'
    return Markup(drawn).format(round(x, 1), round(y, 1), anchor, kind, visible(content))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line of a class: `grid`, `axis`, `whisker`, `warn` or `fail`."""
    return Markup('<path class="{}" d="M{} {} {} {}"/>').format(kind, x1, y1, x2, y2)


def mark(x: float, y: float, shape: str, label: str, *, scale: float = 1.0) -> Markup:
    """A mark, and what a pointer that rests on it is told."""
    drawn = '<g transform="translate({} {}) scale({})"><title>{}</title><path class="mark {}" d="{}"/></g>'
    return Markup(drawn).format(x, y, round(scale, 2), visible(label), shape, MARKS[shape])


def legend(shapes: Mapping[str, str]) -> Markup:
    """What the marks mean: words and the shape of each."""
    entry = '<li><svg viewBox="-7 -7 14 14" aria-hidden="true"><path class="mark {0}" d="{1}"/></svg>{2}</li>'
    listed = (Markup(entry).format(shape, MARKS[shape], visible(words)) for words, shape in shapes.items())
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(listed))


def shapes_of(names: Iterable[str]) -> dict[str, str]:
    """A shape for each name, in order; they begin again where there are more names than shapes."""
    shapes = list(MARKS)
    return {name: shapes[number % len(shapes)] for number, name in enumerate(names)}


def width_of(words: str) -> float:
    """Pixels that words take, about."""
    return len(words) * _CHAR


def shorten(words: str, pixels: float) -> str:
    """Words that fit into so many pixels, about."""
    most = max(int(pixels / _CHAR), 4)
    return words if len(words) <= most else words[: most - 1] + "…"


def horizontal_axis(scale: Scale, top: float, bottom: float, written: Format) -> Markup:
    """Grid lines and their values below."""
    parts = []
    for tick in scale.ticks():
        x = scale(tick)
        anchor = "start" if x < 24 else "end" if x > WIDTH - 24 else "middle"
        parts += [
            line(x, top, x, bottom, "grid"),
            text(x, bottom + 14, limit(tick, written), anchor=anchor, kind="tick"),
        ]
    return Markup("").join(parts)


def vertical_axis(scale: Scale, written: Format) -> Markup:
    """Grid lines and their values at the left."""
    parts = []
    for tick in scale.ticks(4):
        y = scale(tick)
        parts += [
            line(LEFT, y, RIGHT, y, "grid"),
            text(LEFT - 5, y + 4, limit(tick, written), anchor="end", kind="tick"),
        ]
    return Markup("").join(parts)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: Sequence[float] = ()
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**decade for decade in decades for f in factors if low <= f * 10.0**decade <= high]
        if len(ticks) <= most:
            return list(ticks)
    return list(ticks)[:: math.ceil(len(ticks) / most)]
