"""A whole decoder as a stateful OpenVINO graph, from a source under a recipe.

The stateful form is what an engine stores: OpenVINO reads no paged attention back from a file, so the runtime makes the
paged form when it loads the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from harness.build.lowering.attention import AttentionInputs, gqa, mla
from harness.build.lowering.layers import mlp, rms_norm, rope_tables
from harness.build.lowering.moe import moe
from harness.build.lowering.weights import WeightLowering
from harness.spec import MlaSpec, ModelSpec

LOWERING_VERSION = 2
"""Part of every engine's id. To be raised when lowering makes other bytes of the same weights under the same recipe."""


def build_stateful_model(
    spec: ModelSpec,
    weights: WeightLowering,
    *,
    absorbed: bool = True,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> ov.Model:
    """Lower a model to a stateful graph: `input_ids`, `attention_mask`, `position_ids`, `beam_idx` to `logits`.

    `absorbed` chooses what the KV cache of multi-head latent attention holds. `on_layer` is called as layers finish.
    """
    input_ids = _parameter("input_ids", ov.Type.i64, [-1, -1])
    attention_mask = _parameter("attention_mask", ov.Type.i64, [-1, -1])
    position_ids = _parameter("position_ids", ov.Type.i64, [-1, -1])
    beam_idx = _parameter("beam_idx", ov.Type.i32, [-1])
    embedding = weights.matrix("model.embed_tokens")
    hidden = ops.gather(embedding, input_ids, ops.constant(np.int64(0)))
    inputs = AttentionInputs(
        beam_idx=beam_idx, rope=spec.rope, rope_tables=rope_tables(position_ids, spec.rope), state_writes=[]
    )
    for layer in range(spec.num_layers):
        hidden = _layer(spec, weights, hidden, layer, inputs, absorbed=absorbed)
        on_layer(layer)
    hidden = rms_norm(hidden, weights.vector("model.norm.weight"), spec.rms_norm_eps)
    head = embedding if spec.tie_word_embeddings else weights.matrix("lm_head")
    logits = ops.result(ops.matmul(hidden, head, False, True))
    logits.output(0).set_names({"logits"})
    parameters = [input_ids, attention_mask, position_ids, beam_idx]
    return ov.Model([logits], inputs.state_writes, parameters, "decoder")


def _parameter(name: str, element_type: ov.Type, shape: list[int]) -> Any:
    parameter = ops.parameter(ov.PartialShape(shape), element_type, name=name)
    parameter.output(0).set_names({name})
    return parameter


def _layer(
    spec: ModelSpec, weights: WeightLowering, x: Any, layer: int, inputs: AttentionInputs, *, absorbed: bool
) -> Any:
    prefix = f"model.layers.{layer}"
    normed = rms_norm(x, weights.vector(f"{prefix}.input_layernorm.weight"), spec.rms_norm_eps)
    if isinstance(spec.attention, MlaSpec):
        attended = mla(weights, normed, f"{prefix}.self_attn", spec.attention, inputs, absorbed=absorbed)
    else:
        attended = gqa(weights, normed, f"{prefix}.self_attn", spec.attention, inputs, spec.rms_norm_eps)
    x = ops.add(x, attended)
    normed = rms_norm(x, weights.vector(f"{prefix}.post_attention_layernorm.weight"), spec.rms_norm_eps)
    if spec.moe is not None and spec.is_moe_layer(layer):
        return ops.add(x, moe(weights, normed, f"{prefix}.mlp", spec.moe, spec.hidden_size))
    return ops.add(x, mlp(weights, normed, f"{prefix}.mlp", spec.intermediate_size, bias=spec.mlp_bias))
