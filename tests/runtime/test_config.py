"""What settings resolve to, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import CapacityError, UsageError
from harness.machine import available_memory_bytes, num_usable_cores
from harness.manifest import EngineManifest
from harness.runtime.config import EngineConfig
from harness.runtime.wire import decode_config, encode_config

GIB = 1 << 30
WEIGHTS = 2 * GIB
KV_PER_TOKEN = 1 << 15  # 1 MiB a block


@pytest.fixture
def manifest(make_manifest: Any) -> EngineManifest:
    made: EngineManifest = make_manifest(weight_bytes=WEIGHTS, kv_bytes_per_token=KV_PER_TOKEN, max_model_len=4096)
    return made


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(engine_dir=Path("engine"), **fields)


def test_kv_gets_what_concurrency_times_length_needs(manifest: EngineManifest) -> None:
    resolved = config(max_num_seqs=4).resolve(manifest, available_bytes=64 * GIB, num_cores=6)
    assert resolved.kv_cache_bytes == 4 * 4096 * KV_PER_TOKEN
    assert (resolved.max_model_len, resolved.num_threads) == (4096, 6)


def test_kv_takes_at_most_half_of_what_is_left(manifest: EngineManifest) -> None:
    resolved = config().resolve(manifest, available_bytes=5 * GIB, num_cores=1)
    left = 5 * GIB - WEIGHTS - 0.12 * 5 * GIB
    assert resolved.kv_cache_bytes == pytest.approx(left / 2, abs=1)


def test_deterministic_mode_counts_its_larger_kv(manifest: EngineManifest) -> None:
    resolved = config(max_num_seqs=1, deterministic=True).resolve(manifest, available_bytes=64 * GIB, num_cores=1)
    assert resolved.kv_cache_bytes == 4096 * 4 * KV_PER_TOKEN


def test_what_is_given_is_kept(manifest: EngineManifest) -> None:
    given = config(kv_cache_bytes=GIB, max_model_len=1000, num_threads=3, prefix_cache=False)
    resolved = given.resolve(manifest, available_bytes=16 * GIB, num_cores=8)
    assert (resolved.kv_cache_bytes, resolved.max_model_len, resolved.num_threads) == (GIB, 1000, 3)
    assert not resolved.scheduler.prefix_cache


@pytest.mark.parametrize(
    ("fields", "available", "words"),
    [
        ({}, GIB, ("2.00 GiB", "1.00 GiB", "int4")),
        ({}, 0, ("2.00 GiB", "0.00 GiB", "int4")),
        ({"kv_cache_bytes": 8 * GIB}, 8 * GIB, ("8192MiB", "8.00 GiB", "--kv-cache-memory")),
        ({"kv_cache_bytes": 10 << 20}, 8 * GIB, ("4096 tokens", "--max-model-len 320", "--kv-cache-memory 128MiB")),
    ],
)
def test_settings_that_cannot_fit_are_refused(
    manifest: EngineManifest, fields: dict[str, Any], available: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(CapacityError) as caught:
        config(**fields).resolve(manifest, available_bytes=available, num_cores=1)
    assert all(word in str(caught.value) for word in words), caught.value


def test_advice_of_a_refusal_is_right(manifest: EngineManifest) -> None:
    tight = {"kv_cache_bytes": 10 << 20}
    config(**tight, max_model_len=320).resolve(manifest, available_bytes=8 * GIB, num_cores=1)
    with pytest.raises(CapacityError):
        config(**tight, max_model_len=321).resolve(manifest, available_bytes=8 * GIB, num_cores=1)
    config(kv_cache_bytes=128 << 20).resolve(manifest, available_bytes=8 * GIB, num_cores=1)


def test_a_context_longer_than_the_engines_is_refused(manifest: EngineManifest) -> None:
    with pytest.raises(UsageError, match="4096"):
        config(max_model_len=4097).resolve(manifest, available_bytes=64 * GIB, num_cores=1)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("max_num_seqs", 0, "--max-num-seqs"),
        ("max_model_len", 0, "--max-model-len"),
        ("max_model_len", 1, "--max-model-len"),
        ("num_threads", 0, "--threads"),
        ("max_num_batched_tokens", 63, "--max-num-batched-tokens"),
        ("max_waiting", 0, "--max-waiting"),
        ("kv_cache_bytes", 0, "--kv-cache-memory"),
    ],
)
def test_values_out_of_range_are_refused_by_the_name_of_the_flag(field: str, value: int, flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        config(**{field: value})
    assert caught.value.message == f"{flag} is {value}"
    assert caught.value.hint.startswith("allowed: ")


def test_advice_leaves_out_what_would_be_refused(manifest: EngineManifest) -> None:
    with pytest.raises(CapacityError) as caught:
        config(kv_cache_bytes=1).resolve(manifest, available_bytes=8 * GIB, num_cores=1)
    assert caught.value.hint == "give --kv-cache-memory 128MiB"


def test_a_config_crosses_the_process_border_unchanged(manifest: EngineManifest) -> None:
    resolved = config().resolve(manifest, available_bytes=64 * GIB, num_cores=2)
    line = encode_config(resolved)
    assert line.count(b"\n") == 1
    assert decode_config(line) == resolved


def test_a_containers_limits_count(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 19}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 18}\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert available_memory_bytes(tmp_path) == (1 << 19) + (1 << 18)
    assert num_usable_cores(tmp_path) == 1


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_memory_bytes(tmp_path) > 1 << 20
    assert num_usable_cores(tmp_path) >= 1
