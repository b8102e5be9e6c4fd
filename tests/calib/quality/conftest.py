"""Engines of the tiny trained models, for what is measured on engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.build.cpu_engine import build_cpu_engine
from harness.build.open_source import open_source
from harness.recipe import preset


def build(model: Path, out: Path, precision: str) -> Path:
    source = open_source(str(model))
    return build_cpu_engine(source, preset(precision, source.spec), engines_dir=out.parent, out=out).engine_dir


@pytest.fixture(scope="session")
def llama_f16(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tiny_llama_path, tmp_path_factory.mktemp("quality") / "f16", "f16")


@pytest.fixture(scope="session")
def llama_int4(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tiny_llama_path, tmp_path_factory.mktemp("quality") / "int4", "int4")


@pytest.fixture(scope="session")
def deepseek_f16(tiny_deepseek_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tiny_deepseek_path, tmp_path_factory.mktemp("quality") / "f16", "f16")
