from __future__ import annotations

import pytest

from harness.calib.quality import svg


@pytest.mark.parametrize("magnitude", [1e-9, 1e-3, 1.0, 7e8])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("make", [svg.linear_scale, svg.log_scale])
def test_scale_holds_its_values_and_has_ticks(make: type[svg.Scale], magnitude: float, spread: float) -> None:
    values = [magnitude, magnitude * (1 + spread), magnitude * (1 + 2 * spread)]
    scale = make(values, 10, 300)  # type: ignore[arg-type]
    places = [scale(value) for value in values]
    assert places == sorted(places)
    assert all(10 < place < 300 for place in places)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 7
    assert all(scale.low <= tick <= scale.high for tick in ticks)


def test_values_beyond_a_scale_are_put_at_its_edge() -> None:
    scale = svg.Scale(low=1, high=100, start=0, end=200, log=True)
    assert [scale(value) for value in (0, 1, 10, 100, 1e9)] == [0, 0, 100, 200, 200]


def test_shapes_are_told_apart() -> None:
    names = [f"precision {number}" for number in range(len(svg.MARKS))]
    assert len(set(svg.shapes_of(names).values())) == len(names)


def test_texts_are_escaped() -> None:
    drawn = svg.figure("p", "<b>", "</svg>", 10, [svg.text(0, 0, "<i>\x00"), svg.mark(0, 0, "disc", "</title><u>")])
    assert '<title id="p-title">&lt;b&gt;</title>' in drawn
    assert "&lt;i&gt;␀" in drawn
    assert "</title><u>" not in drawn
    assert drawn.count("</svg>") == 1
