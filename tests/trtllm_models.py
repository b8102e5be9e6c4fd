"""Random models and quantized checkpoints of them for the tests of TensorRT-LLM's lowering, made without calibration.

Imported by several tests (pyproject.toml puts this folder on their path). Widths are multiples of 256, so that int4 in
groups of 64 divides over four ranks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file

from harness.build.hf_source import HfFolderSource
from harness.build.lowering.quantize import quantize_rows
from harness.build.tensorrt_llm.tensors import unpack_row_pairs
from harness.build.weight_check import expected_shapes
from harness.checkpoint_record import RECORD_NAME, STATISTICS_NAME, CheckpointRecord, LossPart
from harness.manifest import CalibrationSetPart, ModelPart, RecipePart, describe_files
from harness.recipe import Precision, Recipe, in_decoder
from harness.spec import ModelSpec
from harness.tokenizer import TokenizerFiles

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]

_SIZES: dict[str, Any] = {
    "vocab_size": 321,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA: dict[str, Any] = _SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN: dict[str, Any] = _SIZES | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "float16",
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
DEEPSEEK: dict[str, Any] = _SIZES | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
MIXED = (
    ("*.self_attn.[qkv]_proj", "int8"),
    ("*.o_proj", "int4-g64"),
    ("*.down_proj", "int8-a8"),
    ("*.[13].mlp.*", "f16"),
    ("*", "int4-g64"),
)
"""The same in the first two layers and the last two, so that both can be stages."""


def recipe_of(*rules: tuple[str, str]) -> Recipe:
    """Rules in writing; embeddings and output are in int8, which an engine has in 16 bits."""
    ends = (("model.embed_tokens", "int8"), ("lm_head", "int8"))
    return Recipe(name="rules", rules=tuple((pattern, Precision.parse(text)) for pattern, text in (*ends, *rules)))


def write_model(folder: Path, config: dict[str, Any], files: TokenizerFiles) -> Path:
    """A Hugging Face folder of random weights, exact in half precision."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in expected_shapes(ModelSpec.from_hf_config(config)).items():
        values = rng.uniform(0.5, 1.5, shape) if "norm" in name else rng.normal(0.0, 0.1, shape)
        tensors[name] = values.astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(files.special_tokens))
    return folder


def write_quantized(model: Path, folder: Path, recipe: Recipe, *, statistics: bool = True) -> Path:
    """A quantized checkpoint of a model, rounded to nearest, with made-up statistics."""
    shutil.copytree(model, folder)
    spec = HfFolderSource(model).spec
    resolved = recipe.resolve(spec)
    tensors = load_file(model / "model.safetensors")
    rng = np.random.default_rng(1)
    maxima: dict[str, Array] = {}
    for module, precision in resolved.items():
        if in_decoder(module):
            weight = tensors.pop(f"{module}.weight")
            tensors |= {f"{module}.{part}": values for part, values in _stored(weight, precision).items()}
            key = module.replace("q_proj", "first").replace("gate_proj", "gate_up")
            maxima[f"{key}.input_maxima"] = rng.uniform(0.5, 4.0, weight.shape[1]).astype(np.float32)
            maxima[f"{module}.output_maxima"] = rng.uniform(0.5, 4.0, weight.shape[0]).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    if statistics:
        save_file(maxima, folder / STATISTICS_NAME)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    seal(folder, spec, {name: str(precision) for name, precision in resolved.items()})
    return folder


def _stored(weight: Array, precision: Precision) -> dict[str, Array]:
    if precision.dtype == "f16":
        return {"weight": weight}
    rows = quantize_rows(weight.astype(np.float32), precision)
    assert rows.scale is not None
    if precision.int8_activations:
        return {"weight": rows.data, "weight_scale": rows.scale}
    offset = 0x80 if precision.dtype == "int8" else 0x88
    words = np.ascontiguousarray(rows.data.view(np.uint8) ^ offset).view(np.int32)
    stored = {"weight_packed": words, "weight_scale": rows.scale, "weight_shape": np.array(weight.shape, np.int64)}
    if rows.zero_point is not None:
        groups = rows.zero_point.reshape(-1, 8, rows.zero_point.shape[1]).astype(np.uint32)
        stored["weight_zero_point"] = np.bitwise_or.reduce(groups << (4 * np.arange(8))[None, :, None], axis=1).view(
            np.int32
        )
    return stored


def seal(
    folder: Path, spec: ModelSpec, layers: dict[str, str], *, target: Literal["portable", "cpu"] = "portable"
) -> None:
    """Writes the record of a quantized checkpoint over what lies in the folder."""
    record = CheckpointRecord(
        checkpoint_id="0123456789ab",
        model=ModelPart(
            name="tiny",
            architecture=spec.architecture,
            content_hash="a" * 64,
            num_parameters=1,
            num_layers=spec.num_layers,
            vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_position_embeddings,
        ),
        method="gptq",
        calibration_set=CalibrationSetPart(
            label="traffic.jsonl", fingerprint="b" * 64, num_samples=128, num_tokens=4096, system_prompt_share=0.5
        ),
        recipe=RecipePart(name="searched", layers=layers, bits_per_weight=4.5, decoder_bits_per_weight=4.5),
        target=target,
        optimize="decode",
        loss=LossPart(perplexity_before=3.0, perplexity_after=3.1, kl_divergence=0.01, num_tokens=100),
        unreached_experts=[],
        versions={"harness": "0"},
        files={name: part for name, part in describe_files(folder).items() if name != RECORD_NAME},
    )
    (folder / RECORD_NAME).write_text(record.model_dump_json())


def rank_tensors(folder: Path) -> list[Tensors]:
    """The tensors of every rank of a TensorRT-LLM checkpoint."""
    return [load_torch_file(folder / f"rank{rank}.safetensors") for rank in range(len(list(folder.glob("rank*"))))]


def dequantized(tensors: Tensors, name: str) -> Array:
    """The weights `(out, in)` that a linear layer's tensors stand for."""
    weight = tensors[f"{name}.weight"]
    if weight.dtype != torch.int8:
        return np.asarray(weight.float().numpy())
    scale = tensors[f"{name}.weights_scaling_factor"].numpy()
    if scale.ndim == 1:
        return np.asarray(weight.numpy().astype(np.float32) * scale[:, None])
    integers = unpack_row_pairs(weight.numpy().view(np.uint8)).astype(np.float32)
    return np.asarray(integers * np.repeat(scale, integers.shape[1] // scale.shape[1], axis=1))
