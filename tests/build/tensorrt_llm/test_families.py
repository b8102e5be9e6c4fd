"""What cannot become a TensorRT-LLM engine is refused before any work, with the reason and the way that works."""

from __future__ import annotations

import time
from typing import Any

import pytest
from trtllm_models import DEEPSEEK, LLAMA, QWEN, recipe_of

from harness.arch import ARCHS
from harness.build.tensorrt_llm.families import check_family
from harness.errors import HarnessError, RecipeError, UnsupportedModelError, UsageError
from harness.spec import ModelSpec

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
INT4 = ("*", "int4-g64")


def check(config: dict[str, Any], *rules: tuple[str, str], arch: str | None = None, **options: Any) -> None:
    spec = ModelSpec.from_hf_config(config)
    resolved = recipe_of(*(rules or (("*", "f16"),))).resolve(spec)
    check_family(spec, ARCHS[arch] if arch else None, resolved, **options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=["llama", "qwen2"])
def test_dense_models_are_taken_in_every_precision(config: dict[str, Any], arch: str) -> None:
    for precision in ("f16", "int8", "int8-a8", "int4-g64", "int4-g128"):
        check(config, ("*", precision), arch=arch)
    check(config, ("*.mlp.*", "int8"), INT4, arch=arch, tp_size=4, pp_size=2, kv_dtype="int8")


@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
def test_datacenter_blackwell_is_for_16_bit_alone(arch: str) -> None:
    check(LLAMA, arch=arch, tp_size=2)
    for precision in ("int4-g64", "int8"):
        with pytest.raises(UsageError, match=rf"{arch} \(.*\) cannot run int4 and int8 weights: .*16-bit") as raised:
            check(LLAMA, ("*", precision), arch=arch)
        assert "--precision f16" in raised.value.hint
    with pytest.raises(UsageError, match="cannot run an int8 KV cache"):
        check(LLAMA, arch=arch, kv_dtype="int8")


def test_embeddings_in_integers_do_not_count() -> None:
    spec = ModelSpec.from_hf_config(LLAMA)
    resolved = recipe_of(("*", "f16")).resolve(spec)
    assert str(resolved["model.embed_tokens"]) == "int8"
    check_family(spec, ARCHS["sm_100"], resolved)


@pytest.mark.parametrize(
    ("config", "words", "hint"),
    [
        (
            DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc"},
            "no engines of DeepSeek-V3's family",
            "trtllm-serve",
        ),
        (LLAMA | {"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM is not lowered", "trtllm-pytorch"),
        (LLAMA | {"rope_scaling": YARN | {"attention_factor": 1.2}}, "does not read attention_factor", "rope_scaling"),
        (QWEN | {"rope_scaling": YARN | {"truncate": False}}, "does not read truncate", "rope_scaling"),
    ],
)  # fmt: skip
def test_a_family_that_it_does_not_run_names_the_way_that_works(config: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as raised:
        check(config, arch="sm_90")
    assert hint in raised.value.hint


def test_latent_attention_is_for_hopper_in_16_bit() -> None:
    check(DEEPSEEK, arch="sm_90", tp_size=2)
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        with pytest.raises(UsageError, match=rf"{arch} .*latent attention") as raised:
            check(DEEPSEEK, arch=arch)
        assert "sm_90" in raised.value.hint
    with pytest.raises(RecipeError, match=r"layers\.0\.self_attn\.q_proj is int4-g64: .*bfloat16 alone"):
        check(DEEPSEEK, INT4, arch="sm_90")
    with pytest.raises(UsageError, match="latent KV cache"):
        check(DEEPSEEK, kv_dtype="int8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": None}, "not YaRN with mscale"),
        ({"rope_scaling": DEEPSEEK["rope_scaling"] | {"mscale": None}}, "not YaRN with mscale"),
        ({"rope_scaling": DEEPSEEK["rope_scaling"] | {"attention_factor": 1.5}}, "attention_factor"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace is 2"),
        ({"v_head_dim": 16}, "v_head_dim is 16 and qk_nope_head_dim 32"),
        ({"attention_bias": True}, "biases"),
        ({"n_shared_experts": 0}, "no shared experts"),
        ({"routed_scaling_factor": 2.0}, r"routed_scaling_factor is 2\.0"),
    ],
)
def test_a_deepseek_v2_that_differs_from_the_released_ones_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        check(DEEPSEEK | change, arch="sm_90")


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("int4-g64-zp", "it has zero points"),
        ("int4-g32", "groups are of 64 or 128"),
        ("int4-channel", "groups are of 64 or 128"),
    ],
)
def test_precisions_of_checkpoints_for_cpu_are_refused_by_name(precision: str, words: str) -> None:
    with pytest.raises(RecipeError, match=rf"layers\.2\.mlp\.gate_proj is {precision}.*{words}") as raised:
        check(LLAMA, ("*.2.mlp.up_proj", precision), ("*.2.mlp.gate_proj", precision), ("*", "f16"))
    assert "--for cpu" in raised.value.hint


