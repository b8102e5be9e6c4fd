"""The report of an acceptance run: report.json for programs, report.md for people; written again after each step."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steps import Result

import harness
from harness.build.tensorrt_llm.versions import REQUIREMENTS, installed
from harness.errors import DeviceError
from harness.nvml import devices

_MARKS = {"pass": "pass", "fail": "**fail**", "skipped": "skipped", "not run": "not run"}
_LONGEST = 300


def machine() -> dict[str, Any]:
    """What the run was made on."""
    try:
        gpus = [
            f"{d.name}, sm_{d.compute_capability[0]}{d.compute_capability[1]}, {d.total_bytes / 2**30:.0f} GiB, "
            f"driver {d.driver_version}"
            for d in devices()
        ]
    except DeviceError as error:
        gpus = [error.message]
    versions = {name: installed(name) or "not installed" for name in REQUIREMENTS}
    return {
        "gpus": gpus,
        "harness": harness.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **versions,
    }


def mixed_verdict(results: Sequence[Result]) -> str:
    """Whether int4 and int8 layers go into one engine, in a sentence."""
    by_name = {result.name: result for result in results}
    built, answered = by_name.get("mixed-engine"), by_name.get("mixed-answers")
    if built is None or built.verdict in ("not run", "skipped"):
        return f"not known: {built.reason if built else 'not reached'}"
    if built.verdict == "fail":
        alone = [f"{n} alone: {by_name[f'{n}-engine'].verdict}" for n in ("int4", "int8") if f"{n}-engine" in by_name]
        advice = "Build models in one of them: --recipe scripts/acceptance/recipes/int4.yaml"
        return f"no: {built.reason}. {', '.join(alone)}. {advice}"
    if answered is None or answered.verdict != "pass":
        return f"it is built, but its answers are not right: {answered.reason if answered else 'not reached'}"
    return "yes: it is built, loads, and answers like the CPU engine"


def write_report(folder: Path, results: Sequence[Result], about: Mapping[str, Any], *, is_whole: bool) -> None:
    """Write both files into the report's folder.

    Args:
        about: of the run: machine and flags.
        is_whole: whether all steps are there; what is written before says that it was cut off.
    """
    failed = any(result.fails_the_run for result in results)
    verdict = "fail" if failed else "pass" if is_whole else "unfinished"
    content = {
        "verdict": verdict,
        "int4_and_int8_in_one_engine": mixed_verdict(results),
        **about,
        "steps": [asdict(result) for result in results],
    }
    (folder / "report.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(_page(results, about, verdict), encoding="utf-8")


def _page(results: Sequence[Result], about: Mapping[str, Any], verdict: str) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(r.verdict for r in results).items())
    lines = [
        "# GPU acceptance",
        "",
        f"Verdict: **{verdict}** ({counts})",
        "",
        f"int4 and int8 in one engine: {mixed_verdict(results)}",
        "",
        *(f"- {name}: {_text(value)}" for name, value in about["machine"].items()),
        f"- flags: `{about['flags']}`",
        "",
        "| step | verdict | seconds | what | found |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        name = f"[{result.name}]({result.log})" if result.log else result.name
        said = [_short(result.reason), f"(tolerated: {result.tolerated})" if result.tolerated else ""]
        said += [f"{key}: {_short(_text(value))}" for key, value in result.findings.items() if key != "samples"]
        found = "; ".join(part for part in said if part)
        lines.append(
            f"| {name} | {_MARKS[result.verdict]} | {result.seconds or ''} | {_cell(result.what)} | {_cell(found)} |"
        )
    lines += ["", "## Commands", ""]
    for result in results:
        if result.command:
            lines += [f"{result.name} ({result.verdict}{', ' + result.reason if result.verdict == 'not run' else ''}):"]
            lines += ["", f"    {result.command}", ""]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items() if key != "samples")
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
