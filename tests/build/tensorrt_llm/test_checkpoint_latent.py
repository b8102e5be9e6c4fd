"""DeepSeek-V2 in a TensorRT-LLM checkpoint: latent attention and experts against torch, and ranks against the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trtllm_models import DEEPSEEK, Tensors, rank_tensors, write_model

from harness.build.hf_source import HfFolderSource
from harness.build.tensorrt_llm.checkpoint import build_trtllm_checkpoint, open_trtllm_checkpoint
from harness.recipe import preset
from harness.tokenizer import TokenizerFiles

HEADS, NOPE, ROPE, RANK, EXPERTS = 4, 32, 16, 64, 4
QUERY_LATENT = DEEPSEEK | {
    "q_lora_rank": 96,
    "topk_method": "group_limited_greedy",
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
Make = Callable[..., tuple[HfFolderSource, Path]]


@pytest.fixture
def make(tmp_path: Path, make_tokenizer: Callable[..., TokenizerFiles]) -> Make:
    """A random model and its checkpoint."""

    def build(config: dict[str, Any], **options: int) -> tuple[HfFolderSource, Path]:
        folder = tmp_path / "model"
        source = HfFolderSource(folder if folder.exists() else write_model(folder, config, make_tokenizer()))
        built = build_trtllm_checkpoint(source, preset("f16", source.spec), engines_dir=tmp_path, **options)
        return source, built.path

    return build


def original(source: HfFolderSource, name: str) -> torch.Tensor:
    return torch.from_numpy(source.read(name))


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16()


@pytest.mark.parametrize("config", [DEEPSEEK, QUERY_LATENT], ids=["lite", "query-latent"])
def test_every_tensor_is_what_torch_makes_of_the_weights(config: dict[str, Any], make: Make) -> None:
    source, folder = make(config)
    (tensors,) = rank_tensors(folder)
    latent = config["q_lora_rank"]
    for layer in range(3):
        module, name = f"model.layers.{layer}.self_attn", f"transformer.layers.{layer}.attention"
        query = original(source, f"{module}.{'q_b_proj' if latent else 'q_proj'}.weight")
        up = original(source, f"{module}.kv_b_proj.weight").unflatten(0, (HEADS, 2 * NOPE))
        by_head = query.unflatten(0, (HEADS, NOPE + ROPE))
        compressed = original(source, f"{module}.kv_a_proj_with_mqa.weight")
        if latent:
            compressed = torch.cat([original(source, f"{module}.q_a_proj.weight"), compressed])
            norm = original(source, f"{module}.q_a_layernorm.weight")
            assert torch.equal(tensors.pop(f"{name}.q_a_layernorm.weight"), rounded(norm))
        absorbed = torch.einsum("hdq,hdk->hkq", by_head[:, :NOPE], up[:, :NOPE])
        fused = torch.cat([absorbed, by_head[:, NOPE:]], dim=1).flatten(0, 1)
        assert torch.allclose(tensors.pop(f"{name}.fused_q_proj").float(), fused, rtol=2**-7, atol=1e-5)
        expected = {
            "fused_a.weight": compressed,
            "kv_a_layernorm.weight": original(source, f"{module}.kv_a_layernorm.weight"),
            "q_b_proj": query,
            "kv_b_proj": torch.cat([up[:, :NOPE].flatten(0, 1), up[:, NOPE:].flatten(0, 1)]),
            "k_b_proj_trans": up[:, :NOPE].transpose(1, 2).flatten(0, 1),
            "dense.weight": original(source, f"{module}.o_proj.weight"),
        }
        for part, values in expected.items():
            assert torch.equal(tensors.pop(f"{name}.{part}"), rounded(values)), part
        for norm_name, part in (("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "post_layernorm")):
            values = original(source, f"model.layers.{layer}.{norm_name}.weight")
            assert torch.equal(tensors.pop(f"transformer.layers.{layer}.{part}.weight"), rounded(values))
        check_mlp(source, layer, tensors)
    assert set(tensors) == {"transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight"}


def check_mlp(source: HfFolderSource, layer: int, tensors: Tensors) -> None:
    """The MLP of a layer, which is taken out of `tensors`."""
    module, name = f"model.layers.{layer}.mlp", f"transformer.layers.{layer}.mlp"
    if layer == 0:
        for part, projection in (("fc", "gate_proj"), ("gate", "up_proj"), ("proj", "down_proj")):
            values = original(source, f"{module}.{projection}.weight")
            assert torch.equal(tensors.pop(f"{name}.{part}.weight"), rounded(values))
        return

    def stacked(projection: str) -> torch.Tensor:
        return torch.stack([original(source, f"{module}.experts.{e}.{projection}.weight") for e in range(EXPERTS)])

    both = torch.cat([stacked("up_proj"), stacked("gate_proj")], dim=1)
    assert torch.equal(tensors.pop(f"{name}.fc.weight"), rounded(both))
    assert torch.equal(tensors.pop(f"{name}.proj.weight"), rounded(stacked("down_proj")))
    router = tensors.pop(f"{name}.router.weight")
    assert router.dtype == torch.float32
    assert torch.equal(router, original(source, f"{module}.gate.weight"))
    shared = [original(source, f"{module}.shared_experts.{p}_proj.weight") for p in ("up", "gate")]
    assert torch.equal(tensors.pop(f"{name}.shared_expert.fc.weight"), rounded(torch.cat(shared)))
    down = original(source, f"{module}.shared_experts.down_proj.weight")
    assert torch.equal(tensors.pop(f"{name}.shared_expert.proj.weight"), rounded(down))


@pytest.mark.parametrize("config", [DEEPSEEK, QUERY_LATENT], ids=["lite", "query-latent"])
def test_ranks_put_together_are_the_whole(config: dict[str, Any], make: Make) -> None:
    _, folder = make(config)
    (one,) = rank_tensors(folder)
    _, folder = make(config, tp_size=2, pp_size=3)
    ranks = rank_tensors(folder)
    by_inputs = ("dense.weight", "proj.weight")
    for layer in range(3):
        group = ranks[2 * layer : 2 * layer + 2]
        for name in (n.removeprefix("transformer.layers.0.") for n in group[0] if ".layers." in n):
            parts = [rank[f"transformer.layers.0.{name}"] for rank in group]
            expected = one[f"transformer.layers.{layer}.{name}"]
            if "norm" in name or name.endswith(("fused_a.weight", "router.weight")):
                assert all(torch.equal(part, expected) for part in parts), name
            elif name.endswith(by_inputs) and not name.endswith("kv_b_proj"):
                assert torch.equal(torch.cat(parts, dim=-1), expected), name
            elif name.endswith(("kv_b_proj", "mlp.fc.weight", "shared_expert.fc.weight")) and layer + ("kv_b" in name):
                halves = zip(*(part.chunk(2, dim=-2) for part in parts), strict=True)
                whole = torch.cat([torch.cat(half, dim=-2) for half in halves], dim=-2)
                assert torch.equal(whole, expected), name
            else:
                assert torch.equal(torch.cat(parts), expected), name


def test_the_config_names_what_the_model_code_reads(make: Make) -> None:
    _, folder = make(QUERY_LATENT)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architecture"], config["dtype"], config["hidden_act"]) == (
        "DeepseekV2ForCausalLM",
        "bfloat16",
        "swiglu",
    )
    assert (config["num_key_value_heads"], config["head_size"]) == (1, RANK + ROPE)
    assert config["rotary_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    assert config["moe"] == {
        "num_experts": 4,
        "top_k": 2,
        "shared_expert_intermediate_size": 128,
        "normalization_mode": 3,
        "topk_method": 1,
        "device_limited_n_group": 2,
        "device_limited_topk_group": 1,
        "device_limited_routed_scaling_factor": 2.5,
    }
    assert config["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None}
    assert open_trtllm_checkpoint(folder).record.dtype == "bfloat16"
