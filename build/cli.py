"""The console script `harness-build`: weights in, engine out; and the verbs that look at an engine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.arch import resolve_arch
from harness.console import VersionOption, run_cli
from harness.errors import UsageError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
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
    arch: Annotated[str, typer.Option(help="What to build for. This version lowers to cpu alone.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder of the engine. Default: ./engines/MODEL/ARCH-ID.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="f16, int8 (one scale per channel), or int4 (embeddings, lm_head, first and last layer int8, the rest "
            "int4 in groups of 128). Default: int8 below a billion parameters, int4 above."
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A recipe (YAML) with a precision per layer, instead of --precision.")
    ] = None,
    version: VersionOption = False,
) -> None:
    """Build an engine from model weights, for `harness-run` to serve.

    - `harness-build --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B`
    - `harness-build --model model.gguf --precision int4`
    - `harness-build inspect --engine DIR`

    The folder of the engine is printed on stdout, all else on stderr. The build reads tensor by tensor, writes into a
    temporary folder and renames it when complete. An engine that was built before, from the same weights with the same
    recipe and versions, is found and reused.
    """
    if context.invoked_subcommand is not None:
        return
    if not model:
        raise UsageError("no model given", "harness-build --model MODEL, see harness-build --help")
    if precision is not None and recipe is not None:
        raise UsageError("--precision and --recipe exclude each other", "a recipe says the precision of every layer")
    target = resolve_arch(arch)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the temporary folder is removed

    from harness.build.cpu_engine import build_cpu_engine
    from harness.build.open_source import open_source
    from harness.ledger import bytes_read_per_token, gib, kv_layout, weights_bytes
    from harness.recipe import PRESETS, default_preset, load_recipe, preset, summarize

    if precision is not None and precision not in PRESETS:
        raise UsageError(f"unknown --precision {precision!r}", f"allowed: {', '.join(PRESETS)}")
    written = load_recipe(recipe) if recipe else None
    console = Console(stderr=True, markup=False, highlight=False)
    source = open_source(model)
    spec = source.spec
    chosen = written or preset(precision or default_preset(spec), spec)
    resolved = chosen.resolve(spec)
    counts = ", ".join(f"{count} x {name}" for name, count in summarize(resolved).items())
    console.print(
        f"{source.name}: {spec.architecture}, {spec.num_layers} layers, recipe {chosen.name} ({counts})", soft_wrap=True
    )
    console.print(
        f"weights {gib(weights_bytes(spec, resolved))}, of which a decoded token reads "
        f"{gib(bytes_read_per_token(spec, resolved))}; KV {kv_layout(spec).bytes_per_token('u8'):,} bytes a token"
    )
    if written:
        for pattern in written.unused_rules(spec):
            console.print(f"note: the recipe's rule {pattern!r} decides no layer of this model", soft_wrap=True)
    columns = (TextColumn("lowering"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=spec.num_layers)
        built = build_cpu_engine(
            source,
            chosen,
            engines_dir=Path("engines"),
            out=out,
            on_layer=lambda layer: progress.update(task, completed=layer + 1),
        )
        progress.update(task, visible=not built.reused)
    console.print(f"{'found' if built.reused else 'built'} for {target.name}; serve it with:")
    console.print(f"  harness-run server --engine {shlex.quote(str(built.engine_dir))}", soft_wrap=True)
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(built.engine_dir) + b"\n")  # exact, whatever the terminal's encoding


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
    counts: dict[str, int] = {}
    for layer_precision in manifest.recipe.layers.values():
        counts[layer_precision] = counts.get(layer_precision, 0) + 1
    table = Table(show_header=False, box=None, title=_printable(f"engine {manifest.engine_id}"), title_justify="left")
    kv = manifest.kv
    rows = {
        "model": f"{manifest.model.name} ({manifest.model.architecture}, {manifest.model.num_parameters:,} weights)",
        "arch": f"{manifest.arch} through {manifest.backend}",
        "versions": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
        "recipe": f"{manifest.recipe.name}: "
        + ", ".join(f"{n} x {p}" for p, n in counts.items())
        + f"; {manifest.recipe.bits_per_weight:.2f} bits per weight",
        "calibration": manifest.calibration.method,
        "model files": f"{manifest.weight_bytes() / 2**20:.1f} MiB",
        "KV cache": f"{kv.kind}, {kv.num_layers} layers x {kv.num_kv_heads} heads x ({kv.key_dim} + {kv.value_dim}); "
        + ", ".join(f"{mode} {n:,} bytes a token" for mode, n in kv.bytes_per_token.items()),
        "context": f"{manifest.max_model_len:,} tokens",
        "quality": manifest.quality.verdict,
        "weights hash": manifest.model.content_hash,
    }
    for name, value in rows.items():
        table.add_row(name, _printable(value))
    Console().print(table)


def _printable(text: str) -> Text:
    """Text that cannot speak to the terminal: an engine may come from anywhere."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


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
