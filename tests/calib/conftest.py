"""Small random models of every family, on disk as a source and in memory as transformers runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from harness.build.hf_source import HfFolderSource
from harness.calib.decoder import StreamedDecoder
from harness.spec import ModelSpec

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
    "moe_intermediate_size": 32,
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
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
_GROUPS = {"q_lora_rank": 48, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN}

_FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SMALL),
    "llama tied, all biases": lambda: transformers.LlamaConfig(
        **_SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_SMALL, head_dim=32),
    "v2": lambda: transformers.DeepseekV2Config(**_MLA, topk_method="greedy"),
    "v2 query latent, groups, yarn": lambda: transformers.DeepseekV2Config(
        **_MLA | _GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=2.5
    ),
    "v3": lambda: transformers.DeepseekV3Config(**_MLA | _GROUPS),
}


@pytest.fixture(params=_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each family by name."""
    return str(request.param)


@pytest.fixture
def spec_of() -> Callable[[str], ModelSpec]:
    """The spec of a family's small model."""

    def make(family: str) -> ModelSpec:
        config = _FAMILIES[family]()
        architecture = type(config).__name__.replace("Config", "ForCausalLM")
        return ModelSpec.from_hf_config(config.to_dict() | {"architectures": [architecture]})

    return make


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """One set of weights, twice: as calibration reads it and as transformers runs it."""

    folder: Path
    source: HfFolderSource
    decoder: StreamedDecoder
    reference: transformers.PreTrainedModel


@pytest.fixture
def random_model(save_random_model: Callable[..., Any]) -> Callable[..., RandomModel]:
    """Makes a model of a family; `edit` changes its weights before they are written."""

    def make(family: str, edit: Callable[[transformers.PreTrainedModel], None] | None = None) -> RandomModel:
        folder, model = save_random_model(_FAMILIES[family]())
        if edit is not None:
            with torch.no_grad():
                edit(model)
            model.save_pretrained(folder)
        source = HfFolderSource(folder)
        decoder = StreamedDecoder(source, torch.device("cpu"))
        return RandomModel(folder=folder, source=source, decoder=decoder, reference=model)

    return make
