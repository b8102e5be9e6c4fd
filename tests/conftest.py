"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def weights_dir() -> Path:
    """Where scripts/fetch-weights put the real weights that tests use."""
    default = Path(__file__).resolve().parent.parent / ".cache" / "weights"
    return Path(os.environ.get("HARNESS_TEST_WEIGHTS") or default)


@pytest.fixture(scope="session")
def smollm2_path(weights_dir: Path) -> Path:
    """SmolLM2-135M-Instruct, a trained Llama, as a GGUF file."""
    return _present(weights_dir / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def deepseek_tokenizer_path(weights_dir: Path) -> Path:
    """A tokenizer.json of DeepSeek-V3's family."""
    return _present(weights_dir / "deepseek-tokenizer.json")


def _present(path: Path) -> Path:
    # missing weights must not turn into skipped tests
    if not path.is_file():
        pytest.fail(f"{path} is missing: run scripts/test, which fetches the weights of the tests")
    return path
