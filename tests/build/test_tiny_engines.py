"""Engines of the trained models: real weights of both families against transformers, in half precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from harness.build.hf_source import HfFolderSource
from harness.tokenizer import Tokenizer

Logits = npt.NDArray[np.float32]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-deepseek-v2"])
def test_engine_logits_equal_those_of_transformers(
    name: str,
    tiny_llama_path: Path,
    tiny_deepseek_path: Path,
    held_out_documents: dict[str, list[str]],
    engine_logits: Callable[..., Logits],
) -> None:
    folder = {path.name: path for path in (tiny_llama_path, tiny_deepseek_path)}[name]
    source = HfFolderSource(folder)
    tokenizer = Tokenizer(source.tokenizer, source.generation_config)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": held_out_documents["code"][0][:1200]},
        {"role": "assistant", "content": held_out_documents["english"][0][:600]},
        {"role": "user", "content": held_out_documents["chinese"][0][:200]},
    ]
    ids = tokenizer.encode_chat(turns)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        reference = model(torch.tensor([ids])).logits[0].numpy()
    seen = engine_logits(folder, ids)
    cosine = (reference * seen).sum(axis=1) / np.linalg.norm(reference, axis=1) / np.linalg.norm(seen, axis=1)
    assert cosine.min() >= 0.9999
