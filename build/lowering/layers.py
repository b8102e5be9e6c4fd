"""The pieces every decoder shares, in the graph shapes that OpenVINO's CPU plugin fuses.

Activations are `(batch, tokens, hidden)` float32 while the graph is stateful; the paged transformation turns the tokens
of a step into the batch axis, so no piece may assume which of the two axes carries them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino import opset13 as ops

from harness.build.lowering.weights import WeightLowering
from harness.rope import RopeSpec


def constant_i64(*values: int) -> Any:
    """A 1-D int64 constant."""
    return ops.constant(np.array(values, np.int64))


def scalar(value: float) -> Any:
    """A float32 scalar constant."""
    return ops.constant(np.float32(value))


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Root mean square norm over the last axis (arXiv 1910.07467)."""
    mean = ops.reduce_mean(ops.power(x, scalar(2.0)), constant_i64(-1), keep_dims=True)
    inverse = ops.divide(scalar(1.0), ops.sqrt(ops.add(mean, scalar(eps))))
    return ops.multiply(ops.multiply(x, inverse), weight)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """`x @ weight.T + bias` with a weight `(out, in)`."""
    y = ops.matmul(x, weight, False, True)
    return y if bias is None else ops.add(y, bias)


def silu(x: Any) -> Any:
    """`x * sigmoid(x)`; the plugin fuses it to a one-input Swish, which its expert fusion wants."""
    return ops.multiply(x, ops.sigmoid(x))


def split(x: Any, sizes: list[int], axis: int = -1) -> list[Any]:
    """Split along an axis into parts of the given sizes."""
    return list(ops.variadic_split(x, axis, constant_i64(*sizes)).outputs())


def mlp(weights: WeightLowering, x: Any, prefix: str, width: int, *, bias: bool = False) -> Any:
    """Gated MLP (SwiGLU, arXiv 2002.05202): gate and up as one matrix of `2 * width` rows, then down."""
    gate_up_bias = weights.vector(f"{prefix}.gate_proj.bias", f"{prefix}.up_proj.bias") if bias else None
    gate_up = linear(x, weights.matrix(f"{prefix}.gate_proj", f"{prefix}.up_proj"), gate_up_bias)
    gate, up = split(gate_up, [width, width])
    down_bias = weights.vector(f"{prefix}.down_proj.bias") if bias else None
    return linear(ops.multiply(silu(gate), up), weights.matrix(f"{prefix}.down_proj"), down_bias)


def rope_tables(position_ids: Any, rope: RopeSpec) -> tuple[Any, Any]:
    """cos and sin `(batch, 1, tokens, dim)` of positions `(batch, tokens)`, halves repeated (arXiv 2104.09864)."""
    positions = ops.unsqueeze(ops.convert(position_ids, "f32"), constant_i64(1, 3))
    angles = ops.multiply(positions, ops.constant(rope.inv_freq().reshape(1, 1, 1, -1)))
    angles = ops.concat([angles, angles], -1)
    factor = rope.cos_sin_factor()
    cos, sin = ops.cos(angles), ops.sin(angles)
    if factor == 1.0:
        return cos, sin
    return ops.multiply(cos, scalar(factor)), ops.multiply(sin, scalar(factor))


def apply_rope(x: Any, tables: tuple[Any, Any], dim: int) -> Any:
    """Rotate `(batch, heads, tokens, dim)`; pairs are the two halves."""
    cos, sin = tables
    first, second = split(x, [dim // 2, dim // 2], axis=3)  # the axis by number: the RoPE fusion looks for it
    rotated = ops.concat([ops.multiply(second, scalar(-1.0)), first], -1)
    return ops.add(ops.multiply(x, cos), ops.multiply(rotated, sin))


def halves_order(dim: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Row order that turns neighbouring rotary pairs into halves: even rows, then odd ones.

    Queries and keys permuted alike have the same inner products, so the graph needs one kind of rotation only.
    """
    return np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)]).astype(np.int64)
