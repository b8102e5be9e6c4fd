"""Settings of engines for a GPU: what they resolve to, and which are not for the engine at hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import CapacityError, UsageError
from harness.manifest import EngineManifest
from harness.runtime.config import EngineConfig, ResolvedConfig
from harness.runtime.wire import decode_config, encode_config

GIB = 1 << 30

MakeManifest = Callable[..., EngineManifest]
Resolve = Callable[..., ResolvedConfig]


def test_limits_are_those_the_engine_was_built_for(gpu_manifest: MakeManifest, resolve: Resolve) -> None:
    resolved = resolve(gpu_manifest(max_batch_size=64, max_num_tokens=8192, tp_size=2))
    limits = resolved.scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) == (64, 8192, 512)
    assert resolved.gpu is not None
    assert (resolved.gpu.num_ranks, resolved.gpu.memory_fraction, resolved.gpu.max_kv_tokens) == (2, 0.9, None)
    assert (resolved.gpu.scheduling_policy, resolved.gpu.cuda_graphs) == ("guaranteed-no-evict", True)


def test_the_kv_cache_is_a_fraction_of_what_a_gpu_has_left(gpu_manifest: MakeManifest, resolve: Resolve) -> None:
    resolved = resolve(gpu_manifest(), gpu_memory_fraction=0.5)
    assert resolved.kv_cache_bytes == pytest.approx((64 - 64 * 0.12) / 2 * GIB, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_num_seqs": 5}, "--max-num-seqs 5 is more"),
        ({"max_num_batched_tokens": 300}, "--max-num-batched-tokens 300 is more"),
        ({"max_model_len": 513}, "--max-model-len 513"),
        ({"deterministic": True}, "--deterministic is not for this engine, which was built for a GPU"),
        ({"num_threads": 4}, "--threads is not for this engine"),
    ],
)
def test_what_the_engine_was_not_built_for_is_refused_by_name(
    gpu_manifest: MakeManifest, resolve: Resolve, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(gpu_manifest(), **fields)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"gpu_memory_fraction": 0.9}, "--gpu-memory-fraction"),
        ({"host_cache_bytes": GIB}, "--host-cache-memory"),
        ({"scheduling_policy": "max-utilization"}, "--scheduling-policy"),
        ({"cuda_graphs": True}, "--cuda-graphs"),
        ({"cuda_graphs": False}, "--no-cuda-graphs"),
    ],
)
def test_what_is_for_gpus_is_refused_by_name_on_the_cpu(
    make_manifest: MakeManifest, resolve: Resolve, fields: dict[str, Any], flag: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(make_manifest(), **fields)
    assert caught.value.message == f"{flag} is not for this engine, which was built for the CPU"


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"gpu_memory_fraction": 0.0}, "--gpu-memory-fraction is 0.0"),
        ({"gpu_memory_fraction": 1.0}, "--gpu-memory-fraction is 1.0"),
        ({"gpu_memory_fraction": float("nan")}, "--gpu-memory-fraction is nan"),
        ({"scheduling_policy": "fair"}, "--scheduling-policy is 'fair'"),
    ],
)
def test_values_out_of_range_are_refused_by_the_name_of_the_flag(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(engine_dir=Path("engine"), **fields)
    assert caught.value.message == flag


def test_kv_memory_that_is_given_becomes_tokens(gpu_manifest: MakeManifest, resolve: Resolve) -> None:
    resolved = resolve(gpu_manifest(), kv_cache_bytes=GIB)
    assert resolved.gpu is not None
    assert resolved.gpu.max_kv_tokens == GIB // 1024
    with pytest.raises(CapacityError, match="--kv-cache-memory"):
        resolve(gpu_manifest(), kv_cache_bytes=60 * GIB)


def test_a_config_for_gpus_crosses_the_process_border_unchanged(gpu_manifest: MakeManifest, resolve: Resolve) -> None:
    resolved = resolve(gpu_manifest(), host_cache_bytes=GIB, cuda_graphs=False)
    assert decode_config(encode_config(resolved)) == resolved


def test_a_machine_without_a_gpu_is_told_before_a_port_is_opened(gpu_engine: Callable[..., Path]) -> None:
    code = (
        "import harness.nvml as nvml, pynvml\n"
        "def missing(): raise pynvml.NVMLError_LibraryNotFound\n"
        "pynvml.nvmlInit = missing\n"
        "from harness.runtime.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "server", "--engine", str(gpu_engine()), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "there is no NVIDIA driver here" in done.stderr
    assert "Traceback" not in done.stderr
