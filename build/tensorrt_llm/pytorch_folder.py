"""Builds the folder that the PyTorch backend of TensorRT-LLM loads: a quantized checkpoint or 16-bit weights in.

It is a Hugging Face folder in the format of NVIDIA's modelopt, for Llama, Qwen2 and Qwen3. It belongs to no GPU arch
and no number of ranks: the backend divides the layers, and arranges integers for its kernels, when it loads them. The
integers and scales of a quantized checkpoint are stored bit for bit. `trtllm-pytorch.json` beside them records what
they were made from, and the sha256 of every other file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness.arch import Arch
from harness.build.checkpoint import QuantizedCheckpoint
from harness.build.manifest_parts import calibration_part, model_part, recipe_part, tokenizer_part
from harness.build.safetensors_writer import StreamedTensor, write_safetensors
from harness.build.store import check_free_space, engine_id, not_written, staged, was_taken
from harness.build.tensorrt_llm.pytorch_config import (
    Dtype,
    folder_dtype,
    hf_config,
    quantization_files,
    stored_precisions,
    tokenizer_files,
)
from harness.build.tensorrt_llm.pytorch_limits import BACKEND, check_expressible
from harness.build.tensorrt_llm.pytorch_record import RECORD_NAME, PytorchFolderRecord
from harness.build.tensorrt_llm.pytorch_tensors import folder_tensors, layer_of
from harness.build.tokenizer_check import check_tokenizer
from harness.build.weight_check import check_weights
from harness.errors import BuildError, EngineError
from harness.manifest import describe_files, read_versioned, verify_file
from harness.recipe import Precision, Recipe, in_decoder
from harness.tokenizer import (
    CHAT_TEMPLATE_NAME,
    GENERATION_CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    Tokenizer,
)
from harness.weight_source import WeightSource

FORMAT_VERSION = 1
"""Of what is written for given weights; part of a folder's id."""
_SHARD_BYTES = 4 << 30
_OTHER_BYTES = 64 << 20  # more than config, tokenizer and record take
_REMOVE = "remove it and build again, or give another --out"


@dataclass(frozen=True, kw_only=True)
class BuiltPytorchFolder:
    """Where a folder is, and whether it was there already."""

    path: Path
    reused: bool


