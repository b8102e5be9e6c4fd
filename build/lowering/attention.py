"""Attention as a stateful graph: grouped-query attention and multi-head latent attention.

Each layer keeps its keys and values in two OpenVINO variables in the form that the paged-attention transformation looks
for (ReadValue, Gather by beam, Concat, scaled dot-product attention). MLA has two forms. Absorbed (DeepSeek-V2, arXiv
2405.04434, section 2.1.2): the cache holds one latent and one rotary key a token, the up-projections are applied to the
query and to the result. Expanded: the cache holds every head's key and value; it is the oracle of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

from harness.build.lowering.layers import apply_rope, constant_i64, halves_order, linear, rms_norm, split
from harness.build.lowering.weights import WeightLowering
from harness.rope import RopeSpec
from harness.spec import GqaSpec, MlaSpec

_LATENT_NORM_EPS = 1e-6  # DeepSeek's latent norms have an epsilon of their own


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """What all layers share: beam index `(batch,)`, rotary tables, and the list that collects state writes."""

    beam_idx: Any
    rope: RopeSpec
    rope_tables: tuple[Any, Any]
    state_writes: list[Any]


def _cached(inputs: AttentionInputs, current: Any, name: str, num_heads: int, dim: int) -> Any:
    """Past and current keys or values, `(batch, num_heads, past + tokens, dim)`; registers the write."""
    info = VariableInfo()
    info.data_shape = ov.PartialShape([-1, num_heads, -1, dim])
    info.data_type = ov.Type.f32
    info.variable_id = name
    variable = Variable(info)
    batch = ops.gather(ops.shape_of(inputs.beam_idx), constant_i64(0), ops.constant(np.int64(0)))
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, constant_i64(num_heads, 0, dim)], 0))
    past = ops.read_value(empty, variable)
    past = ops.gather(past, inputs.beam_idx, ops.constant(np.int64(0)))
    joined = ops.concat([past, current], 2)
    inputs.state_writes.append(ops.assign(joined, variable))
    return joined


def _repeat_heads(x: Any, num_heads: int, repeats: int, dim: int) -> Any:
    """Each of the heads of `(batch, heads, tokens, dim)` `repeats` times in a row."""
    if repeats == 1:
        return x
    wide = ops.broadcast(
        ops.unsqueeze(x, constant_i64(2)), constant_i64(1, 1, repeats, 1, 1), broadcast_spec="BIDIRECTIONAL"
    )
    return ops.reshape(wide, constant_i64(0, num_heads, -1, dim), True)


def _attend(query: Any, key: Any, value: Any, scale: float) -> Any:
    return ops.scaled_dot_product_attention(
        query, key, value, causal=True, scale=ops.constant(np.float32(scale)), attention_mask=None
    )


def _heads(x: Any, num_heads: int, dim: int) -> Any:
    """`(batch, tokens, heads * dim)` to `(batch, heads, tokens, dim)`."""
    return ops.transpose(ops.reshape(x, constant_i64(0, 0, num_heads, dim), True), constant_i64(0, 2, 1, 3))


def _joined(x: Any, width: int) -> Any:
    """`(batch, heads, tokens, dim)` to `(batch, tokens, width)`."""
    return ops.reshape(ops.transpose(x, constant_i64(0, 2, 1, 3)), constant_i64(0, 0, width), True)


def gqa(weights: WeightLowering, x: Any, prefix: str, spec: GqaSpec, inputs: AttentionInputs, eps: float) -> Any:
    """Grouped-query attention (arXiv 2305.13245), q, k and v as one matrix; optional biases and q/k norms."""
    names = [f"{prefix}.{n}" for n in ("q_proj", "k_proj", "v_proj")]
    bias = weights.vector(*(f"{n}.bias" for n in names)) if spec.qkv_bias else None
    qkv = linear(x, weights.matrix(*names), bias)
    kv_width = spec.num_kv_heads * spec.head_dim
    q, k, v = split(qkv, [spec.num_heads * spec.head_dim, kv_width, kv_width])
    q, k = _heads(q, spec.num_heads, spec.head_dim), _heads(k, spec.num_kv_heads, spec.head_dim)
    v = _heads(v, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        q = rms_norm(q, weights.vector(f"{prefix}.q_norm.weight"), eps)
        k = rms_norm(k, weights.vector(f"{prefix}.k_norm.weight"), eps)
    q = apply_rope(q, inputs.rope_tables, spec.head_dim)
    k = apply_rope(k, inputs.rope_tables, spec.head_dim)
    k = _cached(inputs, k, f"{prefix}.key", spec.num_kv_heads, spec.head_dim)
    v = _cached(inputs, v, f"{prefix}.value", spec.num_kv_heads, spec.head_dim)
    repeats = spec.num_heads // spec.num_kv_heads
    k = _repeat_heads(k, spec.num_heads, repeats, spec.head_dim)
    v = _repeat_heads(v, spec.num_heads, repeats, spec.head_dim)
    out = _joined(_attend(q, k, v, spec.scale), spec.num_heads * spec.head_dim)
    out_bias = weights.vector(f"{prefix}.o_proj.bias") if spec.o_bias else None
    return linear(out, weights.matrix(f"{prefix}.o_proj"), out_bias)


def mla(weights: WeightLowering, x: Any, prefix: str, spec: MlaSpec, inputs: AttentionInputs, *, absorbed: bool) -> Any:
    """Multi-head latent attention; `absorbed` decides what the cache holds, never the result."""
    q_nope, q_rope, latent, k_rope = _mla_projections(weights, x, prefix, spec, inputs)
    up = weights.read(f"{prefix}.kv_b_proj.weight").reshape(
        spec.num_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank
    )
    up_key, up_value = up[:, : spec.qk_nope_head_dim], up[:, spec.qk_nope_head_dim :]
    attend = _absorbed if absorbed else _expanded
    out = attend(weights, prefix, spec, inputs, (q_nope, q_rope, latent, k_rope), (up_key, up_value))
    out_bias = weights.vector(f"{prefix}.o_proj.bias") if spec.bias else None
    return linear(_joined(out, spec.num_heads * spec.v_head_dim), weights.matrix(f"{prefix}.o_proj"), out_bias)


def _mla_projections(
    weights: WeightLowering, x: Any, prefix: str, spec: MlaSpec, inputs: AttentionInputs
) -> tuple[Any, Any, Any, Any]:
    """q_nope, rotated q_rope `(batch, heads, tokens, .)`; normed latent, rotated k_rope `(batch, 1, tokens, .)`."""
    q_order, kv_order = _rope_orders(spec, inputs.rope)
    first = f"{prefix}.q_proj" if spec.q_lora_rank is None else f"{prefix}.q_a_proj"
    first_width = spec.num_heads * spec.qk_head_dim if spec.q_lora_rank is None else spec.q_lora_rank
    kv_width = spec.kv_lora_rank + spec.qk_rope_head_dim
    joined = weights.matrix(
        first, f"{prefix}.kv_a_proj_with_mqa", orders=[q_order if spec.q_lora_rank is None else None, kv_order]
    )
    query, compressed = split(linear(x, joined, _mla_bias(weights, prefix, spec, kv_order)), [first_width, kv_width])
    if spec.q_lora_rank is not None:
        query = rms_norm(query, weights.vector(f"{prefix}.q_a_layernorm.weight"), _LATENT_NORM_EPS)
        query = linear(query, weights.matrix(f"{prefix}.q_b_proj", orders=[q_order]))
    query = _heads(query, spec.num_heads, spec.qk_head_dim)
    q_nope, q_rope = split(query, [spec.qk_nope_head_dim, spec.qk_rope_head_dim])
    latent, k_rope = split(compressed, [spec.kv_lora_rank, spec.qk_rope_head_dim])
    latent = rms_norm(latent, weights.vector(f"{prefix}.kv_a_layernorm.weight"), _LATENT_NORM_EPS)
    q_rope = apply_rope(q_rope, inputs.rope_tables, spec.qk_rope_head_dim)
    k_rope = apply_rope(_heads(k_rope, 1, spec.qk_rope_head_dim), inputs.rope_tables, spec.qk_rope_head_dim)
    return q_nope, q_rope, _heads(latent, 1, spec.kv_lora_rank), k_rope


def _mla_bias(weights: WeightLowering, prefix: str, spec: MlaSpec, kv_order: Any) -> Any:
    if not spec.bias:
        return None
    kv_bias = weights.read(f"{prefix}.kv_a_proj_with_mqa.bias")
    kv_bias = kv_bias if kv_order is None else kv_bias[kv_order]
    if spec.q_lora_rank is None:
        query_bias = np.zeros(spec.num_heads * spec.qk_head_dim, np.float32)  # q_proj has none
    else:
        query_bias = weights.read(f"{prefix}.q_a_proj.bias")
    return ops.constant(np.concatenate([query_bias, kv_bias]))


def _rope_orders(spec: MlaSpec, rope: RopeSpec) -> tuple[Any, Any]:
    """Row orders of the query and the compressed projection that bring rotary pairs into halves."""
    if not rope.interleaved:
        return None, None
    head = np.concatenate(
        [np.arange(spec.qk_nope_head_dim), spec.qk_nope_head_dim + halves_order(spec.qk_rope_head_dim)]
    )
    heads = np.arange(spec.num_heads)[:, None] * spec.qk_head_dim + head[None, :]
    kv = np.concatenate([np.arange(spec.kv_lora_rank), spec.kv_lora_rank + halves_order(spec.qk_rope_head_dim)])
    return heads.reshape(-1), kv


def _per_head(x: Any, weight: Any, num_heads: int, in_dim: int, out_dim: int, *, transpose: bool) -> Any:
    """`(batch, heads, tokens, in)` times one matrix a head, with all tokens as rows of each product."""
    rows = ops.reshape(ops.transpose(x, constant_i64(1, 0, 2, 3)), constant_i64(num_heads, -1, in_dim), False)
    product = ops.matmul(rows, weight, False, transpose)
    # the tokens of a step lie in the batch axis once the graph is paged, in the token axis before: the input knows
    sizes = ops.shape_of(x)
    batch_and_tokens = [ops.gather(sizes, constant_i64(axis), ops.constant(np.int64(0))) for axis in (0, 2)]
    shape = ops.concat([constant_i64(num_heads), *batch_and_tokens, constant_i64(out_dim)], 0)
    return ops.transpose(ops.reshape(product, shape, False), constant_i64(1, 0, 2, 3))


def _absorbed(weights: WeightLowering, prefix: str, spec: MlaSpec, inputs: AttentionInputs, parts: Any, up: Any) -> Any:
    q_nope, q_rope, latent, k_rope = parts
    up_key, up_value = (weights.half(f"{prefix}.kv_b_proj.weight", u) for u in up)
    heads, rank, key_dim = spec.num_heads, spec.kv_lora_rank, spec.kv_lora_rank + spec.qk_rope_head_dim
    q_latent = _per_head(q_nope, up_key, heads, spec.qk_nope_head_dim, rank, transpose=False)
    key = _cached(inputs, ops.concat([latent, k_rope], -1), f"{prefix}.key", 1, key_dim)
    value = _cached(inputs, latent, f"{prefix}.value", 1, rank)
    out = _attend(
        ops.concat([q_latent, q_rope], -1),
        _repeat_heads(key, heads, heads, key_dim),
        _repeat_heads(value, heads, heads, rank),
        spec.scale,
    )
    return _per_head(out, up_value, heads, rank, spec.v_head_dim, transpose=True)


def _expanded(weights: WeightLowering, prefix: str, spec: MlaSpec, inputs: AttentionInputs, parts: Any, up: Any) -> Any:
    q_nope, q_rope, latent, k_rope = parts
    up_key, up_value = (weights.half(f"{prefix}.kv_b_proj.weight", u.reshape(-1, spec.kv_lora_rank)) for u in up)
    flat = ops.squeeze(latent, constant_i64(1))
    k_nope = _heads(linear(flat, up_key), spec.num_heads, spec.qk_nope_head_dim)
    value = _heads(linear(flat, up_value), spec.num_heads, spec.v_head_dim)
    k_rope = ops.broadcast(k_rope, constant_i64(1, spec.num_heads, 1, 1), broadcast_spec="BIDIRECTIONAL")
    key = _cached(inputs, ops.concat([k_nope, k_rope], -1), f"{prefix}.key", spec.num_heads, spec.qk_head_dim)
    value = _cached(inputs, value, f"{prefix}.value", spec.num_heads, spec.v_head_dim)
    return _attend(ops.concat([q_nope, q_rope], -1), key, value, spec.scale)
