from __future__ import annotations

import math
import unicodedata

import pytest

from harness.calib.quality import wording
from harness.calib.quality.report import Interval


@pytest.mark.parametrize(
    ("written", "value", "expected"),
    [
        (wording.percent, 0.9997, "99.97 %"),
        (wording.percent, 0.942, "94.2 %"),
        (wording.percent, 0.0663, "6.63 %"),
        (wording.signed_percent, 0.0184, "+1.84 %"),
        (wording.signed_percent, -0.0004, "−0.040 %"),
        (wording.signed_percent, 41.2, "+4,120 %"),
        (wording.signed_percent, 0.0, "0 %"),
        (wording.signed_percent, math.inf, "+not finite"[1:]),
        (wording.points, 0.0421, "4.2 points"),
        (wording.signed_points, -0.0421, "−4.2 points"),
        (wording.nats, 0.00004, "0.00004"),
        (wording.nats, 0.0870, "0.0870"),
        (wording.nats, 1e-9, "< 0.00001"),
        (wording.nats, 11.5, "11.50"),
        (wording.nats, math.nan, "not finite"),
        (wording.decimal, 23.414, "23.41"),
        (wording.decimal, 1234567.8, "1,234,568"),
        (wording.size, 83.4 * 2**20, "83.4 MiB"),
        (wording.size, 3 * 2**30, "3.00 GiB"),
        (wording.duration, 0.0147, "14.7 ms"),
        (wording.duration, 0.25, "250 ms"),
        (wording.duration, 48.2, "48.2 s"),
        (wording.duration, 541, "9.0 min"),
        (wording.rate, 1432.6, "1,433"),
        (wording.count, 134515008, "134,515,008"),
    ],
)
def test_figures_have_sensible_digits(written: wording.Format, value: float, expected: str) -> None:
    assert written(value).replace("\u00a0", " ") == expected


@pytest.mark.parametrize(
    ("value", "written", "expected"),
    [
        (0.01, wording.signed_percent, "+1 %"),
        (0.025, wording.signed_percent, "+2.5 %"),
        (0.2, wording.nats, "0.2"),
        (0.005, wording.nats, "0.005"),
        (0.1, wording.points, "10 points"),
        (0.0, wording.count, "0"),
        (10.0, wording.count, "10"),
        (None, wording.nats, "–"),
    ],
)
def test_limits_are_written_as_they_were_set(value: float | None, written: wording.Format, expected: str) -> None:
    assert wording.limit(value, written).replace("\u00a0", " ") == expected


def test_interval() -> None:
    interval = Interval(value=0.01, low=-0.005, high=0.025)
    assert wording.from_to(interval, wording.signed_percent).replace("\u00a0", " ") == "−0.50 % to +2.50 %"


def test_every_character_that_does_not_show_is_written_out() -> None:
    kept = set("\n\t\u200c\u200d")
    every = [chr(code) for plane in (range(0x20000), range(0xE0000, 0xE0200)) for code in plane]
    unseen = {c for c in every if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - kept
    seen = "".join(c for c in every if c not in unseen)
    assert wording.visible(seen) == seen
    assert len(unseen) > 2000
    assert all(wording.visible(c).isprintable() for c in unseen)
    assert wording.visible("שלום \u202eabc\x00\r\n") == "שלום ⟨U+202E⟩abc␀␍\n"


def test_clipped_text_keeps_both_ends() -> None:
    text = "".join(map(str, range(10_000)))
    clipped = wording.clip(text, 100)
    assert clipped.startswith(text[:50])
    assert clipped.endswith(text[-50:])
    assert f"{len(text) - 100:,} characters left out" in clipped
    assert wording.clip("short", 100) == "short"
