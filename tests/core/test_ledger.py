"""The ledger's sums against worked examples and published configurations."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

from harness.ledger import (
    GIB,
    TOKENS_PER_BLOCK,
    KvLayout,
    Ledger,
    bytes_read_per_token,
    decode_floor_seconds,
    kv_cache_bytes,
    kv_layout,
    runtime_reserve,
    unquantized_bytes,
    weights_by_precision,
    weights_bytes,
)
from harness.recipe import linear_shapes, preset
from harness.spec import ModelSpec

KIB = 2**10


def llama(**changes: Any) -> ModelSpec:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    return ModelSpec.from_hf_config(config | changes)


def deepseek_v2_lite() -> ModelSpec:
    return ModelSpec.from_hf_config(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "num_hidden_layers": 27,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "vocab_size": 102400,
            "max_position_embeddings": 163840,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }
    )


def deepseek_v3() -> ModelSpec:
    return ModelSpec.from_hf_config(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }
    )


def test_worked_example_in_the_docs() -> None:
    guide = Path(__file__).parents[2] / "docs" / "ledger.md"
    assert doctest.testfile(str(guide), module_relative=False) == (0, 5)


def test_worked_example_of_full_attention() -> None:
    per_token = kv_layout(llama()).bytes_per_token("f16")
    assert per_token == 512 * KIB
    assert kv_cache_bytes(kv_bytes_per_token=per_token, length=4096) == 2 * GIB


def test_grouped_queries_take_their_share() -> None:
    assert kv_layout(llama(num_key_value_heads=8)).bytes_per_token("f16") == 512 * KIB // 4


def test_deepseek_coder_33b_counts_its_layers() -> None:
    spec = llama(num_hidden_layers=62, hidden_size=7168, num_attention_heads=56, num_key_value_heads=8)
    per_token = kv_layout(spec).bytes_per_token("bf16")
    assert per_token == 248 * KIB
    assert kv_cache_bytes(kv_bytes_per_token=per_token, length=4096, num_sequences=8) == 7.75 * GIB


def test_planning_by_observed_lengths_frees_memory() -> None:
    """R1-Distill-Qwen-7B's KV (28 layers, 4 heads of 128): 60 x 8192 against 45 x 6144."""
    per_token = KvLayout(num_layers=28, num_kv_heads=4, key_dim=128, value_dim=128).bytes_per_token("bf16")
    by_limit = kv_cache_bytes(kv_bytes_per_token=per_token, length=8192, num_sequences=60)
    by_quantile = kv_cache_bytes(kv_bytes_per_token=per_token, length=6144, num_sequences=45)
    assert 11 * GIB < by_limit - by_quantile < 12 * GIB


def test_mla_latent() -> None:
    assert kv_layout(deepseek_v3(), mla="latent-once").bytes_per_token("bf16") == 70_272
    assert kv_layout(deepseek_v2_lite(), mla="latent-once").bytes_per_token("bf16") == 31_104
    assert kv_layout(deepseek_v2_lite(), mla="expanded").bytes_per_token("bf16") == 276_480
    for spec in (deepseek_v2_lite(), deepseek_v3()):
        layout = kv_layout(spec)
        assert layout.num_kv_heads * (layout.key_dim + layout.value_dim) == 1_088


def test_eight_bit_blocks_hold_their_scales() -> None:
    head_128 = KvLayout(num_layers=1, num_kv_heads=1, key_dim=128, value_dim=128)
    assert head_128.bytes_per_block("u8") == 40 * 128 + 32 * 136
    head_64 = KvLayout(num_layers=30, num_kv_heads=3, key_dim=64, value_dim=64)
    assert head_64.bytes_per_block("u8") == 30 * 3 * (40 * 64 + 32 * 72)
    assert head_64.bytes_per_token("u8") * TOKENS_PER_BLOCK == head_64.bytes_per_block("u8")
    assert head_64.bytes_per_token("u8") < head_64.bytes_per_token("f16")
    assert KvLayout(num_layers=1, num_kv_heads=1, key_dim=576, value_dim=0).bytes_per_block("u8") == 40 * 576


def test_sequences_hold_whole_blocks() -> None:
    assert kv_cache_bytes(kv_bytes_per_token=10, length=33, num_sequences=2) == 2 * 64 * 10


