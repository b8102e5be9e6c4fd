"""The quality report as `harness-build` makes it: finds or builds the baseline, measures, tells, and gives the verdict.

Owns which engines a report compares. What is measured and judged is `harness.calib.quality`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as RemainingColumn
from rich.table import Table
from rich.text import Text

from harness.build.cpu_engine import build_cpu_engine
from harness.build.open_source import open_source
from harness.calib.quality.report import METRICS_VERSION, QualityReport, Verdict
from harness.calib.quality.run import Measurement, measure_quality, write_report
from harness.calib.quality.suite import load_suite
from harness.calib.quality.wording import gate_format
from harness.calib.traffic import read_text
from harness.console import printable
from harness.errors import EngineError, QualityError, UsageError
from harness.manifest import MANIFEST_NAME, EngineManifest, read_manifest
from harness.recipe import PRESETS, preset


@dataclass(frozen=True, kw_only=True)
class QualityRequest:
    """What a user asks of a report.

    Args:
        baseline: an engine's folder, or a model of which the f16 engine is built; None for the f16 engine that lies
            beside the engine.
        suite: a suite's file; None for the default.
        compared: folders of engines, or presets such as int8, which are built of the baseline's model.
        full: all layers and speed, or quickly layer 1.
    """

    engine_dir: Path
    baseline: str | None
    suite: Path | None
    compared: tuple[str, ...] = ()
    system_prompts: tuple[Path, ...] = ()
    allow_code_execution: bool = False
    full: bool = True


def report_quality(request: QualityRequest, console: Console) -> Verdict:
    """Measure an engine, write its report and its verdict, and say what came out.

    A report that was made before of the same engine, baseline and suite is not made again by a quick one.

    Raises:
        HarnessError: it cannot be measured; the manifest's verdict is left as it was.
    """
    manifest = read_manifest(request.engine_dir)
    suite = load_suite(request.suite) if request.suite else load_suite()
    prompts = tuple(_read_prompt(path) for path in request.system_prompts)
    baseline_dir = _baseline(request.baseline, request.engine_dir, manifest, console)
    known = manifest.quality
    sought = (suite.sha256, read_manifest(baseline_dir).engine_id, METRICS_VERSION)
    if not request.full and (known.suite_sha256, known.baseline_engine_id, known.metrics_version) == sought:
        assert known.verdict != "not_run", "it was made with a suite"
        console.print(f"quality: {known.verdict}, measured before ({request.engine_dir / (known.report or '')})")
        return known.verdict
    plan = Measurement(
        engine_dir=request.engine_dir,
        baseline_dir=baseline_dir,
        compared={name: _compared(name, request.baseline, console) for name in request.compared},
        suite=suite,
        system_prompts=prompts,
        allow_code_execution=request.allow_code_execution,
        full=request.full,
    )
    report = _measure(plan, console)
    page = write_report(report, request.engine_dir)
    _tell(report, page, console)
    return report.verdict


def _measure(plan: Measurement, console: Console) -> QualityReport:
    columns = (TextColumn("quality: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left:"), RemainingColumn(), console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)
            if not console.is_terminal and done * 4 // total > (done - 1) * 4 // total:
                console.print(f"quality: {stage}, {done} of {total}")  # a log shows no bar

        return measure_quality(plan, show)


def _baseline(baseline: str | None, engine_dir: Path, manifest: EngineManifest, console: Console) -> Path:
    if baseline is None:
        found = _unquantized_beside(engine_dir, manifest)
        if found is None:
            raise QualityError(
                f"no f16 engine of the same weights lies beside {engine_dir}",
                "give --baseline MODEL, of which one is built, or the folder of an engine in production",
            )
        return found
    if (Path(baseline) / MANIFEST_NAME).is_file():
        return Path(baseline)
    return build_preset(baseline, "f16", console)


def _unquantized_beside(engine_dir: Path, manifest: EngineManifest) -> Path | None:
    for path in sorted(engine_dir.resolve().parent.glob(f"*/{MANIFEST_NAME}")):
        try:
            other = read_manifest(path.parent)
        except EngineError:  # of another version, or half copied
            continue
        is_f16 = set(other.recipe.layers.values()) == {"f16"}
        if is_f16 and other.arch == manifest.arch and other.model.content_hash == manifest.model.content_hash:
            return path.parent
    return None


def build_preset(model: str, name: str, console: Console) -> Path:
    """An engine of a model, rounded to nearest, in the store; found there where it was built before."""
    source = open_source(model)
    built = build_cpu_engine(source, preset(name, source.spec), engines_dir=Path("engines"))
    if not built.reused:
        mebibytes = read_manifest(built.engine_dir).weight_bytes() / 2**20
        console.print(printable(f"built {name} engine {built.engine_dir} ({mebibytes:,.0f} MiB)"), soft_wrap=True)
    return built.engine_dir


def _compared(name: str, baseline: str | None, console: Console) -> Path:
    if (Path(name) / MANIFEST_NAME).is_file():
        return Path(name)
    if name not in PRESETS:
        raise UsageError(f"--compare {name!r} is no engine", f"give an engine's folder, or one of {', '.join(PRESETS)}")
    if baseline is None or (Path(baseline) / MANIFEST_NAME).is_file():
        raise UsageError(f"--compare {name} is built of a model", "give the model as --baseline")
    return build_preset(baseline, name, console)


def _read_prompt(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise UsageError(f"--system-prompt {path} cannot be read: {error}", "give a text file") from None


def _tell(report: QualityReport, page: Path, console: Console) -> None:
    table = Table(box=None, title=Text(f"quality: {report.verdict} ({report.kind}, {report.seconds:.0f} s)"))
    table.title_justify = "left"
    for heading in ("text", "perplexity", "change", "KL divergence", "top-1"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    for domain in (report.text.overall, *report.text.domains):
        table.add_row(
            Text(printable(domain.domain)),
            f"{domain.perplexity_baseline:.2f} -> {domain.perplexity:.2f}",
            f"{domain.perplexity_change.value:+.2%}",
            f"{domain.kl_mean.value:.4f}",
            f"{domain.top1_agreement.value:.1%}",
        )
    console.print(table)
    _tell_gates(report, console)
    console.print(f"report: {page}", soft_wrap=True)


def _tell_gates(report: QualityReport, console: Console) -> None:
    decisive: Sequence[Verdict] = ("fail", "warn")
    for gate in sorted((g for g in report.gates if g.verdict in decisive), key=lambda g: decisive.index(g.verdict)):
        value = gate_format(gate.gate)(gate.value)
        line = f"{gate.verdict}: {gate.gate} of {gate.where} is {value}: {gate.reason}"
        console.print(
            printable(" ".join(line.split())), soft_wrap=True
        )  # a terminal needs no spaces that hold together
