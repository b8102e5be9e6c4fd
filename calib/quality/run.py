"""One quality report: which engines are measured on what, in which order, and where the report is kept.

The engine and its baseline are run as `harness-run` runs them, in fast mode. Owns the order of the steps; figures,
limits and presentation are the other modules'.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count
from pathlib import Path

import harness
from harness.calib.overlap import load_ngrams
from harness.calib.quality.engines import (
    MeasuredEngine,
    check_memory,
    machine,
    open_measured,
    serving_config,
    text_executor,
)
from harness.calib.quality.gates import (
    has_nothing_to_lose,
    is_too_small,
    judge_inputs,
    judge_tasks,
    judge_text,
    judge_weights,
    worst,
)
from harness.calib.quality.items import Answer
from harness.calib.quality.page import render_page
from harness.calib.quality.report import (
    EngineRow,
    EngineSummary,
    QualityReport,
    SuiteSummary,
    TaskResult,
    TextResult,
    read_sensitivity,
)
from harness.calib.quality.speed import measure_speed
from harness.calib.quality.suite import Gates, Suite
from harness.calib.quality.summary import render_summary
from harness.calib.quality.task_comparison import compare_task
from harness.calib.quality.tasks import Task, TaskSettings, read_tasks, run_task
from harness.calib.quality.text import WINDOWS_BESIDE, Domain, cut_windows, measure_text, num_windows
from harness.calib.quality.weights import weight_errors
from harness.calib.quality.wording import number_of, points
from harness.checkpoint_record import SENSITIVITY_NAME
from harness.errors import QualityError
from harness.manifest import EngineManifest, QualityPart, read_manifest, write_manifest
from harness.runtime.process_backend import ProcessBackend
from harness.tokenizer import Tokenizer

REPORT_FOLDER = "quality"
_MOST_NAMED = 4
_FEW_TOKENS = 1500  # of a domain: with fewer, an interval rests on a few dozen stretches of text

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a report is to be made of.

    Args:
        engine_dir: the engine that is judged.
        baseline_dir: the engine it is judged by.
        compared: further engines of the same model for the table, each with its name there.
        system_prompts: of production, added to those of the suite.
        full: tasks and speed too, and more text.
    """

    engine_dir: Path
    baseline_dir: Path
    compared: Mapping[str, Path]
    suite: Suite
    system_prompts: tuple[str, ...] = ()
    allow_code_execution: bool = False
    full: bool = True


def measure_quality(plan: Measurement, on_progress: OnProgress) -> QualityReport:
    """Measure, judge, and put it all together; nothing is written.

    Raises:
        QualityError: the engines do not compare, or the baseline is no baseline.
        HarnessError: an engine cannot be run, or the suite is not valid.
    """
    started = time.monotonic()
    engine, baseline = open_measured(plan.engine_dir), open_measured(plan.baseline_dir)
    compared = {name: open_measured(path) for name, path in plan.compared.items()}
    for other in (baseline, *compared.values()):
        _check_comparable(engine, other)
    if _is_same(engine, baseline) and set(engine.manifest.recipe.layers.values()) != {"f16"}:
        raise QualityError(
            f"{engine.path} is its own baseline, which says nothing of what quantizing cost",
            "give the f16 engine, the engine in production, or the model as --baseline",
        )
    tasks = read_tasks(plan.suite) if plan.full else []
    domains = _domains(plan, engine)
    texts = _measure_texts(baseline, {"": engine, **compared}, domains, on_progress)
    text = texts.pop("")
    results = _measure_tasks(plan, tasks, baseline, engine, on_progress)
    table = _table(plan, (engine, baseline, compared), (text, texts), domains, on_progress)
    content = plan.suite.content
    weights = []
    if engine.manifest.gpu is None:
        weights = weight_errors(engine.path, baseline.path, engine.manifest.recipe.layers)
    same_weights = engine.manifest.model.content_hash == baseline.manifest.model.content_hash
    gates = [
        *judge_inputs(engine.manifest, baseline.manifest),
        *judge_text([text.overall, *text.domains], content.gates, engine.manifest.model.num_parameters),
        *(judge_weights(weights, content.gates) if same_weights else []),
        *judge_tasks(results, content.gates),
    ]
    return QualityReport(
        kind="full" if plan.full else "quick",
        verdict=worst(gates),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        machine=machine(engine.manifest),
        versions=engine.manifest.versions | {"harness": harness.__version__},
        suite=_suite_summary(plan),
        baseline_is_engine=_is_same(engine, baseline),
        gates=gates,
        table=table,
        text=text,
        weights=weights,
        sensitivity=read_sensitivity(engine.path / SENSITIVITY_NAME),
        tasks=results,
        notes=_notes(engine.manifest, text, results, content.gates),
    )


