"""Settings of TensorRT-LLM's executor for one engine, in the names of `tensorrt_llm.bindings.executor` 1.2.1.

Every limit is given, since the library's defaults are others. Three settings are not a choice: in-flight batching,
log-probabilities that are not renormalized over the candidates, and no reuse of a part of a block, for the executor
counts such a part as a whole block and the cached tokens of an answer are to be exact.
"""

from __future__ import annotations

from typing import Any

from harness.manifest import GpuPart
from harness.runtime.config import GpuConfig
from harness.runtime.scheduler import SchedulerConfig

_CUDA_GRAPH_CACHE_SIZE = 1000  # as NVIDIA's own benchmark has it: a graph for each shape of a batch that only decodes
_MOST_ITERATIONS = 1000  # whose statistics are kept until they are read, which is after every step


def executor_config(api: Any, engine: GpuPart, gpu: GpuConfig, limits: SchedulerConfig) -> Any:
    """An `ExecutorConfig`.

    Args:
        api: the module `tensorrt_llm.bindings.executor`.
        engine: what was built.
        gpu: how it shall run.
        limits: within those that were built.
    """
    return api.ExecutorConfig(
        max_beam_width=1,
        scheduler_config=_scheduler_config(api, engine, gpu),
        kv_cache_config=api.KvCacheConfig(
            enable_block_reuse=limits.prefix_cache,
            max_tokens=gpu.max_kv_tokens,
            free_gpu_memory_fraction=gpu.memory_fraction,
            host_cache_size=gpu.host_cache_bytes // engine.num_ranks or None,  # of each rank
            enable_partial_reuse=False,
        ),
        enable_chunked_context=engine.chunked_context,
        normalize_log_probs=False,
        iter_stats_max_iterations=_MOST_ITERATIONS,
        batching_type=api.BatchingType.INFLIGHT,
        max_batch_size=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        parallel_config=_parallel_config(api, engine),
        decoding_config=_decoding_config(api, engine),
        max_queue_size=limits.max_waiting,
        extended_runtime_perf_knob_config=_perf_knobs(api, gpu),
    )


def _scheduler_config(api: Any, engine: GpuPart, gpu: GpuConfig) -> Any:
    policies = api.CapacitySchedulerPolicy
    policy = {
        "guaranteed-no-evict": policies.GUARANTEED_NO_EVICT,
        "max-utilization": policies.MAX_UTILIZATION,
    }[gpu.scheduling_policy]
    chunking = api.ContextChunkingPolicy.FIRST_COME_FIRST_SERVED if engine.chunked_context else None
    return api.SchedulerConfig(policy, chunking)


def _parallel_config(api: Any, engine: GpuPart) -> Any:
    """Rank 0 leads, the others follow it; each takes the device of its rank."""
    if engine.num_ranks == 1:
        return None
    return api.ParallelConfig(
        communication_type=api.CommunicationType.MPI, communication_mode=api.CommunicationMode.LEADER
    )


def _decoding_config(api: Any, engine: GpuPart) -> Any:
    if engine.lookahead is None:
        return None
    window, ngram, verification = engine.lookahead
    return api.DecodingConfig(
        lookahead_decoding_config=api.LookaheadDecodingConfig(window, ngram, verification),
    )


def _perf_knobs(api: Any, gpu: GpuConfig) -> Any:
    knobs = api.ExtendedRuntimePerfKnobConfig()
    if gpu.cuda_graphs:  # not among the constructor's arguments
        knobs.cuda_graph_mode = True
        knobs.cuda_graph_cache_size = _CUDA_GRAPH_CACHE_SIZE
    return knobs
