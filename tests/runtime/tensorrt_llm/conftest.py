"""Engines for a GPU that hold no engine, and a core over the stand-in for TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trtllm
import pytest

from harness.manifest import EngineManifest, GpuPart, describe_files, write_manifest
from harness.runtime.config import EngineConfig, ResolvedConfig
from harness.runtime.tensorrt_llm.core import TrtllmCore
from harness.runtime.tensorrt_llm.load import make_executor, max_prompt_len
from harness.runtime.tensorrt_llm.request_mapping import RequestMapper

EOS = 257


@pytest.fixture
def gpu_manifest(make_manifest: Callable[..., EngineManifest]) -> Callable[..., EngineManifest]:
    """Makes manifests of engines for a GPU."""

    def make(*, max_model_len: int = 512, eos_token_ids: tuple[int, ...] = (EOS,), **gpu: Any) -> EngineManifest:
        part = {
            "tp_size": 1,
            "pp_size": 1,
            "dtype": "bfloat16",
            "kv_dtype": "bfloat16",
            "prefix_reuse": True,
            "chunked_context": True,
            "max_batch_size": 4,
            "max_num_tokens": 256,
            "max_input_len": max_model_len,
            "lookahead": None,
            "context_logits": False,
            "build_flags": [],
            "checkpoint_id": "def",
        }
        manifest = make_manifest(arch="sm_90", max_model_len=max_model_len)
        return manifest.model_copy(
            update={
                "backend": "tensorrt-llm",
                "versions": {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"},
                "tokenizer": manifest.tokenizer.model_copy(update={"eos_token_ids": list(eos_token_ids)}),
                "kv": manifest.kv.model_copy(update={"bytes_per_token": {"fast": 1024}}),
                "compile_settings": {},
                "gpu": GpuPart(**(part | gpu)),
            }
        )

    return make


@pytest.fixture
def gpu_engine(gpu_manifest: Callable[..., EngineManifest], tmp_path: Path) -> Callable[..., Path]:
    """Makes folders of engines for a GPU, whole as far as hashes go."""

    def make(**fields: Any) -> Path:
        manifest = gpu_manifest(**fields)
        for name in manifest.required_files():
            (tmp_path / name).write_text("{}")
        write_manifest(tmp_path, manifest.model_copy(update={"files": describe_files(tmp_path)}))
        return tmp_path

    return make


@pytest.fixture
def resolve() -> Callable[..., ResolvedConfig]:
    """Resolves settings for a manifest on a GPU with 64 GiB free."""

    def make(manifest: EngineManifest, engine_dir: Path = Path("engine"), **fields: Any) -> ResolvedConfig:
        wished = EngineConfig(engine_dir=engine_dir, **fields)
        return wished.resolve(manifest, available_bytes=64 << 30, num_cores=4)

    return make


@pytest.fixture
def make_core(
    gpu_manifest: Callable[..., EngineManifest], resolve: Callable[..., ResolvedConfig]
) -> Callable[..., tuple[TrtllmCore, fake_trtllm.ToyEngine]]:
    """Makes cores, each with the toy behind it."""

    def make(manifest: EngineManifest | None = None, **fields: Any) -> tuple[TrtllmCore, fake_trtllm.ToyEngine]:
        manifest = manifest or gpu_manifest()
        api, config = fake_trtllm.make_module(), resolve(manifest, **fields)
        assert manifest.gpu is not None
        assert config.gpu is not None
        executor = make_executor(api, config, manifest.gpu, config.gpu)
        mapper = RequestMapper(
            api=api,
            vocab_size=manifest.model.vocab_size,
            eos_token_ids=manifest.tokenizer.eos_token_ids,
            has_lookahead=manifest.gpu.lookahead is not None,
        )
        core = TrtllmCore(
            executor,
            mapper,
            config.scheduler,
            max_prompt_len=max_prompt_len(manifest.gpu, config.scheduler),
            tokens_per_block=manifest.kv.tokens_per_block,
            gpu_memory=lambda: (3, 80),
        )
        return core, executor.engine

    return make
