"""Fixtures that make small models on disk, build them and run them in deterministic mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from harness.build.cpu_engine import build_cpu_engine
from harness.build.hf_source import HfFolderSource
from harness.manifest import read_manifest
from harness.recipe import preset
from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence, SchedulerOutput
from harness.runtime.openvino_executor import OpenVinoExecutor
from harness.tokenizer import TokenizerFiles

Logits = npt.NDArray[np.float32]


@pytest.fixture
def save_random_model(
    tmp_path: Path, make_tokenizer: Callable[..., TokenizerFiles]
) -> Callable[[transformers.PretrainedConfig], tuple[Path, transformers.PreTrainedModel]]:
    """Writes a random model as a Hugging Face folder; weights are exact in half precision and attention matters."""

    def save(config: transformers.PretrainedConfig) -> tuple[Path, transformers.PreTrainedModel]:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, values in [*model.named_parameters(), *model.named_buffers()]:
                if "e_score_correction_bias" in name:
                    values.normal_(0.0, 0.2)
                elif name.endswith("bias"):
                    values.normal_(0.0, 0.3)
                elif values.ndim == 1 and "norm" in name:
                    values.uniform_(0.5, 1.5)
                elif values.ndim > 1:
                    values.mul_(4.0)
                if "inv_freq" not in name:
                    values.copy_(values.half().float())
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        files = make_tokenizer()
        (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
        (folder / "tokenizer_config.json").write_text(json.dumps(files.special_tokens))
        return folder, model

    return save


@pytest.fixture
def engine_logits(tmp_path: Path) -> Callable[..., Logits]:
    """Builds a folder for `cpu` and returns its logits of all positions, deterministic mode, computed in chunks."""

    def run(
        folder: Path, token_ids: list[int], *, precision: str = "f16", chunk: int = 128, name: str = "engine"
    ) -> Logits:
        source = HfFolderSource(folder)
        out = tmp_path / name
        build_cpu_engine(source, preset(precision, source.spec), engines_dir=tmp_path, out=out)
        executor = OpenVinoExecutor(out, read_manifest(out), deterministic=True, kv_cache_bytes=16 << 20, num_threads=2)
        num_blocks = -(-len(token_ids) // TOKENS_PER_BLOCK)
        table = list(np.random.default_rng(1).permutation(num_blocks + 2)[:num_blocks])
        rows = []
        for start in range(0, len(token_ids), chunk):
            tokens = token_ids[start : start + chunk]
            sequence = ScheduledSequence(
                request_id="r",
                token_ids=tokens,
                num_computed_tokens=start,
                block_table=[int(b) for b in table[: -(-(start + len(tokens)) // TOKENS_PER_BLOCK)]],
                logit_positions=list(range(len(tokens))),
            )
            rows.append(executor.execute(SchedulerOutput(sequences=[sequence])).logits.copy())
        return np.concatenate(rows)

    return run
