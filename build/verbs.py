"""The verbs of `harness-build` beside building: what looks at an engine, and at this machine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.console import printable

if TYPE_CHECKING:
    from harness.manifest import QualityPart

QUALITY_PANEL = "Quality report"
GATE_FAILED = 3
"""Exit code of an engine that failed its quality report."""

BaselineOption = typer.Option(
    help="What the engine is measured against: the folder of an engine, such as the one in production, or a model, of "
    "which the f16 engine is built. Default: the f16 engine of the same weights.",
    rich_help_panel=QUALITY_PANEL,
)
SuiteOption = typer.Option(
    help="A suite (YAML): text, tasks and gates. Default: the one that comes with this version.",
    rich_help_panel=QUALITY_PANEL,
)
EngineOption = Annotated[Path, typer.Option("--engine", help="Folder of an engine (the one with manifest.json).")]


def quality(
    engine: EngineOption,
    baseline: Annotated[str | None, BaselineOption] = None,
    suite: Annotated[Path | None, SuiteOption] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="A further line of the table of quality, size and speed, repeatable: the folder of an engine, or f16, "
            "int8 or int4, which are built of the --baseline model by rounding to nearest."
        ),
    ] = None,
    system_prompt: Annotated[
        list[Path] | None, typer.Option(help="A file with a system prompt of production, repeatable.")
    ] = None,
    allow_code_execution: Annotated[
        bool,
        typer.Option(
            "--allow-code-execution",
            help="Run the code that the models write, in limited subprocesses (docs/suites.md says what they contain).",
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Held-out text alone, as after a build.")] = False,
) -> None:
    """Measure what an engine lost beside a baseline, and say whether it may ship.

    Writes a page, JSON and a Markdown summary into the engine's folder and the verdict into its manifest. Exit code 0:
    pass or warn. 3: a gate failed; the engine is kept, and harness-run server refuses it.

    - `harness-build quality --engine DIR --baseline MODEL --compare int8 --compare int4`
    """
    from harness.build.quality import QualityRequest, report_quality

    wanted = QualityRequest(
        engine_dir=engine,
        baseline=baseline,
        suite=suite,
        compared=tuple(compare or ()),
        system_prompts=tuple(system_prompt or ()),
        allow_code_execution=allow_code_execution,
        full=not quick,
    )
    if report_quality(wanted, Console(stderr=True, markup=False, highlight=False)) == "fail":
        raise typer.Exit(GATE_FAILED)


def inspect(
    engine: EngineOption, as_json: Annotated[bool, typer.Option("--json", help="Print the manifest itself.")] = False
) -> None:
    """Show what an engine is: model, recipe, KV layout, limits, versions, quality."""
    from harness.manifest import read_manifest

    manifest = read_manifest(engine)
    if as_json:
        print(json.dumps(manifest.model_dump(mode="json"), indent=1))
        return
    counts = Counter(manifest.recipe.layers.values())
    table = Table(
        show_header=False, box=None, title=Text(printable(f"engine {manifest.engine_id}")), title_justify="left"
    )
    kv = manifest.kv
    rows = {
        "model": f"{manifest.model.name} ({manifest.model.architecture}, {manifest.model.num_parameters:,} weights)",
        "arch": f"{manifest.arch} through {manifest.backend}",
        "versions": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
        "recipe": f"{manifest.recipe.name}: "
        + ", ".join(f"{n} x {p}" for p, n in counts.items())
        + f"; {manifest.recipe.bits_per_weight:.2f} bits per weight, decoder linears "
        f"{manifest.recipe.decoder_bits_per_weight:.2f}",
        "calibration": manifest.calibration.describe(),
        "model files": f"{manifest.weight_bytes() / 2**20:.1f} MiB",
        "KV cache": f"{kv.kind}, {kv.num_layers} layers x {kv.num_kv_heads} heads x ({kv.key_dim} + {kv.value_dim}); "
        + ", ".join(f"{mode} {n:,} bytes a token" for mode, n in kv.bytes_per_token.items()),
        "context": f"{manifest.max_model_len:,} tokens",
        "quality": _describe_quality(manifest.quality),
        "weights hash": manifest.model.content_hash,
    }
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    Console().print(table)


def _describe_quality(part: QualityPart) -> str:
    if part.verdict == "not_run":
        return part.verdict
    return (
        f"{part.verdict} ({part.kind} report, suite {(part.suite_sha256 or '')[:12]}, beside engine "
        f"{part.baseline_engine_id}): {part.report}"
    )


def verify(engine: EngineOption) -> None:
    """Check every file of an engine against the sha256 in its manifest. Exit code 1 if one is missing or altered."""
    from harness.manifest import read_manifest, verify_files

    manifest = read_manifest(engine)
    verify_files(engine, manifest)
    print(f"{engine}: {len(manifest.files)} files are whole")


def doctor(
    arch: Annotated[
        str | None,
        typer.Option(help="What to check for: cpu, native, or an arch such as sm_90. Default: cpu and the GPUs here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as JSON.")] = False,
) -> None:
    """Check what this machine has for an arch: versions, driver, devices, memory. Exit code 1 if something fails."""
    from harness.build.doctor import examine

    checks = examine(arch)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        console, styles = Console(highlight=False), {"ok": "green", "warn": "yellow", "fail": "red"}
        for check, following in zip_longest(checks, checks[1:]):
            line = Text.assemble((f"{check.status:5}", styles[check.status]), f"{check.target:7}{check.name}: ")
            line.append(printable(check.found if check.status == "ok" else f"{check.found}; needed: {check.needed}"))
            console.print(line, soft_wrap=True)
            if check.action and (following is None or following.action != check.action):  # said once for several lines
                console.print(Text(printable(f"     -> {check.action}")), soft_wrap=True)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
