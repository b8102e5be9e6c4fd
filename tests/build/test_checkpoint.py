"""Quantized checkpoints: the engine holds bit for bit what compressed-tensors unpacks, and every fault has a name.

The oracle is the library: it packs what is read here, and unpacks it again to be compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from engine_oracle import (
    assert_engine_holds,
    deterministic_logits,
    engine_matrices,
    min_cosine,
    scheme_of,
    unpack,
)
from safetensors.torch import load_file, save_file
from trtllm_models import seal

from harness.build.checkpoint import open_checkpoint
from harness.build.cpu_engine import build_cpu_engine
from harness.build.hf_source import HfFolderSource
from harness.build.lowering import weights
from harness.build.lowering.quantize import quantize_rows
from harness.checkpoint_record import RECORD_NAME
from harness.errors import BuildError, RecipeError, SourceError, UnsupportedModelError
from harness.manifest import read_manifest
from harness.recipe import INT8, Precision, Recipe

Tensors = dict[str, torch.Tensor]
Array = npt.NDArray[Any]
SaveModel = Callable[[transformers.PretrainedConfig], tuple[Path, transformers.PreTrainedModel]]

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 256, 64)]
COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA = transformers.LlamaConfig(**COMMON, intermediate_size=132, num_key_value_heads=2)  # 132: words are padded
V2 = transformers.DeepseekV2Config(
    **COMMON,
    intermediate_size=256,
    num_key_value_heads=4,
    moe_intermediate_size=64,
    kv_lora_rank=64,
    q_lora_rank=None,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
QUERY_LATENT = transformers.DeepseekV2Config(**V2.to_diff_dict() | {"q_lora_rank": 64})
UNIFORM = ("int4-g32", "int4-g64", "int4-g128", "int4-g32-zp", "int4-channel", "int4-channel-zp", "int8", "int8-a8")
MIXED = (("*.0.self_attn.*", "int8"), ("*.o_proj", "f16"), ("*.0.mlp.*", "int8-a8"), ("*.down_proj", "int4-g32-zp"))
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
UP = "model.layers.1.mlp.up_proj"


def recipe_of(precision: str, embeddings: str = "f16") -> Recipe:
    rules = MIXED if precision == "mixed" else ()
    ends = (("model.embed_tokens", embeddings), ("lm_head", embeddings))
    last = ("*", "int4-g64" if precision == "mixed" else precision)
    return Recipe(name=precision, rules=tuple((pattern, Precision.parse(p)) for pattern, p in (*ends, *rules, last)))


def pack(weight: torch.Tensor, precision: Precision) -> Tensors:
    """A module's tensors as the library packs them, over bf16 scales, with the lowest integer of the format in them."""
    scheme = scheme_of(precision)
    groups = weight.reshape(weight.shape[0], -1, precision.group_size or weight.shape[1])
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if precision.symmetric:
        steps = 127.0 if precision.dtype == "int8" else 7.5
        scale = (torch.maximum(-low, high) / steps).bfloat16()
        zero_point = torch.zeros_like(scale, dtype=torch.int8)
        weight = weight.clone()
        weight[0, 0] = -(128 if precision.dtype == "int8" else 8) * scale[0, 0].float()
    else:
        scale = ((high - low) / 15).bfloat16()
        zero_point = (torch.round(-low / scale.float()) - 8).clamp(-8, 7).to(torch.int8)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    compressor = IntQuantizationCompressor if precision.int8_activations else PackedQuantizationCompressor
    if precision.int8_activations:
        state["weight_scale"] = scale.float()
    return {name: tensor.contiguous() for name, tensor in compressor.compress(state, scheme).items()}


def write_checkpoint(source: Path, folder: Path, recipe: Recipe, edit: Callable[[Tensors], object] = len) -> Path:
    """A checkpoint of a model's folder in two shards; `edit` changes its tensors before they are hashed."""
    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    spec = HfFolderSource(source).spec
    tensors: Tensors = {}
    resolved = recipe.resolve(spec)
    for name, weight in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        precision = resolved.get(module)
        if precision is None or precision.dtype == "f16" or "layers" not in name:
            tensors[name] = weight if "mlp.gate." in name else weight.half()
        else:
            tensors |= {f"{module}.{part}": tensor for part, tensor in pack(weight, precision).items()}
    edit(tensors)
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    seal(folder, spec, {name: str(p) for name, p in resolved.items()}, target="cpu")
    return folder


