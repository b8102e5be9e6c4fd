"""Folders for the PyTorch backend of TensorRT-LLM, read back as its sources read them.

The oracles are the library of compressed-tensors, which unpacks the checkpoint, transformers, which reads config,
tokenizer and 16-bit weights, and `Reader` below, written after TensorRT-LLM's own loaders. Nothing here ran on a GPU.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trtllm_models
from engine_oracle import unpack
from safetensors.torch import load_file
from small_quantized import quantize, recipe, tensors_of

from harness.arch import resolve_arch
from harness.build.checkpoint import QuantizedCheckpoint, open_checkpoint
from harness.build.hf_source import HfFolderSource
from harness.build.tensorrt_llm import pytorch_folder, pytorch_tensors
from harness.build.tensorrt_llm.pytorch_config import hf_config, quantization_files, stored_precisions, tokenizer_files
from harness.build.tensorrt_llm.pytorch_folder import build_pytorch_folder
from harness.build.tensorrt_llm.pytorch_limits import check_expressible
from harness.build.tensorrt_llm.pytorch_record import RECORD_NAME, PytorchFolderRecord
from harness.errors import BuildError, HarnessError, RecipeError, UnsupportedModelError, UsageError
from harness.manifest import describe_files
from harness.recipe import Precision, Recipe, linear_shapes, preset
from harness.spec import ModelSpec
from harness.tokenizer import Tokenizer, TokenizerFiles

SaveModel = Callable[[transformers.PretrainedConfig], tuple[Path, transformers.PreTrainedModel]]
Tensors = dict[str, torch.Tensor]

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LLAMA = transformers.LlamaConfig(**COMMON, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
QWEN2 = transformers.Qwen2Config(**COMMON)
QWEN3 = transformers.Qwen3Config(**COMMON | {"hidden_size": 256, "intermediate_size": 256}, head_dim=64)
MIXED = (
    ("model.layers.0.self_attn.[qkv]_proj", "f16"),
    ("model.layers.0.self_attn.o_proj", "int8"),
    ("model.layers.1.mlp.*", "int8-a8"),
    ("*", "int4-g128"),
)
PLAIN = (
    ("*.o_proj", "f16"),
    ("model.layers.1.mlp.gate_proj", "f16"),
    ("model.layers.1.mlp.up_proj", "f16"),
    ("*", "int4-g64"),
)
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that the backend fuses: its own names, and the parts, of which the first decides."""


