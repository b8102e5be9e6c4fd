"""Engines of the tiny trained models, for what is measured on engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from preset_engine import build_preset_engine


@pytest.fixture(scope="session")
def llama_f16(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preset_engine(tiny_llama_path, tmp_path_factory.mktemp("quality") / "f16", "f16")


@pytest.fixture(scope="session")
def llama_int4(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preset_engine(tiny_llama_path, tmp_path_factory.mktemp("quality") / "int4", "int4")


@pytest.fixture(scope="session")
def deepseek_f16(tiny_deepseek_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preset_engine(tiny_deepseek_path, tmp_path_factory.mktemp("quality") / "f16", "f16")
