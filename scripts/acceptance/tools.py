"""The programs of a run and the folders they write: command lines of harness-build, harness-run and trtllm-serve.

Calibration and TensorRT-LLM want releases of transformers that exclude each other, so the environment that calibrates
may be another than the one this runs in.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steps import StepFailed

from harness.build.tensorrt_llm.checkpoint import open_trtllm_checkpoint
from harness.build.tensorrt_llm.limits import LimitWishes, choose_limits, rank_ledger
from harness.build.tensorrt_llm.record import RECORD_NAME
from harness.build.tensorrt_llm.trtllm_build import EngineOptions, Lookahead, build_command, build_flags
from harness.checkpoint_record import RECORD_NAME as QUANTIZED_RECORD
from harness.ledger import GIB
from harness.manifest import read_manifest
from harness.recipe import Precision

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL_MODEL = REPOSITORY / "tests" / "models" / "tiny-llama"
RECIPES = Path(__file__).resolve().parent / "recipes"
LOOKAHEAD = "7,7,7"
_CARD_BYTES = 80 * GIB


def program(name: str, first: Path | None = None) -> str:
    """Path of a console script: of the environment `first`, then of this one, then on PATH."""
    folders = [*([first] if first else []), Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    for folder in folders:
        if found := shutil.which(name, path=str(folder)):
            return found
    return shutil.which(name) or name


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model in one form, from its checkpoint to its engine.

    Attributes:
        name: of its steps and its folder.
        work: the folder that holds the folders of all variants.
        source: flags that say which weights in which precision the checkpoint is made of.
        quantized_in: the variant whose calibration quantized them; None where nothing is calibrated.
        tp: GPUs that share each layer.
        checkpoint_flags, engine_flags: further ones of `harness-build`.
        given: a TensorRT-LLM checkpoint made elsewhere; there is none to make then.
    """

    name: str
    work: Path
    source: tuple[str, ...] = ()
    quantized_in: str | None = None
    tp: int = 1
    checkpoint_flags: tuple[str, ...] = ()
    engine_flags: tuple[str, ...] = ()
    given: Path | None = None

    @property
    def folder(self) -> Path:
        """All that is made of it."""
        return self.work / self.name

    @property
    def checkpoint(self) -> Path:
        """The TensorRT-LLM checkpoint."""
        return self.given or self.folder / "trtllm"

    @property
    def engine(self) -> Path:
        """The GPU engine."""
        return self.folder / "engine"

    @property
    def cpu_engine(self) -> Path:
        """The engine of the same integers for `cpu`."""
        return self.folder / "cpu"

    @property
    def cpu_answers(self) -> Path:
        """Greedy answers of that engine."""
        return self.folder / "cpu-answers.json"

    def is_made(self) -> bool:
        """Whether the checkpoint is there, made of the same flags by a former run, or given."""
        if not (self.checkpoint / RECORD_NAME).is_file():
            return False
        return self.given is not None or (self._note.is_file() and self._note.read_text("utf-8") == self._made_of())

    def note(self) -> None:
        """Keep what the checkpoint was made of, for the next run."""
        self._note.write_text(self._made_of(), encoding="utf-8")

    @property
    def _note(self) -> Path:
        return self.folder / "made-of.json"

    def _made_of(self) -> str:
        # of paths the names alone: folders may lie elsewhere on another machine
        return json.dumps([Path(word).name for word in (*self.source, *self.checkpoint_flags, str(self.tp))]) + "\n"

    def lowered_from(self) -> list[str]:
        """Flags that name the very integers of the checkpoint.

        Raises:
            StepFailed: it was calibrated, and its quantized checkpoint is not there.
        """
        if self.quantized_in is None:
            return list(self.source)
        engines = self.work / self.quantized_in / "engines"
        found = sorted(engines.glob(f"*/quantized-*/{QUANTIZED_RECORD}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise StepFailed(f"there is no quantized checkpoint in {engines}")
        return ["--checkpoint", str(found[-1].parent)]


def build(arch: str, *flags: str, calib_bin: Path | None = None) -> list[str]:
    """A command line of `harness-build`; where it may calibrate, in the environment that can."""
    return [program("harness-build", calib_bin), "--arch", arch, *flags]


def serve(engine: Path, *flags: str) -> Callable[[int], list[str]]:
    """The command line of `harness-run server` on a port."""
    command = [program("harness-run"), "server", "--engine", str(engine), *flags]
    return lambda port: [*command, "--port", str(port)]


def trtllm_serve(engine: Path, tokenizer: Path, *, memory_fraction: float) -> Callable[[int], list[str]]:
    """The command line of `trtllm-serve` on an engine of ours, with the engine's own limits."""
    manifest = read_manifest(engine)
    if manifest.gpu is None:
        raise StepFailed(f"{engine} is not an engine for GPUs")
    flags = {
        "--backend": "tensorrt",
        "--tokenizer": str(tokenizer),
        "--host": "127.0.0.1",
        "--tp_size": manifest.gpu.tp_size,
        "--max_batch_size": manifest.gpu.max_batch_size,
        "--max_num_tokens": manifest.gpu.max_num_tokens,
        "--max_seq_len": manifest.max_model_len,
        "--kv_cache_free_gpu_memory_fraction": memory_fraction,
    }
    written = [str(word) for pair in flags.items() for word in pair]
    return lambda port: [program("trtllm-serve"), "serve", str(engine), *written, "--port", str(port)]


def trtllm_serve_folder(folder: Path) -> Callable[[int], list[str]]:
    """The command line of `trtllm-serve` on a folder for its PyTorch backend."""
    command = [program("trtllm-serve"), "serve", str(folder), "--backend", "pytorch", "--host", "127.0.0.1"]
    return lambda port: [*command, "--port", str(port)]


def write_tokenizer(engine: Path, folder: Path) -> Path:
    """The engine's tokenizer as transformers reads it; an engine has its settings in a form of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(engine / "tokenizer.json", folder / "tokenizer.json")
    own = json.loads((engine / "tokenizer_config.json").read_text("utf-8"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **own["special_tokens"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
    return folder


def builder_command(variant: Variant) -> list[str]:
    """The `trtllm-build` that `harness-build --stage engine` runs for a variant, on a card of 80 GiB."""
    checkpoint = open_trtllm_checkpoint(variant.checkpoint)
    record, flags = checkpoint.record, variant.engine_flags
    options = EngineOptions(
        paged_context=record.kv_dtype != "int8",
        lookahead=Lookahead.parse(LOOKAHEAD) if "--lookahead" in flags else None,
    )
    ledger = rank_ledger(
        checkpoint.spec,
        {module: Precision.parse(text) for module, text in record.recipe.layers.items()},
        tp_size=record.tp_size,
        pp_size=record.pp_size,
        kv_dtype=record.kv_dtype,
        memory_bytes=_CARD_BYTES,
    )
    limits = choose_limits(
        checkpoint.spec,
        ledger,
        LimitWishes(),
        chunked_context=options.paged_context,
        num_draft_tokens=options.lookahead.num_draft_tokens if options.lookahead else 0,
    )
    num_ranks = record.tp_size * record.pp_size
    return build_command(variant.checkpoint, variant.engine, build_flags(limits, options), num_workers=num_ranks)
