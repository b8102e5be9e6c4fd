"""What lowering must keep: quantized values as they were chosen, the latent cache's result, and the fused experts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
import torch
import transformers

from harness.build.cpu_engine import build_cpu_engine
from harness.build.hf_source import HfFolderSource
from harness.build.lowering.decoder import build_stateful_model
from harness.build.lowering.quantize import quantize_rows
from harness.build.lowering.weights import Spool, WeightLowering
from harness.manifest import read_manifest
from harness.recipe import Precision, Recipe, linear_shapes, preset
from harness.runtime.executor import ScheduledSequence, SchedulerOutput
from harness.runtime.openvino_executor import OpenVinoExecutor

Logits = npt.NDArray[np.float32]

_TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 256, 96)]
_LLAMA = transformers.Qwen2Config(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
_V3 = transformers.DeepseekV3Config(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256,
    kv_lora_rank=32,
    q_lora_rank=None,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
)


def _recipe(precision: str) -> Recipe:
    return Recipe(name=precision, rules=(("*", Precision.parse(precision)),))


def _run(engine_dir: Path, *, deterministic: bool = True) -> tuple[OpenVinoExecutor, Logits]:
    executor = OpenVinoExecutor(
        engine_dir, read_manifest(engine_dir), deterministic=deterministic, kv_cache_bytes=8 << 20, num_threads=2
    )
    sequence = ScheduledSequence(
        request_id="r",
        token_ids=_TOKENS,
        num_computed_tokens=0,
        block_table=[2, 0, 1],
        logit_positions=list(range(len(_TOKENS))),
    )
    return executor, executor.execute(SchedulerOutput(sequences=[sequence])).logits.copy()


def _min_cosine(a: Logits, b: Logits) -> float:
    return float(((a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def _layer_types(executor: OpenVinoExecutor) -> list[str]:
    ops = executor.compiled_model.get_runtime_model().get_ops()
    return [str(op.get_rt_info()["layerType"].astype(str)) for op in ops]


def _fake_quantized(weight: torch.Tensor, precision: Precision) -> torch.Tensor:
    """What the stored integers and scales stand for, computed the plain way."""
    stored = quantize_rows(weight.numpy(), precision)
    if stored.scale is None:
        return torch.from_numpy(stored.data.astype(np.float32))
    values = stored.data
    if precision.dtype == "int4":
        low, high = values & 0xF, values >> 4
        values = np.stack([low, high], axis=-1).reshape(weight.shape).astype(np.int16)
        if precision.symmetric:
            values = np.where(values > 7, values - 16, values)
    groups = values.reshape(weight.shape[0], stored.scale.shape[1], -1).astype(np.float32)
    if stored.zero_point is not None:
        groups = groups - stored.zero_point[..., None]
    return torch.from_numpy((groups * stored.scale[..., None].astype(np.float32)).reshape(weight.shape))


@pytest.mark.parametrize(
    "precision", ["f16", "int8", "int4-g64", "int4-g32", "int4-g32-zp", "int4-channel", "int4-channel-zp"]
)
@pytest.mark.parametrize("config", [_LLAMA, _V3], ids=["qwen2", "v3"])
def test_engine_computes_with_exactly_the_stored_integers(
    precision: str, config: transformers.PretrainedConfig, save_random_model: Callable[..., Any], tmp_path: Path
) -> None:
    folder, model = save_random_model(config)
    source = HfFolderSource(folder)
    recipe = _recipe(precision)
    resolved = recipe.resolve(source.spec)
    checkpoint = {name: torch.from_numpy(source.read(name)) for name in source.names()}
    for name in linear_shapes(source.spec):
        checkpoint[f"{name}.weight"] = _fake_quantized(checkpoint[f"{name}.weight"], resolved[name])
    fake_folder = tmp_path / "fake"
    shutil.copytree(folder, fake_folder)
    from safetensors.torch import save_file

    save_file(checkpoint, fake_folder / "model.safetensors", metadata={"format": "pt"})
    model = type(model).from_pretrained(fake_folder, dtype=torch.float32)
    with torch.no_grad():
        reference = model(torch.tensor([_TOKENS])).logits[0].numpy()
    build_cpu_engine(source, recipe, engines_dir=tmp_path, out=tmp_path / "engine")
    _, seen = _run(tmp_path / "engine")
    assert _min_cosine(reference, seen) >= 0.99999


@pytest.mark.parametrize("precision", ["f16", "int8", "int4-g32"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_experts_run_as_the_fused_node(
    precision: str, deterministic: bool, save_random_model: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = save_random_model(_V3)
    build_cpu_engine(HfFolderSource(folder), _recipe(precision), engines_dir=tmp_path, out=tmp_path / "engine")
    executor, _ = _run(tmp_path / "engine", deterministic=deterministic)
    # gate, up and down of each of the two layers with experts
    assert _layer_types(executor).count("GatherMatmul") == 6


def test_rotary_embedding_and_norms_run_fused(save_random_model: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = save_random_model(_LLAMA)
    build_cpu_engine(HfFolderSource(folder), _recipe("int8"), engines_dir=tmp_path, out=tmp_path / "engine")
    kinds = _layer_types(_run(tmp_path / "engine")[0])
    assert kinds.count("PagedAttention") == 2
    assert kinds.count("RoPE") == 4
    assert kinds.count("RMS") == 5
    assert kinds.count("FullyConnected") == 2 * 4 + 1  # qkv, o, gate_up, down; lm_head


def test_latent_cache_gives_the_result_of_expanded_heads(save_random_model: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = save_random_model(_V3)
    source = HfFolderSource(folder)
    recipe = preset("f16", source.spec)
    build_cpu_engine(source, recipe, engines_dir=tmp_path, out=tmp_path / "latent")
    shutil.copytree(tmp_path / "latent", tmp_path / "expanded")
    with Spool(tmp_path / "spool") as spool:
        weights = WeightLowering(source, recipe.resolve(source.spec), spool)
        model = build_stateful_model(source.spec, weights, absorbed=False)
        ov.save_model(model, tmp_path / "expanded" / "model.xml", compress_to_fp16=False)
    latent_executor, latent = _run(tmp_path / "latent")
    expanded_executor, expanded = _run(tmp_path / "expanded")
    assert _min_cosine(latent, expanded) >= 0.999999
    assert (latent.argmax(axis=1) == expanded.argmax(axis=1)).all()
    # equal memory holds four heads' (48 + 32) values expanded, one (48 + 32) latent
    assert latent_executor.num_blocks // 4 == expanded_executor.num_blocks


@pytest.mark.parametrize("config", [_LLAMA, _V3], ids=["qwen2", "v3"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_manifest_states_the_true_kv_bytes(
    config: transformers.PretrainedConfig, deterministic: bool, save_random_model: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = save_random_model(config)
    build_cpu_engine(HfFolderSource(folder), _recipe("int8"), engines_dir=tmp_path, out=tmp_path / "engine")
    manifest = read_manifest(tmp_path / "engine")
    kv = manifest.kv
    block_bytes = kv.bytes_per_token["deterministic" if deterministic else "fast"] * kv.tokens_per_block
    executor = OpenVinoExecutor(
        tmp_path / "engine", manifest, deterministic=deterministic, kv_cache_bytes=100 * block_bytes, num_threads=2
    )
    assert executor.num_blocks == 100