def test_weights_of_a_7b_llama() -> None:
    spec = llama()
    half = weights_bytes(spec, preset("f16", spec).resolve(spec))
    assert half == pytest.approx(2 * 6_738_415_616, rel=1e-3)  # Llama-2-7B's parameter count
    eight = weights_bytes(spec, preset("int8", spec).resolve(spec))
    assert eight == pytest.approx(half / 2, rel=2e-3)
    four = weights_by_precision(spec, preset("int4", spec).resolve(spec))
    assert set(four) == {"int8", "int4-g128", "unquantized"}
    inner_layers = 30 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    # 4 bits and one f16 scale for each group of 128
    assert four["int4-g128"] == inner_layers // 2 + inner_layers // 128 * 2


def test_weights_count_every_parameter_of_deepseek() -> None:
    """Published: V2-Lite 15.7B parameters, 2.4B active a token; V3 671B, 37B active."""
    for spec, total, active in ((deepseek_v2_lite(), 15.7e9, 2.4e9), (deepseek_v3(), 671e9, 37e9)):
        resolved = preset("f16", spec).resolve(spec)
        assert weights_bytes(spec, resolved) / 2 == pytest.approx(total, rel=0.01)
        # the published counts of active parameters include the embedding table
        table = spec.vocab_size * spec.hidden_size
        assert bytes_read_per_token(spec, resolved) / 2 + table == pytest.approx(active, rel=0.15)


def test_tied_embeddings_are_stored_once_and_read_whole() -> None:
    tied, untied = llama(tie_word_embeddings=True), llama()
    table = 2 * 32000 * 4096
    f16 = {spec: preset("f16", spec).resolve(spec) for spec in (tied, untied)}
    assert weights_bytes(untied, f16[untied]) - weights_bytes(tied, f16[tied]) == table
    assert bytes_read_per_token(untied, f16[untied]) - bytes_read_per_token(tied, f16[tied]) == 2 * 4096


def test_biases_and_head_norms_are_counted() -> None:
    plain = unquantized_bytes(llama())
    assert plain == 4 * 4096 * 65
    assert unquantized_bytes(llama(architectures=["Qwen2ForCausalLM"])) - plain == 4 * 32 * 3 * 4096
    assert unquantized_bytes(llama(architectures=["Qwen3ForCausalLM"])) - plain == 4 * 32 * 2 * 128
    assert unquantized_bytes(llama(attention_bias=True)) - plain == 4 * 32 * 4 * 4096
    assert unquantized_bytes(llama(mlp_bias=True)) - plain == 4 * 32 * (2 * 11008 + 4096)


def test_decode_floor() -> None:
    seconds = decode_floor_seconds(14_000_000_000, 2e12)
    assert seconds == pytest.approx(0.007)
    assert 140 < 1 / seconds < 143


def test_reserve() -> None:
    assert runtime_reserve(100 * GIB) == 12 * GIB
    assert runtime_reserve(100, 0.0) == 0
    with pytest.raises(ValueError, match=r"1.5; allowed: \[0, 1\)"):
        runtime_reserve(100, 1.5)


def test_nothing_fits_beside_weights_too_large() -> None:
    ledger = Ledger(memory_bytes=8 * GIB, weights_bytes=14 * GIB, reserve_bytes=GIB, kv_bytes_per_token=512 * KIB)
    assert ledger.kv_cache_bytes == 0
    assert ledger.max_concurrency(32) == 0
    assert not ledger.fits(num_sequences=1, length=1)


def test_ledger_knows_what_fits() -> None:
    ledger = Ledger(memory_bytes=80 * GIB, weights_bytes=14 * GIB, reserve_bytes=12 * GIB, kv_bytes_per_token=512 * KIB)
    assert ledger.max_concurrency(4096) == 27
    assert ledger.fits(num_sequences=27, length=4096)
    assert not ledger.fits(num_sequences=28, length=4096)
    assert ledger.fits(num_sequences=28, length=3936)
    assert not ledger.fits(num_sequences=28, length=3937)


def test_ledger_checks_its_sizes() -> None:
    with pytest.raises(ValueError, match="kv_bytes_per_token is 0; allowed: 1 or more"):
        Ledger(memory_bytes=1, weights_bytes=1, reserve_bytes=0, kv_bytes_per_token=0)
    with pytest.raises(ValueError, match="reserve_bytes is -1"):
        Ledger(memory_bytes=1, weights_bytes=1, reserve_bytes=-1, kv_bytes_per_token=1)


def test_every_module_has_a_size() -> None:
    spec = deepseek_v2_lite()
    resolved = preset("int4", spec).resolve(spec)
    assert set(resolved) == set(linear_shapes(spec))
    by_precision = weights_by_precision(spec, resolved)
    assert sum(by_precision.values()) == weights_bytes(spec, resolved)