@pytest.mark.parametrize(
    ("change", "precision", "tp_size", "words"),
    [
        ({"hidden_size": 192, "num_attention_heads": 6}, "int4-g64", 2, "multiple of 128 inputs, it has 192"),
        ({"intermediate_size": 448}, "int4-g64", 2, "gate_proj in int4-g64 .* multiple of 128 outputs, it has 448"),
        ({}, "int4-g128", 4, "q_proj .* multiple of 512 inputs, it has 256"),
        ({"head_dim": 36}, "int4-g64", 1, r"q_proj \+ .*v_proj in .* multiple of 64 outputs, it has 432"),
    ],
)
def test_int4_needs_whole_groups_on_every_rank(
    change: dict[str, Any], precision: str, tp_size: int, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        check(LLAMA | change, ("*", precision), tp_size=tp_size)
    check(LLAMA | change, ("*", "int8"), tp_size=tp_size)


def test_ranks_that_share_a_head_count_it_each() -> None:
    """With one key and value head, four ranks have (8 + 2 * 4) * 32 outputs, a multiple of 4 * 64; one has 10 * 32."""
    config = LLAMA | {"num_key_value_heads": 1}
    check(config, INT4, tp_size=4)
    check(config, INT4)
    with pytest.raises(RecipeError, match="multiple of 128 outputs, it has 320"):
        check(config, ("*", "int4-g128"))


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (LLAMA, {"tp_size": 3}, "--tp 3 does not divide 8 attention heads"),
        (LLAMA | {"intermediate_size": 514}, {"tp_size": 4}, "--tp 4 does not divide 514 rows of an MLP"),
        (LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 768},
         {"tp_size": 6}, "--tp 6 neither divides 4 key and value heads"),
        (LLAMA, {"pp_size": 5}, "--pp 5 is more than the model's 4 layers"),
        (LLAMA, {"tp_size": 0}, "--tp is 0"),
        (LLAMA, {"pp_size": 65}, "--pp is 65"),
        (DEEPSEEK | {"moe_intermediate_size": 98}, {"tp_size": 4}, "--tp 4 does not divide 98 rows of an expert"),
    ],
)  # fmt: skip
def test_numbers_of_ranks_that_do_not_divide_name_the_sizes(
    config: dict[str, Any], options: dict[str, int], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check(config, **options)


def test_every_refusal_says_what_to_do() -> None:
    cases: list[tuple[dict[str, Any], tuple[tuple[str, str], ...], dict[str, Any]]] = [
        (LLAMA, (("*", "int4-g32"),), {}),
        (LLAMA, (), {"tp_size": 3}),
        (DEEPSEEK, (), {"arch": "sm_80"}),
        (DEEPSEEK, (INT4,), {}),
        (LLAMA, (INT4,), {"arch": "sm_103"}),
    ]
    for config, rules, options in cases:
        with pytest.raises(HarnessError) as raised:
            check(config, *rules, **options)
        assert raised.value.hint


def test_a_model_of_absurdly_many_layers_is_checked_in_a_moment() -> None:
    config = LLAMA | {"num_hidden_layers": 20_000}
    started = time.monotonic()
    check(config, ("*", "int8"))
    assert time.monotonic() - started < 10
