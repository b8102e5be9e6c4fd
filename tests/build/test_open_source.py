"""What `--model` may say: a folder, a GGUF file, a hub id, and what each wrong one answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from harness.build.gguf_source import GgufSource
from harness.build.hf_source import HfFolderSource
from harness.build.open_source import open_source
from harness.errors import SourceError
from harness.weight_source import safe_name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a model"
    path.mkdir()
    save_file({"w": np.ones(2, np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return path


def test_folder_and_gguf_file(folder: Path, smollm2_path: Path, tmp_path: Path) -> None:
    source = open_source(str(folder))
    assert isinstance(source, HfFolderSource)
    assert source.name == "a-model"
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / smollm2_path.name).symlink_to(smollm2_path)
    for path in (smollm2_path, alone):
        source = open_source(str(path))
        assert isinstance(source, GgufSource)
        assert source.name == "SmolLM2-135M-Instruct.Q4_1"
    (alone / "second.gguf").write_bytes(b"")
    with pytest.raises(SourceError, match="2 GGUF files"):
        open_source(str(alone))


def test_hub_id_fetches_weights_and_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_source("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B").name == "DeepSeek-R1-Distill-Qwen-1.5B"
    assert asked["repo_id"] == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    kept = huggingface_hub.utils.filter_repo_objects(
        ["model.safetensors", "config.json", "chat_template.jinja", "pytorch_model.bin", "modeling.py", "onnx/x.json"],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == ["model.safetensors", "config.json", "chat_template.jinja"]


def test_offline_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceError, match=r"org/model.*HF_HUB_OFFLINE") as caught:
        open_source("org/model")
    assert "HF_ENDPOINT" in caught.value.hint


def test_a_broken_transfer_says_that_it_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(SourceError, match="reset by peer") as caught:
        open_source("org/model")
    assert "resumes" in caught.value.hint


@pytest.mark.parametrize("model", ["nothing", "a/b/c", "/no/such/place", "", "../x/y"])
def test_what_is_none_of_the_forms_names_them(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        open_source(model)
    if model:  # "" is the current folder, which has no config.json
        assert "hub id" in caught.value.hint


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"not a \.gguf file"):
        open_source(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("DeepSeek-R1", "DeepSeek-R1"),
        ("a b/c", "a-b-c"),
        ("..", "model"),
        (".hidden", "hidden"),
        ("模型", "model"),
        ("x\n", "x"),
    ],
)
def test_names_are_safe_path_components(text: str, name: str) -> None:
    assert safe_name(text) == name
