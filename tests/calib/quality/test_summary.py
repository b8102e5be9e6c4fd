from __future__ import annotations

import re

import pytest
from quality_report_sample import BROKEN_MODULE, full_report, quick_report

from harness.calib.quality.report import QualityReport
from harness.calib.quality.summary import render_summary


def tables(summary: str) -> list[list[str]]:
    return [part.splitlines() for part in summary.split("\n\n") if part.startswith("|")]


def num_cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row)) - 1


@pytest.mark.parametrize("report", [quick_report(), full_report()], ids=["quick", "full"])
def test_summary_answers_first_and_is_short(report: QualityReport) -> None:
    summary = render_summary(report)
    first, *lines = summary.splitlines()
    assert report.verdict.upper() in first
    assert ("No." in first) == (report.verdict == "fail")
    assert len(lines) < 40
    for head, *rows in tables(summary):
        assert {num_cells(row) for row in rows} == {num_cells(head)}


def test_summary_points_at_what_broke() -> None:
    summary = render_summary(full_report())
    where = summary[summary.index("Where to look") :]
    assert f"`{BROKEN_MODULE}`" in where
    assert "100.8\u00a0%" in where
    gates = tables(summary)[0]
    assert [row.split(" | ")[0] for row in gates[2:6]] == ["| ❌ fail"] * 4


def test_summary_stays_short_however_much_failed() -> None:
    report = full_report()
    many = report.model_copy(
        update={"gates": report.gates * 20, "table": report.table * 5, "notes": report.notes * 9, "tasks": []}
    )
    summary = render_summary(many)
    assert len(summary.splitlines()) < 45
    assert "more gates failed or warn" in summary
    assert "24 more notes in the report" in summary


def test_names_are_no_markup() -> None:
    report = quick_report(5)
    name = "a|b`c\n\n# <img src=x> @someone [x](y)\x1b"
    row = report.table[1]
    engine = row.engine.model_copy(update={"name": name, "recipe": name, "calibration": name})
    summary = render_summary(
        report.model_copy(update={"table": [report.table[0], row.model_copy(update={"engine": engine})]})
    )
    assert "# <img" in summary
    outside = re.sub(r"`[^`]*`", "", re.sub(r"\\.", "", summary))
    assert "<img" not in outside
    assert not re.search(r"[@\[]", outside)
    assert "\x1b" not in summary
    assert len(re.findall(r"^#", summary, flags=re.MULTILINE)) == 1
    (table,) = tables(summary)
    assert len({num_cells(line) for line in table}) == 1
