"""Hugging Face folders: what is read equals what torch reads, and every fault names its file and tensors."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from harness.build.hf_source import HfFolderSource
from harness.errors import HarnessError, SourceError, TokenizerError, UnsupportedModelError
from harness.tokenizer import TokenizerFiles
from harness.weight_source import FloatArray

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2}
FP8_CONFIG = CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors `a`, `b` in the first shard, `c` in the second."""
    folder = tmp_path / "Model-1.5B"
    folder.mkdir()
    contents: list[dict[str, torch.Tensor]] = [
        {"a": torch.arange(12.0).reshape(4, 3), "b": torch.ones(5)},
        {"c": torch.zeros(2, 2, dtype=torch.float16)},
    ]
    weight_map = {}
    for shard, tensors in zip(SHARDS, contents, strict=True):
        save_file(tensors, folder / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def fp8_reference(weight: torch.Tensor, scale: torch.Tensor, block: int = 128) -> FloatArray:
    """Each value times the scale of its block, by torch."""
    spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
    return np.asarray((weight.float() * spread).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reads_equal_torch_for_every_dtype_and_slice(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "w": torch.randn(37, 11).to(dtype),
        "norm": torch.randn(7).to(dtype),
        "e": torch.randn(3, 4, 5).to(dtype),
    }
    tensors["scalar"] = torch.tensor(2.5).to(dtype)
    source = HfFolderSource(write_folder(tmp_path / "m", tensors))
    assert source.names() == tensors.keys()
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape)
        read = source.read(name)
        assert read.dtype == np.float32
        assert read.flags.writeable
        np.testing.assert_array_equal(read, tensor.float().numpy())
    for rows in (slice(5, 20), slice(None, 3), slice(30, 99), slice(4, 4), slice(-2, None)):
        np.testing.assert_array_equal(source.read("w", rows), tensors["w"].float().numpy()[rows])
        np.testing.assert_array_equal(source.read("e", rows), tensors["e"].float().numpy()[rows])
    with pytest.raises(ValueError, match="contiguous"):
        source.read("w", slice(0, 10, 2))


@pytest.mark.parametrize("shape", [(256, 256), (300, 200), (1, 129), (576, 7168)])
def test_fp8_is_decoded_with_its_block_scales(tmp_path: Path, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.01
    folder = write_folder(tmp_path / "m", {"w": weight, "w_scale_inv": scale, "n": torch.ones(2)}, FP8_CONFIG)
    source = HfFolderSource(folder)
    assert source.names() == {"w", "n"}
    expected = fp8_reference(weight, scale)
    np.testing.assert_array_equal(source.read("w"), expected)
    for rows in (slice(0, 1), slice(100, 140), slice(127, 129), slice(200, 300), slice(10, 10)):
        np.testing.assert_array_equal(source.read("w", rows), expected[rows])


def test_every_fp8_code_is_torchs(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn)
    folder = write_folder(tmp_path / "m", {"w": codes, "w_scale_inv": torch.ones(1, 1)}, FP8_CONFIG)
    np.testing.assert_array_equal(HfFolderSource(folder).read("w"), codes.float().numpy())


def test_rows_are_read_without_the_rest(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"w": torch.zeros(20_000, 1000, dtype=torch.bfloat16)})
    source = HfFolderSource(folder)
    tracemalloc.start()
    source.read("w", slice(10_000, 10_010))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_shards_are_one_source(sharded: Path) -> None:
    source = HfFolderSource(sharded)
    assert source.name == "Model-1.5B"
    assert source.names() == {"a", "b", "c"}
    np.testing.assert_array_equal(source.read("a", slice(1, 3)), [[3, 4, 5], [6, 7, 8]])
    np.testing.assert_array_equal(source.read("c"), np.zeros((2, 2)))
    with pytest.raises(SourceError, match="no tensor lm_head"):
        source.read("lm_head.weight")


def drop_shard(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()


def truncate_data(folder: Path) -> None:
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes()[:-1])


def truncate_header(folder: Path) -> None:
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes()[:20])


def empty_shard(folder: Path) -> None:
    (folder / SHARDS[0]).write_bytes(b"")


