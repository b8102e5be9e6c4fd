"""llama.cpp's own quantizer: the model written as a float32 GGUF, quantized by `llama_model_quantize`, and read back.

llama.cpp chooses the type of each tensor. Its files of MLA hold kv_b_proj in another form; it is not a decoder linear
here and is not read back. Rows of q and k stay in the order of Hugging Face: blocks lie within a row, so that their
order changes nothing. An importance matrix is the mean square of each input over the calibration texts, as llama.cpp's
own tool collects it.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from contenders import Contender, Quantized, num_weights
from gguf.quants import dequantize
from quality_model import QualityModel

from harness.spec import GqaSpec, MlaSpec
from harness.weight_source import FloatArray

_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(\w+)")


def contenders() -> list[Contender]:
    """The common files, without and with an importance matrix."""
    types = [("Q4_0", False), ("Q4_K_S", False)]
    types += [(name, imatrix) for name in ("Q4_K_M", "Q5_K_M") for imatrix in (False, True)]
    return [
        Contender(
            name=f"llama.cpp {name}{' + imatrix' if imatrix else ''}",
            family=f"llama.cpp{' + imatrix' if imatrix else ''}",
            version=f"llama-cpp-python {llama_cpp.__version__}",
            quantize=partial(_quantize, file_type=name, imatrix=imatrix),
        )
        for name, imatrix in types
    ]


def _quantize(model: QualityModel, file_type: str, imatrix: bool) -> Quantized:
    moments = model.input_second_moments if imatrix else {}
    with tempfile.TemporaryDirectory() as folder:
        plain, quantized = Path(folder, "plain.gguf"), Path(folder, "quantized.gguf")
        tensors = _tensor_names(model)
        _write(model, tensors, plain)
        importance = {name: np.concatenate([moments[m] for m in tensors[name]]) for name in tensors if imatrix}
        _call(plain, quantized, file_type, importance)
        return _read_back(model, tensors, quantized)


def _call(plain: Path, quantized: Path, file_type: str, importance: dict[str, FloatArray]) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    entry, pointer = llama_cpp.llama_model_imatrix_data, ctypes.POINTER(ctypes.c_float)
    entries = (entry * (len(importance) + 1))()  # a nameless one ends them
    for i, (name, values) in enumerate(importance.items()):
        entries[i] = entry(name.encode(), values.ctypes.data_as(pointer), values.size)
    if importance:
        params.imatrix = entries
    llama_cpp.llama_log_set(_silent, None)
    if llama_cpp.llama_model_quantize(bytes(plain), bytes(quantized), params):
        raise RuntimeError(f"llama.cpp could not quantize {plain} as {file_type}")


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    pass


def _tensor_names(model: QualityModel) -> dict[str, list[str]]:
    """The modules in each tensor of the file: routed experts of a layer share one."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[model.spec.architecture], model.spec.num_layers)
    tensors: dict[str, list[str]] = {}
    for module in model.linears:
        name = names.get_name(_EXPERT.sub(r"\1.\2", module))
        tensors.setdefault(f"{name}.weight", []).append(module)
    return tensors


def _write(model: QualityModel, tensors: dict[str, list[str]], path: Path) -> None:
    """The decoder linears, and as much metadata as the quantizer asks for."""
    spec, attention = model.spec, model.spec.attention
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[spec.architecture]])
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_head_count(attention.num_heads)
    if isinstance(attention, GqaSpec):
        writer.add_head_count_kv(attention.num_kv_heads)
        writer.add_key_length(attention.head_dim)
        writer.add_value_length(attention.head_dim)
    else:
        _write_mla(writer, attention)
    if spec.moe is not None:
        writer.add_leading_dense_block_count(spec.moe.first_k_dense)
        writer.add_expert_count(spec.moe.num_experts)
        writer.add_expert_used_count(spec.moe.num_experts_per_tok)
        writer.add_expert_shared_count(spec.moe.num_shared_experts)
        writer.add_expert_feed_forward_length(spec.moe.moe_intermediate_size)
    for name, modules in tensors.items():
        weights = [model.weight(module) for module in modules]
        writer.add_tensor(name, np.stack(weights) if _EXPERT.fullmatch(modules[0]) else weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_mla(writer: gguf.GGUFWriter, attention: MlaSpec) -> None:
    # absorbed: the latent is the one key and value head
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(attention.q_lora_rank or 0)
    writer.add_kv_lora_rank(attention.kv_lora_rank)
    writer.add_key_length(attention.kv_lora_rank + attention.qk_rope_head_dim)
    writer.add_value_length(attention.kv_lora_rank)
    writer.add_key_length_mla(attention.qk_head_dim)
    writer.add_value_length_mla(attention.v_head_dim)
    writer.add_rope_dimension_count(attention.qk_rope_head_dim)


def _read_back(model: QualityModel, tensors: dict[str, list[str]], path: Path) -> Quantized:
    weights: dict[str, FloatArray] = {}
    stored_bits, types = 0, Counter[str]()
    for tensor in gguf.GGUFReader(path).tensors:
        modules = tensors[tensor.name]
        stored_bits += 8 * int(tensor.n_bytes)
        types[tensor.tensor_type.name] += int(tensor.n_elements)
        values = dequantize(tensor.data, tensor.tensor_type).reshape(len(modules), *model.linears[modules[0]])
        weights |= dict(zip(modules, values, strict=True))
    shares = (f"{name} {count / num_weights(model):.0%}" for name, count in types.most_common())
    return Quantized(weights=weights, bits_per_weight=stored_bits / num_weights(model), note=", ".join(shares))
