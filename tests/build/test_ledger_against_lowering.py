"""The ledger plans the bytes that the builder writes, for every family and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from harness.build.lowering.decoder import build_stateful_model
from harness.build.lowering.weights import Spool, WeightLowering
from harness.ledger import weights_bytes
from harness.recipe import Precision, Recipe, linear_shapes, preset
from harness.spec import MlaSpec, ModelSpec
from harness.weight_source import FloatArray

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 384,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
}
MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
MOE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 128},
    "v2": {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "first_k_dense_replace": 1} | MLA | MOE,
    "v2-biases": {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": 96, "attention_bias": True} | MLA,
    "v3": {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 96, "n_group": 4, "topk_group": 2} | MLA | MOE,
}


class OnesSource:
    """A source of the shapes a specification asks for, whatever the tensor; only what lowering uses of one."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._matrices = {f"{name}.weight": shape for name, shape in linear_shapes(spec).items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._matrices)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._matrices:
            return self._matrices[name]
        if name.endswith(".bias"):
            return self._matrices[name.removesuffix("bias") + "weight"][:1]
        leaf, a = name.removesuffix(".weight").rpartition(".")[2], self._spec.attention
        num_experts = self._spec.moe.num_experts if self._spec.moe else 0
        shapes: dict[str, tuple[int, ...]] = {"gate": (num_experts, self._spec.hidden_size)}
        shapes["e_score_correction_bias"] = (num_experts,)
        if isinstance(a, MlaSpec):
            shapes["q_a_layernorm"] = (a.q_lora_rank or 0,)
            shapes["kv_a_layernorm"] = (a.kv_lora_rank,)
            shapes["kv_b_proj"] = (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
        else:
            shapes["q_norm"] = shapes["k_norm"] = (a.head_dim,)
        return shapes.get(leaf, (self._spec.hidden_size,))

    def read(self, name: str, rows: slice | None = None) -> FloatArray:
        return np.ones(self.shape(name), np.float32)[rows or slice(None)]


def constant_bytes(model: ov.Model) -> int:
    """Bytes of a graph's constants of more than a few numbers: weights, not shapes and axes."""
    constants = [op for op in model.get_ops() if op.get_type_name() == "Constant"]
    # a matrix that is tied stands in the graph once
    return sum(op.get_byte_size() for op in constants if op.get_byte_size() >= 128)


@pytest.mark.parametrize("recipe", ["f16", "int8", "int4", "int4-zp"])
@pytest.mark.parametrize("config", CONFIGS)
def test_planned_bytes_are_lowered_bytes(config: str, recipe: str, tmp_path: Path) -> None:
    spec = ModelSpec.from_hf_config(SHAPE | CONFIGS[config])
    chosen = preset(recipe, spec) if recipe != "int4-zp" else zero_points(preset("int4", spec))
    resolved = chosen.resolve(spec)
    with Spool(tmp_path / "spool") as spool:
        source: Any = OnesSource(spec)
        lowered = constant_bytes(build_stateful_model(spec, WeightLowering(source, resolved, spool)))
    assert lowered == pytest.approx(weights_bytes(spec, resolved), rel=2e-3)


def zero_points(recipe: Recipe) -> Recipe:
    """The same recipe with the 4-bit rules made asymmetric."""
    rules = ((pattern, Precision.parse(f"{p}-zp") if p.dtype == "int4" else p) for pattern, p in recipe.rules)
    return Recipe(name=recipe.name, rules=tuple(rules))
