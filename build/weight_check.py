"""The checks that weights must pass before an engine is built: every tensor there, of its shape, and none left over.

They read names and shapes and no values (but a second copy of tied embeddings). Lowering would notice only some of
these faults, late and without a name; embeddings with too few rows, or a bias that nobody reads, it would not notice at
all, and the engine would answer, badly.
"""

from __future__ import annotations

import re

import numpy as np

from harness.errors import SourceError, UnsupportedModelError
from harness.recipe import linear_shapes
from harness.spec import MlaSpec, ModelSpec
from harness.weight_source import WeightSource, some

_ONE_RELEASE = "take weights and config.json from one and the same release"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_CHUNK_ROWS = 4096


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that lowering a model reads, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear_shapes(spec).items()}
    shapes["model.norm.weight"] = (spec.hidden_size,)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{norm}.weight": (spec.hidden_size,) for norm in _LAYER_NORMS}
        shapes |= _attention_shapes(spec, f"{prefix}.self_attn")
        if spec.moe is not None and spec.is_moe_layer(layer):
            shapes[f"{prefix}.mlp.gate.weight"] = (spec.moe.num_experts, spec.hidden_size)
            if spec.moe.scoring == "sigmoid":
                shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (spec.moe.num_experts,)
    for module in _biased_modules(spec):
        shapes[f"{module}.bias"] = shapes[f"{module}.weight"][:1]
    return shapes


def _attention_shapes(spec: ModelSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    a = spec.attention
    if isinstance(a, MlaSpec):
        up = (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
        shapes = {"kv_b_proj": up, "kv_a_layernorm": (a.kv_lora_rank,)}
        shapes |= {} if a.q_lora_rank is None else {"q_a_layernorm": (a.q_lora_rank,)}
    else:
        shapes = {"q_norm": (a.head_dim,), "k_norm": (a.head_dim,)} if a.qk_norm else {}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _biased_modules(spec: ModelSpec) -> list[str]:
    a = spec.attention
    if isinstance(a, MlaSpec):
        compressed = ["kv_a_proj_with_mqa"] if a.q_lora_rank is None else ["q_a_proj", "kv_a_proj_with_mqa"]
        attention = [*compressed, "o_proj"] if a.bias else []
    else:
        attention = ["q_proj", "k_proj", "v_proj"] * a.qkv_bias + ["o_proj"] * a.o_bias
    mlp = ["gate_proj", "up_proj", "down_proj"] * spec.mlp_bias
    return [
        f"model.layers.{layer}.{module}"
        for layer in range(spec.num_layers)
        for module in (
            *(f"self_attn.{name}" for name in attention),
            *(f"mlp.{name}" for name in mlp if not spec.is_moe_layer(layer)),
        )
    ]


def check_weights(source: WeightSource) -> None:
    """Check the tensors of a source against its config.

    Raises:
        SourceError: tensors are missing or of another shape, or embeddings are tied to an `lm_head` that differs; names
            them.
        UnsupportedModelError: there are tensors that lowering would not read.
    """
    expected, names = expected_shapes(source.spec), source.names()
    missing = [name for name in expected if name not in names]
    if missing:
        raise SourceError(f"{source.name} lacks what its config.json asks for: {some(missing)}", _ONE_RELEASE)
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise SourceError(
                f"{source.name}: tensor {name} has shape {source.shape(name)}, by config.json it is {shape}",
                _ONE_RELEASE,
            )
    unread = [name for name in names - expected.keys() if not _is_superfluous(name, source)]
    if unread:
        raise UnsupportedModelError(
            f"{source.name} has tensors that its config.json does not speak of: {some(unread)}",
            f"{_ONE_RELEASE}; a variant of {source.spec.architecture} with parts of its own is not supported",
        )
    if source.spec.tie_word_embeddings and _HEAD in names:
        _check_tied(source)


def _is_superfluous(name: str, source: WeightSource) -> bool:
    """Whether a tensor is known to play no part: computed anew, stored twice, or of layers that predict further."""
    if name.endswith(".rotary_emb.inv_freq") or (name == _HEAD and source.spec.tie_word_embeddings):
        return True
    layer = _LAYER.match(name)
    further = source.config.get("num_nextn_predict_layers")  # DeepSeek-V3's multi-token prediction
    if layer is None or not isinstance(further, int):
        return False
    return 0 <= int(layer[1]) - source.spec.num_layers < further


def _check_tied(source: WeightSource) -> None:
    rows = source.shape(_EMBEDDING)[0]
    chunks = [slice(start, start + _CHUNK_ROWS) for start in range(0, rows, _CHUNK_ROWS)]
    same = source.shape(_HEAD) == source.shape(_EMBEDDING) and all(
        np.array_equal(source.read(_HEAD, chunk), source.read(_EMBEDDING, chunk), equal_nan=True) for chunk in chunks
    )
    if not same:
        raise SourceError(
            f"config.json of {source.name} ties the output to the embeddings, but {_HEAD} is not {_EMBEDDING}",
            "set tie_word_embeddings to false in config.json, or take it from the weights' own release",
        )
