"""Builds a CPU engine: source, recipe and tokenizer in, an engine folder out."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import openvino as ov

import harness
from harness.arch import CPU
from harness.build.checkpoint import QuantizedCheckpoint
from harness.build.lowering.decoder import LOWERING_VERSION, build_stateful_model
from harness.build.lowering.weights import Spool, WeightLowering
from harness.build.manifest_parts import calibration_part, kv_part, model_part, recipe_part, tokenizer_part
from harness.build.store import DISK_FULL, check_free_space, engine_id, existing_engine, not_written, staged, was_taken
from harness.build.tokenizer_check import check_tokenizer
from harness.build.weight_check import check_weights
from harness.errors import BuildError
from harness.ledger import kv_layout, weights_bytes
from harness.manifest import EngineManifest, KvPart, QualityPart, describe_files, write_manifest
from harness.recipe import Precision, Recipe
from harness.spec import ModelSpec
from harness.tokenizer import Tokenizer
from harness.weight_source import WeightSource

_DISK_FACTOR = 2.1  # the spool of finished constants and the engine's own file stand beside each other for a while
_GRAPH_BYTES = 16 << 20  # more than model.xml takes


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """Where an engine is, and whether it was there already."""

    engine_dir: Path
    reused: bool


def build_cpu_engine(
    source: WeightSource,
    recipe: Recipe,
    *,
    engines_dir: Path,
    out: Path | None = None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> BuiltEngine:
    """Lower a model for `cpu` and store it, or find it built.

    Args:
        source: where the weights are; of a `QuantizedCheckpoint`, decoder linears are lowered bit for bit.
        recipe: the precision of each module; of a checkpoint, decoder linears must have its own.
        engines_dir: the store; the engine goes to `<engines_dir>/<model>/cpu-<id>` unless `out` names its folder.
        on_layer: called with the number of each finished decoder layer.

    Raises:
        HarnessError: the model, its tokenizer or the recipe is refused, or the disk is full; nothing is left behind.
    """
    spec = source.spec
    check_weights(source)
    resolved = recipe.resolve(spec)
    if isinstance(source, QuantizedCheckpoint):
        source.check_recipe(resolved)
    layers = {name: str(precision) for name, precision in resolved.items()}
    versions = {"harness": harness.__version__, "lowering": str(LOWERING_VERSION), "openvino": ov.get_version()}
    compile_settings = _compile_settings(resolved)
    fingerprint = source.fingerprint()
    identity = engine_id(
        content_hash=fingerprint,
        arch=CPU.name,
        layers=layers,
        versions=versions,
        compile_settings=compile_settings,
    )
    engine_dir = out or engines_dir / source.name / f"{CPU.name}-{identity}"
    found = BuiltEngine(engine_dir=engine_dir, reused=True)
    try:
        if existing_engine(engine_dir, identity):
            return found
    except OSError as error:
        raise not_written(engine_dir, error) from None
    tokenizer = Tokenizer(source.tokenizer, source.generation_config)
    check_tokenizer(tokenizer, spec)
    try:
        with staged(engine_dir) as stage:
            check_free_space(stage.parent, int(weights_bytes(spec, resolved) * _DISK_FACTOR))
            _write_model(source, resolved, stage, on_layer)
            tokenizer.save(stage)
            if isinstance(source, QuantizedCheckpoint):
                for path in source.evidence():
                    shutil.copyfile(path, stage / path.name)
            manifest = EngineManifest(
                engine_id=identity,
                model=model_part(source, fingerprint),
                arch=CPU.name,
                backend=CPU.backend,
                versions=versions,
                recipe=recipe_part(recipe.name, spec, resolved),
                calibration=calibration_part(source),
                kv=_kv_part(spec),
                max_model_len=spec.max_position_embeddings,
                tokenizer=tokenizer_part(tokenizer),
                compile_settings=compile_settings,
                quality=QualityPart(verdict="not_run"),
                files=describe_files(stage),
            )
            write_manifest(stage, manifest)
    except OSError as error:
        if was_taken(error) and existing_engine(engine_dir, identity):
            return found  # another build of the same engine was faster
        raise not_written(engine_dir, error) from None
    return BuiltEngine(engine_dir=engine_dir, reused=False)


def _write_model(
    source: WeightSource, resolved: dict[str, Precision], stage: Path, on_layer: Callable[[int], None]
) -> None:
    with Spool(stage / "constants.spool") as spool:
        model = build_stateful_model(source.spec, WeightLowering(source, resolved, spool), on_layer=on_layer)
        try:
            ov.save_model(model, stage / "model.xml", compress_to_fp16=False)
        except RuntimeError as error:
            _check_room(stage)
            raise BuildError(
                f"OpenVINO cannot write the model: {error}",
                "build again; if it says the same, report it with this text",
            ) from error
    _check_saved(stage)


def _check_room(stage: Path) -> None:
    """Raises the OSError that OpenVINO does not tell, where the constants would not fit on the disk a second time."""
    try:
        with (stage / "room").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (stage / "constants.spool").stat().st_size + _GRAPH_BYTES)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise


def _check_saved(stage: Path) -> None:
    # OpenVINO does not report a short write
    graph = (stage / "model.xml").read_text(encoding="utf-8", errors="replace")
    if not graph.rstrip().endswith("</net>"):
        raise OSError(errno.ENOSPC, f"model.xml ends after {len(graph)} characters")
    needed = max(int(o) + int(n) for o, n in re.findall(r'offset="(\d+)" size="(\d+)"', graph))
    written = (stage / "model.bin").stat().st_size
    if written < needed:
        raise OSError(errno.ENOSPC, f"only {written} of {needed} bytes of model.bin were written")


def _kv_part(spec: ModelSpec) -> KvPart:
    layout = kv_layout(spec)
    return kv_part(spec, layout, {"fast": layout.bytes_per_token("u8"), "deterministic": layout.bytes_per_token("f32")})


def _compile_settings(resolved: dict[str, Precision]) -> dict[Literal["fast", "deterministic"], dict[str, str]]:
    """OpenVINO properties of the two execution modes. Activations are quantized in the groups of the weights."""
    groups = [p.group_size for p in resolved.values() if p.dtype == "int4" and p.group_size is not None]
    shared = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
    return {
        "fast": {
            **shared,
            "KV_CACHE_PRECISION": "u8",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(min(groups, default=128)),
        },
        "deterministic": {
            **shared,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        },
    }
