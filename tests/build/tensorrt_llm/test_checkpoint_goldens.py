"""Our TensorRT-LLM checkpoints against what nvidia-modelopt exports of the same tiny models, field by field.

The goldens hold names, dtypes, shapes and configs; scripts/record_modelopt_goldens records them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from trtllm_models import recipe_of, write_model, write_quantized

from harness.build.checkpoint import open_checkpoint
from harness.build.tensorrt_llm.checkpoint import build_trtllm_checkpoint
from harness.build.tensorrt_llm.linears import all_linears
from harness.build.tensorrt_llm.ranks import Ranks
from harness.spec import ModelSpec
from harness.tokenizer import TokenizerFiles

GOLDENS = sorted((Path(__file__).parent / "goldens").glob("*.json"))

NOT_READ = {"bias", "decoder", "lm_head_bias", "rank", "rmsnorm", "rotary_pct"}
"""Fields of modelopt's own that no config class of TensorRT-LLM declares; `rotary_pct` is 1 there by default."""
DEFAULTS = {"residual_mlp": False}
"""Fields that modelopt writes and we leave at the value TensorRT-LLM takes without them."""
OURS = {
    "producer",  # who wrote it
    "logits_dtype",  # float32, TensorRT-LLM's own default: modelopt's float16 rounds what sampling compares
    "attn_bias",  # modelopt leaves it to each family's default, which is wrong for a Llama with biases
    "mlp_bias",
    "qwen_type",  # modelopt's manual export leaves it out, but QWenDecoderLayer reads it
}
MERGED = (".k_cache_scaling_factor", ".v_cache_scaling_factor")
"""modelopt writes them beside the larger of both, which is all that TensorRT-LLM keeps."""


def precision_of(algorithm: dict[str, Any] | None) -> str:
    if algorithm is None:
        return "f16"
    return f"int4-g{algorithm['group_size']}" if algorithm["quant_algo"] == "W4A16_AWQ" else "int8"


def mixed_layers(golden: dict[str, Any]) -> dict[str, Any] | None:
    """Its `quant_cfg.json`; without one that is read: beside 16-bit layers modelopt leaves an empty one."""
    quant_cfg: dict[str, Any] | None = golden["quant_cfg"]
    return quant_cfg if quant_cfg and quant_cfg["quantized_layers"] else None


def rules_of(golden: dict[str, Any]) -> list[tuple[str, str]]:
    """A recipe that quantizes what modelopt quantized."""
    mixed = mixed_layers(golden)
    if mixed is None:
        quantization = golden["config"]["quantization"]
        return [("*", precision_of(quantization if quantization["quant_algo"] else None))]
    spec, layers = ModelSpec.from_hf_config(golden["hf_config"]), mixed["quantized_layers"]
    return [
        (module, precision_of(layers.get(name)))
        for name, linear in all_linears(spec, Ranks())
        for module in linear.modules
    ]


def tensors_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: f"{t.get_dtype()} {'x'.join(map(str, t.get_shape()))}" for name, t in slices.items()}


@pytest.mark.parametrize("path", GOLDENS, ids=[path.stem for path in GOLDENS])
def test_a_checkpoint_is_laid_out_as_modelopt_lays_it_out(
    path: Path, tmp_path: Path, make_tokenizer: Callable[..., TokenizerFiles]
) -> None:
    golden = json.loads(path.read_text())
    expected, mapping = golden["config"], golden["config"]["mapping"]
    model = write_model(tmp_path / "model", golden["hf_config"], make_tokenizer())
    source = open_checkpoint(write_quantized(model, tmp_path / "quantized", recipe_of(*rules_of(golden))))
    built = build_trtllm_checkpoint(
        source,
        source.recipe,
        engines_dir=tmp_path,
        tp_size=mapping["tp_size"],
        pp_size=mapping["pp_size"],
        kv_dtype="int8" if expected["quantization"]["kv_cache_quant_algo"] else "auto",
    ).path
    config = json.loads((built / "config.json").read_text())
    assert config["quantization"] == expected["quantization"]
    assert config["rotary_scaling"] == golden["hf_config"]["rope_scaling"] == expected.get("rotary_scaling")
    assert config["rotary_base"] == golden["hf_config"]["rope_theta"] == expected["rotary_base"]
    for name in expected.keys() - NOT_READ - OURS - DEFAULTS.keys():
        assert config[name] == expected[name], name
    assert {name: expected[name] for name in DEFAULTS} == DEFAULTS
    assert config.keys() - expected.keys() <= OURS | {"rotary_scaling"}
    assert config["attn_bias"] == any("qkv.bias" in name for name in golden["ranks"][0])
    mixed = built / "quant_cfg.json"
    assert (json.loads(mixed.read_text()) if mixed.exists() else None) == mixed_layers(golden)
    assert len(list(built.glob("rank*.safetensors"))) == len(golden["ranks"]) == mapping["world_size"]
    for rank, tensors in enumerate(golden["ranks"]):
        kept = {name: what for name, what in tensors.items() if not name.endswith(MERGED)}
        assert tensors_of(built / f"rank{rank}.safetensors") == kept


def test_goldens_cover_both_families_and_every_algorithm() -> None:
    seen = {(g["config"]["architecture"], g["config"]["quantization"]["quant_algo"]) for g in map(_read, GOLDENS)}
    algorithms = (None, "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL", "MIXED_PRECISION")
    assert seen == {(f, a) for f in ("LlamaForCausalLM", "Qwen2ForCausalLM") for a in algorithms}
    mixed = [m["quantized_layers"].values() for m in map(mixed_layers, map(_read, GOLDENS)) if m]
    assert len(mixed) == 2
    assert all(len({layer["quant_algo"] for layer in layers}) == 2 for layers in mixed)


def _read(path: Path) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads(path.read_text())
    return golden
