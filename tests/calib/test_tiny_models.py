"""The committed models are what their training record says, and have learned something that can be lost."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from harness.build.hf_source import HfFolderSource
from harness.tokenizer import Tokenizer

WINDOW = 256
DOMAINS = ["code", "english", "chinese"]


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-deepseek-v2"])
def folder(request: pytest.FixtureRequest, tiny_llama_path: Path, tiny_deepseek_path: Path) -> Path:
    """Each of the two folders."""
    return {path.name: path for path in (tiny_llama_path, tiny_deepseek_path)}[request.param]


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    """The model in float32."""
    return _load(folder)


def _load(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _windows(folder: Path, documents: list[str]) -> torch.Tensor:
    # (windows, 256) token ids, a BOS in front of every document
    source = HfFolderSource(folder)
    tokenizer = Tokenizer(source.tokenizer, source.generation_config)
    ids = [i for text in documents for i in tokenizer.encode(text)]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


def _losses(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(ids[:, :-1], use_cache=False).logits
    targets = ids[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def _unigram_loss(ids: torch.Tensor) -> float:
    # token frequencies of every other window, add-one smoothed, on the windows between
    counts = np.bincount(ids[::2].flatten().numpy(), minlength=4096) + 1
    return float(-np.log(counts / counts.sum())[ids[1::2].flatten().numpy()].mean())


def _record(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "training-record.json").read_text(encoding="utf-8")))


def test_folder_is_that_of_the_record(folder: Path, model: transformers.PreTrainedModel) -> None:
    seen = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    del seen["training-record.json"]
    assert seen == _record(folder)["files"]
    assert model.num_parameters() == _record(folder)["parameters"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_held_out_loss_is_that_of_the_record_and_far_below_unigrams(
    domain: str, folder: Path, model: transformers.PreTrainedModel, held_out_documents: dict[str, list[str]]
) -> None:
    ids = _windows(folder, held_out_documents[domain])
    loss = _losses(model, ids[:16]).mean().item()
    assert loss == pytest.approx(_record(folder)["held_out_committed"][domain]["loss_nats"], abs=0.005)
    assert loss < _unigram_loss(ids) - 0.5


def test_longer_context_helps(
    folder: Path, model: transformers.PreTrainedModel, held_out_documents: dict[str, list[str]]
) -> None:
    # sequences of 512 are sane: the second half is predicted no worse than text with 256 tokens before it
    ids = _windows(folder, held_out_documents["code"])
    long = _losses(model, ids[:24].view(-1, 2 * WINDOW))[:, WINDOW:]
    short = _losses(model, ids[1:24:2])
    assert long.mean() < short.mean()


def test_traffic_reaches_every_expert(tiny_deepseek_path: Path, held_out_documents: dict[str, list[str]]) -> None:
    model = _load(tiny_deepseek_path)
    chosen: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for router in routers:
        router.register_forward_hook(lambda _module, _inputs, out: chosen.append(out[2]))
    mixed = torch.cat([_windows(tiny_deepseek_path, held_out_documents[d])[:4] for d in DOMAINS])
    with torch.no_grad():
        model(mixed, use_cache=False)
    assert len(chosen) == 3
    for experts in chosen:
        share = torch.bincount(experts.flatten(), minlength=8) / experts.numel()
        assert share.min() > 0.02  # 0.125 would be even
