"""The console script `harness-build`: weights in, engine out; and the verbs that look at an engine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.arch import Arch, resolve_arch
from harness.console import VersionOption, printable, run_cli

if TYPE_CHECKING:
    from harness.build.cpu_engine import BuiltEngine
    from harness.build.request import BuildRequest
    from harness.recipe import Recipe
    from harness.spec import ModelSpec

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
_RECIPE, _CALIBRATION = "Precision of the layers (one of --precision, --bits, --max-loss, --recipe)", "Calibration"
_QUALITY = "Quality report"
_REPORTS = ("none", "quick", "full")
GATE_FAILED = 3
BaselineOption = typer.Option(
    help="What the engine is measured against: the folder of an engine, such as the one in production, or a model, of "
    "which the f16 engine is built. Default: the f16 engine of the same weights.",
    rich_help_panel=_QUALITY,
)
SuiteOption = typer.Option(
    help="A suite (YAML): text, tasks and gates. Default: the one that comes with this version.",
    rich_help_panel=_QUALITY,
)
EngineOption = Annotated[Path, typer.Option("--engine", help="Folder of an engine (the one with manifest.json).")]


@app.callback(invoke_without_command=True)
def build(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="Where the weights are: a Hugging Face folder, a .gguf file, or a hub id such as "
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A quantized checkpoint made before, instead of --model: it is only lowered.")
    ] = None,
    arch: Annotated[str, typer.Option(help="What to build for. This version lowers to cpu alone.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder of the engine. Default: ./engines/MODEL/ARCH-ID.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="f16, int8 (one scale per channel), or int4 (embeddings, lm_head, first and last layer int8, the rest "
            "int4 in groups of 128). Default: int8 below a billion parameters, above --bits 4.5, or int4 with "
            "--no-calib.",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            help="Mix int4 and int8 per layer by measurement, with so many bits per decoder linear weight, scales "
            "included.",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(
            help="Mix as --bits does, with the fewest bits whose perplexity rises by no more than this, such as 1%. "
            "Up to three checkpoints are made.",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="A recipe (YAML) with a precision per layer, yours or a former build's.", rich_help_panel=_RECIPE
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--for",
            help="portable: a checkpoint that every arch, transformers, vLLM and SGLang read. cpu: smaller groups and "
            "zero points too, closer to the original at the same size, slower, read by the cpu arch alone.",
            rich_help_panel=_RECIPE,
        ),
    ] = "portable",
    optimize: Annotated[
        str,
        typer.Option(
            help="decode: int8 layers are weight-only. prefill: their activations are int8 too.",
            rich_help_panel=_RECIPE,
        ),
    ] = "decode",
    calib: Annotated[
        list[Path] | None,
        typer.Option(
            help="Traffic to calibrate on, repeatable: JSON lines of chat requests or completions as a server logs "
            "them, or plain text. Default: a small bundled set.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    system_prompt: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a system prompt of production, repeatable.", rich_help_panel=_CALIBRATION),
    ] = None,
    no_system_prompts: Annotated[
        bool, typer.Option(help="Say that production has no system prompts.", rich_help_panel=_CALIBRATION)
    ] = False,
    calib_samples: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Samples to calibrate on. Default: 128.", rich_help_panel=_CALIBRATION),
    ] = None,
    calib_tokens: Annotated[
        int | None,
        typer.Option(
            min=16, max=8192, help="Tokens of each sample at most. Default: 512.", rich_help_panel=_CALIBRATION
        ),
    ] = None,
    calib_device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda: where calibration computes. Default: auto, the GPU where there is one.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None,
    no_calib: Annotated[
        bool,
        typer.Option(help="Round to nearest: quick, needs no torch, costs quality.", rich_help_panel=_CALIBRATION),
    ] = False,
    report: Annotated[
        str,
        typer.Option(
            help="quick: held-out text through the engine and its baseline. full: tasks and speed too, minutes. none: "
            "the engine is marked not_run.",
            rich_help_panel=_QUALITY,
        ),
    ] = "quick",
    baseline: Annotated[str | None, BaselineOption] = None,
    suite: Annotated[Path | None, SuiteOption] = None,
    version: VersionOption = False,
) -> None:
    """Build an engine from model weights, for `harness-run` to serve.

    - `harness-build --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --calib traffic.jsonl --bits 4.5`
    - `harness-build --model model.gguf --precision int4 --no-calib`
    - `harness-build inspect --engine DIR`

    Weights are calibrated into a quantized checkpoint, ./engines/MODEL/quantized-ID, which every arch is lowered from
    and which is found again; a calibration that was killed goes on where it stopped. The folder of the engine is
    printed on stdout, all else on stderr. An engine that was built before, from the same inputs, is reused.

    A quality report follows. Exit code 0: pass or warn. 1: an error. 2: wrong usage. 3: a gate failed; the engine is
    kept, and harness-run server refuses it.
    """
    if context.invoked_subcommand is not None:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary folders are removed

    from harness.build.quality import read_suite
    from harness.build.request import BuildRequest
    from harness.errors import UsageError

    request = BuildRequest(
        model=model,
        checkpoint=checkpoint,
        precision=precision,
        bits=bits,
        max_loss=max_loss,
        recipe=recipe,
        target=target,
        optimize=optimize,
        traffic=tuple(calib or ()),
        system_prompts=tuple(system_prompt or ()),
        no_system_prompts=no_system_prompts,
        num_samples=calib_samples,
        max_tokens=calib_tokens,
        device=calib_device,
        no_calib=no_calib,
    )
    console = Console(stderr=True, markup=False, highlight=False)
    if report not in _REPORTS:
        raise UsageError(f"unknown --report {report!r}", f"allowed: {', '.join(_REPORTS)}")
    if suite is not None:
        read_suite(suite)  # before hours of calibration
    built = _lower(request, resolve_arch(arch), out, console)
    console.print(f"{'found' if built.reused else 'built'} for {arch}")
    # before the report, which may take minutes; exact, whatever the terminal's encoding
    sys.stdout.buffer.write(os.fsencode(built.engine_dir) + b"\n")
    sys.stdout.flush()
    failed = report != "none" and not _passes(request, built, report == "full", baseline, suite, console)
    console.print("serve it with:")
    flag = " --allow-failed-quality" if failed else ""
    console.print(f"  harness-run server --engine {shlex.quote(str(built.engine_dir))}{flag}", soft_wrap=True)
    if failed:
        raise typer.Exit(GATE_FAILED)


def _passes(
    request: BuildRequest, built: BuiltEngine, full: bool, baseline: str | None, suite: Path | None, console: Console
) -> bool:
    """Whether the engine passes its gates; also where it cannot be measured, which is said."""
    from harness.build.quality import QualityRequest, report_quality
    from harness.errors import CapacityError, QualityError

    if baseline is None and request.model is None:
        reason = "a checkpoint has no unquantized weights to compare with: give --baseline"
        console.print(f"quality: not_run, {reason}", soft_wrap=True)
        return True
    wanted = QualityRequest(
        engine_dir=built.engine_dir,
        baseline=baseline or request.model,
        suite=suite,
        system_prompts=request.system_prompts,
        full=full,
    )
    try:
        return report_quality(wanted, console) != "fail"
    except (CapacityError, QualityError) as error:
        if baseline is not None or suite is not None:
            raise
        console.print(printable(f"quality: not_run, {error}"), soft_wrap=True)
        return True


@app.command()
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


def _lower(request: BuildRequest, target: Arch, out: Path | None, console: Console) -> BuiltEngine:
    from harness.build.cpu_engine import build_cpu_engine
    from harness.build.store import refuse_occupied

    if out is not None:
        refuse_occupied(out)  # before hours of calibration
    source, recipe = request.open(Path("engines"), console)
    _describe(source.spec, source.name, recipe, console)
    columns = (TextColumn("lowering"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=source.spec.num_layers)
        built = build_cpu_engine(
            source,
            recipe,
            engines_dir=Path("engines"),
            out=out,
            on_layer=lambda layer: progress.update(task, completed=layer + 1),
        )
        progress.update(task, visible=not built.reused)
    return built


def _describe(spec: ModelSpec, name: str, recipe: Recipe, console: Console) -> None:
    from harness.ledger import bytes_read_per_token, gib, kv_layout, weights_bytes
    from harness.recipe import decoder_bits_per_weight, model_bits_per_weight, summarize

    resolved = recipe.resolve(spec)
    counts = ", ".join(f"{count} x {precision}" for precision, count in summarize(resolved).items())
    console.print(
        printable(f"{name}: {spec.architecture}, {spec.num_layers} layers, recipe {recipe.name} ({counts})"),
        soft_wrap=True,
    )
    console.print(
        f"bits per weight: decoder linears {decoder_bits_per_weight(spec, resolved):.3f}, "
        f"whole model {model_bits_per_weight(spec, resolved):.3f}",
        soft_wrap=True,
    )
    console.print(
        f"weights {gib(weights_bytes(spec, resolved))}, of which a decoded token reads "
        f"{gib(bytes_read_per_token(spec, resolved))}; KV {kv_layout(spec).bytes_per_token('u8'):,} bytes a token",
        soft_wrap=True,
    )


@app.command()
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
        "quality": manifest.quality.verdict,
        "weights hash": manifest.model.content_hash,
    }
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    Console().print(table)


@app.command()
def verify(engine: EngineOption) -> None:
    """Check every file of an engine against the sha256 in its manifest. Exit code 1 if one is missing or altered."""
    from harness.manifest import read_manifest, verify_files

    manifest = read_manifest(engine)
    verify_files(engine, manifest)
    print(f"{engine}: {len(manifest.files)} files are whole")


def main() -> None:
    """Entry point of the console script."""
    run_cli(app)
