"""TensorRT-LLM checkpoints: what stands in them is what the quantized one says; a folder is whole or not there."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_quantized
import torch
import transformers
from safetensors.numpy import load_file, save_file
from trtllm_models import LLAMA, MIXED, QWEN, Array, dequantized, rank_tensors, recipe_of, write_model, write_quantized

from harness.build.checkpoint import QuantizedCheckpoint, open_checkpoint
from harness.build.hf_source import HfFolderSource
from harness.build.tensorrt_llm import weights
from harness.build.tensorrt_llm.checkpoint import (
    BuiltTrtllmCheckpoint,
    build_trtllm_checkpoint,
    open_trtllm_checkpoint,
)
from harness.build.tensorrt_llm.record import RECORD_NAME
from harness.checkpoint_record import STATISTICS_NAME
from harness.errors import BuildError, RecipeError, SourceError, UsageError
from harness.recipe import F16, Recipe, preset
from harness.tokenizer import TokenizerFiles
from harness.weight_source import FloatArray, WeightSource

FUSED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
HEAD_DIM = 32


@pytest.fixture
def model(tmp_path: Path, make_tokenizer: Callable[..., TokenizerFiles]) -> Callable[..., Path]:
    """Writes a random model's folder; options go into its config."""

    def make(config: dict[str, Any] = LLAMA, **options: Any) -> Path:
        return write_model(tmp_path / "model", config | options, make_tokenizer())

    return make


@pytest.fixture
def quantized(model: Callable[..., Path], tmp_path: Path) -> Callable[..., QuantizedCheckpoint]:
    """A quantized checkpoint of a random model under some rules."""

    def make(config: dict[str, Any] = LLAMA, *rules: tuple[str, str], **options: Any) -> QuantizedCheckpoint:
        folder = write_quantized(model(config, **options), tmp_path / "quantized", recipe_of(*(rules or MIXED)))
        return open_checkpoint(folder)

    return make


def lower(source: WeightSource, tmp_path: Path, recipe: Recipe | None = None, **options: Any) -> BuiltTrtllmCheckpoint:
    chosen = recipe or getattr(source, "recipe", None) or preset("f16", source.spec)
    return build_trtllm_checkpoint(source, chosen, engines_dir=tmp_path / "engines", **options)


def in_dtype(values: FloatArray, name: str) -> Array:
    """Values rounded as torch rounds them."""
    return np.asarray(torch.from_numpy(values).to(getattr(torch, name)).float().numpy())


