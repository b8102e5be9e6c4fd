"""Limits of a GPU engine: what fits is chosen, what does not is refused with what would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.build.tensorrt_llm.limits import (
    LimitWishes,
    choose_limits,
    rank_kv_bytes_per_token,
    rank_ledger,
    rank_weight_bytes,
)
from harness.errors import CapacityError, UsageError
from harness.ledger import GIB, Ledger
from harness.manifest import EngineManifest, FilePart, GpuPart
from harness.recipe import Precision, Recipe
from harness.runtime.config import EngineConfig
from harness.spec import ModelSpec

QWEN_7B = ModelSpec.from_hf_config(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rope_theta": 10000,
    }
)
V2_LITE = ModelSpec.from_hf_config(
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "max_position_embeddings": 163840,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "vocab_size": 102400,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
    }
)


def resolved(spec: ModelSpec, text: str) -> dict[str, Precision]:
    return Recipe(name="all", rules=(("*", Precision.parse(text)),)).resolve(spec)


def ledger(memory: float, *, text: str = "f16", tp: int = 1, kv: str = "bfloat16") -> Ledger:
    return rank_ledger(
        QWEN_7B,
        resolved(QWEN_7B, text),
        tp_size=tp,
        pp_size=1,
        kv_dtype=kv,  # type: ignore[arg-type]
        memory_bytes=int(memory * GIB),
    )


def test_a_token_of_qwen_7b_takes_56_kib_of_kv_cache_and_half_with_int8() -> None:
    one = rank_kv_bytes_per_token(QWEN_7B, tp_size=1, pp_size=1, kv_dtype="bfloat16")
    assert one == 56 * 1024
    assert rank_kv_bytes_per_token(QWEN_7B, tp_size=1, pp_size=1, kv_dtype="int8") == one // 2
    assert rank_kv_bytes_per_token(QWEN_7B, tp_size=2, pp_size=2, kv_dtype="float16") == one // 4


def test_kv_heads_are_copied_where_there_are_more_ranks_than_heads() -> None:
    assert rank_kv_bytes_per_token(QWEN_7B, tp_size=8, pp_size=1, kv_dtype="bfloat16") == 56 * 1024 // 4


def test_a_latent_is_whole_on_every_rank_of_a_layer() -> None:
    one = rank_kv_bytes_per_token(V2_LITE, tp_size=1, pp_size=1, kv_dtype="bfloat16")
    assert one == 27 * (512 + 64) * 2
    assert rank_kv_bytes_per_token(V2_LITE, tp_size=4, pp_size=1, kv_dtype="bfloat16") == one


def test_ranks_share_the_decoder_and_keep_the_ends() -> None:
    f16 = resolved(QWEN_7B, "f16")
    whole = rank_weight_bytes(QWEN_7B, f16, tp_size=1, pp_size=1)
    assert whole == pytest.approx(7.6e9 * 2, rel=0.02)
    ends = 2 * 152064 * 3584 * 2
    assert rank_weight_bytes(QWEN_7B, f16, tp_size=2, pp_size=2) == pytest.approx((whole - ends) / 4 + ends, rel=1e-3)


def test_what_fits_is_chosen() -> None:
    chosen = choose_limits(QWEN_7B, ledger(141), LimitWishes(), chunked_context=True)
    assert chosen.max_seq_len == chosen.max_input_len == 131072
    assert chosen.max_batch_size == 256
    assert chosen.max_num_tokens == 8192
    small = choose_limits(QWEN_7B, ledger(20), LimitWishes(), chunked_context=True)
    assert 0 < small.max_seq_len < 131072
    assert small.max_seq_len % 1024 == 0
    assert 1 <= small.max_batch_size < 16


def test_without_chunks_a_prompt_must_fit_one_step() -> None:
    chosen = choose_limits(QWEN_7B, ledger(80, kv="int8"), LimitWishes(), chunked_context=False)
    assert chosen.max_input_len == chosen.max_num_tokens < chosen.max_seq_len


def test_drafts_count_as_tokens_of_a_step() -> None:
    chosen = choose_limits(QWEN_7B, ledger(141), LimitWishes(), chunked_context=True, num_draft_tokens=83)
    assert chosen.max_num_tokens == 256 * 84
    wishes = LimitWishes(max_batch_size=64, max_num_tokens=1000)
    with pytest.raises(UsageError, match="less than a step of 64 sequences needs"):
        choose_limits(QWEN_7B, ledger(80), wishes, chunked_context=True, num_draft_tokens=83)


@pytest.mark.parametrize(
    ("memory", "wishes", "error", "words"),
    [
        (12, {}, CapacityError, ["the weights need", "--tp", "--bits 4.5"]),
        (24, {"max_model_len": 131072}, CapacityError, ["one sequence of 131072", "give --max-model-len", "--tp"]),
        (80, {"max_model_len": 200_000}, UsageError, ["more than the model was made for", "131072"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    memory: float, wishes: dict[str, int], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as refused:
        choose_limits(QWEN_7B, ledger(memory), LimitWishes(**wishes), chunked_context=True)
    for word in words:
        assert word in str(refused.value)


def test_the_length_that_is_advised_fits() -> None:
    with pytest.raises(CapacityError, match=r"give --max-model-len (\d+)") as refused:
        choose_limits(QWEN_7B, ledger(24), LimitWishes(max_model_len=131072), chunked_context=True)
    advised = int(str(refused.value).split("--max-model-len ")[1].split(",")[0])
    assert (
        choose_limits(QWEN_7B, ledger(24), LimitWishes(max_model_len=advised), chunked_context=True).max_seq_len
        == advised
    )


@pytest.mark.parametrize("memory", [20, 24, 40, 80])
def test_what_is_built_can_be_served_with_defaults(memory: int, make_manifest: Callable[..., EngineManifest]) -> None:
    """On the same card, when CUDA has taken a gigabyte of it, of an engine a little larger than its weights."""
    f16 = resolved(QWEN_7B, "f16")
    planned = rank_ledger(QWEN_7B, f16, tp_size=1, pp_size=1, kv_dtype="bfloat16", memory_bytes=memory * GIB)
    chosen = choose_limits(QWEN_7B, planned, LimitWishes(), chunked_context=True)
    gpu = GpuPart(
        tp_size=1,
        pp_size=1,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        prefix_reuse=True,
        chunked_context=True,
        max_batch_size=chosen.max_batch_size,
        max_num_tokens=chosen.max_num_tokens,
        max_input_len=chosen.max_input_len,
        lookahead=None,
        context_logits=False,
        build_flags=[],
        checkpoint_id="c",
    )
    manifest = make_manifest(arch="sm_90", max_model_len=chosen.max_seq_len)
    kv = manifest.kv.model_copy(update={"bytes_per_token": {"fast": planned.kv_bytes_per_token}})
    engine = FilePart(sha256="0" * 64, num_bytes=planned.weights_bytes + GIB // 4)
    manifest = manifest.model_copy(update={"gpu": gpu, "kv": kv, "files": {"rank0.engine": engine}})
    served = EngineConfig(engine_dir=Path("e")).resolve(manifest, available_bytes=(memory - 1) * GIB, num_cores=1)
    assert served.max_model_len == chosen.max_seq_len


def test_logits_of_prompts_take_room() -> None:
    f16 = resolved(QWEN_7B, "f16")
    sizes = {"tp_size": 1, "pp_size": 1, "kv_dtype": "bfloat16", "memory_bytes": 24 * GIB}
    plain, measured = (rank_ledger(QWEN_7B, f16, num_logit_tokens=n, **sizes) for n in (0, 2048))  # type: ignore[arg-type]
    assert plain.kv_cache_bytes - measured.kv_cache_bytes == pytest.approx(0.9 * 2048 * 152064 * 4, rel=1e-6)


@pytest.mark.parametrize(
    "wish",
    [{"max_batch_size": 0}, {"max_num_tokens": 1}, {"max_model_len": 1}, {"max_batch_size": 1 << 31}],
)
def test_a_limit_out_of_range_is_refused(wish: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="allowed"):
        LimitWishes(**wish)