def write_report(report: QualityReport, engine_dir: Path) -> Path:
    """Write JSON, page and summary into the engine's folder and the verdict into its manifest; returns the page."""
    folder = engine_dir / REPORT_FOLDER
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(render_summary(report), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(render_page(report), encoding="utf-8")
    baseline = next(row.engine for row in report.table if row.role == "baseline")
    part = QualityPart(
        verdict=report.verdict,
        kind=report.kind,
        suite_sha256=report.suite.sha256,
        baseline_engine_id=baseline.engine_id,
        metrics_version=report.metrics_version,
        report=page.relative_to(engine_dir).as_posix(),
    )
    write_manifest(engine_dir, read_manifest(engine_dir).model_copy(update={"quality": part}))
    return page


def _is_same(engine: MeasuredEngine, other: MeasuredEngine) -> bool:
    return engine.manifest.engine_id == other.manifest.engine_id


def _check_comparable(engine: MeasuredEngine, other: MeasuredEngine) -> None:
    for what, ours, theirs in (
        ("tokenizer", engine.manifest.tokenizer.sha256, other.manifest.tokenizer.sha256),
        ("vocabulary", engine.manifest.model.vocab_size, other.manifest.model.vocab_size),
        ("arch", engine.manifest.arch, other.manifest.arch),
        ("architecture", engine.manifest.model.architecture, other.manifest.model.architecture),
        ("number of layers", engine.manifest.model.num_layers, other.manifest.model.num_layers),
    ):
        if ours != theirs:
            raise QualityError(
                f"{engine.path} and {other.path} do not compare: the {what} differs", "give engines of one model"
            )


def _stepper(stage: str, total: int, on_progress: OnProgress) -> Callable[[], None]:
    """Counts the steps of a stage, one at each call."""
    done = count(1)
    return lambda: on_progress(stage, next(done), total)


def _domains(plan: Measurement, engine: MeasuredEngine) -> list[Domain]:
    text = plan.suite.content.text
    return cut_windows(
        plan.suite,
        Tokenizer.from_dir(engine.path),
        text.full if plan.full else text.quick,
        max_model_len=engine.manifest.max_model_len,
        calibration_ngrams=load_ngrams(engine.path),
    )


def _measure_texts(
    baseline: MeasuredEngine, others: Mapping[str, MeasuredEngine], domains: Sequence[Domain], on_progress: OnProgress
) -> dict[str, TextResult]:
    """Layer 1 of each engine beside the baseline, which stays loaded."""
    total = len(others) * num_windows(domains)
    on_progress("text", 0, total)
    step = _stepper("text", total, on_progress)
    check_memory(baseline, max(others.values(), key=lambda engine: engine.manifest.weight_bytes()))
    tokens = max(len(window) for domain in domains for window in domain.windows)
    results = {}
    with text_executor(baseline, tokens, WINDOWS_BESIDE) as expected:
        for name, engine in others.items():
            with text_executor(engine, tokens, WINDOWS_BESIDE) as executor:
                results[name] = measure_text(expected, executor, domains, step)
    return results


def _measure_tasks(
    plan: Measurement, tasks: Sequence[Task], baseline: MeasuredEngine, engine: MeasuredEngine, on_progress: OnProgress
) -> list[TaskResult]:
    step = _stepper("tasks", 2 * sum(len(task.items) for task in tasks), on_progress)
    answers = {
        side: asyncio.run(_answers(side_engine, tasks, plan, step))
        for side, side_engine in (("baseline", baseline), ("engine", engine))
        if tasks
    }
    return [
        compare_task(task, before, after)
        for task, before, after in zip(tasks, answers.get("baseline", []), answers.get("engine", []), strict=True)
    ]


async def _answers(
    engine: MeasuredEngine, tasks: Sequence[Task], plan: Measurement, on_item: Callable[[], None]
) -> list[list[Answer]]:
    """Answers of one engine to all tasks; each engine's conversations go through its own chat template."""
    config, tokenizer = serving_config(engine), Tokenizer.from_dir(engine.path)
    settings = TaskSettings(
        decoding=plan.suite.content.decoding,
        system_prompts=(*plan.suite.system_prompts(), *plan.system_prompts),
        max_model_len=config.max_model_len,
        allow_code_execution=plan.allow_code_execution,
        on_item=on_item,
    )
    backend = ProcessBackend(config)
    await backend.start()
    try:
        return [await run_task(backend, tokenizer, task, settings) for task in tasks]
    finally:
        await backend.stop()


def _table(
    plan: Measurement,
    engines: tuple[MeasuredEngine, MeasuredEngine, Mapping[str, MeasuredEngine]],
    texts: tuple[TextResult, Mapping[str, TextResult]],
    domains: Sequence[Domain],
    on_progress: OnProgress,
) -> list[EngineRow]:
    engine, baseline, compared = engines
    text, compared_texts = texts
    rows: dict[str, tuple[MeasuredEngine, TextResult | None]] = {"baseline": (baseline, None), "engine": (engine, text)}
    rows |= {f"compared {name}": (e, compared_texts[name]) for name, e in compared.items()}
    speeds = {}
    if plan.full:
        wanted = plan.suite.content.speed
        step = _stepper("speed", wanted.rounds * len(rows), on_progress)
        prompt = [token for domain in domains for window in domain.windows for token in window]
        speeds = measure_speed({key: serving_config(e) for key, (e, _) in rows.items()}, prompt, wanted, step)
    return [
        EngineRow(
            role=key.partition(" ")[0],  # type: ignore[arg-type]
            engine=_summary(e),
            perplexity=text.overall.perplexity_baseline if seen is None else seen.overall.perplexity,
            perplexity_change=None if seen is None else seen.overall.perplexity_change,
            kl_mean=None if seen is None else seen.overall.kl_mean,
            top1_agreement=None if seen is None else seen.overall.top1_agreement,
            speed=speeds.get(key),
        )
        for key, (e, seen) in rows.items()
    ]


def _summary(engine: MeasuredEngine) -> EngineSummary:
    manifest = engine.manifest
    return EngineSummary(
        name=manifest.model.name,
        engine_id=manifest.engine_id,
        path=str(engine.path),
        arch=manifest.arch,
        backend=manifest.backend,
        recipe=manifest.recipe.name,
        precisions=dict(Counter(manifest.recipe.layers.values())),
        calibration=manifest.calibration.describe(),
        decoder_bits_per_weight=manifest.recipe.decoder_bits_per_weight,
        bits_per_weight=manifest.recipe.bits_per_weight,
        weight_bytes=manifest.weight_bytes(),
        num_parameters=manifest.model.num_parameters,
    )


def _suite_summary(plan: Measurement) -> SuiteSummary:
    content = plan.suite.content
    return SuiteSummary(
        name=content.name,
        path=str(plan.suite.path),
        sha256=plan.suite.sha256,
        decoding=content.decoding.model_dump(),
        num_system_prompts=len(content.system_prompts) + len(plan.system_prompts),
        license_notes=[f"{task.name}: {task.source}" for task in content.tasks],
    )


def _notes(manifest: EngineManifest, text: TextResult, tasks: Sequence[TaskResult], gates: Gates) -> list[str]:
    notes = ["Both engines ran in fast mode, as harness-run serves them unless --deterministic is given."]
    chosen = manifest.calibration.calibration_set
    if chosen is not None and chosen.is_bundled:
        notes.append(
            "The engine was calibrated on the bundled default set, not on traffic of yours: harness-build --calib."
        )
    if text.overall.num_overlapping:
        notes.append(
            f"{text.overall.num_overlapping} windows of the held-out text were left out: the calibration set holds "
            "runs of 13 tokens of theirs."
        )
    if manifest.gpu is not None:
        notes.append("Weights of an engine for a GPU cannot be read back, so they are not compared module by module.")
    elif any(precision.endswith("-a8") for precision in manifest.recipe.layers.values()):
        notes.append(
            "Weights of modules with int8 activations are smoothed, so they are not compared module by module."
        )
    if skipped := [task.name for task in tasks if task.skipped is not None]:
        notes.append(f"Not run: {', '.join(skipped)}.")
    num_run = sum(task.skipped is None for task in tasks)
    if blind := [task.name for task in tasks if has_nothing_to_lose(task, gates)]:
        notes.append(
            f"The baseline itself scores next to nothing on {', '.join(blind)}: there is nothing to lose, and that "
            "these pass means nothing."
        )
    if short := [domain for domain in text.domains if domain.num_tokens < _FEW_TOKENS]:
        named = ", ".join(f"{domain.domain} ({number_of(domain.num_tokens, 'token')})" for domain in short)
        notes.append(f"There is little text: {named}. Add some to the suite before you rely on its figures.")
    if small := [task for task in tasks if is_too_small(task, gates)]:
        shown = [f"{task.name} (nothing below {points(task.detectable_difference)})" for task in small[:_MOST_NAMED]]
        notes.append(
            f"{number_of(len(small), 'task')} of {num_run} would not show a loss at the limit, for lack of items: "
            f"{', '.join(shown)}{', …' if len(small) > _MOST_NAMED else ''}. That such a task passes means little."
        )
    return notes
