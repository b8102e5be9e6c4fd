"""Opens an engine for the CPU: what this runtime can run, and loading it.

Owns what is refused before a weight is read. The process and its loop are `engine_process`.
"""

from __future__ import annotations

from pathlib import Path

import openvino

from harness.arch import CPU
from harness.errors import EngineError
from harness.manifest import EngineManifest, read_manifest, verify_files
from harness.runtime.config import ResolvedConfig
from harness.runtime.engine_core import EngineCore, warm_up
from harness.runtime.openvino_executor import OpenVinoExecutor


def check_runnable(manifest: EngineManifest, installed_openvino: str) -> None:
    """Refuse an engine that this runtime cannot run as it was built.

    Raises:
        EngineError: built for another arch, or with another release of OpenVINO; shows both.
    """
    if manifest.arch != CPU.name or manifest.backend != CPU.backend:
        raise EngineError(
            f"engine {manifest.engine_id} was built for {manifest.arch} ({manifest.backend}), this runtime runs "
            f"{CPU.name} ({CPU.backend})",
            f"rebuild it with: harness-build --model MODEL --arch {CPU.name}",
        )
    built_with = manifest.versions.get("openvino")
    if built_with != installed_openvino:
        raise EngineError(
            f"engine {manifest.engine_id} was built with openvino {built_with}, installed is {installed_openvino}",
            "rebuild the engine with harness-build, or install the release it was built with",
        )


def open_engine(engine_dir: Path) -> EngineManifest:
    """The manifest of an engine that this runtime can run and whose files are whole.

    Raises:
        EngineError: it is not such an engine; says why.
    """
    manifest = read_manifest(engine_dir)
    check_runnable(manifest, openvino.get_version())
    verify_files(engine_dir, manifest)
    return manifest


def load_openvino(config: ResolvedConfig) -> EngineCore:
    """Check and load the engine of `config`, and run a few tokens through it.

    Raises:
        HarnessError: it cannot be run; says why.
    """
    manifest = open_engine(config.engine_dir)
    executor = OpenVinoExecutor(
        config.engine_dir,
        manifest,
        deterministic=config.deterministic,
        kv_cache_bytes=config.kv_cache_bytes,
        num_threads=config.num_threads,
    )
    warm_up(executor)
    return EngineCore(executor, config.scheduler, manifest.tokenizer.eos_token_ids)
