"""How a report's figures and texts are written: digits, signs, units, and characters that would not show.

Page and summary write the same figure the same way. Owns no figure and no layout.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable

from harness.calib.quality.report import Gate, Interval

NBSP, MINUS = "\u00a0", "\u2212"
Format = Callable[[float], str]

# Unicode categories: control, format, unpaired surrogate, line and paragraph separator.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_KEPT = frozenset("\n\t\u200c\u200d")  # and the joiners that scripts and emoji need
_TRAILING_ZEROS = re.compile(r"(?:(\.\d*[1-9])|\.)0+(?!\d)")


def visible(text: str) -> str:
    """Text with what a reader could not see, or a terminal or browser would obey, written out.

    Line breaks and tabs stay.
    """
    return text if text.isprintable() else "".join(map(_written_out, text))


def clip(text: str, most: int) -> str:
    """Text of at most `most` characters and a remark: its beginning and its end, where it has more."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [… {count(len(text) - 2 * half)} characters left out …] {text[-half:]}"


def count(number: float) -> str:
    """A whole number, with thousands apart."""
    return f"{number:,.0f}"


def percent(share: float) -> str:
    """A fraction in percent, about three digits."""
    return _unsigned(share * 100, _decimals_of_percent(share), f"{NBSP}%")


def signed_percent(share: float) -> str:
    """A change in percent, with its sign."""
    return _signed(share * 100, _decimals_of_percent(share), f"{NBSP}%")


def points(share: float) -> str:
    """A difference of scores in percentage points."""
    return _unsigned(share * 100, 1, f"{NBSP}points")


def signed_points(share: float) -> str:
    """A difference of scores in percentage points, with its sign."""
    return _signed(share * 100, 1, f"{NBSP}points")


def nats(divergence: float) -> str:
    """A divergence in nats a token; the unit stands beside it."""
    if not math.isfinite(divergence):
        return "not finite"
    if divergence and abs(divergence) < 0.00001:
        return "<" + NBSP + "0.00001"
    decimals = 5 if abs(divergence) < 0.01 else 4 if abs(divergence) < 1 else 2
    return _unsigned(divergence, decimals, "")


def decimal(value: float) -> str:
    """A perplexity, or bits: two decimals, none from a thousand on."""
    return _unsigned(value, 2 if abs(value) < 1000 else 0, "")


def plain(value: float) -> str:
    """A figure of unknown unit: four digits."""
    return f"{value:,.4g}".replace("-", MINUS)


def size(num_bytes: float) -> str:
    """A size in MiB, or GiB from one on."""
    mib = num_bytes / 2**20
    return f"{mib / 1024:,.2f}{NBSP}GiB" if mib >= 1024 else f"{mib:.1f}{NBSP}MiB"


def duration(value: float) -> str:
    """A time: milliseconds below one second, minutes from two on."""
    if value < 1:
        return f"{value * 1000:.{1 if value < 0.1 else 0}f}{NBSP}ms"
    return f"{value:.1f}{NBSP}s" if value < 120 else f"{value / 60:.1f}{NBSP}min"


def rate(value: float) -> str:
    """Tokens a second; the unit stands beside it."""
    return f"{value:,.{1 if value < 100 else 0}f}"


def limit(value: float | None, written: Format) -> str:
    """A limit of a gate: as its values are, but as short as it was set."""
    return "–" if value is None else _TRAILING_ZEROS.sub(r"\1", written(value))


def from_to(interval: Interval, written: Format) -> str:
    """The bounds of an interval."""
    return f"{written(interval.low)} to {written(interval.high)}"


_GATES: dict[Gate, Format] = {
    "perplexity change": signed_percent,
    "KL divergence": nats,
    "score drop": points,
    "non-finite logits": count,
    "chat template": plain,
    "weight error": percent,
}


def gate_format(gate: Gate) -> Format:
    """How the value of a gate and its limits are written."""
    return _GATES[gate]


def number_of(amount: int, noun: str) -> str:
    """`1 gate`, `2 gates`."""
    return f"{count(amount)} {noun}{'' if amount == 1 else 's'}"


def _written_out(character: str) -> str:
    if unicodedata.category(character) not in _UNSEEN or character in _KEPT:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of a control character
    return f"⟨U+{code:04X}⟩"


def _decimals_of_percent(share: float) -> int:
    scaled = abs(share) * 100
    if scaled and scaled < 0.1:
        return 3
    if scaled == 100:
        return 0
    if scaled < 10 or 99 <= scaled < 100:  # 99.97 is not 100
        return 2
    return 1 if scaled < 1000 else 0


def _unsigned(value: float, decimals: int, unit: str) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.{decimals}f}{unit}".replace("-", MINUS) if value else f"0{unit}"


def _signed(value: float, decimals: int, unit: str) -> str:
    return "+" * (value > 0 and math.isfinite(value)) + _unsigned(value, decimals, unit)
