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
from harness.calib.quality.findings import answer
from harness.calib.quality.report import METRICS_VERSION, QualityReport, Verdict
from harness.calib.quality.run import Measurement, measure_quality, write_report
from harness.calib.quality.suite import DEFAULT_SUITE, Suite, load_suite
from harness.calib.quality.tasks import read_tasks
from harness.calib.quality.wording import (
    duration,
    gate_format,
    nats,
    percent,
    points,
    rate,
    signed_percent,
    signed_points,
    size,
)
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


def read_suite(path: Path | None) -> Suite:
    """A suite of which every file was read and every item checked; the default without a path.

    Raises:
        SuiteError: names the file and what is wrong in it.
    """
    if path is not None and not path.is_file():
        raise UsageError(f"--suite {path} is no file", f"give a suite's YAML file; {DEFAULT_SUITE} is an example")
    suite = load_suite(path or DEFAULT_SUITE)
    read_tasks(suite)
    return suite


def report_quality(request: QualityRequest, console: Console) -> Verdict:
    """Measure an engine, write its report and its verdict, and say what came out.

    A report that was made before of the same engine, baseline and suite is not made again by a quick one.

    Raises:
        HarnessError: it cannot be measured; the manifest's verdict is left as it was.
    """
    manifest = read_manifest(request.engine_dir)
    suite = read_suite(request.suite)
    prompts = tuple(_read_prompt(path) for path in request.system_prompts)
    for name in request.compared:
        _check_compared(name, request.baseline)
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
    if known.verdict not in ("not_run", report.verdict):
        console.print(
            f"the former verdict was {known.verdict}, of a {known.kind} report with "
            f"{'this' if known.suite_sha256 == suite.sha256 else 'another'} suite; it is replaced",
            soft_wrap=True,
        )
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
    path = Path(baseline)
    if not path.exists() and path.parent != Path() and path.parent.is_dir():
        raise UsageError(f"--baseline: there is no {path}", "give the folder of an engine, or a model")
    if manifest.gpu is not None:
        raise UsageError(
            f"--baseline {baseline} is no engine, and the baseline of one for {manifest.arch} is not built on the way",
            f"build it: harness-build --model MODEL --arch {manifest.arch} --precision f16 --context-logits",
        )
    return build_preset(baseline, "f16", console)


def _unquantized_beside(engine_dir: Path, manifest: EngineManifest) -> Path | None:
    for path in sorted(engine_dir.resolve().parent.glob(f"*/{MANIFEST_NAME}")):
        try:
            other = read_manifest(path.parent)
        except EngineError:  # of another version, or half copied
            continue
        is_f16 = set(other.recipe.layers.values()) == {"f16"}
        is_measurable = other.gpu is None or other.gpu.context_logits
        if (
            is_f16
            and is_measurable
            and other.arch == manifest.arch
            and other.model.content_hash == manifest.model.content_hash
        ):
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


def _check_compared(name: str, baseline: str | None) -> None:
    if (Path(name) / MANIFEST_NAME).is_file():
        return
    if name not in PRESETS:
        raise UsageError(f"--compare {name!r} is no engine", f"give an engine's folder, or one of {', '.join(PRESETS)}")
    if baseline is None or (Path(baseline) / MANIFEST_NAME).is_file():
        raise UsageError(f"--compare {name} is built of a model", "give the model as --baseline")


def _compared(name: str, baseline: str | None, console: Console) -> Path:
    if (Path(name) / MANIFEST_NAME).is_file():
        return Path(name)
    assert baseline is not None, "checked before"
    return build_preset(baseline, name, console)


def _read_prompt(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise UsageError(f"--system-prompt {path} cannot be read: {error}", "give a text file") from None


def _tell(report: QualityReport, page: Path, console: Console) -> None:
    _, decided = answer(report)
    console.print(f"quality: {report.verdict} ({report.kind}, {report.seconds:.0f} s). {decided}")
    domains = (report.text.overall, *report.text.domains)
    _print_table(
        ("text", "perplexity", "change", "KL divergence", "top-1"),
        [
            (
                domain.domain,
                f"{domain.perplexity_baseline:.2f} -> {domain.perplexity:.2f}",
                signed_percent(domain.perplexity_change.value),
                nats(domain.kl_mean.value),
                percent(domain.top1_agreement.value),
            )
            for domain in domains
        ],
        console,
    )
    if report.kind == "full":
        _tell_tasks(report, console)
        _tell_speed(report, console)
    _tell_gates(report, console)
    console.print(f"report: {page}", soft_wrap=True)


def _tell_tasks(report: QualityReport, console: Console) -> None:
    rows = [
        (task.name, "not run", "", "")
        if task.skipped
        else (
            task.name,
            f"{percent(task.score_baseline)} -> {percent(task.score)}",
            signed_points(task.difference.value),
            points(task.detectable_difference),
        )
        for task in report.tasks
    ]
    if rows:
        _print_table(("task", "score", "change", "least that shows"), rows, console)


def _tell_speed(report: QualityReport, console: Console) -> None:
    rows = [
        (
            f"{row.engine.recipe} ({row.role})",
            size(row.engine.weight_bytes),
            duration(row.speed.ttft_s.mean),
            duration(row.speed.tpot_s.mean),
            rate(row.speed.tokens_per_s.mean),
        )
        for row in report.table
        if row.speed is not None
    ]
    _print_table(("recipe", "size", "TTFT", "TPOT", "tokens/s"), rows, console)


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(box=None)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)


def _tell_gates(report: QualityReport, console: Console) -> None:
    decisive: Sequence[Verdict] = ("fail", "warn")
    for gate in sorted((g for g in report.gates if g.verdict in decisive), key=lambda g: decisive.index(g.verdict)):
        value = gate_format(gate.gate)(gate.value)
        reason = gate.reason.partition(": ")[0]  # why a limit is one stands in the page
        line = f"{gate.verdict}: {gate.gate} of {gate.where} is {value}: {reason}"
        console.print(
            printable(" ".join(line.split())), soft_wrap=True
        )  # a terminal needs no spaces that hold together
