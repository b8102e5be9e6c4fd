"""Every supported family against transformers' own logits, on small random models.

Positions run past the original context length, so that rope scaling decides the result; the controls show that the
check would notice if scaling, mscale or the routing rules were lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

Logits = npt.NDArray[np.float32]

_TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 256, 200)]
_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
_MLA = _SMALL | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LITE_MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}
_MSCALE_YARN = _YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}
_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0}

_CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**_SMALL),
    "llama tied, all biases": transformers.LlamaConfig(
        **_SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "deepseek-coder: linear rope": transformers.LlamaConfig(**_SMALL, rope_parameters=_LINEAR),
    "r1-distill-llama: llama3 rope": transformers.LlamaConfig(**_SMALL, rope_parameters=_LLAMA3),
    "qwen2": transformers.Qwen2Config(**_SMALL, tie_word_embeddings=True),
    "qwen3: yarn": transformers.Qwen3Config(**_SMALL, head_dim=32, rope_parameters=_YARN),
    "v2: no query latent, greedy": transformers.DeepseekV2Config(**_MLA),
    "v2-lite: no query latent, greedy, yarn": transformers.DeepseekV2Config(
        **_MLA, topk_method="greedy", routed_scaling_factor=1.0, rope_parameters=_YARN | _LITE_MSCALE
    ),
    "v2: query latent, groups, yarn": transformers.DeepseekV2Config(
        **_MLA | {"q_lora_rank": 48} | _GROUPS, rope_parameters=_MSCALE_YARN
    ),
    "v3: sigmoid, groups, yarn": transformers.DeepseekV3Config(
        **_MLA | {"q_lora_rank": 48, "n_group": 4, "topk_group": 2}, rope_parameters=_MSCALE_YARN
    ),
    "v3: biases, halves": transformers.DeepseekV3Config(
        **_MLA | {"q_lora_rank": 48, "n_group": 4, "topk_group": 2}, attention_bias=True, rope_interleave=False
    ),
}


def _reference(model: transformers.PreTrainedModel) -> Logits:
    with torch.no_grad():
        logits: Logits = model(torch.tensor([_TOKENS])).logits[0].numpy()
    return logits


def _agrees(reference: Logits, seen: Logits) -> bool:
    norms = np.linalg.norm(reference, axis=1) * np.linalg.norm(seen, axis=1)
    cosine = (reference * seen).sum(axis=1) / norms
    return bool(cosine.min() >= 0.99999 and (reference.argmax(axis=1) == seen.argmax(axis=1)).all())


@pytest.mark.parametrize("name", _CONFIGS)
def test_logits_equal_those_of_transformers(
    name: str, save_random_model: Callable[..., Any], engine_logits: Callable[..., Logits]
) -> None:
    folder, model = save_random_model(_CONFIGS[name])
    assert _agrees(_reference(model), engine_logits(folder, _TOKENS))


def _without(*keys: str, **changes: object) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        for part in (config, config.get("rope_parameters") or {}):
            for key in keys:
                part.pop(key, None)
        config.update(changes)

    return edit


def _no_rope_scaling(config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("deepseek-coder: linear rope", _no_rope_scaling),
        ("r1-distill-llama: llama3 rope", _no_rope_scaling),
        ("qwen3: yarn", _no_rope_scaling),
        ("v2-lite: no query latent, greedy, yarn", _no_rope_scaling),
        ("v2-lite: no query latent, greedy, yarn", _without("mscale")),
        ("v2-lite: no query latent, greedy, yarn", _without("mscale_all_dim")),
        ("v2: query latent, groups, yarn", _no_rope_scaling),
        ("v2: query latent, groups, yarn", _without("mscale")),
        ("v2: query latent, groups, yarn", _without("mscale_all_dim")),
        ("v2: query latent, groups, yarn", _without(topk_method="greedy")),
        ("v2: query latent, groups, yarn", _without("routed_scaling_factor")),
        ("v3: sigmoid, groups, yarn", _without(n_group=1, topk_group=1)),
        ("v3: sigmoid, groups, yarn", _without(norm_topk_prob=False)),
        ("v3: sigmoid, groups, yarn", _without(rope_interleave=False)),
    ],
)
def test_check_notices_what_is_lost(
    name: str,
    edit: Callable[[dict[str, Any]], None],
    save_random_model: Callable[..., Any],
    engine_logits: Callable[..., Logits],
) -> None:
    folder, model = save_random_model(_CONFIGS[name])
    path: Path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    assert not _agrees(_reference(model), engine_logits(folder, _TOKENS))
