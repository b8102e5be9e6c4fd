"""Writes what nvidia-modelopt exports of tiny models for TensorRT-LLM: names, shapes, dtypes and configs, no weights.

modelopt's exporter is what TensorRT-LLM's own quantization calls, so it is the oracle of our writer. Run by
scripts/record_modelopt_goldens, in an environment of its own.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from safetensors import safe_open

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_MODELS = {
    "llama": transformers.LlamaConfig(
        **_SIZES, rope_theta=500000.0, rope_scaling=_LLAMA3, torch_dtype="bfloat16", architectures=["LlamaForCausalLM"]
    ),
    "qwen": transformers.Qwen2Config(
        **_SIZES, rope_theta=1000000.0, torch_dtype="float16", architectures=["Qwen2ForCausalLM"]
    ),
}
_CASES = [  # name, algorithm, ranks that share each layer, ranks that share the layers
    ("16-bit", "none", 1, 1),
    ("int4", "int4", 1, 1),
    ("int8", "int8", 1, 1),
    ("int8-kv", "kv", 1, 1),
    ("mixed", "mixed", 1, 1),
    ("int4-tp2", "int4", 2, 1),
    ("int8-tp2", "int8", 2, 1),
    ("int4-pp2", "int4", 1, 2),
]


def main(folder: Path) -> None:
    """Write one JSON file for each model and algorithm."""
    for family, config in _MODELS.items():
        for name, algorithm, tp_size, pp_size in _CASES:
            golden = _record(copy.deepcopy(config), algorithm, tp_size, pp_size)
            path = folder / f"{family}-{name}.json"
            path.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            print(path)


def _record(config: Any, algorithm: str, tp_size: int, pp_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    dtype = config.torch_dtype
    hf_config = json.loads(config.to_json_string(use_diff=False))
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=dtype).eval()
    model.config.architectures = hf_config["architectures"]
    model = _quantized(model, algorithm)
    with tempfile.TemporaryDirectory() as out, torch.inference_mode():
        # without tensorrt_llm beside it, modelopt exports a Qwen2 only by the layout of a Llama, which is the same
        export_tensorrt_llm_checkpoint(model, "llama", dtype, out, tp_size, pp_size)
        ranks = [_tensors(Path(out) / f"rank{rank}.safetensors") for rank in range(tp_size * pp_size)]
        quant_cfg = Path(out) / "quant_cfg.json"
        return {
            "modelopt": modelopt.__version__,
            "transformers": transformers.__version__,
            "hf_config": hf_config,
            "config": json.loads((Path(out) / "config.json").read_text()),
            "quant_cfg": json.loads(quant_cfg.read_text()) if quant_cfg.exists() else None,
            "ranks": ranks,
        }


def _quantized(model: Any, algorithm: str) -> Any:
    batches = [torch.arange(start, start + 64).reshape(2, 32) for start in (0, 64, 128, 192)]

    def calibrate(model: Any) -> None:
        for ids in batches:
            model(ids)

    if algorithm == "none":
        return model
    if algorithm == "mixed":
        found, _ = mtq.auto_quantize(
            model,
            constraints={"effective_bits": 6.0},
            quantization_formats=[mtq.INT4_AWQ_CFG, mtq.INT8_SMOOTHQUANT_CFG],
            data_loader=batches,
            forward_step=lambda model, ids: model(ids).logits,
            loss_func=lambda logits, ids: logits.float().square().mean(),
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            disabled_layers=["*lm_head*"],
        )
        return found
    if algorithm == "kv":
        chosen = copy.deepcopy(mtq.INT8_SMOOTHQUANT_CFG)
        chosen["quant_cfg"]["*[kv]_bmm_quantizer"] = {"num_bits": 8, "axis": None, "enable": True}
        return mtq.quantize(model, chosen, calibrate)
    return mtq.quantize(model, {"int4": mtq.INT4_AWQ_CFG, "int8": mtq.INT8_SMOOTHQUANT_CFG}[algorithm], calibrate)


def _tensors(path: Path) -> dict[str, str]:
    """Dtype and sizes of each tensor: `I8 256x128`."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_slice(name) for name in sorted(file.keys())}
    return {name: f"{t.get_dtype()} {'x'.join(map(str, t.get_shape()))}" for name, t in tensors.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
