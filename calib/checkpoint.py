"""Writes quantized checkpoints: a Hugging Face folder in compressed-tensors format, one shard for each decoder layer.

Decoder linears are stored in integers; embeddings, output, norms, routers and MLA's `kv_b_proj` stay in 16 bits, or in
32 where 16 would alter a vector. The packing is the library's own, so that transformers, vLLM and SGLang read it: every
config group names its own `format`, all targets are exact module names, and the routed experts come first with a
pattern that names them. Needs torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors import SafetensorError
from safetensors.torch import save_file

from harness.calib.quantizer import QuantizedMatrix, weight_args
from harness.errors import CalibrationError
from harness.recipe import Precision, is_routed_expert
from harness.tokenizer import TokenizerFiles
from harness.weight_source import WeightSource

_LARGEST_HALF = 65504.0


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        CalibrationError: the disk is full, or cannot be written to.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        save_file({name: values.cpu().contiguous() for name, values in tensors.items()}, temporary, {"format": "pt"})
    except SafetensorError as error:  # it is no OSError
        raise CalibrationError(
            f"{path} cannot be written: {error}", "free some disk and run the same command: it goes on from there"
        ) from None
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def stored_tensors(module: str, matrix: QuantizedMatrix) -> dict[str, torch.Tensor]:
    """The tensors of one quantized linear module, by name, as compressed-tensors lays them out."""
    precision = matrix.precision
    scale = {f"{module}.weight_scale": matrix.scale.bfloat16()}
    if precision.int8_activations:
        return {f"{module}.weight": matrix.integers} | scale
    bits = 8 if precision.dtype == "int8" else 4
    stored = scale | {
        f"{module}.weight_packed": pack_to_int32(matrix.integers, bits),
        f"{module}.weight_shape": torch.tensor(matrix.integers.shape),
    }
    if matrix.zero_point is not None:
        stored[f"{module}.weight_zero_point"] = pack_to_int32(matrix.zero_point, bits, packed_dim=0)
    return stored


def in_16_bits(values: torch.Tensor) -> torch.Tensor:
    """Values in bfloat16 or half precision if one of them is exact; else matrices in half, vectors as they are."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values.to(dtype).float(), values):
            return values.to(dtype)
    if values.ndim < 2:
        return values
    return values.to(torch.float16 if values.abs().max() <= _LARGEST_HALF else torch.bfloat16)


def finish_folder(folder: Path, source: WeightSource, linears: Mapping[str, Precision]) -> None:
    """Write all that surrounds the layers' shards: config, index, tokenizer, generation config.

    `linears`: precision of each decoder linear.
    """
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "auto_map")}
    if not config.keys() & {"dtype", "torch_dtype"}:
        config["torch_dtype"] = "bfloat16"
    _write_json(folder / "config.json", config | {"quantization_config": quantization_config(source, linears)})
    _write_json(folder / "generation_config.json", source.generation_config)
    _write_tokenizer(folder, source.tokenizer)
    shards = sorted(folder.glob("model-*.safetensors"))
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for shard in shards:
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        weight_map |= dict.fromkeys(header, shard.name)
        num_bytes += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def shard_name(number: int, total: int) -> str:
    """File name of a shard, counted from 1."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def quantization_config(source: WeightSource, linears: Mapping[str, Precision]) -> dict[str, Any]:
    """`quantization_config` of config.json for decoder linears of given precisions."""
    experts = {m: p for m, p in linears.items() if is_routed_expert(m) and p.dtype != "f16"}
    others = {m: p for m, p in linears.items() if not is_routed_expert(m) and p.dtype != "f16"}
    groups: dict[str, QuantizationScheme] = {}
    for precision in dict.fromkeys(experts.values()):
        layers = sorted({int(m.split(".")[2]) for m, p in experts.items() if p == precision})
        numbers = "|".join(map(str, layers))
        kinds = sorted({m.rpartition(".")[2] for m, p in experts.items() if p == precision})
        target = rf"re:.*layers\.({numbers})\.mlp\.experts\.\d+\.({'|'.join(kinds)})$"
        groups[f"group_{len(groups)}"] = _scheme([target], precision)
    for precision in dict.fromkeys(others.values()):
        groups[f"group_{len(groups)}"] = _scheme([m for m, p in others.items() if p == precision], precision)
    formats = {str(scheme.format) for scheme in groups.values()}
    plain = [m for m, p in linears.items() if p.dtype == "f16"]
    latent = sorted(n.removesuffix(".weight") for n in source.names() if n.endswith(".kv_b_proj.weight"))
    config = QuantizationConfig(
        config_groups=groups,
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=["lm_head", *latent, *plain],
    )
    return config.to_dict()  # type: ignore[no-any-return]


def _scheme(targets: Sequence[str], precision: Precision) -> QuantizationScheme:
    activations = None
    if precision.int8_activations:
        activations = QuantizationArgs(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
    return QuantizationScheme(
        targets=list(targets),
        # the order in which columns were solved leaves no trace in what is stored
        weights=weight_args(precision).model_copy(update={"actorder": None}),
        input_activations=activations,
        format="int-quantized" if precision.int8_activations else "pack-quantized",
    )


def _write_tokenizer(folder: Path, files: TokenizerFiles) -> None:
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    if files.chat_template is not None:
        (folder / "chat_template.jinja").write_bytes(files.chat_template.encode())
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens}
    if files.add_bos is not None:
        settings["add_bos_token"] = files.add_bos
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
