"""The quality report in a few lines of Markdown, for a pull request.

What decided, the table of choices, and where to look; the page has the rest. Names from the report stand as code, so
that none is taken for markup or for a mention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from harness.calib.quality import wording
from harness.calib.quality.findings import answer, findings, rows_of
from harness.calib.quality.report import EngineRow, GateResult, Interval, QualityReport
from harness.calib.quality.wording import Format, from_to, number_of
from harness.manifest import BUNDLED_SET

_MOST_GATES, _MOST_ROWS, _MOST_FINDINGS, _MOST_NOTES = 8, 8, 5, 3
_SIGNS = {"pass": "✅ pass", "warn": "⚠️ warn", "fail": "❌ fail"}
_NAME_CHARS, _WORDS_CHARS, _NOTE_CHARS = 60, 200, 500
_MARKUP = frozenset(r"\`*_{}[]<>#|!~@&")


def render_summary(report: QualityReport) -> str:
    """The summary of a report, under 40 lines."""
    return "\n\n".join("\n".join(part) for part in _parts(report) if part) + "\n"


def _parts(report: QualityReport) -> Iterable[list[str]]:
    engine, baseline = rows_of(report)
    shipping, decided = answer(report)
    yield [f"### {_SIGNS[report.verdict].upper()}: may {_code(engine.engine.name)} ship? {shipping}."]
    yield [f"{decided} {_compared(report, engine, baseline)}"]
    yield _gates(report.gates)
    yield _choices(report.table)
    yield _where_to_look(report)
    if report.notes:
        left = len(report.notes) - _MOST_NOTES
        listed = [f"- {_words(note, _NOTE_CHARS)}" for note in report.notes[:_MOST_NOTES]]
        yield ["**Notes**", "", *listed, *([f"- {number_of(left, 'more note')} in the report"] if left > 0 else [])]


def _compared(report: QualityReport, engine: EngineRow, baseline: EngineRow) -> str:
    against = "itself, since it is not quantized" if report.baseline_is_engine else _code(baseline.engine.recipe)
    scope = "; tasks were not run" if report.kind == "quick" else ""
    default = " (not your traffic)" if BUNDLED_SET in engine.engine.calibration else ""
    return (
        f"{_code(engine.engine.recipe)} against {against}, calibration {_words(engine.engine.calibration)}{default}. "
        f"Suite {_code(report.suite.name)} (`{report.suite.sha256[:12]}`), {report.kind} report{scope}; "
        f"{_words(report.machine)}."
    )


def _gates(gates: Sequence[GateResult]) -> list[str]:
    worst = _kinds_first([gate for verdict in ("fail", "warn") for gate in gates if gate.verdict == verdict])
    if not worst:
        return []
    lines = _head("verdict", "gate", "where", "value", "95 %", "warns above", "fails above")
    for gate in worst[:_MOST_GATES]:
        written = wording.gate_format(gate.gate)
        limits = (wording.limit(at, written) for at in (gate.warn, gate.fail))
        has_value = gate.interval is not None or gate.fail is not None
        value = written(gate.value) if has_value else "–"
        between = from_to(gate.interval, written) if gate.interval else "–"
        lines.append(_row(_SIGNS[gate.verdict], _words(gate.gate), _code(gate.where), value, between, *limits))
    left = len(worst) - _MOST_GATES
    return [*lines, *(["", f"{number_of(left, 'more gate')} failed or warn."] if left > 0 else [])]


def _kinds_first(gates: Sequence[GateResult]) -> list[GateResult]:
    """Failures before warnings, of each the first of every kind and then the others: one kind would fill the table."""
    first = {(gate.gate, gate.verdict): number for number, gate in reversed(list(enumerate(gates)))}
    order = sorted(
        enumerate(gates), key=lambda each: (each[1].verdict != "fail", each[0] not in first.values(), each[0])
    )
    return [gate for _, gate in order]


def _choices(rows: Sequence[EngineRow]) -> list[str]:
    has_speed = any(row.speed for row in rows)
    columns = ["recipe", "bits, decoder / model", "size", "perplexity", "change", "KL, nats", "top-1"]
    lines = _head(*columns, *(["peak memory", "TTFT", "TPOT", "tokens/s"] if has_speed else []))
    roles = {"engine": "**this engine**", "baseline": "baseline", "compared": ""}
    for row in rows[:_MOST_ROWS]:
        bits = f"{row.engine.decoder_bits_per_weight:.2f} / {row.engine.bits_per_weight:.2f}"
        cells = [
            f"{_code(row.engine.recipe)} {roles[row.role]}".strip(),
            bits,
            wording.size(row.engine.weight_bytes),
            "–" if row.perplexity is None else wording.decimal(row.perplexity),
            _value(row.perplexity_change, wording.signed_percent),
            _value(row.kl_mean, wording.nats),
            _value(row.top1_agreement, wording.percent),
        ]
        lines.append(_row(*cells, *(_speed(row) if has_speed else [])))
    return lines


def _speed(row: EngineRow) -> list[str]:
    if row.speed is None:
        return ["–"] * 4
    peak = row.speed.peak_memory_bytes
    return [
        "–" if peak is None else wording.size(peak),
        wording.duration(row.speed.ttft_s.mean),
        wording.duration(row.speed.tpot_s.mean),
        wording.rate(row.speed.tokens_per_s.mean),
    ]


def _where_to_look(report: QualityReport) -> list[str]:
    found = findings(report)
    if not found:
        return []
    return ["**Where to look**", "", *(f"- {_code(f.subject)}: {_words(f.text)}" for f in found[:_MOST_FINDINGS])]


def _value(interval: Interval | None, written: Format) -> str:
    return "–" if interval is None else written(interval.value)


def _head(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    """Text as code; a backtick would end it."""
    return f"`{_one_line(text, _NAME_CHARS).replace('`', chr(39))}`"


def _words(text: str, most: int = _WORDS_CHARS) -> str:
    """A sentence, with all that Markdown or HTML would read escaped."""
    line = _one_line(text, most)
    return "".join(f"\\{character}" if character in _MARKUP else character for character in line)


def _one_line(text: str, most: int) -> str:
    text = wording.visible(re.sub(r"[ \t\r\n]+", " ", text)).strip() or " "
    return text if len(text) <= most else text[: most - 1] + "…"
