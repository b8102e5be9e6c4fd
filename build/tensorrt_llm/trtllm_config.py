"""`config.json` and `quant_cfg.json` of a TensorRT-LLM checkpoint.

Keys are those of `PretrainedConfig`, `LLaMAConfig`, `QWenConfig` and `DeepSeekV2Config` in TensorRT-LLM 1.2.1.
"""

from __future__ import annotations

from typing import Any

import harness
from harness.build.tensorrt_llm.families import LATENT_FAMILY
from harness.build.tensorrt_llm.plan import Plan
from harness.rope import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling
from harness.spec import GqaSpec, MlaSpec, ModelSpec

MIXED = "MIXED_PRECISION"
# numbers of `MoeConfig`'s enumerations
_GREEDY, _GROUP_LIMITED_GREEDY = 0, 1
_NO_NORMALIZATION, _DEVICE_LIMITED = 0, 3


def trtllm_config(plan: Plan) -> dict[str, Any]:
    """All of `config.json`."""
    spec, ranks = plan.spec, plan.ranks
    config = {
        "producer": {"name": "deepseek-harness", "version": harness.__version__},
        "architecture": spec.architecture,
        "dtype": plan.dtype,
        "logits_dtype": "float32",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "intermediate_size": spec.intermediate_size,
        "norm_epsilon": spec.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": spec.max_position_embeddings,
        "rotary_base": spec.rope.theta,
        "rotary_scaling": _rotary_scaling(spec.rope),
        "mlp_bias": spec.mlp_bias,
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "mapping": {"world_size": ranks.num_ranks, "tp_size": ranks.tp_size, "pp_size": ranks.pp_size},
        "quantization": _quantization(plan),
    }
    return config | (_attention(spec) if isinstance(spec.attention, GqaSpec) else _latent(spec))


def quant_cfg(plan: Plan) -> dict[str, Any] | None:
    """All of `quant_cfg.json`; None where one algorithm is enough, which `config.json` then names."""
    if _quantization(plan)["quant_algo"] != MIXED:
        return None
    layers = {name: algorithm for name, algorithm in plan.algorithms.items() if algorithm is not None}
    return {"quant_algo": MIXED, "kv_cache_quant_algo": _kv_algorithm(plan), "quantized_layers": layers}


def _quantization(plan: Plan) -> dict[str, Any]:
    kv = {"kv_cache_quant_algo": _kv_algorithm(plan)}
    if plan.spec.architecture == LATENT_FAMILY:
        return {"quant_algo": None} | kv
    seen = [algorithm for algorithm in plan.algorithms.values() if algorithm is not None]
    if not seen:
        return {"quant_algo": None} | kv
    if any(algorithm != seen[0] for algorithm in seen):
        return {"quant_algo": MIXED} | kv
    return seen[0] | kv | {"exclude_modules": sorted(name for name, a in plan.algorithms.items() if a is None)}


def _kv_algorithm(plan: Plan) -> str | None:
    return "INT8" if plan.kv_scales else None


def _rotary_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    match rope.scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as s:
            return {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_position_embeddings,
            }
        case YarnScaling() as s:
            # transformers reads both or neither; with 1 and 0 the temperature is YaRN's own
            mscale, mscale_all_dim = (s.mscale, s.mscale_all_dim) if s.mscale and s.mscale_all_dim else (1.0, 0.0)
            return {
                "rope_type": "yarn",
                "factor": s.factor,
                "original_max_position_embeddings": s.original_max_position_embeddings,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
                "mscale": mscale,
                "mscale_all_dim": mscale_all_dim,
            }


def _attention(spec: ModelSpec) -> dict[str, Any]:
    a = spec.attention
    assert isinstance(a, GqaSpec), "the family was checked"
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_size": a.head_dim,
        "attn_bias": a.qkv_bias,
    }
    if spec.architecture == "Qwen2ForCausalLM":
        config["qwen_type"] = "qwen2"
    return config


def _latent(spec: ModelSpec) -> dict[str, Any]:
    a, moe = spec.attention, spec.moe
    assert isinstance(a, MlaSpec), "the family was checked"
    assert moe is not None, "the family was checked"
    return {
        "hidden_act": "swiglu",
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": 1,
        "head_size": a.kv_lora_rank + a.qk_rope_head_dim,
        "attn_bias": False,
        "q_lora_rank": a.q_lora_rank,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.qk_nope_head_dim,
        "qk_rope_head_dim": a.qk_rope_head_dim,
        "v_head_dim": a.v_head_dim,
        "first_k_dense_replace": moe.first_k_dense,
        "moe_inter_size": moe.moe_intermediate_size,
        "moe": {
            "num_experts": moe.num_experts,
            "top_k": moe.num_experts_per_tok,
            "shared_expert_intermediate_size": moe.num_shared_experts * moe.moe_intermediate_size,
            "normalization_mode": _NO_NORMALIZATION if moe.num_groups == 1 else _DEVICE_LIMITED,
            "topk_method": _GREEDY if moe.num_groups == 1 else _GROUP_LIMITED_GREEDY,
            "device_limited_n_group": moe.num_groups,
            "device_limited_topk_group": moe.topk_groups,
            "device_limited_routed_scaling_factor": moe.routed_scaling_factor,
        },
    }