def git_lfs_pointer(folder: Path) -> None:
    (folder / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\n")


def edit_index(edit: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def break_header(folder: Path) -> None:
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"', 1))


def lie_about_shape(folder: Path) -> None:
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes().replace(b"[4,3]", b"[4,4]", 1))


def both_forms(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")


def no_weights(folder: Path) -> None:
    (folder / INDEX).unlink()


def config_missing(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{'a': 1}")


def config_not_object(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def foreign_quantization(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (drop_shard, rf"{SHARDS[1]} is missing.*holds c"),
        (truncate_data, rf"{SHARDS[0]} is truncated.*cut off: [ab]"),
        (truncate_header, rf"{SHARDS[0]} is truncated.*header"),
        (empty_shard, rf"{SHARDS[0]} is truncated"),
        (git_lfs_pointer, rf"{SHARDS[0]} is a Git LFS pointer"),
        (edit_index(lambda m: m.update(ghost=SHARDS[0])), rf"stale: .*{SHARDS[0]}.*lacks ghost"),
        (edit_index(lambda m: m.pop("b")), rf"stale: .*{SHARDS[0]}.*also holds b"),
        (edit_index(lambda m: m.update(b=SHARDS[1])), rf"stale: .*{SHARDS[0]}.*also holds b"),
        (edit_index(lambda m: m.update(b="../x.safetensors")), "not a file of its own folder"),
        (edit_index(lambda m: m.update(b=7)), "no weight_map"),
        (break_header, rf"{SHARDS[0]} has a broken header.*F99"),
        (lie_about_shape, rf"{SHARDS[0]} has a broken header"),
        (both_forms, "stale: it does not name .*model.safetensors"),
        (no_weights, "neither model.safetensors nor"),
        (config_missing, "config.json is missing"),
        (config_not_json, "config.json is not JSON"),
        (config_not_object, "config.json is not a JSON object"),
        (foreign_quantization, "awq"),
    ],
)
def test_faults_are_named_at_opening(sharded: Path, harm: Callable[[Path], None], said: str) -> None:
    harm(sharded)
    with pytest.raises(HarnessError, match=said) as caught:
        HfFolderSource(sharded)
    assert caught.value.hint


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not a folder"):
        HfFolderSource(tmp_path / "nowhere")


@pytest.mark.parametrize("scale", [None, torch.ones(2, 2), torch.ones(3)])
def test_fp8_without_fitting_scales_is_refused(tmp_path: Path, scale: torch.Tensor | None) -> None:
    tensors = {"w": torch.zeros(300, 200).to(torch.float8_e4m3fn)} | ({} if scale is None else {"w_scale_inv": scale})
    with pytest.raises(SourceError, match=r"w of shape \(300, 200\) needs w_scale_inv"):
        HfFolderSource(write_folder(tmp_path / "m", tensors, FP8_CONFIG))
    with pytest.raises(UnsupportedModelError, match="weight_block_size"):
        HfFolderSource(write_folder(tmp_path / "m", tensors, CONFIG))


def test_an_unreadable_dtype_is_named_when_read(tmp_path: Path) -> None:
    source = HfFolderSource(write_folder(tmp_path / "m", {"w": torch.ones(2, dtype=torch.int64)}))
    with pytest.raises(SourceError, match="tensor w is I64"):
        source.read("w")


def test_fingerprint_follows_content_and_not_the_place(sharded: Path, tmp_path: Path) -> None:
    (sharded / "tokenizer.json").write_text("{}")
    copy = tmp_path / "another name"
    shutil.copytree(sharded, copy)
    seen = [HfFolderSource(sharded).fingerprint()]
    assert HfFolderSource(copy).fingerprint() == seen[0]
    assert HfFolderSource(copy).name == "another-name"
    (copy / "tokenizer.json").write_text("{ }")
    seen.append(HfFolderSource(copy).fingerprint())
    (copy / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
    seen.append(HfFolderSource(copy).fingerprint())
    shard = copy / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    seen.append(HfFolderSource(copy).fingerprint())
    assert len(set(seen)) == 4
    assert all(len(fingerprint) == 64 for fingerprint in seen)


def test_generation_config_falls_back_to_the_config(sharded: Path) -> None:
    assert HfFolderSource(sharded).generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    (sharded / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert HfFolderSource(sharded).generation_config == {"eos_token_id": [2, 3]}


def test_tokenizer_json_is_taken_as_it_is(sharded: Path, make_tokenizer: Callable[..., TokenizerFiles]) -> None:
    written = make_tokenizer().tokenizer_json
    (sharded / "tokenizer.json").write_bytes(written)
    (sharded / "special_tokens_map.json").write_text('{"bos_token": "<old>", "pad_token": {"content": "<eos>"}}')
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "bos_token": {"__type": "AddedToken", "content": "<bos>"},
        "eos_token": "<eos>",
        "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    }
    (sharded / "tokenizer_config.json").write_text(json.dumps(config))
    files = HfFolderSource(sharded).tokenizer
    assert files.tokenizer_json == written
    assert files.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    assert (files.chat_template, files.add_bos) == ("D", True)
    (sharded / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "one"}))
    assert HfFolderSource(sharded).tokenizer.chat_template == "one"
    (sharded / "chat_template.jinja").write_text("from a file")
    assert HfFolderSource(sharded).tokenizer.chat_template == "from a file"


def test_a_tokenizer_class_without_tokenizer_json_is_refused(sharded: Path) -> None:
    (sharded / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*LlamaTokenizer"):
        _ = HfFolderSource(sharded).tokenizer
