"""One typed description of a model, read from a Hugging Face `config.json`.

Everything downstream (lowering, ledger, manifest) reads this and never the raw dictionary. An option that would change
the logits and that we do not lower is an error here, so that a model is either served right or refused.

Sources: LLaMA (arXiv 2302.13971), GQA (2305.13245), RoPE (2104.09864), YaRN (2309.00071), DeepSeek-V2 with MLA
(2405.04434), DeepSeek-V3 (2412.19437).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from harness.errors import UnsupportedModelError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071) with DeepSeek's `mscale` pair."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature of YaRN, eq. 22: `0.1 * mscale * ln(factor) + 1`, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding over `dim` values a head; `interleaved`: pairs are neighbours (DeepSeek), not halves."""

    theta: float
    dim: int
    interleaved: bool = False
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def inv_freq(self) -> npt.NDArray[np.float32]:
        """Scaled inverse frequencies, shape `(dim / 2,)`."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        base: npt.NDArray[np.float32] = np.asarray(1.0 / np.power(np.float32(self.theta), exponents), dtype=np.float32)
        match self.scaling:
            case None:
                return base
            case LinearScaling(factor=factor):
                return np.asarray(base / np.float32(factor), dtype=np.float32)
            case Llama3Scaling() as s:
                return _llama3_inv_freq(base, s)
            case YarnScaling() as s:
                return _yarn_inv_freq(base, s, self.theta, self.dim)

    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by (YaRN's attention factor; 1 otherwise)."""
        if not isinstance(self.scaling, YarnScaling):
            return 1.0
        s = self.scaling
        if s.attention_factor is not None:
            return s.attention_factor
        if s.mscale and s.mscale_all_dim:
            return yarn_mscale(s.factor, s.mscale) / yarn_mscale(s.factor, s.mscale_all_dim)
        return yarn_mscale(s.factor)


def _llama3_inv_freq(base: npt.NDArray[np.float32], s: Llama3Scaling) -> npt.NDArray[np.float32]:
    wavelength = 2 * math.pi / base
    low = s.original_max_position_embeddings / s.low_freq_factor
    high = s.original_max_position_embeddings / s.high_freq_factor
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    ramp = (1 - smooth) * base / s.factor + smooth * base
    scaled = np.where(wavelength > low, base / s.factor, np.where(wavelength < high, base, ramp))
    return scaled.astype(np.float32)


def _yarn_inv_freq(base: npt.NDArray[np.float32], s: YarnScaling, theta: float, dim: int) -> npt.NDArray[np.float32]:
    def correction_dim(num_rotations: float) -> float:
        span = s.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(theta))

    low, high = correction_dim(s.beta_fast), correction_dim(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return np.asarray(base / s.factor * interpolated + base * (1 - interpolated), dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention: `num_heads` queries share `num_kv_heads` keys and values of `head_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

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

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` routes its MLP over experts."""
        return self.moe is not None and layer >= self.moe.first_k_dense

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face `config.json` dictionary.

        Raises:
            UnsupportedModelError: the architecture, or an option that changes the logits, is not lowered here; or a
                required field is missing.
        """
        architecture = _architecture(config)
        try:
            is_mla = architecture.startswith("Deepseek")
            rope = _rope(config, is_mla=is_mla)
            _refuse_unknown_options(config)
            return cls(
                architecture=architecture,
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=int(config["hidden_size"]),
                intermediate_size=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                max_position_embeddings=int(config["max_position_embeddings"]),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                attention=_mla(config, rope) if is_mla else _gqa(config, architecture),
                rope=rope,
                moe=_moe(config, architecture) if is_mla else None,
            )
        except KeyError as missing:
            raise UnsupportedModelError(
                f"config.json of {architecture} has no field {missing}", "take config.json from the model's own release"
            ) from None


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    name = names[0] if names else "(none named)"
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"unknown architecture {name!r} in config.json", f"supported: {', '.join(ARCHITECTURES)}"
        )
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
    theta = float(raw.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if float(raw.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported", "use another model")
    if is_mla:
        dim, interleaved = int(config["qk_rope_head_dim"]), bool(config.get("rope_interleave", True))
    else:
        dim, interleaved = _head_dim(config), False
    kind = raw.get("rope_type") or raw.get("type") or "default"
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None
    original = raw.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if kind in ("default", "mrope"):
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(factor=float(raw["factor"]))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=float(raw["factor"]),
            low_freq_factor=float(raw["low_freq_factor"]),
            high_freq_factor=float(raw["high_freq_factor"]),
            original_max_position_embeddings=int(raw["original_max_position_embeddings"]),
        )
    elif kind == "yarn":
        scaling = _yarn(raw, int(original or 0), int(config["max_position_embeddings"]))
    else:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported", "supported: default, linear, llama3, yarn"
        )
    return RopeSpec(theta=theta, dim=dim, interleaved=interleaved, scaling=scaling)


def _yarn(raw: Mapping[str, Any], original: int, max_positions: int) -> YarnScaling:
    factor = raw.get("factor")
    return YarnScaling(
        factor=float(factor) if factor is not None else max_positions / original,
        original_max_position_embeddings=original,
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        truncate=bool(raw.get("truncate", True)),
        mscale=raw.get("mscale"),
        mscale_all_dim=raw.get("mscale_all_dim"),
        attention_factor=raw.get("attention_factor"),
    )


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))