def read_tensors(folder: Path) -> Tensors:
    return load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1])


CASES = [
    *((LLAMA, p) for p in (*UNIFORM, "mixed")),
    *((V2, p) for p in ("int4-g64", "int4-g32-zp", "int8", "mixed")),
    (QUERY_LATENT, "int4-g64-zp"),
]


@pytest.mark.parametrize(("config", "precision"), CASES, ids=[f"{c.model_type}-{p}" for c, p in CASES])
def test_engine_holds_what_the_library_unpacks(
    config: transformers.PretrainedConfig, precision: str, save_random_model: SaveModel, tmp_path: Path
) -> None:
    original, model = save_random_model(config)
    folder = write_checkpoint(original, tmp_path / "checkpoint", recipe_of(precision))
    checkpoint = open_checkpoint(folder)
    tensors = read_tensors(folder)
    unpacked = {module: unpack(tensors, module, p) for module, p in checkpoint.quantized.items()}
    engine = build_cpu_engine(checkpoint, checkpoint.recipe, engines_dir=tmp_path).engine_dir

    assert_engine_holds(engine, checkpoint.spec, unpacked)

    whole = load_file(original / "model.safetensors")
    whole |= {f"{module}.weight": stored.dequantized for module, stored in unpacked.items()}
    save_file(whole, original / "model.safetensors", metadata={"format": "pt"})
    model = type(model).from_pretrained(original, dtype=torch.float32)
    with torch.no_grad():
        reference = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert min_cosine(reference, deterministic_logits(engine, TOKENS)) >= 0.9999


@pytest.fixture
def checkpoint_folder(save_random_model: SaveModel, tmp_path: Path) -> Path:
    """A Llama whose layers have zero points, scales of groups, and both ways to store int8."""
    return write_checkpoint(save_random_model(LLAMA)[0], tmp_path / "checkpoint", recipe_of("mixed"))


def test_it_is_a_weight_source_of_the_values_it_stands_for(checkpoint_folder: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder)
    tensors = read_tensors(checkpoint_folder)
    assert checkpoint.name == "tiny"
    for module, precision in checkpoint.quantized.items():
        expected = unpack(tensors, module, precision).dequantized.numpy()
        assert f"{module}.weight" in checkpoint.names()
        assert checkpoint.shape(f"{module}.weight") == expected.shape
        for rows in (None, slice(3, 21), slice(8, 16), slice(125, 999), slice(4, 4)):
            np.testing.assert_array_equal(checkpoint.read(f"{module}.weight", rows), expected[rows or slice(None)])
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(checkpoint.read(name), tensors[name].float().numpy())


