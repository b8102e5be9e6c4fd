"""What a folder for the PyTorch backend of TensorRT-LLM says of itself, in JSON.

`hf_quant_config.json` is the format of NVIDIA's modelopt. It names one algorithm for all linear layers, or
MIXED_PRECISION, and then `quant_cfg.json` lists each layer by its exact name. `config.json` must not speak of
quantization: the backend mistakes int8 of compressed-tensors for fp8. Source: `model_config.py` of TensorRT-LLM 1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import tokenizers
from tokenizers import processors

from harness.recipe import Precision, in_decoder
from harness.tokenizer import Tokenizer, TokenizerFiles

Dtype = Literal["float16", "bfloat16"]

HF_QUANT_CONFIG_NAME = "hf_quant_config.json"
QUANT_CFG_NAME = "quant_cfg.json"
_FUSED_AS = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}


def stored_precisions(resolved: Mapping[str, Precision]) -> dict[str, Precision]:
    """The precision of each module as a folder stores it.

    Embeddings and `lm_head` are 16-bit. Int8 layers are W8A16: of those whose activations were to be int8, too, the
    smoothed weights are the same, and their factors lie in what precedes them; activations just stay 16-bit.
    """
    return {
        module: Precision(
            dtype="int8" if precision.int8_activations else precision.dtype, group_size=precision.group_size
        )
        if in_decoder(module)
        else Precision(dtype="f16")
        for module, precision in resolved.items()
    }


def folder_dtype(config: Mapping[str, Any]) -> Dtype:
    """The 16-bit dtype of a model: its own where it has one, else bfloat16, which has the range of float32."""
    return "float16" if "float16" in (config.get("dtype"), config.get("torch_dtype")) else "bfloat16"


def hf_config(config: Mapping[str, Any], dtype: Dtype) -> dict[str, Any]:
    """`config.json` of a folder: the model's own, without quantization, in the words that transformers 4 knows.

    Transformers 5 writes the rotary settings as `rope_parameters`, which 4.57 (TensorRT-LLM 1.2's) passes over; both
    read `rope_theta` and `rope_scaling`.
    """
    dropped = ("quantization_config", "auto_map", "dtype", "torch_dtype")
    written = {key: value for key, value in config.items() if key not in dropped} | {"torch_dtype": dtype}
    rope = config.get("rope_parameters")
    if rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if "rope_theta" in rope:
            written["rope_theta"] = rope["rope_theta"]
        written["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    return written


def quantization_files(stored: Mapping[str, Precision]) -> dict[str, dict[str, Any]]:
    """The JSON files that speak of quantization, by name; none where nothing is quantized.

    Args:
        stored: as `stored_precisions` gives it.
    """
    decoder = {module: precision for module, precision in stored.items() if in_decoder(module)}
    layers = {module: _algorithm(precision) for module, precision in decoder.items() if precision.dtype != "f16"}
    if not layers:
        return {}
    plain = [module for module, precision in decoder.items() if precision.dtype == "f16"]
    first, *others = layers.values()
    mixed = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    is_mixed = any(other != first for other in others)
    quantization = {
        **(mixed if is_mixed else first | {"kv_cache_quant_algo": None}),
        # the backend asks for fused layers by their own names, too
        "exclude_modules": ["lm_head", *plain, *_fused(plain)],
    }
    # the only producer's name that every version takes
    files: dict[str, dict[str, Any]] = {}
    files[HF_QUANT_CONFIG_NAME] = {"producer": {"name": "modelopt"}, "quantization": quantization}
    if is_mixed:
        files[QUANT_CFG_NAME] = mixed | {"quantized_layers": layers}
    return files


def tokenizer_files(tokenizer: Tokenizer, files: TokenizerFiles) -> tuple[bytes, dict[str, Any]]:
    """`tokenizer.json` and `tokenizer_config.json` that make transformers tokenize as `tokenizer` does.

    The generic class is named: by the class of their release, DeepSeek's byte-level tokenizers would lose every space.
    It leaves the BOS to `tokenizer.json`, so that is where it is put, or taken out, if the release says it elsewhere.
    """
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens}
    bos, bos_id = files.special_tokens.get("bos_token"), tokenizer.bos_token_id
    inner = tokenizers.Tokenizer.from_str(files.tokenizer_json.decode())
    if bos_id is None or (inner.encode("a").ids[:1] == [bos_id]) == tokenizer.adds_bos:
        return files.tokenizer_json, settings
    inner.post_processor = (
        processors.TemplateProcessing(single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=[(bos, bos_id)])
        if tokenizer.adds_bos
        else processors.ByteLevel(trim_offsets=False)
    )
    return inner.to_str().encode(), settings


def _algorithm(precision: Precision) -> dict[str, Any]:
    if precision.dtype == "int8":
        return {"quant_algo": "W8A16"}
    return {
        "quant_algo": "W4A16_AWQ",
        "group_size": precision.group_size,
        "has_zero_point": False,
        "pre_quant_scale": True,
    }


def _fused(modules: list[str]) -> list[str]:
    """Names that the backend gives the layers into which it joins some of these."""
    parts = (module.rpartition(".") for module in modules)
    return [f"{parent}.{_FUSED_AS[name]}" for parent, _, name in parts if name in _FUSED_AS]
