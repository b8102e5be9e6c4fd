"""Builds a GPU engine from a TensorRT-LLM checkpoint, on a machine with the GPU it is for.

Owns what an engine's folder and manifest hold. Limits are `limits`, the builder's command line is `trtllm_build`. What
the manifest says of limits and of reuse was read from what was built, not from what was asked for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.arch import Arch
from harness.build.cpu_engine import BuiltEngine
from harness.build.manifest_parts import kv_part
from harness.build.store import check_free_space, engine_id, existing_engine, not_written, staged, was_taken
from harness.build.tensorrt_llm.checkpoint import TrtllmCheckpoint
from harness.build.tensorrt_llm.limits import EngineLimits, rank_kv_bytes_per_token
from harness.build.tensorrt_llm.trtllm_build import (
    LOG_NAME,
    EngineOptions,
    build_command,
    build_flags,
    run_trtllm_build,
)
from harness.checkpoint_record import NGRAMS_NAME, SENSITIVITY_NAME
from harness.errors import BuildError
from harness.ledger import kv_layout
from harness.manifest import EngineManifest, GpuPart, KvPart, QualityPart, describe_files, engine_files, write_manifest
from harness.weight_source import safe_name

_CONFIG_NAME = "config.json"
_LIMITS = ("max_batch_size", "max_num_tokens", "max_input_len")
_DISK_FACTOR = 1.1  # of the checkpoint: an engine holds its weights, and code
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class BuiltGpuEngine(BuiltEngine):
    """A GPU engine, and the lines of the builder's log that tell of something given up."""

    fallbacks: list[str]


def build_gpu_engine(
    checkpoint: TrtllmCheckpoint,
    arch: Arch,
    limits: EngineLimits,
    options: EngineOptions,
    *,
    versions: Mapping[str, str],
    engines_dir: Path,
    out: Path | None = None,
    num_workers: int = 1,
    on_line: Callable[[str], None] = lambda line: None,
) -> BuiltGpuEngine:
    """Build an engine and store it, or find it built.

    Args:
        arch: of the GPU that is here; the builder asks the device and cannot be told.
        versions: of all that the engine depends on, `tensorrt_llm` and `tensorrt` among them.
        engines_dir: the store; the engine goes to `<engines_dir>/<model>/<arch>-<id>` unless `out` names its folder.
        num_workers: ranks built at once, each on a GPU of its own.
        on_line: called with each line of the builder's log.

    Raises:
        BuildError: the builder failed, or built something else than it was asked for; nothing is left behind.
    """
    record = checkpoint.record
    flags = build_flags(limits, options)
    identity = engine_id(
        content_hash=record.checkpoint_id,
        arch=arch.name,
        layers=record.recipe.layers,
        versions=versions,
        compile_settings={"fast": {"trtllm-build": " ".join(flags)}},
    )
    engine_dir = out or engines_dir / safe_name(record.model.name) / f"{arch.name}-{identity}"
    found = BuiltGpuEngine(engine_dir=engine_dir, reused=True, fallbacks=[])
    if existing_engine(engine_dir, identity):
        return found
    try:
        with staged(engine_dir) as stage:
            weights = sum(p.num_bytes for name, p in record.files.items() if name.endswith(".safetensors"))
            check_free_space(stage.parent, int(weights * _DISK_FACTOR))
            command = build_command(checkpoint.path, stage, flags, num_workers=num_workers)
            fallbacks = run_trtllm_build(command, stage / LOG_NAME, on_line)
            for name in (*_TOKENIZER_FILES, NGRAMS_NAME, SENSITIVITY_NAME):
                if (checkpoint.path / name).is_file():
                    shutil.copyfile(checkpoint.path / name, stage / name)
            manifest = EngineManifest(
                engine_id=identity,
                model=record.model,
                arch=arch.name,
                backend=arch.backend,
                versions=dict(versions),
                recipe=record.recipe,
                calibration=record.calibration,
                kv=_kv_part(checkpoint),
                max_model_len=limits.max_seq_len,
                tokenizer=record.tokenizer,
                compile_settings={},
                gpu=_gpu_part(checkpoint, _built_with(stage, checkpoint), options, flags),
                quality=QualityPart(verdict="not_run"),
                files=describe_files(stage),
            )
            write_manifest(stage, manifest)
    except OSError as error:
        if was_taken(error) and existing_engine(engine_dir, identity):
            return found  # another build of the same engine was faster
        raise not_written(engine_dir, error) from None
    return BuiltGpuEngine(engine_dir=engine_dir, reused=False, fallbacks=fallbacks)


def _built_with(stage: Path, checkpoint: TrtllmCheckpoint) -> dict[str, Any]:
    """What an engine was built with, after a look that all of it is there."""
    num_ranks = checkpoint.record.tp_size * checkpoint.record.pp_size
    missing = [name for name in engine_files(num_ranks) if not (stage / name).is_file()]
    if missing:
        raise BuildError(f"trtllm-build wrote no {missing[0]}", "see its log; build again")
    try:
        config: dict[str, Any] = json.loads((stage / _CONFIG_NAME).read_text(encoding="utf-8"))["build_config"]
        built = {name: config[name] for name in _LIMITS}
        wrong = [name for name, value in built.items() if type(value) is not int or value < 1]
        if wrong:
            raise ValueError(f"{wrong[0]} is {built[wrong[0]]!r}")
        built["gather_context_logits"] = bool(config["gather_context_logits"])
        built["use_paged_context_fmha"] = config["plugin_config"]["use_paged_context_fmha"] is True
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(
            f"the {_CONFIG_NAME} that trtllm-build wrote is not as known: {error!r}", "see harness-build doctor"
        ) from None
    return built


def _gpu_part(
    checkpoint: TrtllmCheckpoint, built: Mapping[str, Any], options: EngineOptions, flags: list[str]
) -> GpuPart:
    record, ahead = checkpoint.record, options.lookahead
    paged_context = built["use_paged_context_fmha"]
    return GpuPart(
        tp_size=record.tp_size,
        pp_size=record.pp_size,
        dtype=record.dtype,
        kv_dtype=record.kv_dtype,
        prefix_reuse=paged_context,
        chunked_context=paged_context,
        max_batch_size=built["max_batch_size"],
        max_num_tokens=built["max_num_tokens"],
        max_input_len=built["max_input_len"],
        lookahead=(ahead.window, ahead.ngram, ahead.verification) if ahead else None,
        context_logits=built["gather_context_logits"],
        build_flags=flags,
        checkpoint_id=record.checkpoint_id,
    )


def _kv_part(checkpoint: TrtllmCheckpoint) -> KvPart:
    record, spec = checkpoint.record, checkpoint.spec
    per_rank = rank_kv_bytes_per_token(spec, tp_size=record.tp_size, pp_size=record.pp_size, kv_dtype=record.kv_dtype)
    return kv_part(spec, kv_layout(spec, mla="latent-once"), {"fast": per_rank})