def _gqa(config: Mapping[str, Any], architecture: str) -> GqaSpec:
    num_heads = int(config["num_attention_heads"])
    bias = bool(config.get("attention_bias", False))
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=_head_dim(config),
        qkv_bias=True if architecture == "Qwen2ForCausalLM" else bias,
        o_bias=False if architecture == "Qwen2ForCausalLM" else bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _mla(config: Mapping[str, Any], rope: RopeSpec) -> MlaSpec:
    nope, rope_dim = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    scale = float((nope + rope_dim) ** -0.5)
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        scale *= yarn_mscale(rope.scaling.factor, rope.scaling.mscale_all_dim) ** 2
    q_lora_rank = config.get("q_lora_rank")
    return MlaSpec(
        num_heads=int(config["num_attention_heads"]),
        q_lora_rank=int(q_lora_rank) if q_lora_rank else None,
        kv_lora_rank=int(config["kv_lora_rank"]),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=int(config["v_head_dim"]),
        scale=scale,
        bias=bool(config.get("attention_bias", False)),
    )


def _moe(config: Mapping[str, Any], architecture: str) -> MoeSpec | None:
    num_experts = config.get("n_routed_experts")
    if not num_experts:
        return None
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    if int(config.get("moe_layer_freq", 1)) != 1:
        raise UnsupportedModelError(f"moe_layer_freq {config['moe_layer_freq']} is not supported", "only 1 is")
    norm_topk_prob = bool(config.get("norm_topk_prob", is_v3))
    if norm_topk_prob and not is_v3:
        raise UnsupportedModelError("norm_topk_prob is not supported with DeepSeek-V2's router", "only false is")
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if method not in ({"noaux_tc"} if is_v3 else {"greedy", "group_limited_greedy"}):
        raise UnsupportedModelError(f"topk_method {method!r} is not supported for {architecture}", "use another model")
    grouped = method != "greedy"
    num_groups = int(config.get("n_group") or 1) if grouped else 1
    return MoeSpec(
        num_experts=int(num_experts),
        num_experts_per_tok=int(config["num_experts_per_tok"]),
        num_shared_experts=int(config.get("n_shared_experts") or 0),
        moe_intermediate_size=int(config["moe_intermediate_size"]),
        first_k_dense=int(config.get("first_k_dense_replace", 0)),
        scoring="sigmoid" if is_v3 else "softmax",
        num_groups=num_groups,
        topk_groups=int(config.get("topk_group") or 1) if grouped else 1,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
    )
