"""What a user asks of `harness-build` for a GPU, and the way there: a checkpoint here, an engine where the GPU is.

Owns the flags that only GPU archs have, and what is said of the half that this machine cannot do.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import harness
from harness.arch import Arch, check_device
from harness.build.request import BuildRequest
from harness.build.tensorrt_llm.checkpoint import TrtllmCheckpoint, build_trtllm_checkpoint, open_trtllm_checkpoint
from harness.build.tensorrt_llm.engine import build_gpu_engine
from harness.build.tensorrt_llm.families import LATENT_CAVEAT, LATENT_FAMILY, check_family
from harness.build.tensorrt_llm.limits import (
    DEFAULT_NUM_TOKENS,
    NUM_LOGIT_TOKENS,
    LimitWishes,
    choose_limits,
    rank_ledger,
)
from harness.build.tensorrt_llm.pytorch_folder import build_pytorch_folder
from harness.build.tensorrt_llm.pytorch_limits import BACKEND as PYTORCH
from harness.build.tensorrt_llm.pytorch_limits import check_expressible
from harness.build.tensorrt_llm.record import RECORD_NAME, TrtllmCheckpointRecord
from harness.build.tensorrt_llm.trtllm_build import EngineOptions, Lookahead
from harness.build.tensorrt_llm.versions import installed, missing_for_engines
from harness.console import printable
from harness.errors import BuildError, DeviceError, HarnessError, UsageError
from harness.ledger import gib
from harness.manifest import MOST_RANKS
from harness.nvml import GpuDevice, devices
from harness.recipe import Precision, Recipe
from harness.spec import ModelSpec
from harness.weight_source import some

BACKENDS = ("tensorrt-llm", PYTORCH)
STAGES = ("all", "checkpoint", "engine")
_INT8_KV = (
    "an int8 KV cache halves KV memory, and TensorRT-LLM then has no paged context attention: no reuse of prefixes, "
    "and no prompt longer than --max-num-tokens"
)
_PROBE = Recipe(name="int4 everywhere", rules=(("*", Precision.parse("int4")),))


@dataclass(frozen=True, kw_only=True)
class GpuRequest:
    """The flags that only GPU archs have, as given.

    Raises:
        UsageError: flags that contradict each other, or a value that is none of those allowed.
    """

    backend: str = BACKENDS[0]
    stage: str = STAGES[0]
    tp_size: int = 1
    pp_size: int = 1
    kv_cache_dtype: str = "auto"
    wishes: LimitWishes = field(default_factory=LimitWishes)
    lookahead: str | None = None
    context_logits: bool = False

    def __post_init__(self) -> None:
        for flag, value, allowed in (
            ("--backend", self.backend, BACKENDS),
            ("--stage", self.stage, STAGES),
            ("--kv-cache-dtype", self.kv_cache_dtype, ("auto", "int8")),
        ):
            if value not in allowed:
                raise UsageError(f"unknown {flag} {value!r}", f"allowed: {', '.join(allowed)}")
        for flag, size in (("--tp", self.tp_size), ("--pp", self.pp_size)):
            if not 1 <= size <= MOST_RANKS:
                raise UsageError(f"{flag} is {size}", f"allowed: 1 to {MOST_RANKS}")
        self.options()
        engine_flags = self.engine_flags()
        if self.backend == PYTORCH:
            engine_flags += [*["--stage"] * (self.stage != STAGES[0]), *["--pp"] * (self.pp_size != 1)]
            if engine_flags:
                raise UsageError(
                    f"{engine_flags[0]} is of engines, --backend {PYTORCH} builds none",
                    "give it to trtllm-serve, which loads the folder",
                )
        elif engine_flags and self.stage == "checkpoint":
            raise UsageError(
                f"{engine_flags[0]} is of engines, --stage checkpoint builds none", "give it with --stage engine"
            )

    def engine_flags(self) -> list[str]:
        """What was asked of the engine, and not of its checkpoint, as a command line gives it."""
        ahead = ["--lookahead", self.lookahead] if self.lookahead is not None else []
        return [*ahead, *["--context-logits"] * self.context_logits, *self.wishes.flags()]

    def options(self) -> EngineOptions:
        """What the engine can do besides."""
        return EngineOptions(
            paged_context=self.kv_cache_dtype != "int8",
            lookahead=Lookahead.parse(self.lookahead) if self.lookahead is not None else None,
            context_logits=self.context_logits,
        )

    @property
    def num_ranks(self) -> int:
        """GPUs of an engine."""
        return self.tp_size * self.pp_size

    @property
    def kv_dtype(self) -> Literal["auto", "int8"]:
        """Of the KV cache."""
        return "int8" if self.kv_cache_dtype == "int8" else "auto"


@dataclass(frozen=True, kw_only=True)
class GpuOutcome:
    """What came of a request: `path` is an engine, or what an engine is made of, or a folder for another server."""

    path: Path
    kind: Literal["engine", "checkpoint", "folder"]
    reused: bool


def build_for_gpu(
    request: BuildRequest, gpu: GpuRequest, arch: Arch, *, out: Path | None, console: Console
) -> GpuOutcome:
    """Do what can be done here of what was asked for, and say what is left.

    Raises:
        HarnessError: the model, the recipe, the arch or this machine is refused; what was finished before stays.
    """
    if gpu.backend == PYTORCH:
        return _pytorch_folder(request, gpu, arch, out, console)
    if gpu.kv_dtype == "int8":
        console.print(_INT8_KV, soft_wrap=True)
    if arch.caveat:
        console.print(f"{arch.name}: {arch.caveat}", soft_wrap=True)
    if gpu.stage == "engine":
        return _engine(_given_checkpoint(request), gpu, arch, out, console)
    checkpoint, reused = _checkpoint(request, gpu, arch, out if gpu.stage == "checkpoint" else None, console)
    if gpu.stage == "checkpoint":
        return GpuOutcome(path=checkpoint.path, kind="checkpoint", reused=reused)
    lacking = _lacking(arch, gpu.num_ranks)
    if lacking is None:
        return _engine(checkpoint, gpu, arch, out, console)
    _say_what_is_left(checkpoint, gpu, arch, out, lacking, console)
    return GpuOutcome(path=checkpoint.path, kind="checkpoint", reused=reused)


def _checkpoint(
    request: BuildRequest, gpu: GpuRequest, arch: Arch, out: Path | None, console: Console
) -> tuple[TrtllmCheckpoint, bool]:
    if request.checkpoint is not None and (request.checkpoint / RECORD_NAME).is_file():
        if out is not None:
            raise UsageError(
                f"{request.checkpoint} is a TensorRT-LLM checkpoint already, nothing is made for --out",
                "build its engine: --stage engine",
            )
        checkpoint = _given_checkpoint(request)
        _check_agrees(gpu, checkpoint.record)
        return checkpoint, True

    def check(spec: ModelSpec, resolved: Mapping[str, Precision] | None) -> None:
        if resolved is None and gpu.pp_size > 1:
            raise UsageError(
                "--pp needs equal precisions in each stage, which a search for a mix does not keep",
                "divide each layer with --tp, or give a --recipe or --precision",
            )
        if spec.architecture == LATENT_FAMILY:
            console.print(LATENT_CAVEAT, soft_wrap=True)
        check_family(
            spec,
            arch,
            _PROBE.resolve(spec) if resolved is None else resolved,
            tp_size=gpu.tp_size,
            pp_size=gpu.pp_size,
            kv_dtype=gpu.kv_dtype,
        )

    source, recipe = request.open(Path("engines"), console, check)
    with _layers("lowering", source.spec.num_layers, console) as on_layer:
        built = build_trtllm_checkpoint(
            source,
            recipe,
            engines_dir=Path("engines"),
            out=out,
            tp_size=gpu.tp_size,
            pp_size=gpu.pp_size,
            kv_dtype=gpu.kv_dtype,
            on_layer=on_layer,
        )
    checkpoint = built.checkpoint
    _tell_sixteen_bit(built.sixteen_bit, console)
    console.print(printable(f"{'found' if built.reused else 'made'} checkpoint {built.path}"), soft_wrap=True)
    _tell_checkpoint(checkpoint, console)
    return checkpoint, built.reused


def _tell_checkpoint(checkpoint: TrtllmCheckpoint, console: Console) -> None:
    record = checkpoint.record
    ranks = record.tp_size * record.pp_size
    lines = [f"{ranks} rank{'s' if ranks > 1 else ''}, {record.dtype}, KV cache {record.kv_dtype}"]
    if set(record.recipe.layers.values()) != {"f16"}:
        lines.append("embeddings and lm_head stay 16-bit")
    if any(precision.startswith("int8") for precision in record.recipe.layers.values()):
        lines.append("int8 layers compute with int8 inputs, by scales that calibration measured")
    console.print("; ".join(lines), soft_wrap=True)


def _tell_sixteen_bit(modules: Sequence[str], console: Console) -> None:
    if modules:
        console.print(
            printable(
                f"16-bit instead of int8, for want of the input maxima that calibration measures: {some(modules)}"
            ),
            soft_wrap=True,
        )


def _given_checkpoint(request: BuildRequest) -> TrtllmCheckpoint:
    if request.checkpoint is None:
        raise UsageError(
            "--stage engine builds from a TensorRT-LLM checkpoint, none was given",
            "make one with --stage checkpoint, and give its folder as --checkpoint",
        )
    return open_trtllm_checkpoint(request.checkpoint)


def _engine(
    checkpoint: TrtllmCheckpoint, gpu: GpuRequest, arch: Arch, out: Path | None, console: Console
) -> GpuOutcome:
    record = checkpoint.record
    num_ranks = record.tp_size * record.pp_size
    _check_agrees(gpu, record)
    int8_kv = record.kv_dtype == "int8"
    if int8_kv and gpu.kv_dtype != "int8":
        console.print(_INT8_KV, soft_wrap=True)
    resolved = {module: Precision.parse(text) for module, text in record.recipe.layers.items()}
    check_family(
        checkpoint.spec,
        arch,
        resolved,
        tp_size=record.tp_size,
        pp_size=record.pp_size,
        kv_dtype="int8" if int8_kv else "auto",
    )
    if lacking := _lacking(arch, num_ranks):
        raise lacking
    found = devices()[:num_ranks]
    options = replace(gpu.options(), paged_context=not int8_kv)
    num_tokens = NUM_LOGIT_TOKENS if options.context_logits else DEFAULT_NUM_TOKENS
    ledger = rank_ledger(
        checkpoint.spec,
        resolved,
        tp_size=record.tp_size,
        pp_size=record.pp_size,
        kv_dtype=record.kv_dtype,
        memory_bytes=min(device.total_bytes for device in found),
        num_logit_tokens=(gpu.wishes.max_num_tokens or num_tokens) if options.context_logits else 0,
    )
    limits = choose_limits(
        checkpoint.spec,
        ledger,
        gpu.wishes,
        chunked_context=options.paged_context,
        num_draft_tokens=options.lookahead.num_draft_tokens if options.lookahead else 0,
        num_tokens=num_tokens,
    )
    console.print(
        f"limits: {limits.max_batch_size} sequences and {limits.max_num_tokens:,} tokens a step, context "
        f"{limits.max_seq_len:,}; on each GPU {gib(ledger.weights_bytes)} of weights and "
        f"{ledger.kv_bytes_per_token:,} bytes of KV a token",
        soft_wrap=True,
    )
    with console.status("trtllm-build, minutes ...") as status:
        built = build_gpu_engine(
            checkpoint,
            arch,
            limits,
            options,
            versions=_versions(found),
            engines_dir=Path("engines"),
            out=out,
            num_workers=num_ranks,
            on_line=lambda line: status.update(printable(line[-100:])),
        )
    for line in built.fallbacks:
        console.print(printable(f"trtllm-build gave something up: {line}"), soft_wrap=True)
    return GpuOutcome(path=built.engine_dir, kind="engine", reused=built.reused)


def _check_agrees(gpu: GpuRequest, record: TrtllmCheckpointRecord) -> None:
    """Refuse flags that the checkpoint has decided otherwise."""
    for flag, given, made, unsaid in (
        ("--kv-cache-dtype", gpu.kv_cache_dtype, "int8" if record.kv_dtype == "int8" else "auto", "auto"),
        ("--tp", gpu.tp_size, record.tp_size, 1),
        ("--pp", gpu.pp_size, record.pp_size, 1),
    ):
        if given not in (made, unsaid):
            raise UsageError(
                f"{flag} is {given}, the checkpoint was made with {made}", "give the same, or make it again"
            )


def _versions(found: list[GpuDevice]) -> dict[str, str]:
    """What an engine depends on; only the same TensorRT and TensorRT-LLM can load it."""
    packages = {name.replace("-", "_"): installed(name) for name in ("tensorrt-llm", "tensorrt")}
    cuda = ".".join(map(str, found[0].cuda_version))
    return {"harness": harness.__version__, "cuda_driver": cuda} | {k: v for k, v in packages.items() if v}


def _lacking(arch: Arch, num_ranks: int) -> HarnessError | None:
    """Why this machine cannot build an engine for an arch; None where it can."""
    try:
        found = devices()
        check_device(arch, found)
    except DeviceError as error:
        return error
    if len(found) < num_ranks:
        return BuildError(
            f"an engine of {num_ranks} ranks needs as many GPUs, {len(found)} are visible", "see --tp, --pp"
        )
    missing = missing_for_engines()
    if missing:
        return BuildError(
            f"this environment lacks {', '.join(missing)}", f"see harness-build doctor --arch {arch.name}"
        )
    return None


def _say_what_is_left(
    checkpoint: TrtllmCheckpoint, gpu: GpuRequest, arch: Arch, out: Path | None, lacking: HarnessError, console: Console
) -> None:
    to = [] if out is None else ["--out", str(out)]
    flags = shlex.join(["--checkpoint", str(checkpoint.path), *gpu.engine_flags(), *to])
    for line in (
        f"the engine is left to do: {lacking.message}",
        f"copy the folder to a machine with {arch.describe()} and TensorRT-LLM, and there:",
        f"  harness-build --arch {arch.name} --stage engine {flags}",
    ):
        console.print(printable(line), soft_wrap=True)


def _pytorch_folder(
    request: BuildRequest, gpu: GpuRequest, arch: Arch, out: Path | None, console: Console
) -> GpuOutcome:
    def check(spec: ModelSpec, resolved: Mapping[str, Precision] | None) -> None:
        wanted = _PROBE.resolve(spec) if resolved is None else resolved
        check_expressible(spec, wanted, arch, gpu.tp_size, gpu.kv_cache_dtype)

    source, recipe = request.open(Path("engines"), console, check)
    with _layers("writing", source.spec.num_layers, console) as on_layer:
        built = build_pytorch_folder(
            source, recipe, engines_dir=Path("engines"), out=out, tp_size=gpu.tp_size, arch=arch, on_layer=on_layer
        )
    for line in (
        "serve it with TensorRT-LLM's PyTorch backend, on the GPU machine:",
        f"  trtllm-serve {shlex.quote(str(built.path))} --backend pytorch --tp_size {gpu.tp_size}",
    ):
        console.print(printable(line), soft_wrap=True)
    return GpuOutcome(path=built.path, kind="folder", reused=built.reused)


@contextmanager
def _layers(what: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda layer: progress.update(task, completed=layer + 1)
