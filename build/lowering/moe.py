"""Mixture of experts in the one graph shape that OpenVINO's CPU plugin fuses into its expert node.

Written as if every expert saw every token and the router masked the sum; the plugin recognises the shape (Tile, three
batched products, ScatterElementsUpdate, Transpose, Reshape, ReduceSum) and runs only the chosen experts, as
`GatherMatmul`. The tests assert that it did: the shape is the plugin's own and may change with a release.

Routers: DeepSeek-V2 (arXiv 2405.04434, 2.2.2) and DeepSeek-V3 (arXiv 2412.19437, 2.1.2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino import opset13 as ops

from harness.build.lowering.layers import constant_i64, linear, mlp, scalar, silu
from harness.build.lowering.weights import WeightLowering
from harness.spec import MoeSpec


def moe(weights: WeightLowering, x: Any, prefix: str, spec: MoeSpec, hidden_size: int) -> Any:
    """Routed experts plus shared ones over `(batch, tokens, hidden)`."""
    tokens = ops.reshape(x, constant_i64(-1, hidden_size), False)
    chosen, routing = _route(weights, tokens, prefix, spec)
    output = _experts(weights, x, tokens, prefix, spec, hidden_size, (chosen, routing))
    if spec.num_shared_experts:
        width = spec.moe_intermediate_size * spec.num_shared_experts
        output = ops.add(output, mlp(weights, x, f"{prefix}.shared_experts", width))
    return output


def _experts(
    weights: WeightLowering,
    x: Any,
    tokens: Any,
    prefix: str,
    spec: MoeSpec,
    hidden_size: int,
    routed: tuple[Any, Any],
) -> Any:
    chosen, routing = routed
    names = [f"{prefix}.experts.{e}" for e in range(spec.num_experts)]
    every = ops.reshape(
        ops.tile(tokens, constant_i64(spec.num_experts, 1)), constant_i64(spec.num_experts, -1, hidden_size), False
    )
    gate = ops.matmul(every, weights.matrix(*(f"{n}.gate_proj" for n in names), stacked=True), False, True)
    up = ops.matmul(every, weights.matrix(*(f"{n}.up_proj" for n in names), stacked=True), False, True)
    down = ops.matmul(
        ops.multiply(silu(gate), up), weights.matrix(*(f"{n}.down_proj" for n in names), stacked=True), False, True
    )
    sizes = ops.gather(ops.shape_of(x), constant_i64(0, 1), ops.constant(np.int64(0)))
    outer = ops.concat([constant_i64(spec.num_experts), sizes], 0)
    down = ops.reshape(down, ops.concat([outer, constant_i64(hidden_size)], 0), False)
    # a dense (tokens, experts) table of routing weights, zero where an expert is not chosen
    num_tokens = ops.gather(ops.shape_of(tokens), constant_i64(0), ops.constant(np.int64(0)))
    zeros = ops.broadcast(scalar(0.0), ops.concat([num_tokens, constant_i64(spec.num_experts)], 0))
    table = ops.scatter_elements_update(zeros, chosen, routing, ops.constant(np.int64(1)))
    by_expert = ops.reshape(ops.transpose(table, constant_i64(1, 0)), outer, False)
    weighted = ops.multiply(down, ops.unsqueeze(by_expert, ops.constant(np.int64(-1))))
    return ops.reduce_sum(weighted, constant_i64(0), keep_dims=False)


def _route(weights: WeightLowering, tokens: Any, prefix: str, spec: MoeSpec) -> tuple[Any, Any]:
    """Chosen experts `(tokens, top_k)` and their weights. The router runs in float32, as it was trained."""
    logits = linear(tokens, weights.vector(f"{prefix}.gate.weight"))
    if spec.scoring == "softmax":
        scores = ops.softmax(logits, -1)
        limited = _group_limit(scores, spec, best_of_group=1, masked=0.0)
        picked = ops.topk(limited, ops.constant(np.int64(spec.num_experts_per_tok)), -1, "max", "value")
        routing, chosen = picked.output(0), picked.output(1)
    else:
        scores = ops.sigmoid(logits)
        corrected = ops.add(scores, weights.vector(f"{prefix}.gate.e_score_correction_bias"))
        limited = _group_limit(corrected, spec, best_of_group=2, masked=-np.inf)
        picked = ops.topk(limited, ops.constant(np.int64(spec.num_experts_per_tok)), -1, "max", "value")
        chosen = picked.output(1)
        routing = ops.gather_elements(scores, chosen, 1)
    if spec.norm_topk_prob:
        total = ops.reduce_sum(routing, constant_i64(-1), keep_dims=True)
        routing = ops.divide(routing, ops.add(total, scalar(1e-20)))
    if spec.routed_scaling_factor != 1.0:
        routing = ops.multiply(routing, scalar(spec.routed_scaling_factor))
    return chosen, routing


def _group_limit(scores: Any, spec: MoeSpec, *, best_of_group: int, masked: float) -> Any:
    """Scores with all but the best `topk_groups` groups of experts masked out."""
    if spec.num_groups == 1:
        return scores
    per_group = spec.num_experts // spec.num_groups
    grouped = ops.reshape(scores, constant_i64(-1, spec.num_groups, per_group), False)
    best = ops.topk(grouped, ops.constant(np.int64(best_of_group)), -1, "max", "value").output(0)
    group_scores = ops.reduce_sum(best, constant_i64(-1), keep_dims=False)
    kept = ops.topk(group_scores, ops.constant(np.int64(spec.topk_groups)), -1, "max", "value").output(1)
    zeros = ops.multiply(group_scores, scalar(0.0))
    ones = ops.broadcast(scalar(1.0), ops.shape_of(kept))
    mask = ops.scatter_elements_update(zeros, kept, ones, ops.constant(np.int64(1)))
    keep = ops.greater(ops.unsqueeze(mask, constant_i64(-1)), scalar(0.5))
    limited = ops.select(keep, grouped, scalar(masked))
    return ops.reshape(limited, constant_i64(-1, spec.num_experts), False)
