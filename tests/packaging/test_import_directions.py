"""Who may import whom. The rules are the architecture; the imports are read from the source, wherever they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"src/harness": "harness", "build": "harness.build", "runtime": "harness.runtime", "calib": "harness.calib"}
OPENVINO_RUNTIME = ("openvino_core", "openvino_engine", "openvino_executor", "paged_graph", "engine_weights")
TENSORRT_LLM = ("tensorrt_llm", "mpi4py")
PYDANTIC_BORDERS = (
    "harness.manifest",
    "harness.recipe",
    "harness.checkpoint_record",
    "harness.build.tensorrt_llm.pytorch_record",
    "harness.build.tensorrt_llm.record",
    "harness.calib.quality.report",
    "harness.calib.quality.suite",
)
CALIB_EXTRA = ("torch", "transformers", "llmcompressor", "compressed_tensors", "detect_secrets", "phonenumbers")
NEEDS_TORCH = "Needs torch."
SCHEDULING = ("scheduler", "block_pool", "prefix_cache", "sampler", "engine_core")


def modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    found: dict[str, Path] = {}
    for folder, package in FOLDERS.items():
        # links are not followed: src/harness is the core alone
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            linked = folder == "src/harness" and parts[0] in ("build", "runtime", "calib")
            if not linked:
                found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imported(source: str, module: str) -> Iterator[str]:
    """Dotted names a module imports; for `from a import b` both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def forbidden(module: str) -> set[str]:
    """Packages that a module must not import."""
    banned: set[str] = set()
    in_build, in_runtime = within(module, "harness.build"), within(module, "harness.runtime")
    in_calib = within(module, "harness.calib")
    if in_build:
        banned |= {"harness.runtime"}
    elif in_runtime:
        banned |= {"harness.build", "harness.calib"}
    elif within(module, "harness.calib.quality"):
        banned |= {"harness.build", "harness.runtime.server"}  # it measures engines through the runtime that serves
    elif in_calib:
        banned |= {"harness.build", "harness.runtime"}
    else:
        banned |= {"harness.build", "harness.runtime", "harness.calib"}
    if not in_build and not within(module, *(f"harness.runtime.{name}" for name in OPENVINO_RUNTIME)):
        banned |= {"openvino"}
    if module != "harness.nvml":
        banned |= {"pynvml"}
    if not within(module, "harness.runtime.tensorrt_llm"):
        banned |= set(TENSORRT_LLM)
    in_server = within(module, "harness.runtime.server") or module == "harness.runtime.cli"
    if not in_server:
        banned |= {"fastapi", "starlette", "uvicorn"}
    if not in_server and module not in PYDANTIC_BORDERS:
        banned |= {"pydantic"}
    if in_runtime and not in_server and module.rpartition(".")[2] in SCHEDULING:
        banned |= {"harness.runtime.server", "harness.runtime.openvino_executor", "harness.runtime.tensorrt_llm", "zmq"}
    if not in_calib:
        banned |= set(CALIB_EXTRA)
    return banned


def violations(module: str, source: str) -> set[str]:
    banned = forbidden(module)
    return {name for name in imported(source, module) if within(name, *banned)}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_the_right_way(module: str) -> None:
    assert violations(module, modules()[module].read_text(encoding="utf-8")) == set()


def test_all_folders_are_seen() -> None:
    names = set(modules())
    assert {"harness.spec", "harness.build.cli", "harness.runtime.cli", "harness.runtime.openvino_executor"} <= names
    assert {f"harness.runtime.{name}" for name in SCHEDULING} <= names


def test_modules_of_calibration_say_whether_they_need_torch() -> None:
    """Those that do not say so can be used without it: none imports torch, nor a module that says it needs it."""
    paths = {name: path for name, path in modules().items() if within(name, "harness.calib")}
    sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    needing = {
        name
        for name, source in sources.items()
        if NEEDS_TORCH in " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    }
    assert "harness.calib.quantizer" in needing
    for name, source in sources.items():
        reached = {n for n in imported(source, name) if within(n, "torch", "transformers", "llmcompressor", *needing)}
        assert bool(reached) == (name in needing), (name, reached)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("harness.spec", "from harness import build"),
        ("harness.ledger", "def f():\n    from harness.runtime.executor import Executor"),
        ("harness.build.cli", "import harness.runtime.cli"),
        ("harness.runtime.config", "from harness.build import store"),
        ("harness.runtime.config", "import harness.calib"),
        ("harness.runtime.scheduler", "import openvino as ov"),
        ("harness.runtime.scheduler", "from .openvino_executor import OpenvinoExecutor"),
        ("harness.runtime.engine_core", "from harness.runtime.server import app"),
        ("harness.runtime.sampler", "try:\n    import torch.nn\nexcept ImportError:\n    pass"),
        ("harness.runtime.backend", "from fastapi.responses import JSONResponse"),
        ("harness.runtime.config", "from pydantic import BaseModel"),
        ("harness.runtime.server.app", "import openvino.runtime"),
        ("harness.runtime.engine_process", "import openvino"),
        ("harness.runtime.engine_process", "from tensorrt_llm.bindings import executor"),
        ("harness.build.tensorrt_llm.engine", "def f():\n    import tensorrt_llm"),
        ("harness.runtime.scheduler", "from harness.runtime.tensorrt_llm.core import TrtllmCore"),
        ("harness.build.hub", "from transformers import AutoTokenizer"),
        ("harness.calib.measure", "from harness.runtime.executor import Executor"),
        ("harness.calib.quality.text", "from harness.build.store import staged"),
        ("harness.calib.decoder", "from harness.build.open_source import open_source"),
        ("harness.build.request", "def f():\n    from compressed_tensors.quantization import QuantizationArgs"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("harness.build.cli", "from harness.build.lowering import weights\nimport openvino as ov"),
        ("harness.runtime.server.app", "import fastapi, pydantic\nfrom harness.runtime.backend import Backend"),
        ("harness.runtime.openvino_executor", "from openvino import Core"),
        ("harness.runtime.tensorrt_llm.ranks", "from mpi4py import MPI\nfrom tensorrt_llm.bindings import executor"),
        ("harness.manifest", "from pydantic import BaseModel"),
        ("harness.calib.search", "import torch"),
        ("harness.calib.quality.text", "from harness.runtime.executor import Executor"),
        ("harness.runtime.config", "import openvino_like\nimport harness.builder"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert not violations(module, source)
