"""What an engine for a GPU is refused for before TensorRT-LLM sees it, and the settings it is loaded with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trtllm
import pytest
from fake_gpus import INSTALLED, device

from harness.errors import CapacityError, DeviceError, EngineError, HarnessError
from harness.manifest import EngineManifest
from harness.nvml import GpuDevice
from harness.runtime.config import ResolvedConfig
from harness.runtime.process_backend import engine_command
from harness.runtime.request import Request, SamplingParams
from harness.runtime.tensorrt_llm import load
from harness.runtime.tensorrt_llm.executor_config import executor_config
from harness.runtime.tensorrt_llm.stats import InflightBatchingStats, IterationStats, KvCacheStats

Resolve = Callable[..., ResolvedConfig]
MakeManifest = Callable[..., EngineManifest]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with TensorRT-LLM, which is never imported by what is refused, and one GPU."""

    def make(visible: list[GpuDevice] | None = None, **versions: str | None) -> None:
        monkeypatch.setattr(load, "devices", lambda: [device()] if visible is None else visible)
        monkeypatch.setattr(load, "installed_version", lambda package: {**INSTALLED, **versions}.get(package))

    make()
    return make


def opened(engine_dir: Path, resolve: Resolve, manifest: EngineManifest, **fields: Any) -> None:
    load.open_engine(resolve(manifest, engine_dir, **fields))


@pytest.mark.parametrize(
    ("machine_fields", "kind", "words", "hint"),
    [
        ({"tensorrt_llm": "1.1.0"}, EngineError, "tensorrt_llm 1.2.1, installed is 1.1.0", "tensorrt_llm==1.2.1"),
        ({"tensorrt": "10.13.3.9"}, EngineError, "tensorrt 10.14.1.48, installed is 10.13.3.9", "rebuild"),
        ({"tensorrt_llm": None}, EngineError, "tensorrt_llm 1.2.1, installed is None", "tensorrt_llm==1.2.1"),
        ({"visible": [device(capability=(8, 9))]}, DeviceError, "built for sm_90.*sm_89", "--arch sm_89"),
    ],
)
def test_an_engine_of_another_machine_is_refused_with_both_sides(
    machine: Callable[..., None],
    gpu_engine: Callable[..., Path],
    gpu_manifest: MakeManifest,
    resolve: Resolve,
    machine_fields: dict[str, Any],
    kind: type[HarnessError],
    words: str,
    hint: str,
) -> None:
    engine_dir = gpu_engine()
    opened(engine_dir, resolve, gpu_manifest())
    machine(**machine_fields)
    with pytest.raises(kind, match=words) as caught:
        opened(engine_dir, resolve, gpu_manifest())
    assert hint in caught.value.hint


def test_too_few_gpus_are_told_before_anything_is_read(
    machine: Callable[..., None], gpu_engine: Callable[..., Path], gpu_manifest: MakeManifest, resolve: Resolve
) -> None:
    divided = {"tp_size": 2, "pp_size": 2}
    engine_dir = gpu_engine(**divided)
    machine([device(index) for index in range(4)])
    opened(engine_dir, resolve, gpu_manifest(**divided))
    machine([device(index) for index in range(2)])
    (engine_dir / "rank3.engine").unlink()
    with pytest.raises(EngineError, match=r"built for 4 GPUs \(tp 2, pp 2\), 2 visible") as caught:
        opened(engine_dir, resolve, gpu_manifest(**divided))
    assert "--tp 2" in caught.value.hint


def test_an_altered_engine_file_is_refused(
    machine: Callable[..., None], gpu_engine: Callable[..., Path], gpu_manifest: MakeManifest, resolve: Resolve
) -> None:
    engine_dir = gpu_engine()
    (engine_dir / "rank0.engine").write_text("[]")
    with pytest.raises(EngineError, match=r"rank0\.engine is corrupt"):
        opened(engine_dir, resolve, gpu_manifest())


def test_a_host_cache_beyond_the_hosts_memory_is_refused(
    machine: Callable[..., None], gpu_engine: Callable[..., Path], gpu_manifest: MakeManifest, resolve: Resolve
) -> None:
    with pytest.raises(CapacityError, match=r"--host-cache-memory is 1048576\.00 GiB"):
        opened(gpu_engine(), resolve, gpu_manifest(), host_cache_bytes=1 << 50)


