"""The paged form of a decoder graph, made when an engine is loaded.

An engine stores a stateful graph. This rewrites it for OpenVINO's paged attention, in which tokens of many sequences
run in one call and the caller owns the KV blocks, and lets the caller choose which tokens get logits: a long prefill
would otherwise pay the whole vocabulary for every token. See PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

LOGIT_INDICES = "logit_indices"


def to_paged(model: ov.Model) -> None:
    """Rewrite a stateful decoder, in place.

    Inputs after: `input_ids`, `position_ids` `(tokens,)`; `past_lens` `(sequences,)`; `subsequence_begins`,
    `block_indices_begins` `(sequences + 1,)`; `block_indices`; `max_context_len`; `logit_indices` `(num_logits,)`; and
    `key_cache.i`, `value_cache.i` for each layer. Output: `logits` `(num_logits, vocab)`.
    """
    paged_attention_transformation(model)
    head = model.output("logits").get_node().input_value(0).get_node()
    hidden_size = head.input_value(1).get_partial_shape()[1].get_length()
    indices = ops.parameter(ov.PartialShape([-1]), ov.Type.i64, name=LOGIT_INDICES)
    indices.output(0).set_names({LOGIT_INDICES})
    hidden = ops.reshape(head.input_value(0), ops.constant(np.array([-1, hidden_size], np.int64)), False)
    picked = ops.gather(hidden, indices, ops.constant(np.int64(0)))
    head.input(0).replace_source_output(picked.output(0))
    model.add_parameters([indices])
    model.validate_nodes_and_infer_types()
