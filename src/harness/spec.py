"""One typed description of a model, read from a Hugging Face `config.json`.

Everything downstream (lowering, ledger, manifest) reads this and never the raw dictionary. An option that would change
the logits and that we do not lower is an error here, so that a model is either served right or refused.

Sources: LLaMA (arXiv 2302.13971), GQA (2305.13245), DeepSeek-V2 with MLA (2405.04434), DeepSeek-V3 (2412.19437).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.errors import UnsupportedModelError
from harness.rope import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling, check_positive, yarn_mscale

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
_OWN_RELEASE = "take config.json from the model's own release"
_MOST_EXPERT_LAYERS = 100_000  # layers times experts; the largest models have a quarter of it


@dataclass(frozen=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention: `num_heads` queries share `num_kv_heads` keys and values of `head_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_key_value_heads is {self.num_kv_heads}; allowed: divisors of {self.num_heads} heads")

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention: one latent of `kv_lora_rank` and one rotary key of `qk_rope_head_dim` a token."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    bias: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.q_lora_rank is not None:
            check_positive(self, "q_lora_rank")

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head, both parts together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Routed experts beside shared ones, in every layer from `first_k_dense` on.

    `scoring` "softmax" with group maxima is DeepSeek-V2's router; "sigmoid" with a bias that only corrects the choice
    and groups scored by their best two is DeepSeek-V3's. `num_groups == 1` means no group limit.
    """

    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    moe_intermediate_size: int
    first_k_dense: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int = 1
    topk_groups: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_groups")
        check_positive(self, "topk_groups", "routed_scaling_factor")
        if self.num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not divide into {self.num_groups} groups to choose from")
        reachable = self.num_experts // self.num_groups * self.topk_groups
        if self.num_experts_per_tok > reachable:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}; allowed: up to {reachable}")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All that decides a model's logits, but the weights."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    mlp_bias: bool
    attention: GqaSpec | MlaSpec
    rope: RopeSpec
    moe: MoeSpec | None = None

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")
        check_positive(self, "max_position_embeddings")
        # everything downstream makes a table of all modules
        num_expert_layers = self.num_layers * (self.moe.num_experts if self.moe else 1)
        if num_expert_layers > _MOST_EXPERT_LAYERS:
            raise ValueError(f"{num_expert_layers} layers times experts; allowed: up to {_MOST_EXPERT_LAYERS}")

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` routes its MLP over experts."""
        return self.moe is not None and layer >= self.moe.first_k_dense

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face `config.json` dictionary.

        Raises:
            UnsupportedModelError: the architecture, or an option that changes the logits, is not lowered here; or a
                field is missing or has no sensible value; names it.
        """
        architecture = _architecture(config)
        try:
            is_mla = architecture.startswith("Deepseek")
            rope = _rope(config, is_mla=is_mla)
            _refuse_unknown_options(config)
            return cls(
                architecture=architecture,
                num_layers=_int(config, "num_hidden_layers"),
                hidden_size=_int(config, "hidden_size"),
                intermediate_size=_int(config, "intermediate_size"),
                vocab_size=_int(config, "vocab_size"),
                rms_norm_eps=_float(config, "rms_norm_eps", 1e-6),
                max_position_embeddings=_int(config, "max_position_embeddings"),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                attention=_mla(config, rope) if is_mla else _gqa(config, architecture),
                rope=rope,
                moe=_moe(config, architecture) if is_mla else None,
            )
        except KeyError as missing:
            raise UnsupportedModelError(f"config.json of {architecture} has no field {missing}", _OWN_RELEASE) from None
        except ValueError as error:
            raise UnsupportedModelError(f"config.json of {architecture}: {error}", _OWN_RELEASE) from None


def _float(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number; where it is missing or null, the default, and without one KeyError."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r}, a number is needed")
    return float(value)


def _int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number; as `_float`."""
    number = _float(config, key, default)
    if number != int(number):
        raise ValueError(f"{key} is {number!r}, a whole number is needed")
    return int(number)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names or "(none named)"
    if name not in ARCHITECTURES:
        hint = f"supported: {', '.join(ARCHITECTURES)}"
        if str(name).startswith("Deepseek"):  # V3.2 and V4, whose sparse attention no engine builder knows
            hint += "; TensorRT-LLM's PyTorch backend serves its own release: trtllm-serve MODEL --backend pytorch"
        raise UnsupportedModelError(f"unknown architecture {name!r} in config.json", hint)
    return str(name)


def _refuse_unknown_options(config: Mapping[str, Any]) -> None:
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModelError(f"hidden_act {act!r} is not supported", "only 'silu' is")
    if config.get("use_sliding_window"):
        raise UnsupportedModelError(
            "use_sliding_window is true: sliding-window attention is not supported",
            "set it to false in config.json only if the model was trained without it",
        )


def _rope(config: Mapping[str, Any], *, is_mla: bool) -> RopeSpec:
    # transformers 5 writes `rope_parameters`; earlier releases `rope_theta` and `rope_scaling`
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise ValueError(f"its rope parameters are {raw!r}, an object is needed")
    theta = _float(raw, "rope_theta", _float(config, "rope_theta", 10000.0))
    if _float(raw, "partial_rotary_factor", _float(config, "partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported", "use another model")
    if is_mla:
        dim, interleaved = _int(config, "qk_rope_head_dim"), bool(config.get("rope_interleave", True))
    else:
        dim, interleaved = _head_dim(config), False
    kind = raw.get("rope_type") or raw.get("type") or "default"
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None
    if kind in ("default", "mrope"):
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(factor=_float(raw, "factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=_float(raw, "factor"),
            low_freq_factor=_float(raw, "low_freq_factor"),
            high_freq_factor=_float(raw, "high_freq_factor"),
            original_max_position_embeddings=_int(raw, "original_max_position_embeddings"),
        )
    elif kind == "yarn":
        scaling = _yarn(raw, _int(config, "max_position_embeddings"))
    else:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported", "supported: default, linear, llama3, yarn"
        )
    return RopeSpec(theta=theta, dim=dim, interleaved=interleaved, scaling=scaling)


def _yarn(raw: Mapping[str, Any], max_positions: int) -> YarnScaling:
    def optional(key: str) -> float | None:
        return None if raw.get(key) is None else _float(raw, key)

    original = _int(raw, "original_max_position_embeddings", max_positions)
    return YarnScaling(
        factor=_float(raw, "factor", max_positions / max(1, original)),
        original_max_position_embeddings=original,
        beta_fast=_float(raw, "beta_fast", 32.0),
        beta_slow=_float(raw, "beta_slow", 1.0),
        truncate=bool(raw.get("truncate", True)),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        attention_factor=optional("attention_factor"),
    )


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return _int(config, "head_dim")
    return _int(config, "hidden_size") // max(1, _int(config, "num_attention_heads"))


def _gqa(config: Mapping[str, Any], architecture: str) -> GqaSpec:
    num_heads = _int(config, "num_attention_heads")
    bias = bool(config.get("attention_bias", False))
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=_int(config, "num_key_value_heads", num_heads),
        head_dim=_head_dim(config),
        qkv_bias=True if architecture == "Qwen2ForCausalLM" else bias,
        o_bias=False if architecture == "Qwen2ForCausalLM" else bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _mla(config: Mapping[str, Any], rope: RopeSpec) -> MlaSpec:
    nope, rope_dim = _int(config, "qk_nope_head_dim"), _int(config, "qk_rope_head_dim")
    scale = max(1, nope + rope_dim) ** -0.5
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        scale *= yarn_mscale(rope.scaling.factor, rope.scaling.mscale_all_dim) ** 2
    return MlaSpec(
        num_heads=_int(config, "num_attention_heads"),
        q_lora_rank=_int(config, "q_lora_rank") if config.get("q_lora_rank") else None,
        kv_lora_rank=_int(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=_int(config, "v_head_dim"),
        scale=scale,
        bias=bool(config.get("attention_bias", False)),
    )


def _moe(config: Mapping[str, Any], architecture: str) -> MoeSpec | None:
    if not config.get("n_routed_experts"):
        return None
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    if _int(config, "moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(f"moe_layer_freq {config['moe_layer_freq']} is not supported", "only 1 is")
    norm_topk_prob = bool(config.get("norm_topk_prob", is_v3))
    if norm_topk_prob and not is_v3:
        raise UnsupportedModelError("norm_topk_prob is not supported with DeepSeek-V2's router", "only false is")
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if method not in (("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")):
        raise UnsupportedModelError(f"topk_method {method!r} is not supported for {architecture}", "use another model")
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if is_v3 else "softmax"
    if config.get("scoring_func", scoring) != scoring:
        raise UnsupportedModelError(
            f"scoring_func {config['scoring_func']!r} is not supported for {architecture}", f"only {scoring!r} is"
        )
    grouped = method != "greedy"
    return MoeSpec(
        num_experts=_int(config, "n_routed_experts"),
        num_experts_per_tok=_int(config, "num_experts_per_tok"),
        num_shared_experts=_int(config, "n_shared_experts", 0),
        moe_intermediate_size=_int(config, "moe_intermediate_size"),
        first_k_dense=_int(config, "first_k_dense_replace", 0),
        scoring=scoring,
        num_groups=_int(config, "n_group", 1) if grouped else 1,
        topk_groups=_int(config, "topk_group", 1) if grouped else 1,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=_float(config, "routed_scaling_factor", 1.0),
    )
