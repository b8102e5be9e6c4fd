"""The tables of docs/gpu.md are what the code says: archs, versions, and what fits on which card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.arch import ARCHS, Arch
from harness.build.tensorrt_llm.limits import LimitWishes, choose_limits, rank_ledger
from harness.build.tensorrt_llm.versions import MIN_CUDA, MIN_DRIVER, PYTHON_VERSIONS, REQUIREMENTS
from harness.ledger import GIB
from harness.recipe import Precision, Recipe
from harness.spec import ModelSpec

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu.md"
SHAPES = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_key_value_heads": 8},
}
LAYERS = {"7B": 28, "32B": 64}
CARDS = {"A100 80 GB, H100 80 GB": 80 * GIB, "H200 141 GB": 140 * GIB}
PRECISIONS = {"16-bit": "f16", "int8": "int8-a8", "int4": "int4-g128"}


def distilled(size: str) -> ModelSpec:
    """DeepSeek-R1-Distill-Qwen, by the config of its release."""
    config = {"vocab_size": 152064, "max_position_embeddings": 131072, "rope_theta": 10000}
    return ModelSpec.from_hf_config(
        {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": LAYERS[size], **SHAPES[size], **config}
    )


def sizing_rows() -> Iterator[str]:
    for size in SHAPES:
        spec = distilled(size)
        for name, precision in PRECISIONS.items():
            resolved = Recipe(name=name, rules=(("*", Precision.parse(precision)),)).resolve(spec)
            for card, memory_bytes in CARDS.items():
                ledger = rank_ledger(
                    spec, resolved, tp_size=1, pp_size=1, kv_dtype="bfloat16", memory_bytes=memory_bytes
                )
                limits = choose_limits(spec, ledger, LimitWishes(), chunked_context=True)
                tokens = ledger.kv_cache_bytes // ledger.kv_bytes_per_token
                yield (
                    f"| {size} | {name} | {card} | {ledger.weights_bytes / GIB:.1f} GiB | "
                    f"{ledger.kv_cache_bytes / GIB:.1f} GiB | {tokens:,} | {limits.max_batch_size} | "
                    f"{limits.max_seq_len:,} |"
                )


@pytest.mark.parametrize("row", list(sizing_rows()))
def test_a_size_in_the_docs_is_the_ledgers(row: str) -> None:
    assert row in PAGE.read_text("utf-8").splitlines()


@pytest.mark.parametrize("arch", [arch for arch in ARCHS.values() if arch.is_gpu], ids=lambda arch: arch.name)
def test_an_arch_in_the_docs_is_that_of_the_table(arch: Arch) -> None:
    integers, latent = ("yes" if value else "no" for value in (arch.integers, arch.latent_attention))
    row = f"| `{arch.name}` | {', '.join(arch.cards)} | {integers} | {latent} | {arch.caveat} |"
    assert row in PAGE.read_text("utf-8").splitlines()


def test_the_versions_in_the_docs_are_those_that_are_checked() -> None:
    text = PAGE.read_text("utf-8")
    for package, specifier in REQUIREMENTS.items():
        assert f"| {package} | {specifier or 'any'} |" in text
    for row in (
        f"| Python | {' or '.join(PYTHON_VERSIONS)} |",
        f"| driver | {MIN_DRIVER} or newer |",
        f"| CUDA of the driver | {'.'.join(map(str, MIN_CUDA))} or newer |",
    ):
        assert row in text