def test_chunks_of_rows_make_the_same_engine(
    save_random_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = save_random_model(V2)
    recipe = recipe_of("int4-g32-zp")
    checkpoint = open_checkpoint(write_checkpoint(original, tmp_path / "checkpoint", recipe))
    whole = build_cpu_engine(checkpoint, recipe, engines_dir=tmp_path, out=tmp_path / "whole").engine_dir
    monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", 5 * 128)
    chunked = build_cpu_engine(checkpoint, recipe, engines_dir=tmp_path, out=tmp_path / "chunked").engine_dir
    assert read_manifest(whole).files["model.bin"] == read_manifest(chunked).files["model.bin"]


def test_embeddings_are_rounded_under_their_own_entry(checkpoint_folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder)
    recipe = recipe_of("mixed", embeddings="int8")
    engine = build_cpu_engine(checkpoint, recipe, engines_dir=tmp_path).engine_dir
    seen = {integers.tobytes(): scale for integers, scale, _ in engine_matrices(engine)}
    tensors = read_tensors(checkpoint_folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        expected = quantize_rows(tensors[name].float().numpy(), INT8)
        assert expected.scale is not None
        np.testing.assert_array_equal(seen[expected.data.tobytes()], expected.scale.reshape(-1))


def test_the_manifest_and_the_id_tell_checkpoints_apart(checkpoint_folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder)
    built = build_cpu_engine(checkpoint, checkpoint.recipe, engines_dir=tmp_path / "engines")
    manifest = read_manifest(built.engine_dir)
    assert built.engine_dir.parent == tmp_path / "engines" / "tiny"
    assert manifest.model.content_hash == checkpoint.record.model.content_hash
    assert manifest.calibration.method == "gptq"
    assert manifest.calibration.checkpoint_id == checkpoint.record.checkpoint_id
    assert manifest.calibration.calibration_set == checkpoint.record.calibration_set
    assert manifest.recipe.layers == checkpoint.record.recipe.layers
    again = build_cpu_engine(open_checkpoint(checkpoint_folder), checkpoint.recipe, engines_dir=tmp_path / "engines")
    assert (again.engine_dir, again.reused) == (built.engine_dir, True)

    path = checkpoint_folder / SHARDS[0]
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("weight_packed"))
    tensors[name] = tensors[name] ^ 1
    save_file(tensors, path)
    seal(checkpoint_folder, checkpoint.spec, checkpoint.record.recipe.layers, target="cpu")
    other = build_cpu_engine(open_checkpoint(checkpoint_folder), checkpoint.recipe, engines_dir=tmp_path / "engines")
    assert not other.reused
    assert read_manifest(other.engine_dir).model == manifest.model


def test_a_recipe_that_asks_for_other_integers_is_refused(checkpoint_folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder)
    with pytest.raises(RecipeError, match=r"layers\.0\.self_attn\.q_proj is int8 in the checkpoint .* int4-g64"):
        build_cpu_engine(checkpoint, recipe_of("int4-g64"), engines_dir=tmp_path / "engines")
    assert not (tmp_path / "engines").exists()


def test_as_a_model_it_is_refused_with_the_way_out(checkpoint_folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'compressed-tensors'.*\n.*--checkpoint"):
        HfFolderSource(checkpoint_folder)


def set_scale(value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{UP}.weight_scale"][5, 1] = value

    return edit


@pytest.mark.parametrize("value", [0.0, -0.25, float("inf"), float("nan"), 2.0**-26, 2.0**17, 1.0078125 * 2.0**-18])
def test_scales_that_an_engine_cannot_hold_are_refused(
    value: float, save_random_model: SaveModel, tmp_path: Path
) -> None:
    original, _ = save_random_model(LLAMA)
    recipe = recipe_of("int4-g32")
    checkpoint = open_checkpoint(write_checkpoint(original, tmp_path / "checkpoint", recipe, set_scale(value)))
    with pytest.raises(BuildError, match=rf"{UP}\.weight_scale has a scale of {value:.9g}: not a positive number"):
        build_cpu_engine(checkpoint, recipe, engines_dir=tmp_path / "engines")
    assert not (tmp_path / "engines").exists()


def replace(part: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{UP}.{part}": tensor})


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "shape written": (replace("weight_shape", torch.tensor([132, 64])), r"weight_shape says \(132, 64\)"),
    "transposed": (replace("weight_packed", torch.zeros(16, 132, dtype=torch.int32)), r"shape \(16, 132\)"),
    "too few groups": (replace("weight_scale", torch.ones(132, 1)), r"weight_scale is F32 of shape \(132, 1\)"),
    "scale of integers": (replace("weight_scale", torch.ones(132, 4, dtype=torch.int32)), "weight_scale is I32"),
    "order of columns": (replace("weight_g_idx", torch.zeros(128, dtype=torch.int32)), "it has weight_g_idx, weight_p"),
    "zero points": (replace("weight_zero_point", torch.zeros(17, 4, dtype=torch.int32)), "it has .*weight_zero_point"),
    "not packed": (lambda tensors: tensors.pop(f"{UP}.weight_packed"), "it has weight_scale, weight_shape, not"),
    "not there": (lambda t: [t.pop(name) for name in list(t) if name.startswith(UP)], "it has no tensors"),
    "other bits": (
        lambda tensors: tensors.update({f"{UP}.{k}": v for k, v in pack(torch.ones(132, 128), INT8).items()}),
        "weight_packed is I32 of shape",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_are_not_what_the_record_says_are_refused(
    fault: str, save_random_model: SaveModel, tmp_path: Path
) -> None:
    edit, words = TENSOR_FAULTS[fault]
    folder = write_checkpoint(save_random_model(LLAMA)[0], tmp_path / "checkpoint", recipe_of("int4-g32"), edit)
    with pytest.raises(SourceError, match=f"{UP} is not stored as int4-g32: .*{words}"):
        open_checkpoint(folder)


def test_a_quantized_part_that_must_not_be_is_refused(save_random_model: SaveModel, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.kv_b_proj"
    recipe = recipe_of("int8")

    def edit(tensors: Tensors) -> None:
        packed = pack(tensors.pop(f"{name}.weight").float(), INT8)
        tensors.update({f"{name}.{part}": tensor for part, tensor in packed.items()})

    folder = write_checkpoint(save_random_model(V2)[0], tmp_path / "checkpoint", recipe, edit)
    with pytest.raises(SourceError, match=name):
        build_cpu_engine(open_checkpoint(folder), recipe, engines_dir=tmp_path)


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / SHARDS[1]).read_bytes())
    content[-1] ^= 1
    (folder / SHARDS[1]).write_bytes(content)


def edit_json(name: str, *keys: str, value: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        (folder / name).write_text(json.dumps(content))

    return edit


def without_quantization(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    seal(folder, checkpoint.spec, checkpoint.record.recipe.layers, target="cpu")


FILE_PART = {"sha256": "0" * 64, "num_bytes": 1}
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (flip_a_byte, f"{SHARDS[1]} is corrupt"),
    "cut": (lambda f: (f / SHARDS[0]).write_bytes((f / SHARDS[0]).read_bytes()[:-9]), f"{SHARDS[0]} has .* bytes"),
    "missing": (lambda f: (f / SHARDS[0]).unlink(), f"{SHARDS[0]} is missing"),
    "unknown shard": (lambda f: shutil.copy(f / SHARDS[0], f / "model.safetensors"), "model.safetensors is not in"),
    "unknown template": (lambda f: (f / "chat_template.jinja").write_text("x"), "chat_template.jinja is not in"),
    "edited config": (edit_json("config.json", "rms_norm_eps", value=0.5), "config.json (is corrupt|has .* bytes)"),
    "no record": (lambda f: (f / RECORD_NAME).unlink(), "no quantized checkpoint in .*calibration.json"),
    "no folder": (shutil.rmtree, "there is no folder"),
    "not JSON": (lambda f: (f / RECORD_NAME).write_text("{"), "is not valid"),
    "not an object": (lambda f: (f / RECORD_NAME).write_text("[1]"), "is not valid"),
    "other schema": (
        edit_json(RECORD_NAME, "schema_version", value=2),
        "of another version: its schema_version is 2, this one reads 1",
    ),
    "no method": (edit_json(RECORD_NAME, "method", value="awq"), "is not valid: method"),
    "way out": (edit_json(RECORD_NAME, "files", "../x.safetensors", value=FILE_PART), "own folder: '../x.safetensors'"),
    "absolute": (edit_json(RECORD_NAME, "files", "/etc/passwd", value=FILE_PART), "own folder: '/etc/passwd'"),
    "parent": (edit_json(RECORD_NAME, "files", "..", value=FILE_PART), "own folder: '..'"),
    "zero byte": (edit_json(RECORD_NAME, "files", "a\0", value=FILE_PART), r"own folder: 'a\\x00'"),
    "other model": (edit_json(RECORD_NAME, "recipe", "layers", value={UP: "int8"}), "not of this model: lm_head"),
    "no precision": (edit_json(RECORD_NAME, "recipe", "layers", UP, value="int3"), "unknown precision 'int3'"),
    "parted": (edit_json(RECORD_NAME, "recipe", "layers", UP, value="int8"), "fused into one matrix"),
    "not quantized": (without_quantization, "config.json is not of a quantized checkpoint"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_files_are_named(fault: str, checkpoint_folder: Path) -> None:
    edit, words = FAULTS[fault]
    edit(checkpoint_folder)
    with pytest.raises(SourceError, match=words) as raised:
        open_checkpoint(checkpoint_folder)
    assert raised.value.hint
