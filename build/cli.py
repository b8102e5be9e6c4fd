"""The console script `harness-build`: weights in, engine out; and the verbs that look at an engine."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.arch import CPU, resolve_arch
from harness.build import verbs
from harness.console import VersionOption, printable, run_cli

if TYPE_CHECKING:
    from harness.build.cpu_engine import BuiltEngine
    from harness.build.quality import QualityRequest
    from harness.build.request import BuildRequest
    from harness.recipe import Recipe
    from harness.spec import ModelSpec

_Flag = TypeVar("_Flag")

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
_RECIPE, _CALIBRATION = "Precision of the layers (one of --precision, --bits, --max-loss, --recipe)", "Calibration"
_GPU = "GPU engines (--arch sm_* or native)"
_REPORTS = ("none", "quick", "full")


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
    arch: Annotated[
        str,
        typer.Option(
            help="What to build for: cpu; sm_80 (A100), sm_86 (A10, RTX 30), sm_89 (L4, L40S, RTX 40), sm_90 (H100, "
            "H200), sm_100 (B200), sm_103 (B300), sm_120 (RTX 50), through TensorRT-LLM; native, the GPU that is here."
        ),
    ] = "cpu",
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
            rich_help_panel=verbs.QUALITY_PANEL,
        ),
    ] = "quick",
    baseline: Annotated[str | None, verbs.BaselineOption] = None,
    suite: Annotated[Path | None, verbs.SuiteOption] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="tensorrt-llm: an engine (default). trtllm-pytorch: a folder of weights for TensorRT-LLM's PyTorch "
            "backend, which releases after 1.2 have alone.",
            rich_help_panel=_GPU,
        ),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help="checkpoint: what an engine is built from, on any machine. engine: the engine, from such a "
            "--checkpoint, on a machine with the GPU. Default: all, as far as this machine can.",
            rich_help_panel=_GPU,
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="GPUs that share each layer. Default: 1.", rich_help_panel=_GPU)
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="GPUs that share the layers. Default: 1.", rich_help_panel=_GPU)
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="auto: 16 bits. int8: half the KV memory, but no reuse of prefixes and no chunked prompts.",
            rich_help_panel=_GPU,
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(help="Most sequences in a step. Default: what fits, at most 256.", rich_help_panel=_GPU),
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in a step. Default: 8192.", rich_help_panel=_GPU)
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt and answer together. Default: what fits, at most the model's.", rich_help_panel=_GPU
        ),
    ] = None,
    lookahead: Annotated[
        str | None,
        typer.Option(
            help="W,N,G: lookahead decoding with that window, n-gram and verification set, such as 7,7,7: lower "
            "latency while few requests run.",
            rich_help_panel=_GPU,
        ),
    ] = None,
    context_logits: Annotated[
        bool,
        typer.Option(
            help="Let the engine give logits of prompts, for a quality report; prefill is slower.", rich_help_panel=_GPU
        ),
    ] = False,
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

    from harness.build.quality import QualityRequest, read_suite
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
    flags = {
        "backend": backend,
        "stage": stage,
        "tp_size": tp,
        "pp_size": pp,
        "kv_cache_dtype": kv_cache_dtype,
        "lookahead": lookahead,
        "context_logits": context_logits or None,
    }
    limits = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens, "max_model_len": max_model_len}
    if arch != CPU.name:
        engine_dir = _build_for_gpu(request, arch, _given(flags), _given(limits), out, console)
        if engine_dir is None:
            return
    else:
        if given := [*_given(flags), *_given(limits)]:
            flag = given[0].removesuffix("_size").replace("_", "-")
            raise UsageError(f"--{flag} is of GPU engines", "leave it out, or give --arch native or one of sm_*")
        built = _lower(request, out, console)
        engine_dir = built.engine_dir
        console.print(f"{'found' if built.reused else 'built'} for {arch}")
        _print_path(engine_dir)  # before the report, which may take minutes
    of_model = request.model if arch == CPU.name else None  # a GPU engine's baseline is not built on the way
    failed = report != "none" and not _passes(
        QualityRequest(
            engine_dir=engine_dir,
            baseline=baseline or of_model,
            suite=suite,
            system_prompts=request.system_prompts,
            full=report == "full",
        ),
        is_asked=baseline is not None or suite is not None,
        console=console,
    )
    if failed:
        console.print("more bits may pass (--bits 5, --precision int8), or calibration on more traffic")
        console.print("serve it all the same with:")
    else:
        console.print("serve it with:")
    flag = " --allow-failed-quality" if failed else ""
    console.print(f"  harness-run server --engine {shlex.quote(str(engine_dir))}{flag}", soft_wrap=True)
    if failed:
        raise typer.Exit(verbs.GATE_FAILED)


def _print_path(path: Path) -> None:
    # exact, whatever the terminal's encoding
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.flush()


def _passes(wanted: QualityRequest, *, is_asked: bool, console: Console) -> bool:
    """Whether the engine passes its gates; also where it cannot be measured, unless what it lacks was asked for."""
    from harness.build.quality import report_quality
    from harness.errors import CapacityError, QualityError

    try:
        return report_quality(wanted, console) != "fail"
    except (CapacityError, QualityError) as error:
        if is_asked:
            raise
        console.print(printable(f"quality: not_run, {error}"), soft_wrap=True)
        return True


def _given(flags: Mapping[str, _Flag | None]) -> dict[str, _Flag]:
    return {name: value for name, value in flags.items() if value is not None}


def _build_for_gpu(
    request: BuildRequest,
    arch_name: str,
    flags: dict[str, Any],
    limits: dict[str, int],
    out: Path | None,
    console: Console,
) -> Path | None:
    """The engine; None where what was made is not one."""
    from harness.arch import native_arch
    from harness.build.tensorrt_llm.limits import LimitWishes
    from harness.build.tensorrt_llm.request import GpuRequest, build_for_gpu
    from harness.nvml import devices

    gpu = GpuRequest(wishes=LimitWishes(**limits), **flags)
    arch = native_arch(devices()) if arch_name == "native" else resolve_arch(arch_name)
    made = build_for_gpu(request, gpu, arch, out=out, console=console)
    _print_path(made.path)
    if made.kind != "engine":
        return None
    console.print(f"{'found' if made.reused else 'built'} for {arch.name}")
    return made.path


def _lower(request: BuildRequest, out: Path | None, console: Console) -> BuiltEngine:
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


for _verb in (verbs.quality, verbs.inspect, verbs.verify, verbs.doctor):
    app.command()(_verb)


def main() -> None:
    """Entry point of the console script."""
    run_cli(app)