class Reader:
    """What TensorRT-LLM makes of a folder: the algorithm of each linear layer, and its weight on one rank."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        self.tensors: Tensors = {}
        for shard in sorted(folder.glob("*.safetensors")):
            held = load_file(shard)
            assert held.keys() == {name for name, file in index["weight_map"].items() if file == shard.name}
            self.tensors |= held
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in self.tensors.values())
        self.config = json.loads((folder / "config.json").read_text())
        assert "quantization_config" not in self.config, "it would be read as compressed-tensors"
        self.dtype = getattr(torch, self.config["torch_dtype"])
        path = folder / "hf_quant_config.json"
        self.quantization = json.loads(path.read_text())["quantization"] if path.exists() else {"exclude_modules": []}
        self.layers: dict[str, dict[str, Any]] | None = None
        if self.quantization.get("quant_algo") == "MIXED_PRECISION":
            mixed = json.loads((folder / "quant_cfg.json").read_text())
            assert mixed["kv_cache_quant_algo"] == self.quantization["kv_cache_quant_algo"]
            self.layers = mixed["quantized_layers"]
        else:
            assert not (folder / "quant_cfg.json").exists()

    def algorithm(self, layer: str) -> dict[str, Any] | None:
        """Of a layer by the backend's own name, in which fused parts are one."""
        prefix, _, name = layer.rpartition(".")
        if any(fnmatchcase(layer, pattern) for pattern in self.quantization["exclude_modules"]):
            return None
        if self.layers is not None:
            first = PARTS.get(name, (name,))[0]
            return self.layers.get(f"{prefix}.{first}")
        return self.quantization if self.quantization.get("quant_algo") else None

    def weight(self, module: str, layer: str, rank: int = 0, num_ranks: int = 1) -> torch.Tensor:
        """The weight of a module on a rank, as float32."""
        name = layer.rpartition(".")[2]
        dim = 1 if name in ("o_proj", "down_proj") else 0

        def share(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            return tensor.chunk(num_ranks, dim)[rank]

        algorithm, stored = self.algorithm(layer), self.tensors[f"{module}.weight"]
        if algorithm is None:
            assert stored.dtype == self.dtype
            return share(stored, dim).float()
        scale = self.tensors[f"{module}.weight_scale"]
        assert scale.dtype == self.dtype
        if algorithm["quant_algo"] == "W8A16":
            assert stored.dtype == torch.int8
            assert scale.ndim == 1
            return share(stored, dim).float() * (scale if dim else share(scale, 0)).float()[:, None]
        assert algorithm["quant_algo"] == "W4A16_AWQ"
        assert not algorithm["has_zero_point"]
        assert stored.dtype == torch.uint8
        kernel_weight = share(stored, dim).T.contiguous()  # (in, out / 2): a byte is two neighbours of a row
        low, high = kernel_weight & 15, kernel_weight >> 4
        integers = torch.stack([low, high], 2).flatten(1).to(torch.int8)
        integers = torch.where(integers > 7, integers - 16, integers)
        scales = share(scale, dim).T.repeat_interleave(algorithm["group_size"], 0)
        if dim == 1:
            smooth = self.tensors[f"{module}.pre_quant_scale"]
            assert smooth.dtype == self.dtype
            assert smooth.shape == (self.tensors[f"{module}.weight"].shape[1],)
            assert (smooth == 1).all()
        return (integers.float() * scales.float()).T


def layer_names(spec: ModelSpec) -> dict[str, str]:
    """The name that the backend gives each decoder linear."""
    fused = {part: name for name, parts in PARTS.items() for part in parts}
    names = {}
    for module in linear_shapes(spec):
        prefix, _, name = module.rpartition(".")
        if prefix.startswith("model.layers."):
            names[module] = f"{prefix}.{fused.get(name, name)}"
    return names


@pytest.fixture(scope="module")
def quantized(
    make_tokenizer: Callable[..., TokenizerFiles], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Calibrated checkpoints of random models, by the names of `CASES`; each is made once."""

    @cache
    def folder(name: str) -> Path:
        config, rules = CASES[name]
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        folder = tmp_path_factory.mktemp("checkpoint") / "model"
        model.save_pretrained(folder)
        files = make_tokenizer()
        (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
        (folder / "tokenizer_config.json").write_text(json.dumps(files.special_tokens))
        return quantize(folder, *rules)

    return folder


@pytest.fixture
def mixed(quantized: Callable[[str], Path]) -> QuantizedCheckpoint:
    return open_checkpoint(quantized("llama-mixed"))


CASES: dict[str, tuple[transformers.PretrainedConfig, tuple[tuple[str, str], ...]]] = {
    "llama-mixed": (LLAMA, MIXED),
    "qwen2-int8": (QWEN2, (("*.mlp.*", "int8-a8"), ("*", "int8"))),
    "qwen3-mixed": (QWEN3, MIXED),
    "llama-int4-and-16-bit": (LLAMA, PLAIN),
}


@pytest.mark.parametrize("name", CASES)
def test_the_backend_reads_the_values_of_the_checkpoint(
    name: str, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint, packed = open_checkpoint(quantized(name)), tensors_of(quantized(name))
    done: list[int] = []
    built = build_pytorch_folder(checkpoint, checkpoint.recipe, engines_dir=tmp_path / "e", on_layer=done.append)
    assert done == [0, 1]
    reader, names = Reader(built.path), layer_names(checkpoint.spec)
    read = set()
    for module, layer in names.items():
        precision = checkpoint.quantized.get(module)
        algorithm = reader.algorithm(layer)
        if precision is None:
            expected = packed[f"{module}.weight"].bfloat16().float()
            assert algorithm is None
        else:
            expected = unpack(packed, module, precision).dequantized
            assert algorithm is not None
            assert algorithm["quant_algo"] == ("W8A16" if precision.dtype == "int8" else "W4A16_AWQ")
            assert algorithm.get("group_size") == precision.group_size
            read |= {f"{module}.weight_scale"}
            if precision.dtype == "int4" and module.endswith(("o_proj", "down_proj")):
                read |= {f"{module}.pre_quant_scale"}
        assert torch.equal(reader.weight(module, layer), expected), module
        read |= {f"{module}.weight"}
    rest = {name for name in packed if name.endswith(".bias") or name.rpartition(".")[0] not in names}
    if checkpoint.spec.tie_word_embeddings:
        rest -= {"lm_head.weight"}
    assert reader.tensors.keys() == read | rest
    for name in rest:
        assert torch.equal(reader.tensors[name], packed[name].bfloat16()), name


def test_every_projection_of_a_mixed_folder_is_listed_by_its_exact_name(
    mixed: QuantizedCheckpoint, tmp_path: Path
) -> None:
    path = build_pytorch_folder(mixed, mixed.recipe, engines_dir=tmp_path).path
    int4 = {"quant_algo": "W4A16_AWQ", "group_size": 128, "has_zero_point": False, "pre_quant_scale": True}
    first, second = "model.layers.0", "model.layers.1"
    assert json.loads((path / "hf_quant_config.json").read_text()) == {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "exclude_modules": [
                "lm_head",
                *(f"{first}.self_attn.{name}_proj" for name in "qkv"),
                f"{first}.self_attn.qkv_proj",
            ],
        },
    }
    assert json.loads((path / "quant_cfg.json").read_text()) == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": {
            f"{first}.self_attn.o_proj": {"quant_algo": "W8A16"},
            **{f"{first}.mlp.{name}_proj": int4 for name in ("gate", "up")},
            f"{first}.mlp.down_proj": int4 | {"group_size": 64},
            **{f"{second}.self_attn.{name}_proj": int4 for name in "qkvo"},
            **{f"{second}.mlp.{name}_proj": {"quant_algo": "W8A16"} for name in ("gate", "up", "down")},
        },
    }


def test_one_algorithm_needs_no_list(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    int4 = {"quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False, "pre_quant_scale": True}
    plain = [
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "gate_up")),
    ]
    for name, algorithm, excluded in (
        ("llama-int4-and-16-bit", int4, plain),
        ("qwen2-int8", {"quant_algo": "W8A16"}, []),
    ):
        checkpoint = open_checkpoint(quantized(name))
        path = build_pytorch_folder(checkpoint, checkpoint.recipe, engines_dir=tmp_path).path
        said = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
        assert sorted(said.pop("exclude_modules")) == sorted(["lm_head", *excluded])
        assert said == {**algorithm, "kv_cache_quant_algo": None}
        assert not (path / "quant_cfg.json").exists()


def test_two_groups_are_two_algorithms() -> None:
    resolved = recipe(("*.down_proj", "int4-g64"), ("*", "int4-g128")).resolve(spec_of())
    files = quantization_files(stored_precisions(resolved))
    sizes = {name: layer["group_size"] for name, layer in files["quant_cfg.json"]["quantized_layers"].items()}
    assert sizes == {module: 64 if "down_proj" in module else 128 for module in layer_names(spec_of())}


def test_the_shares_of_two_ranks_make_the_whole(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(quantized("qwen3-mixed"))
    built = build_pytorch_folder(checkpoint, checkpoint.recipe, engines_dir=tmp_path, tp_size=2)
    reader = Reader(built.path)
    for module, layer in layer_names(checkpoint.spec).items():
        dim = 1 if layer.endswith(("o_proj", "down_proj")) else 0
        shares = [reader.weight(module, layer, rank, 2) for rank in range(2)]
        whole = torch.from_numpy(checkpoint.read(f"{module}.weight"))
        assert torch.equal(
            torch.cat(shares, dim), whole if module in checkpoint.quantized else whole.bfloat16().float()
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_16_bit_weights_make_a_plain_folder(
    config: transformers.PretrainedConfig, dtype: str, save_random_model: SaveModel, tmp_path: Path
) -> None:
    folder, model = save_random_model(config)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"dtype": dtype}))
    source = HfFolderSource(folder)
    path = build_pytorch_folder(source, preset("f16", source.spec), engines_dir=tmp_path / "e").path
    assert {file.name for file in path.iterdir()} == {
        RECORD_NAME,
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    written = torch.float16 if dtype == "float16" else torch.bfloat16
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert loaded.dtype == written
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for name, values in loaded.state_dict().items():
        assert torch.equal(values, state[name].to(written)), name
    assert loaded.config.rope_parameters == model.config.rope_parameters


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama3-rope", "default-rope"])
def test_rotary_settings_reach_readers_of_both_spellings(config: transformers.PretrainedConfig) -> None:
    original = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "auto_map": {}, "quantization_config": {}}
    spec = ModelSpec.from_hf_config(original)
    written = hf_config(original, "bfloat16")
    assert ModelSpec.from_hf_config(written) == spec
    del written["rope_parameters"]
    assert ModelSpec.from_hf_config(written) == spec
    assert written["torch_dtype"] == "bfloat16"
    assert not written.keys() & {"auto_map", "quantization_config", "dtype"}
    older = hf_config(written, "float16")
    assert older == written | {"torch_dtype": "float16"}


BOS_CASES: dict[str, tuple[transformers.PretrainedConfig, tuple[tuple[str, str], ...]]] = {
    "said by the config": {"add_bos": True},
    "said by the tokenizer": {"post_processor_adds_bos": True},
    "said by both": {"add_bos": True, "post_processor_adds_bos": True},
    "denied by the config": {"add_bos": False, "post_processor_adds_bos": True},
    "not said": {},
    "no bos": {"bos": None},
}


@pytest.mark.parametrize("case", BOS_CASES.values(), ids=BOS_CASES)
def test_transformers_tokenizes_a_folder_as_we_do(
    case: dict[str, Any], make_tokenizer: Callable[..., TokenizerFiles], tmp_path: Path
) -> None:
    files = make_tokenizer(**case)
    tokenizer = Tokenizer(files, {})
    tokenizer_json, settings = tokenizer_files(tokenizer, files)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a b  c", " 你好", "x"):
        assert theirs.encode(text) == tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert theirs.eos_token == "<eos>"
    assert theirs.bos_token == case.get("bos", "<bos>")


def test_chunks_and_shards_do_not_change_the_values(
    mixed: QuantizedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_pytorch_folder(mixed, mixed.recipe, engines_dir=tmp_path, out=tmp_path / "whole").path
    monkeypatch.setattr(pytorch_tensors, "_CHUNK_ELEMENTS", 5 * 128)
    monkeypatch.setattr(pytorch_folder, "_SHARD_BYTES", 30_000)
    done: list[int] = []
    out = tmp_path / "cut"
    cut = build_pytorch_folder(mixed, mixed.recipe, engines_dir=tmp_path, out=out, on_layer=done.append).path
    shards = sorted(cut.glob("*.safetensors"))
    assert len(shards) > 3
    assert [shard.name for shard in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert done == [0, 1]
    one, many = Reader(whole).tensors, Reader(cut).tensors
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_the_record_says_what_the_folder_is_and_finds_it_again(mixed: QuantizedCheckpoint, tmp_path: Path) -> None:
    built = build_pytorch_folder(mixed, mixed.recipe, engines_dir=tmp_path / "e")
    record = PytorchFolderRecord.model_validate_json((built.path / RECORD_NAME).read_text())
    assert built.path == tmp_path / "e" / mixed.name / f"trtllm-pytorch-{record.folder_id}"
    files = describe_files(built.path)
    del files[RECORD_NAME]
    assert record.files == files
    assert record.model.content_hash == mixed.record.model.content_hash
    assert record.calibration.checkpoint_id == mixed.record.checkpoint_id
    assert record.dtype == "bfloat16"
    layers = record.recipe.layers
    assert layers["model.embed_tokens"] == "f16"
    assert layers["model.layers.1.mlp.down_proj"] == "int8"  # its inputs stay 16-bit
    assert layers["model.layers.0.mlp.down_proj"] == "int4-g64"
    again = build_pytorch_folder(mixed, mixed.recipe, engines_dir=tmp_path / "e", arch=resolve_arch("sm_90"))
    assert (again.path, again.reused, built.reused) == (built.path, True, False)
    ends = Recipe(name="ends", rules=(("lm_head", Precision.parse("int8")), *mixed.recipe.rules))
    assert build_pytorch_folder(mixed, ends, engines_dir=tmp_path / "e").reused


def damage(path: Path) -> None:
    (path / "tokenizer.json").write_text("{}")


def add_file(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def other_id(path: Path) -> None:
    record = json.loads((path / RECORD_NAME).read_text())
    (path / RECORD_NAME).write_text(json.dumps(record | {"folder_id": "0123456789ab"}))


def no_record(path: Path) -> None:
    (path / RECORD_NAME).unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damage, "cannot be reused"),
        (add_file, "does not hold what its trtllm-pytorch.json lists: model.safetensors"),
        (other_id, "holds another folder"),
        (no_record, "is not a folder for trtllm-pytorch"),
    ],
)
def test_what_lies_in_its_place_is_refused_and_left_alone(
    change: Callable[[Path], None], said: str, save_random_model: SaveModel, tmp_path: Path
) -> None:
    source = HfFolderSource(save_random_model(QWEN2)[0])
    plain = preset("f16", source.spec)
    path = build_pytorch_folder(source, plain, engines_dir=tmp_path, out=tmp_path / "folder").path
    change(path)
    before = describe_files(path)
    with pytest.raises(BuildError, match=said):
        build_pytorch_folder(source, plain, engines_dir=tmp_path, out=path)
    assert describe_files(path) == before


def test_a_full_disk_leaves_nothing_behind(
    mixed: QuantizedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
        with pytest.raises(BuildError, match="building needs"):
            build_pytorch_folder(mixed, mixed.recipe, engines_dir=tmp_path / "e")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BuildError, match="No space left"):
        build_pytorch_folder(mixed, mixed.recipe, engines_dir=tmp_path / "e", on_layer=full)
    assert not (tmp_path / "e").exists()


def test_integers_that_nobody_calibrated_are_refused(save_random_model: SaveModel, tmp_path: Path) -> None:
    source = HfFolderSource(save_random_model(LLAMA)[0])
    with pytest.raises(BuildError, match=r"layers\.0\.self_attn\.q_proj is int8 in weights that are not"):
        build_pytorch_folder(source, preset("int8", source.spec), engines_dir=tmp_path / "e")
    ends = recipe(("*", "f16"))
    ends = Recipe(name="ends", rules=(("model.embed_tokens", Precision.parse("int8")), *ends.rules))
    assert build_pytorch_folder(source, ends, engines_dir=tmp_path / "e").path.is_dir()


def test_a_recipe_that_asks_for_other_integers_is_refused(mixed: QuantizedCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="in the checkpoint"):
        build_pytorch_folder(mixed, recipe(("*", "int8")), engines_dir=tmp_path / "e")


def test_scales_that_bfloat16_does_not_hold_are_refused(
    make_tokenizer: Callable[..., TokenizerFiles], tmp_path: Path
) -> None:
    model = trtllm_models.write_model(tmp_path / "model", trtllm_models.LLAMA, make_tokenizer())
    rules = trtllm_models.recipe_of(("*", "int4-g64"))
    checkpoint = open_checkpoint(trtllm_models.write_quantized(model, tmp_path / "checkpoint", rules))
    with pytest.raises(BuildError, match=r"weight_scale has scales that are not exact in bfloat16"):
        build_pytorch_folder(checkpoint, rules, engines_dir=tmp_path / "e")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "NaN or infinite"), (70000.0, "too large for float16")], ids=["nan", "large"]
)
def test_weights_that_the_dtype_does_not_hold_are_refused(
    value: float, said: str, save_random_model: SaveModel, tmp_path: Path
) -> None:
    folder, model = save_random_model(LLAMA)
    with torch.no_grad():
        model.model.norm.weight[3] = value
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    source = HfFolderSource(folder)
    with pytest.raises(BuildError, match=rf"model\.norm\.weight has a.*{said}"):
        build_pytorch_folder(source, preset("f16", source.spec), engines_dir=tmp_path / "e")


def spec_of(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelSpec:
    sizes = COMMON | {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    return ModelSpec.from_hf_config(sizes | {"architectures": [architecture]} | fields)


V3: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "num_key_value_heads": 8,
}
REFUSED: dict[str, tuple[dict[str, Any], str, dict[str, Any], type[HarnessError], str]] = {
    "zero points": ({}, "int4-g128-zp", {}, RecipeError, "q_proj is int4-g128-zp.*no zero points"),
    "groups of 32": ({}, "int4-g32", {}, RecipeError, "q_proj is int4-g32.*groups of 64 and 128"),
    "int4 per channel": ({}, "int4-channel", {}, RecipeError, "q_proj is int4-channel.*in groups"),
    "int8 kv": ({}, "int8", {"kv_cache_dtype": "int8"}, UsageError, "no int8 KV cache"),
    "v2": (V3 | {"architecture": "DeepseekV2ForCausalLM"}, "f16", {}, UnsupportedModelError, "--arch sm_90"),
    "v3": (V3 | {"architecture": "DeepseekV3ForCausalLM"}, "f16", {}, UnsupportedModelError, "trtllm-serve MODEL"),
    "groups cut": ({"intermediate_size": 1152}, "int4-g128", {"tp_size": 2}, RecipeError, "down_proj.*576 inputs on"),
    "odd inputs": ({"hidden_size": 1040}, "int8", {}, RecipeError, "q_proj.*multiple of 32 inputs, not 1040"),
    "inputs on ampere": ({"hidden_size": 1056}, "int8", {"arch": "sm_80"}, RecipeError, r"sm_80 \(A100.*64 inputs"),
    "inputs on ada": ({"hidden_size": 1056}, "int8", {"arch": "sm_89"}, RecipeError, r"sm_89 \(L4.*64 inputs"),
    "odd outputs": ({"intermediate_size": 1032}, "int8", {}, RecipeError, "gate_proj.*of 16 outputs, not 1032"),
    "outputs cut": ({"intermediate_size": 1040}, "int8", {"tp_size": 2}, RecipeError, "gate_proj.*, not 520 on each"),
    "cpu": ({}, "f16", {"arch": "cpu"}, UsageError, "NVIDIA's GPUs, not for cpu"),
    "int4 on sm_120": ({}, "int4-g128", {"arch": "sm_120"}, UsageError, "known to be right"),
    "int8 on sm_120": ({}, "int8", {"arch": "sm_120"}, UsageError, "--precision f16"),
    "heads": ({}, "f16", {"tp_size": 3}, UsageError, "--tp 3 does not divide 8 attention heads"),
    "scales of copied heads": ({}, "int8", {"tp_size": 4}, UsageError, "--tp 4 does not divide 2 key and value heads"),
    "mlp": ({"intermediate_size": 1001}, "f16", {"tp_size": 2}, UsageError, "--tp 2 does not divide 1001 rows"),
    "no rank": ({}, "f16", {"tp_size": 0}, UsageError, "--tp is 0"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "precision", "options", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_refused_by_name(
    fields: dict[str, Any], precision: str, options: dict[str, Any], kind: type[HarnessError], said: str
) -> None:
    spec = spec_of(**fields)
    resolved = recipe(("*", precision)).resolve(spec)
    if "arch" in options:
        options = options | {"arch": resolve_arch(options["arch"])}
    with pytest.raises(kind, match=f"(?s){said}"):
        check_expressible(spec, resolved, **options)


@pytest.mark.parametrize("fused", [("self_attn.q_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")])
def test_parts_of_one_matrix_must_agree(fused: tuple[str, str]) -> None:
    spec = spec_of()
    resolved = recipe(("*", "int4-g128")).resolve(spec)
    last = f"model.layers.1.{fused[1]}"
    with pytest.raises(RecipeError, match=rf"{fused[0]} \(int4-g128\).*{fused[1]} \(int4-g64\) are fused"):
        check_expressible(spec, resolved | {last: Precision.parse("int4-g64")})


def test_more_ranks_than_key_heads_need_keys_and_values_in_16_bits() -> None:
    spec = spec_of()
    check_expressible(spec, recipe(("*.self_attn.[qkv]_proj", "f16"), ("*", "int4-g64")).resolve(spec), tp_size=4)
    with pytest.raises(UsageError, match="2 key and value heads"):
        check_expressible(spec, recipe(("*.self_attn.[qkv]_proj", "int8"), ("*", "f16")).resolve(spec), tp_size=4)


def test_int8_with_and_without_int8_inputs_is_stored_alike() -> None:
    spec = spec_of()
    resolved = recipe(("*", "int8")).resolve(spec)
    check_expressible(spec, resolved | {"model.layers.1.mlp.up_proj": Precision.parse("int8-a8")})


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("int4-g128", {"arch": "sm_80", "tp_size": 2}),
        ("int4-g64", {"arch": "sm_90"}),
        ("int8-a8", {"arch": "sm_86", "tp_size": 2}),
        ("int8", {"arch": "sm_103"}),
        ("f16", {"arch": "sm_120", "tp_size": 8}),
    ],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_what_can_be_run_passes(architecture: str, precision: str, options: dict[str, Any]) -> None:
    spec = spec_of(architecture)
    resolved = recipe(("*", precision)).resolve(spec)
    check_expressible(spec, resolved, resolve_arch(options["arch"]), options.get("tp_size", 1), kv_cache_dtype="auto")