def build_pytorch_folder(
    source: WeightSource,
    recipe: Recipe,
    *,
    engines_dir: Path,
    out: Path | None = None,
    tp_size: int = 1,
    arch: Arch | None = None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> BuiltPytorchFolder:
    """Write a folder for the PyTorch backend, or find it written.

    Args:
        source: a quantized checkpoint; or any weights, for a recipe whose decoder linears are all `f16`.
        recipe: the precision of each module; embeddings and `lm_head` become 16-bit whatever it says.
        engines_dir: the store; the folder goes to `<engines_dir>/<model>/trtllm-pytorch-<id>` unless `out` names it.
        tp_size: GPUs that it must be possible to divide each layer over.
        arch: the GPU to serve on, where it is known; like `tp_size` it decides what is refused, not what is written.
        on_layer: called with the number of each finished decoder layer.

    Raises:
        HarnessError: the model, its tokenizer or the recipe is refused, or the disk is full; nothing is left behind.
    """
    resolved = recipe.resolve(source.spec)
    check_expressible(source.spec, resolved, arch, tp_size)
    check_weights(source)
    _check_source(source, resolved)
    stored, dtype = stored_precisions(resolved), folder_dtype(source.config)
    layers = {module: str(precision) for module, precision in stored.items()}
    versions = {"harness": harness.__version__, "format": str(FORMAT_VERSION)}
    fingerprint = source.fingerprint()
    identity = engine_id(
        content_hash=fingerprint,
        arch=BACKEND,
        layers=layers,
        versions=versions,
        compile_settings={},
    )
    path = out or engines_dir / source.name / f"{BACKEND}-{identity}"
    try:
        if _existing(path, identity):
            return BuiltPytorchFolder(path=path, reused=True)
        tokenizer = Tokenizer(source.tokenizer, source.generation_config)
        check_tokenizer(tokenizer, source.spec)
        with staged(path) as stage:
            _write_weights(stage, folder_tensors(source, stored, dtype), on_layer)
            _write_rest(stage, source, tokenizer, stored, dtype)
            record = PytorchFolderRecord(
                folder_id=identity,
                model=model_part(source, fingerprint),
                recipe=recipe_part(recipe.name, source.spec, stored),
                calibration=calibration_part(source),
                tokenizer=tokenizer_part(tokenizer),
                dtype=dtype,
                versions=versions,
                files=describe_files(stage),
            )
            _write_json(stage / RECORD_NAME, record.model_dump(mode="json"))
    except OSError as error:
        if was_taken(error) and _existing(path, identity):
            return BuiltPytorchFolder(path=path, reused=True)  # another build of the same folder was faster
        raise not_written(path, error) from None
    return BuiltPytorchFolder(path=path, reused=False)


def _check_source(source: WeightSource, resolved: Mapping[str, Precision]) -> None:
    if isinstance(source, QuantizedCheckpoint):
        source.check_recipe(resolved)
        return
    integers = [module for module, precision in resolved.items() if in_decoder(module) and precision.dtype != "f16"]
    if integers:
        raise BuildError(
            f"--backend {BACKEND} takes integers from a calibrated checkpoint, and {integers[0]} is "
            f"{resolved[integers[0]]} in weights that are not",
            "calibrate (leave --no-calib out, or give --checkpoint), or build 16-bit weights: --precision f16",
        )


def _existing(path: Path, wanted_id: str) -> bool:
    """Whether the wanted folder is already there, whole."""
    if not path.exists():
        return False
    if not (path / RECORD_NAME).is_file():
        if not path.is_dir() or any(path.iterdir()):
            raise BuildError(f"{path} exists and is not a folder for {BACKEND}", "give another --out, or remove it")
        return False
    record = read_versioned(path / RECORD_NAME, PytorchFolderRecord, BuildError, _REMOVE)
    if record.folder_id != wanted_id:
        raise BuildError(
            f"{path} holds another folder (id {record.folder_id}, this build is {wanted_id})", "give another --out"
        )
    seen = {file.name for file in path.iterdir()} - {RECORD_NAME}
    if differing := sorted(seen ^ record.files.keys()):
        raise BuildError(f"{path} does not hold what its {RECORD_NAME} lists: {differing[0]}", _REMOVE)
    try:
        for name, part in record.files.items():
            verify_file(path / name, part)
    except EngineError as error:
        raise BuildError(f"{path} cannot be reused: {error.message}", _REMOVE) from None
    return True


def _write_weights(stage: Path, tensors: Sequence[StreamedTensor], on_layer: Callable[[int], None]) -> None:
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    check_free_space(stage.parent, num_bytes + _OTHER_BYTES)
    ends = {layer_of(tensor.name): tensor.name for tensor in tensors}  # the last of each layer remains
    shards = list(_shards(tensors))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for name in write_safetensors(stage / file_name, shard, metadata={"format": "pt"}):
            weight_map[name] = file_name
            layer = layer_of(name)
            if layer is not None and ends[layer] == name:
                on_layer(layer)
    _write_json(
        stage / "model.safetensors.index.json", {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    )


def _shards(tensors: Sequence[StreamedTensor]) -> Iterator[list[StreamedTensor]]:
    shard: list[StreamedTensor] = []
    for tensor in tensors:
        if shard and sum(other.num_bytes for other in shard) + tensor.num_bytes > _SHARD_BYTES:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _write_rest(
    stage: Path, source: WeightSource, tokenizer: Tokenizer, stored: Mapping[str, Precision], dtype: Dtype
) -> None:
    tokenizer_json, settings = tokenizer_files(tokenizer, source.tokenizer)
    (stage / TOKENIZER_NAME).write_bytes(tokenizer_json)
    if tokenizer.chat_template is not None:
        (stage / CHAT_TEMPLATE_NAME).write_bytes(tokenizer.chat_template.encode())
    files = {
        "config.json": hf_config(source.config, dtype),
        GENERATION_CONFIG_NAME: source.generation_config,
        TOKENIZER_CONFIG_NAME: settings,
        **quantization_files(stored),
    }
    for name, content in files.items():
        _write_json(stage / name, content)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
