"""Checkpoints as others read them: transformers loads the folder, and computes with what was chosen."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_oracle import min_cosine
from small_quantized import LLAMA, TOKENS, V2, quantize, recipe, streamed_logits, tensors_of

from harness.build.checkpoint import open_checkpoint
from harness.build.hf_source import HfFolderSource
from harness.calib.checkpoint import in_16_bits, quantization_config, write_shard
from harness.errors import CalibrationError

SaveModel = Callable[[transformers.PretrainedConfig], tuple[Path, transformers.PreTrainedModel]]

LLAMA_RULES = (
    ("*.0.self_attn.[qkv]_proj", "int8"),
    ("*.o_proj", "f16"),
    ("*.0.mlp.*", "int8-a8"),
    ("*.1.mlp.*", "int4-g64"),
    ("*", "int4-g128"),
)
# routing follows activations, so that int8 ones would send tokens elsewhere: they are in the last layer alone
V2_RULES = (
    ("*.mlp.experts.*", "int4-g64"),
    ("*.0.mlp.*", "int8"),
    ("*.1.self_attn.o_proj", "f16"),
    ("*.2.mlp.shared_experts.*", "int8-a8"),
    ("*", "int4-g128"),
)


def weight_in(state: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """A module's weight in transformers' model, which keeps all experts of a layer in one tensor."""
    prefix, is_expert, rest = module.partition(".experts.")
    if not is_expert:
        return state[f"{module}.weight"]
    number, _, kind = rest.partition(".")
    if kind == "down_proj":
        return state[f"{prefix}.experts.down_proj"][int(number)]
    return state[f"{prefix}.experts.gate_up_proj"][int(number)].chunk(2)[kind == "up_proj"]


@pytest.mark.parametrize(("config", "rules"), [(LLAMA, LLAMA_RULES), (V2, V2_RULES)], ids=["llama", "v2"])
def test_transformers_computes_what_was_chosen(
    config: transformers.PretrainedConfig, rules: tuple[tuple[str, str], ...], save_random_model: SaveModel
) -> None:
    folder = quantize(save_random_model(config)[0], *rules)
    checkpoint = open_checkpoint(folder)
    assert {str(p) for p in checkpoint.quantized.values()} >= {p for _, p in rules if p != "f16"}
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    with torch.no_grad():
        theirs = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    assert min_cosine(theirs, streamed_logits(checkpoint, TOKENS)) >= 0.999
    state = model.state_dict()  # the first forward pass has decompressed it
    for module in checkpoint.quantized:
        ours = torch.from_numpy(checkpoint.read(f"{module}.weight"))
        seen = weight_in(state, module)
        # the library dequantizes experts in bfloat16 whatever is asked for, and the rest in what is asked for
        torch.testing.assert_close(seen, ours.to(seen.dtype), rtol=0, atol=0, msg=module)
    tied = state["model.embed_tokens.weight"].data_ptr() == state["lm_head.weight"].data_ptr()
    assert tied == config.tie_word_embeddings


def test_every_linear_is_the_target_of_one_group(save_random_model: SaveModel) -> None:
    source = HfFolderSource(save_random_model(V2)[0])
    linears = {m: p for m, p in recipe(*V2_RULES).resolve(source.spec).items() if m.startswith("model.layers.")}
    written = quantization_config(source, linears)

    def matches(target: str, module: str) -> bool:
        return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module

    for module, precision in linears.items():
        groups = [g for g in written["config_groups"].values() if any(matches(t, module) for t in g["targets"])]
        if precision.dtype == "f16":
            assert not groups
            assert module in written["ignore"]
            continue
        (group,) = groups
        weights, activations = group["weights"], group["input_activations"]
        assert (weights["num_bits"], weights["group_size"]) == (
            4 if precision.dtype == "int4" else 8,
            precision.group_size,
        )
        assert (activations is not None) == precision.int8_activations
        assert group["format"] == ("int-quantized" if precision.int8_activations else "pack-quantized")
    unquantized = {"lm_head", *(f"model.layers.{n}.self_attn.kv_b_proj" for n in range(3))}
    assert unquantized <= set(written["ignore"])
    # servers find the experts' scheme by a target with their name in it
    assert "experts" in written["config_groups"]["group_0"]["targets"][0]


def test_what_is_not_quantized_keeps_its_values(save_random_model: SaveModel) -> None:
    path = save_random_model(V2)[0]
    original, stored = HfFolderSource(path), tensors_of(quantize(path, ("*", "int8")))
    for name in original.names():
        if f"{name.removesuffix('.weight')}.weight_scale" in stored:
            continue
        assert torch.equal(stored[name].float(), torch.from_numpy(original.read(name))), name
        assert stored[name].dtype != torch.float32


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([[1.0, 2.0**-120], [3e38, -7.0]], torch.bfloat16),
        ([[1.0 + 2**-9, 2.0]], torch.float16),
        ([1.0 + 2**-9, 2.0], torch.float16),
        ([1.0 + 2**-20, 2.0], torch.float32),
        ([[1.0 + 2**-20, 65504.0]], torch.float16),
        ([[1.0 + 2**-20, 65520.0]], torch.bfloat16),
    ],
)
def test_16_bits_are_exact_where_they_can_be(values: list[Any], dtype: torch.dtype) -> None:
    given = torch.tensor(values)
    stored = in_16_bits(given)
    assert stored.dtype == dtype
    assert torch.isfinite(stored).all()
    torch.testing.assert_close(stored.float(), given, rtol=2**-8, atol=0)


def test_a_shard_that_does_not_fit_the_disk_is_an_error_with_a_hint(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CalibrationError, match=r"a\.safetensors cannot be written") as refusal:
            write_shard(tmp_path / "a.safetensors", {"weight": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "goes on" in refusal.value.hint
    assert not (tmp_path / "a.safetensors").exists()