def test_an_engine_is_loaded_warm_and_with_its_counts_at_zero(
    machine: Callable[..., None], gpu_engine: Callable[..., Path], gpu_manifest: MakeManifest, resolve: Resolve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    api = fake_trtllm.make_module()
    for name in ("tensorrt_llm", "tensorrt_llm.bindings", fake_trtllm.TABLE["module"]):
        monkeypatch.setitem(sys.modules, name, None)
    fake_trtllm.install(api)
    core = load.load_tensorrt_llm(resolve(gpu_manifest(), gpu_engine()))
    stats = core.stats()
    assert (stats.steps_total, stats.prompt_tokens_total, stats.num_running) == (0, 0, 0)
    assert (stats.gpu_memory_used_bytes, stats.gpu_memory_bytes) == (1 << 30, 80 << 30)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    core.add_request(Request(request_id="r", prompt_token_ids=[0] * 40, sampling=sampling))
    assert core.step()[0].num_cached_tokens == 0  # the warm-up's blocks are nobody's


def settings(gpu_manifest: MakeManifest, resolve: Resolve, gpu: dict[str, Any], **fields: Any) -> Any:
    manifest = gpu_manifest(**gpu)
    config = resolve(manifest, **fields)
    assert manifest.gpu is not None
    assert config.gpu is not None
    return executor_config(fake_trtllm.make_module(), manifest.gpu, config.gpu, config.scheduler)


def test_the_executor_gets_every_limit(gpu_manifest: MakeManifest, resolve: Resolve) -> None:
    found = settings(gpu_manifest, resolve, {}, max_num_seqs=3, max_num_batched_tokens=128, max_waiting=7)
    assert (found.max_batch_size, found.max_num_tokens, found.max_queue_size, found.max_beam_width) == (3, 128, 7, 1)
    assert found.batching_type.name == "INFLIGHT"
    assert found.normalize_log_probs is False
    assert found.scheduler_config.capacity_scheduler_policy.name == "GUARANTEED_NO_EVICT"
    assert (found.parallel_config, found.decoding_config) == (None, None)


def test_block_reuse_is_by_whole_blocks(gpu_manifest: MakeManifest, resolve: Resolve) -> None:
    kv_cache = settings(gpu_manifest, resolve, {}).kv_cache_config
    assert (kv_cache.enable_block_reuse, kv_cache.enable_partial_reuse) == (True, False)
    assert (kv_cache.max_tokens, kv_cache.free_gpu_memory_fraction, kv_cache.host_cache_size) == (None, 0.9, None)
    chosen = {"kv_cache_bytes": 1 << 30, "gpu_memory_fraction": 0.5, "host_cache_bytes": 1 << 31}
    kv_cache = settings(gpu_manifest, resolve, {}, prefix_cache=False, **chosen).kv_cache_config
    assert kv_cache.enable_block_reuse is False
    assert (kv_cache.max_tokens, kv_cache.free_gpu_memory_fraction) == ((1 << 30) // 1024, 0.5)
    assert kv_cache.host_cache_size == 1 << 31


def test_chunked_context_follows_the_engine(gpu_manifest: MakeManifest, resolve: Resolve) -> None:
    chunked, whole = (settings(gpu_manifest, resolve, {"chunked_context": value}) for value in (True, False))
    assert (chunked.enable_chunked_context, whole.enable_chunked_context) == (True, False)
    assert chunked.scheduler_config.context_chunking_policy.name == "FIRST_COME_FIRST_SERVED"
    assert whole.scheduler_config.context_chunking_policy is None


def test_policy_graphs_lookahead_and_ranks(gpu_manifest: MakeManifest, resolve: Resolve) -> None:
    parts = {"lookahead": (7, 5, 3), "tp_size": 2}
    found = settings(gpu_manifest, resolve, parts, scheduling_policy="max-utilization", host_cache_bytes=1 << 31)
    assert found.kv_cache_config.host_cache_size == 1 << 30  # each rank has a cache of its own
    assert found.scheduler_config.capacity_scheduler_policy.name == "MAX_UTILIZATION"
    knobs = found.extended_runtime_perf_knob_config
    assert (knobs.cuda_graph_mode, knobs.cuda_graph_cache_size) == (True, 1000)
    lookahead = found.decoding_config.lookahead_decoding_config
    sizes = (lookahead.max_window_size, lookahead.max_ngram_size, lookahead.max_verification_set_size)
    assert sizes == (7, 5, 3)
    assert found.parallel_config.communication_mode.name == "LEADER"
    knobs = settings(gpu_manifest, resolve, {}, cuda_graphs=False).extended_runtime_perf_knob_config
    assert not knobs.cuda_graph_mode


def test_the_fields_read_of_statistics_are_in_the_table() -> None:
    for kind in (IterationStats, KvCacheStats, InflightBatchingStats):
        assert set(kind.__struct_encode_fields__) <= set(fake_trtllm.TABLE["json"][kind.__name__])


def test_an_engine_of_several_gpus_is_started_by_mpi_a_process_a_rank(
    gpu_manifest: MakeManifest, resolve: Resolve
) -> None:
    alone = engine_command(resolve(gpu_manifest()))
    assert alone[0] == sys.executable
    assert "engine_process" in alone[-1]
    divided = engine_command(resolve(gpu_manifest(tp_size=2, pp_size=2)))
    assert divided[0] == "mpirun"
    assert divided[divided.index("-n") + 1] == "4"
    assert divided[-3:-1] == (sys.executable, "-c")
    assert "harness.runtime.tensorrt_llm.ranks" in divided[-1]


def test_the_engine_process_of_a_gpu_loads_no_openvino() -> None:
    code = (
        "import sys, harness.runtime.engine_process, harness.runtime.tensorrt_llm.load; "
        "heavy = {'openvino', 'torch', 'tensorrt_llm', 'mpi4py', 'fastapi'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_library_that_does_not_import_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm.bindings", None)
    with pytest.raises(EngineError, match="tensorrt_llm cannot be imported") as caught:
        load.executor_api()
    assert "doctor" in caught.value.hint