def written(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("config", [LLAMA | {"mlp_bias": True, "attention_bias": True}, QWEN], ids=["llama", "qwen2"])
def test_every_layer_stands_for_the_weights_of_the_quantized_checkpoint(
    config: dict[str, Any], quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path
) -> None:
    source = quantized(config)
    built = lower(source, tmp_path)
    (tensors,) = rank_tensors(built.path)
    dtype = config["torch_dtype"]
    statistics = load_file(tmp_path / "quantized" / STATISTICS_NAME)
    seen = set()
    for layer in range(4):
        for name, parts in FUSED.items():
            modules = [f"model.layers.{layer}.{part}" for part in parts]
            fused = f"transformer.layers.{layer}.{name}"
            precision = source.quantized.get(modules[0], F16)
            expected = np.concatenate([source.read(f"{module}.weight") for module in modules])
            if precision == F16:
                expected = in_dtype(expected, dtype)
            assert np.array_equal(dequantized(tensors, fused), expected), (fused, precision)
            if precision.dtype == "int8":
                key = modules[0].replace("q_proj", "first").replace("gate_proj", "gate_up")
                scale = np.float32(statistics[f"{key}.input_maxima"].max()) / np.float32(127)
                assert tensors[f"{fused}.activation_scaling_factor"].numpy() == pytest.approx([scale])
            else:
                assert f"{fused}.activation_scaling_factor" not in tensors
            if precision != F16:
                assert (tensors[f"{fused}.prequant_scaling_factor"].float() == 1).all()
            if f"{modules[0]}.bias" in source.names():
                bias = np.concatenate([source.read(f"{module}.bias") for module in modules])
                assert np.array_equal(tensors[f"{fused}.bias"].float().numpy(), in_dtype(bias, dtype))
            assert (f"{fused}.bias" in tensors) == (f"{modules[0]}.bias" in source.names())
            seen.add(str(precision))
    assert seen == {"int8", "int8-a8", "int4-g64", "f16"}
    head = "model.embed_tokens.weight" if source.spec.tie_word_embeddings else "lm_head.weight"
    for name, original in (
        ("lm_head.weight", head),
        ("transformer.vocab_embedding.weight", "model.embed_tokens.weight"),
        ("transformer.ln_f.weight", "model.norm.weight"),
        ("transformer.layers.2.input_layernorm.weight", "model.layers.2.input_layernorm.weight"),
        ("transformer.layers.2.post_layernorm.weight", "model.layers.2.post_attention_layernorm.weight"),
    ):
        assert np.array_equal(tensors[name].float().numpy(), in_dtype(source.read(original), dtype)), name


def whole(tensors: list[dict[str, torch.Tensor]], name: str, num_kv_heads: int, num_heads: int) -> Array:
    """A layer of one stage put together again from its ranks, by the rules of TensorRT-LLM."""
    parts = [dequantized(rank, name) for rank in tensors]
    if name.endswith(("attention.dense", "mlp.proj")):
        return np.concatenate(parts, axis=1)
    if not name.endswith("attention.qkv"):
        return np.concatenate(parts)
    width = num_heads // len(tensors) * HEAD_DIM
    queries = [part[:width] for part in parts]
    keys, values = zip(*(np.split(part[width:], 2) for part in parts), strict=True)
    copies = max(1, len(tensors) // num_kv_heads)
    for several in (keys, values):
        for rank, part in enumerate(several):
            assert np.array_equal(part, several[rank // copies * copies]), "copies of a head differ"
    return np.concatenate([*queries, *keys[::copies], *values[::copies]])


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=["llama", "qwen2"])
def test_ranks_put_together_are_the_whole(
    config: dict[str, Any],
    tp_size: int,
    pp_size: int,
    quantized: Callable[..., QuantizedCheckpoint],
    tmp_path: Path,
) -> None:
    source = quantized(config)
    (one,) = rank_tensors(lower(source, tmp_path).path)
    built = lower(source, tmp_path, tp_size=tp_size, pp_size=pp_size)
    ranks = rank_tensors(built.path)
    assert len(ranks) == tp_size * pp_size
    mapping = {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size}
    assert written(built.path)["mapping"] == mapping
    for layer in range(4):
        stage, local = divmod(layer, 4 // pp_size)
        group = ranks[stage * tp_size : (stage + 1) * tp_size]
        for name in FUSED:
            there, here = f"transformer.layers.{local}.{name}", f"transformer.layers.{layer}.{name}"
            assert np.array_equal(whole(group, there, 2, 8), dequantized(one, here)), (layer, name)
            for part in ("activation_scaling_factor", "weights_scaling_factor"):
                assert all((f"{there}.{part}" in rank) == (f"{here}.{part}" in one) for rank in group)
            if f"{here}.activation_scaling_factor" in one:
                assert all(
                    torch.equal(rank[f"{there}.activation_scaling_factor"], one[f"{here}.activation_scaling_factor"])
                    for rank in group
                )
        if config is QWEN:
            here, there = (f"transformer.layers.{n}.attention.qkv.bias" for n in (layer, local))
            as_column = [{f"{there[:-5]}.weight": rank[there][:, None]} for rank in group]
            assert np.array_equal(whole(as_column, there[:-5], 2, 8)[:, 0], one[here].float().numpy())
    first, last = ranks[:tp_size], ranks[-tp_size:]
    for name, group in (("transformer.vocab_embedding.weight", first), ("lm_head.weight", last)):
        rows = torch.cat([rank[name] for rank in group])
        assert torch.equal(rows[:321], one[name])
        assert len(rows) == -(-321 // tp_size) * tp_size
        assert not rows[321:].any(), "the rows that fill up the vocabulary are zero"
    assert all(("lm_head.weight" in rank) == (number >= len(ranks) - tp_size) for number, rank in enumerate(ranks))
    assert all(("transformer.vocab_embedding.weight" in rank) == (n < tp_size) for n, rank in enumerate(ranks))


def test_layers_that_do_not_divide_evenly_go_to_the_first_stages(model: Callable[..., Path], tmp_path: Path) -> None:
    built = lower(HfFolderSource(model()), tmp_path, pp_size=3)
    counts = [len({n.split(".")[2] for n in rank if ".layers." in n}) for rank in rank_tensors(built.path)]
    assert counts == [2, 1, 1]


def test_layers_of_two_stages_that_share_a_name_and_differ_are_refused(
    quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path
) -> None:
    source = quantized(LLAMA, ("*.layers.2.mlp.down_proj", "f16"), ("*", "int4-g64"))
    with pytest.raises(RecipeError, match=r"layers\.0\.mlp\.down_proj is int4-g64 and model\.layers\.2.*f16.*--pp 2"):
        lower(source, tmp_path, pp_size=2)
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(
    ("rules", "algorithm", "excluded"),
    [
        ((("*", "f16"),), None, None),
        ((("*", "int4-g128"),), "W4A16_AWQ", ["lm_head"]),
        ((("*", "int8"),), "W8A8_SQ_PER_CHANNEL", ["lm_head"]),
        (
            (("*.3.mlp.down_proj", "f16"), ("*", "int4-g64")),
            "W4A16_AWQ",
            ["lm_head", "transformer.layers.3.mlp.proj"],
        ),
    ],
)
def test_one_algorithm_is_named_with_the_layers_that_it_is_not_for(
    rules: tuple[tuple[str, str], ...],
    algorithm: str | None,
    excluded: list[str] | None,
    quantized: Callable[..., QuantizedCheckpoint],
    tmp_path: Path,
) -> None:
    built = lower(quantized(LLAMA, *rules), tmp_path)
    quantization = written(built.path)["quantization"]
    assert quantization["quant_algo"] == algorithm
    assert quantization.get("exclude_modules") == excluded
    assert not (built.path / "quant_cfg.json").exists()


def test_several_algorithms_are_named_by_layer(quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path) -> None:
    built = lower(quantized(), tmp_path)
    assert written(built.path)["quantization"]["quant_algo"] == "MIXED_PRECISION"
    layers = json.loads((built.path / "quant_cfg.json").read_text())["quantized_layers"]
    (tensors,) = rank_tensors(built.path)
    assert set(layers) == {n.removesuffix(".weights_scaling_factor") for n in tensors if "weights_scaling" in n}
    for name, chosen in layers.items():
        packed = tensors[f"{name}.weights_scaling_factor"].ndim == 2
        assert chosen["quant_algo"] == ("W4A16_AWQ" if packed else "W8A8_SQ_PER_CHANNEL")
        assert chosen.get("group_size") == (64 if packed else None)


def test_int8_without_observed_inputs_is_16_bit_and_told(model: Callable[..., Path], tmp_path: Path) -> None:
    source = HfFolderSource(model())
    built = lower(source, tmp_path, recipe_of(("*.mlp.*", "int8"), ("*", "int4-g64")))
    modules = [f"model.layers.{n}.mlp.{m}_proj" for n in range(4) for m in ("gate", "up", "down")]
    assert list(built.sixteen_bit) == modules
    record = open_trtllm_checkpoint(built.path).record
    assert {m for m, p in record.recipe.layers.items() if p == "f16"} == {*modules, "model.embed_tokens", "lm_head"}
    (tensors,) = rank_tensors(built.path)
    assert tensors["transformer.layers.0.mlp.fc.weight"].dtype == torch.bfloat16
    assert tensors["transformer.layers.0.attention.qkv.weight"].dtype == torch.int8
    assert record.calibration.method == "round-to-nearest"


def test_a_layer_that_calibration_never_reached_is_16_bit(
    quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path
) -> None:
    quantized(LLAMA, ("*", "int8"))
    folder = write_quantized(tmp_path / "model", tmp_path / "other", recipe_of(("*", "int8")), statistics=False)
    source = open_checkpoint(folder)
    built = lower(source, tmp_path)
    assert len(built.sixteen_bit) == 4 * 7
    (tensors,) = rank_tensors(built.path)
    original = source.read("model.layers.1.self_attn.o_proj.weight")
    assert np.array_equal(dequantized(tensors, "transformer.layers.1.attention.dense"), in_dtype(original, "bfloat16"))


def test_an_int8_cache_has_scales_that_hold_rotated_keys(
    quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path
) -> None:
    built = lower(quantized(), tmp_path, kv_dtype="int8")
    assert written(built.path)["quantization"]["kv_cache_quant_algo"] == "INT8"
    assert json.loads((built.path / "quant_cfg.json").read_text())["kv_cache_quant_algo"] == "INT8"
    assert open_trtllm_checkpoint(built.path).record.kv_dtype == "int8"
    (tensors,) = rank_tensors(built.path)
    statistics = load_file(tmp_path / "quantized" / STATISTICS_NAME)
    for layer in range(4):
        prefix = f"model.layers.{layer}.self_attn"
        keys, values = (statistics[f"{prefix}.{part}_proj.output_maxima"] for part in "kv")
        # the worst rotation of each pair, tried out
        angles = np.linspace(0, np.pi / 2, 2001)
        pairs = keys.reshape(-1, 2, HEAD_DIM // 2)
        turned = pairs[:, 0, :, None] * np.cos(angles) + pairs[:, 1, :, None] * np.sin(angles)
        largest = max(turned.max(), values.max()) / 127
        scale = tensors[f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"]
        assert scale.shape == (1,)
        assert scale.item() == pytest.approx(largest, rel=1e-5)


def test_an_int8_cache_needs_calibration(model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layer 0, which nobody observed"):
        lower(HfFolderSource(model()), tmp_path, kv_dtype="int8")


def test_scales_are_those_that_calibration_observed(
    save_random_model: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, _ = save_random_model(small_quantized.LLAMA)
    source = open_checkpoint(small_quantized.quantize(folder, ("*.mlp.*", "int8-a8"), ("*", "int8")))
    path = source.statistics()
    assert path is not None
    statistics = load_file(path)
    built = lower(source, tmp_path, kv_dtype="int8")
    assert built.sixteen_bit == ()
    (tensors,) = rank_tensors(built.path)
    for name, key in {
        "attention.qkv": "self_attn.first",
        "attention.dense": "self_attn.o_proj",
        "mlp.fc": "mlp.gate_up",
        "mlp.gate": "mlp.gate_up",
        "mlp.proj": "mlp.down_proj",
    }.items():
        scale = tensors[f"transformer.layers.2.{name}.activation_scaling_factor"].item()
        assert scale == pytest.approx(statistics[f"model.layers.2.{key}.input_maxima"].max() / 127)
    assert (tmp_path / "engines").exists()
    assert {p.name for p in source.evidence()} <= {p.name for p in built.path.iterdir()}


def test_small_pieces_make_the_same_files(
    quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = quantized()
    one = lower(source, tmp_path, tp_size=2).path
    largest = []
    read, stored = QuantizedCheckpoint.read, QuantizedCheckpoint.stored

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: QuantizedCheckpoint, name: str, rows: slice | None = None) -> Any:
            if len(self.shape(name if "weight" in name or "bias" in name else f"{name}.weight")) == 2:
                largest.append(10**9 if rows is None else rows.stop - rows.start)
            return method(self, name, rows)

        return call

    monkeypatch.setattr(weights, "_CHUNK_VALUES", 2048)
    monkeypatch.setattr(QuantizedCheckpoint, "read", watched(read))
    monkeypatch.setattr(QuantizedCheckpoint, "stored", watched(stored))
    other = lower(source, tmp_path, tp_size=2, out=tmp_path / "other").path
    assert max(largest) == 8
    for rank in range(2):
        assert (one / f"rank{rank}.safetensors").read_bytes() == (other / f"rank{rank}.safetensors").read_bytes()


def test_a_checkpoint_is_found_again(quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path) -> None:
    source = quantized()
    layers: list[int] = []
    first = lower(source, tmp_path, tp_size=2, on_layer=layers.append)
    again = lower(source, tmp_path, tp_size=2)
    assert (first.reused, again.reused, first.path) == (False, True, again.path)
    assert layers == [0, 1, 2, 3]
    assert first.path.parent == tmp_path / "engines" / "tiny"
    opened = open_trtllm_checkpoint(first.path)
    assert opened.record.checkpoint_id == first.path.name.removeprefix("trtllm-")
    assert opened.spec == source.spec
    others = {lower(source, tmp_path, **options).path for options in ({}, {"pp_size": 2}, {"kv_dtype": "int8"})}
    assert len(others | {first.path}) == 4


def test_the_record_says_what_stands_there(quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path) -> None:
    source = quantized()
    record = open_trtllm_checkpoint(lower(source, tmp_path, tp_size=2).path).record
    layers = record.recipe.layers
    assert (layers["model.embed_tokens"], layers["lm_head"]) == ("f16", "f16")
    assert layers["model.layers.0.self_attn.q_proj"] == "int8-a8"  # inputs are int8 too, there
    assert layers["model.layers.0.self_attn.o_proj"] == "int4-g64"
    assert record.recipe.bits_per_weight > record.recipe.decoder_bits_per_weight
    assert record.calibration.checkpoint_id == source.record.checkpoint_id
    assert (record.dtype, record.kv_dtype, record.tp_size, record.pp_size) == ("bfloat16", "bfloat16", 2, 1)
    assert record.tokenizer.eos_token_ids


@pytest.mark.parametrize("name", ["rank0.safetensors", "config.json", "hf_config.json", "tokenizer.json"])
def test_a_damaged_checkpoint_is_not_opened(
    name: str, quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path
) -> None:
    source = quantized()
    path = lower(source, tmp_path).path
    content = bytearray((path / name).read_bytes())
    content[-3] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(SourceError, match=f"{name} is corrupt"):
        open_trtllm_checkpoint(path)
    with pytest.raises(BuildError, match="cannot be reused"):
        lower(source, tmp_path)
    (path / name).unlink()
    with pytest.raises(SourceError, match=f"{name} is missing"):
        open_trtllm_checkpoint(path)


def test_a_file_that_the_builder_would_read_and_the_record_does_not_know_is_refused(
    model: Callable[..., Path], tmp_path: Path
) -> None:
    path = lower(HfFolderSource(model()), tmp_path).path
    (path / "quant_cfg.json").write_text("{}")
    with pytest.raises(SourceError, match=r"quant_cfg\.json is not in the checkpoint's"):
        open_trtllm_checkpoint(path)


def test_a_record_without_a_rank_is_refused(model: Callable[..., Path], tmp_path: Path) -> None:
    path = lower(HfFolderSource(model()), tmp_path).path
    record = json.loads((path / RECORD_NAME).read_text())
    (path / RECORD_NAME).write_text(json.dumps(record | {"tp_size": 2}))
    with pytest.raises(SourceError, match=r"lists no rank1\.safetensors"):
        open_trtllm_checkpoint(path)


def test_a_place_that_is_taken_is_refused(model: Callable[..., Path], tmp_path: Path) -> None:
    source = HfFolderSource(model())
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "letter").write_text("mine")
    with pytest.raises(BuildError, match="is not a TensorRT-LLM checkpoint"):
        lower(source, tmp_path, out=taken)
    one = lower(source, tmp_path, out=tmp_path / "one").path
    with pytest.raises(BuildError, match="holds another checkpoint"):
        lower(source, tmp_path, out=one, tp_size=2)


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (np.nan, "bfloat16", "down_proj.weight has a NaN"),
        (1e5, "float16", "down_proj.weight has a value too large for float16"),
    ],
)
def test_a_weight_that_cannot_be_written_is_named_and_leaves_nothing(
    value: float, dtype: str, words: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model(torch_dtype=dtype)
    tensors = {name: values.astype(np.float32) for name, values in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.3.mlp.down_proj.weight"][5, 7] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BuildError, match=words):
        lower(HfFolderSource(folder), tmp_path)
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(("named", "dtype"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float16")])
def test_the_dtype_is_the_models_own(named: str, dtype: str, model: Callable[..., Path], tmp_path: Path) -> None:
    built = lower(HfFolderSource(model(torch_dtype=named)), tmp_path)
    assert written(built.path)["dtype"] == dtype
    (tensors,) = rank_tensors(built.path)
    assert {values.dtype for values in tensors.values()} == {getattr(torch, dtype)}


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            YARN,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
            },
        ),
    ],
)
def test_rotary_settings_are_those_of_the_model(
    scaling: dict[str, Any] | None, expected: dict[str, Any] | None, model: Callable[..., Path], tmp_path: Path
) -> None:
    config = written(lower(HfFolderSource(model(rope_scaling=scaling)), tmp_path).path)
    assert (config["rotary_base"], config["rotary_scaling"]) == (500000.0, expected)


@pytest.mark.parametrize("pair", [{}, {"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 0.5}])
def test_the_temperature_of_yarn_is_what_transformers_makes_of_it(
    pair: dict[str, float], model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model(rope_scaling=YARN | pair)
    written_scaling = written(lower(HfFolderSource(folder), tmp_path).path)["rotary_scaling"]
    theirs = transformers.LlamaConfig.from_pretrained(folder)
    _, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, device="cpu")

    def temperature(mscale: float) -> float:  # as TensorRT-LLM computes it
        return 0.1 * mscale * math.log(4.0) + 1.0

    seen = temperature(written_scaling["mscale"]) / temperature(written_scaling["mscale_all_dim"])
    assert seen == pytest.approx(factor)


def test_an_int8_cache_counts_the_temperature_of_yarn(
    quantized: Callable[..., QuantizedCheckpoint], tmp_path: Path
) -> None:
    plain = lower(quantized(LLAMA, max_position_embeddings=512), tmp_path, kv_dtype="int8").path
    shutil.rmtree(tmp_path / "model")
    shutil.rmtree(tmp_path / "quantized")
    scaled = lower(quantized(LLAMA, rope_scaling=YARN), tmp_path, kv_dtype="int8").path
    name = "transformer.layers.0.attention.kv_cache_scaling_factor"
    (one,), (other,) = rank_tensors(plain), rank_tensors(scaled)
    assert other[name].item() == pytest.approx(one[name].item() * (0.1 * math.log(4.0) + 1.0))
