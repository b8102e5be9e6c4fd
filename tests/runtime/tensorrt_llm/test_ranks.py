"""An engine over several GPUs: who checks, who loads, and that the ranks get the leader's config."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import fake_trtllm
import pytest
from fake_gpus import INSTALLED, device

from harness.errors import EngineError
from harness.manifest import EngineManifest
from harness.runtime.config import ResolvedConfig
from harness.runtime.tensorrt_llm import load, ranks


class Ranks:
    """What is broadcast between ranks that are threads of this process."""

    def __init__(self) -> None:
        self.sent: Queue[bytes] = Queue()

    def bcast(self, data: bytes | None, root: int) -> bytes:
        assert root == 0
        if data is None:
            return self.sent.get(timeout=10)
        self.sent.put(data)
        return data


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Two GPUs, TensorRT-LLM's stand-in, and MPI between the threads of this process."""
    communicator = Ranks()
    module = types.ModuleType("mpi4py")
    vars(module)["MPI"] = types.SimpleNamespace(COMM_WORLD=communicator)
    for name in ("tensorrt_llm", "tensorrt_llm.bindings", fake_trtllm.TABLE["module"]):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    fake_trtllm.install(fake_trtllm.make_module())
    monkeypatch.setattr(load, "devices", lambda: [device(0), device(1)])
    monkeypatch.setattr(load, "installed_version", INSTALLED.get)
    return communicator


def test_all_ranks_load_what_the_leader_was_told_to(
    mpi: Ranks,
    gpu_engine: Callable[..., Path],
    gpu_manifest: Callable[..., EngineManifest],
    resolve: Callable[..., ResolvedConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve(gpu_manifest(tp_size=2), gpu_engine(tp_size=2), max_num_seqs=3)
    loaded: list[ResolvedConfig] = []
    make_executor = load.make_executor

    def noting(api: Any, config: ResolvedConfig, *rest: Any) -> Any:
        loaded.append(config)
        return make_executor(api, config, *rest)

    monkeypatch.setattr(ranks, "make_executor", noting)
    monkeypatch.setattr(load, "make_executor", noting)
    follower = threading.Thread(target=ranks.follow)
    follower.start()
    core = ranks.lead(config)
    follower.join(10)
    assert not follower.is_alive()
    assert loaded == [config, config]
    assert core.stats().gpu_memory_bytes == 2 * (80 << 30)


def test_what_the_leader_refuses_no_rank_loads(
    mpi: Ranks,
    gpu_engine: Callable[..., Path],
    gpu_manifest: Callable[..., EngineManifest],
    resolve: Callable[..., ResolvedConfig],
) -> None:
    divided = {"tp_size": 4}
    with pytest.raises(EngineError, match="built for 4 GPUs"):
        ranks.lead(resolve(gpu_manifest(**divided), gpu_engine(**divided)))
    assert mpi.sent.empty()
