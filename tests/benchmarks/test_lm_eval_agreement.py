"""lm-evaluation-harness itself, against a real server of a real small engine: its figures are those of the logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from preset_engine import build_preset_engine

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "lm_eval_agreement.py"


def test_lm_eval_agrees_with_layer_1(tiny_llama_path: Path, tmp_path: Path) -> None:
    engine = build_preset_engine(tiny_llama_path, tmp_path / "engine", "int8")
    command = [sys.executable, str(SCRIPT), str(engine), "--documents", "2", "--modes", "deterministic"]
    finished = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    seen = json.loads((tmp_path / "lm-eval.json").read_text())["deterministic"]
    # documents of more than one window, and choices whose likelihoods tell them apart
    assert seen["tokens"] > 512 * seen["documents"]
    assert seen["questions"] == 6
    assert seen["perplexity_lm_eval"] == pytest.approx(seen["perplexity"], rel=1e-6)
    assert seen["largest_choice_difference"] < 1e-3
    assert seen["accuracy_lm_eval"] == seen["accuracy"]
