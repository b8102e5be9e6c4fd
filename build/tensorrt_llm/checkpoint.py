"""Lowers a model to a TensorRT-LLM checkpoint, the folder that `trtllm-build` makes an engine of. Needs no GPU.

Owns the folder: whole or not there, found again where it was made before, its files hashed before any is read. What
stands in it is decided by `plan`, laid out by `weights` and `latent_weights`, described by `trtllm_config`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import harness
from harness.build.checkpoint import QuantizedCheckpoint
from harness.build.hf_tokenizer import read_json
from harness.build.manifest_parts import calibration_part, model_part, recipe_part, tokenizer_part
from harness.build.safetensors_writer import StreamedTensor, write_safetensors
from harness.build.store import check_free_space, not_written, staged, was_taken
from harness.build.tensorrt_llm.families import LATENT_FAMILY, check_family
from harness.build.tensorrt_llm.latent_weights import LatentRankWeights
from harness.build.tensorrt_llm.plan import Plan, make_plan
from harness.build.tensorrt_llm.ranks import Ranks
from harness.build.tensorrt_llm.record import (
    HF_CONFIG_NAME,
    RECORD_NAME,
    TrtllmCheckpointRecord,
    read_trtllm_record,
)
from harness.build.tensorrt_llm.trtllm_config import quant_cfg, trtllm_config
from harness.build.tensorrt_llm.weights import RankWeights
from harness.build.tokenizer_check import check_tokenizer
from harness.build.weight_check import check_weights
from harness.errors import BuildError, EngineError, SourceError
from harness.manifest import describe_files, verify_file
from harness.recipe import Recipe, linear_shapes
from harness.spec import ModelSpec
from harness.tokenizer import Tokenizer
from harness.weight_source import WeightSource

_LAYOUT_VERSION = 1
_READ_BY_BUILDER = ("config.json", "quant_cfg.json")
_COPY_AGAIN = "copy the checkpoint again, whole, or remove its folder and make it again with --stage checkpoint"


@dataclass(frozen=True, kw_only=True)
class BuiltTrtllmCheckpoint:
    """A checkpoint, whether it was there already, and the int8 modules that are 16-bit in it.

    Those have no static scale of their inputs: the weights were not calibrated, or nothing reached them.
    """

    checkpoint: TrtllmCheckpoint
    reused: bool
    sixteen_bit: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.checkpoint.path


class TrtllmCheckpoint:
    """A whole checkpoint. Made by `open_trtllm_checkpoint`.

    Attributes:
        path: its folder.
        record: what it says of itself.
    """

    def __init__(self, path: Path, record: TrtllmCheckpointRecord) -> None:
        self.path = path
        self.record = record

    @cached_property
    def spec(self) -> ModelSpec:
        """The typed description of the model."""
        return ModelSpec.from_hf_config(read_json(self.path / HF_CONFIG_NAME, required=True))


def build_trtllm_checkpoint(
    source: WeightSource,
    recipe: Recipe,
    *,
    engines_dir: Path,
    out: Path | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    kv_dtype: Literal["auto", "int8"] = "auto",
    on_layer: Callable[[int], None] = lambda layer: None,
) -> BuiltTrtllmCheckpoint:
    """Lower a model to a checkpoint and store it, or find it made.

    Args:
        source: where the weights are; of a `QuantizedCheckpoint`, decoder linears are lowered bit for bit.
        recipe: the precision of each module; of a checkpoint, decoder linears must have its own. Embeddings and
            `lm_head` are 16-bit whatever it says.
        engines_dir: the store; the folder is `<engines_dir>/<model>/trtllm-<id>` unless `out` names it.
        tp_size: ranks that share each layer.
        pp_size: groups of ranks that share the layers.
        kv_dtype: of the KV cache; `auto` is the checkpoint's 16-bit dtype.
        on_layer: called with the number of each decoder layer once all of its ranks are written.

    Raises:
        HarnessError: the model, its tokenizer, the recipe or the ranks are refused, or the disk is full; nothing is
            left behind.
    """
    spec = source.spec
    check_weights(source)
    resolved = recipe.resolve(spec)
    if isinstance(source, QuantizedCheckpoint):
        source.check_recipe(resolved)
    check_family(spec, None, resolved, tp_size=tp_size, pp_size=pp_size, kv_dtype=kv_dtype)
    plan = make_plan(source, resolved, Ranks(tp_size=tp_size, pp_size=pp_size), int8_kv=kv_dtype == "int8")
    fingerprint = source.fingerprint()
    identity = _identity(plan, fingerprint)
    folder = out or engines_dir / source.name / f"trtllm-{identity}"
    if found := _existing(folder, identity):
        return BuiltTrtllmCheckpoint(checkpoint=found, reused=True, sixteen_bit=plan.sixteen_bit)
    tokenizer = Tokenizer(source.tokenizer, source.generation_config)
    check_tokenizer(tokenizer, spec)
    try:
        with staged(folder) as stage:
            _write_weights(source, plan, stage, on_layer)
            _write_json(stage / "config.json", trtllm_config(plan))
            mixed = quant_cfg(plan)
            if mixed is not None:
                _write_json(stage / "quant_cfg.json", mixed)
            left_out = ("quantization_config", "auto_map")
            _write_json(stage / HF_CONFIG_NAME, {k: v for k, v in source.config.items() if k not in left_out})
            tokenizer.save(stage)
            if isinstance(source, QuantizedCheckpoint):
                for path in source.evidence():
                    shutil.copyfile(path, stage / path.name)
            record = TrtllmCheckpointRecord(
                checkpoint_id=identity,
                model=model_part(source, fingerprint),
                recipe=recipe_part(recipe.name, spec, plan.precisions),
                calibration=calibration_part(source),
                tokenizer=tokenizer_part(tokenizer),
                tp_size=tp_size,
                pp_size=pp_size,
                dtype=plan.dtype,
                kv_dtype="int8" if plan.kv_scales else plan.dtype,
                versions={"harness": harness.__version__, "layout": str(_LAYOUT_VERSION)},
                files=describe_files(stage),
            )
            (stage / RECORD_NAME).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        if was_taken(error) and (found := _existing(folder, identity)):
            return BuiltTrtllmCheckpoint(checkpoint=found, reused=True, sixteen_bit=plan.sixteen_bit)
        raise not_written(folder, error) from None
    made = TrtllmCheckpoint(folder, record)
    return BuiltTrtllmCheckpoint(checkpoint=made, reused=False, sixteen_bit=plan.sixteen_bit)


def open_trtllm_checkpoint(path: Path) -> TrtllmCheckpoint:
    """Open the folder of a checkpoint. Every file is hashed before any is read.

    Raises:
        SourceError: no checkpoint there, or a file that is missing, altered or unknown; names it.
    """
    record = read_trtllm_record(path)
    num_ranks = record.tp_size * record.pp_size
    for name in ("config.json", HF_CONFIG_NAME, *(f"rank{rank}.safetensors" for rank in range(num_ranks))):
        if name not in record.files:
            raise SourceError(f"{path / RECORD_NAME} lists no {name}", _COPY_AGAIN)
    for file in sorted(path.iterdir()):
        if file.name not in record.files and (file.name in _READ_BY_BUILDER or file.suffix == ".safetensors"):
            raise SourceError(f"{file} is not in the checkpoint's {RECORD_NAME}", f"remove it, or {_COPY_AGAIN}")
    with ThreadPoolExecutor() as pool:
        try:
            list(pool.map(verify_file, (path / name for name in record.files), record.files.values()))
        except EngineError as error:
            raise SourceError(error.message, _COPY_AGAIN) from None
    checkpoint = TrtllmCheckpoint(path, record)
    fault = _contradiction(checkpoint)
    if fault:
        raise SourceError(f"{path} contradicts its {RECORD_NAME}: {fault}", _COPY_AGAIN)
    return checkpoint


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def _contradiction(checkpoint: TrtllmCheckpoint) -> str:
    """Where what the builder will read is not what the record says; empty where it is."""
    record, config = checkpoint.record, read_json(checkpoint.path / "config.json", required=True)
    if record.recipe.layers.keys() != linear_shapes(checkpoint.spec).keys():
        return f"its recipe is not of this {HF_CONFIG_NAME}"
    mapping, quantization = (_part(config, name) for name in ("mapping", "quantization"))
    int8_kv = "INT8" if record.kv_dtype == "int8" else None
    for what, seen, said in (
        ("tp_size", mapping.get("tp_size"), record.tp_size),
        ("pp_size", mapping.get("pp_size"), record.pp_size),
        ("dtype", config.get("dtype"), record.dtype),
        ("architecture", config.get("architecture"), checkpoint.spec.architecture),
        ("kv_cache_quant_algo", quantization.get("kv_cache_quant_algo"), int8_kv),
    ):
        if seen != said:
            return f"{what} of config.json is {seen!r}, {said!r} was recorded"
    return ""


def _identity(plan: Plan, fingerprint: str) -> str:
    """12 hex digits from all that decides what a checkpoint holds."""
    parts = {
        "content": fingerprint,
        "layers": {module: str(precision) for module, precision in plan.precisions.items()},
        "ranks": [plan.ranks.tp_size, plan.ranks.pp_size],
        "dtypes": [plan.dtype, bool(plan.kv_scales)],
        "versions": [harness.__version__, _LAYOUT_VERSION],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _existing(folder: Path, identity: str) -> TrtllmCheckpoint | None:
    """The wanted checkpoint, if it is already there, whole."""
    if not folder.exists():
        return None
    if (folder / RECORD_NAME).is_file():
        try:
            found = open_trtllm_checkpoint(folder)
        except SourceError as error:
            raise BuildError(
                f"{folder} holds a checkpoint that cannot be reused: {error.message}",
                "remove it and build again, or give another --out",
            ) from None
        seen = found.record.checkpoint_id
        if seen != identity:
            raise BuildError(
                f"{folder} holds another checkpoint (id {seen}, this one is {identity})", "give another --out"
            )
        return found
    if not folder.is_dir() or any(folder.iterdir()):
        raise BuildError(f"{folder} exists and is not a TensorRT-LLM checkpoint", "give another --out, or remove it")
    return None


def _write_weights(source: WeightSource, plan: Plan, stage: Path, on_layer: Callable[[int], None]) -> None:
    ranks = plan.ranks
    stages = ranks.stages(plan.spec.num_layers)
    kind = LatentRankWeights if plan.spec.architecture == LATENT_FAMILY else RankWeights
    files = [
        [_stage_tensors(kind(source, plan, tp_rank), layers, plan.spec.num_layers) for tp_rank in range(ranks.tp_size)]
        for layers in stages
    ]
    num_bytes = sum(tensor.num_bytes for of_stage in files for tensors in of_stage for tensor, _ in tensors)
    check_free_space(stage.parent, num_bytes)
    for number, of_stage in enumerate(files):
        writers = [
            write_safetensors(
                stage / f"rank{number * ranks.tp_size + tp_rank}.safetensors",
                [tensor for tensor, _ in tensors],
                metadata={"format": "pt"},
            )
            for tp_rank, tensors in enumerate(of_stage)
        ]
        layers = [layer for _, layer in of_stage[0]]
        # all ranks of a layer are written side by side, so that the source is read in order once
        for position, _ in enumerate(zip(*writers, strict=True)):
            layer = layers[position]
            if layer is not None and layers[position + 1 : position + 2] != [layer]:
                on_layer(layer)


def _stage_tensors(weights: RankWeights, layers: range, num_layers: int) -> list[tuple[StreamedTensor, int | None]]:
    """The tensors of one rank in order, each with the number of its decoder layer."""
    tensors: list[tuple[StreamedTensor, int | None]] = []
    if layers.start == 0:
        tensors.append((weights.embedding(), None))
    for layer in layers:
        prefix = f"transformer.layers.{layer - layers.start}"
        tensors += [(tensor, layer) for tensor in weights.layer(layer, prefix)]
    if layers.stop == num_layers:
        tensors += [(tensor, None) for tensor in weights.head()]
    return tensors


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
