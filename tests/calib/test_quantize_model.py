"""The quantizer's run over a model: what it stores is what an engine computes, and no accident changes a byte of it."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engine_oracle import assert_engine_holds, deterministic_logits, min_cosine, unpack
from safetensors.torch import load_file, save_file
from small_quantized import (
    LLAMA,
    TOKENS,
    V2,
    V3,
    calibration_of,
    contents,
    draw_set,
    quantize,
    recipe,
    streamed_logits,
    tensors_of,
)

from harness.build.checkpoint import open_checkpoint
from harness.build.cpu_engine import build_cpu_engine
from harness.calib import checkpoint_maker, quantize_model
from harness.calib.calibrate import Goal, calibrate
from harness.calib.checkpoint_maker import Target
from harness.calib.measure import negative_log_likelihood, perplexity
from harness.calib.quantize_model import working_folder
from harness.checkpoint_record import STATISTICS_NAME, read_record
from harness.errors import CalibrationError

SaveModel = Callable[[transformers.PretrainedConfig], tuple[Path, transformers.PreTrainedModel]]
Rules = tuple[tuple[str, str], ...]

PORTABLE: Rules = (("*.0.mlp.*", "int8"), ("*.mlp.experts.*", "int4-g64"), ("*.2.*", "int8-a8"), ("*", "int4-g128"))
FOR_CPU: Rules = (
    ("model.layers.0.*", "int8"),
    ("*.o_proj", "int4-channel"),
    ("*.down_proj", "int4-g32"),
    ("*", "int4-g32-zp"),
)


ODD_LLAMA = transformers.LlamaConfig(
    **LLAMA.to_diff_dict() | {"intermediate_size": 100, "num_hidden_layers": 2, "head_dim": 24}
)
ODD_V2 = transformers.DeepseekV2Config(
    **V2.to_diff_dict() | {"moe_intermediate_size": 36, "v_head_dim": 24, "num_hidden_layers": 2}
)


@pytest.mark.parametrize(
    ("config", "target", "rules"),
    [
        *((config, "portable", PORTABLE) for config in (LLAMA, V2, ODD_LLAMA, ODD_V2)),
        *((config, "cpu", FOR_CPU) for config in (LLAMA, V2, ODD_LLAMA, ODD_V2)),
    ],
    ids=[
        *("llama", "v2", "llama of odd widths", "v2 of odd widths"),
        *("llama for cpu", "v2 for cpu", "llama of odd widths for cpu", "v2 of odd widths for cpu"),
    ],
)
def test_the_engine_is_the_fake_quantized_model(
    config: transformers.PretrainedConfig, target: Target, rules: Rules, save_random_model: SaveModel, tmp_path: Path
) -> None:
    folder = quantize(save_random_model(config)[0], *rules, target=target)
    checkpoint = open_checkpoint(folder)
    engine = build_cpu_engine(checkpoint, checkpoint.recipe, engines_dir=tmp_path / "engines").engine_dir
    tensors = tensors_of(folder)
    assert_engine_holds(engine, checkpoint.spec, {m: unpack(tensors, m, p) for m, p in checkpoint.quantized.items()})
    ours, theirs = streamed_logits(checkpoint, TOKENS), deterministic_logits(engine, TOKENS.tolist())
    assert min_cosine(ours, theirs) >= 0.9999
    np.testing.assert_array_equal(ours.argmax(axis=1), theirs.argmax(axis=1))


@pytest.mark.parametrize("logits_held", [2 * 320 * 7, 50_000_000], ids=["in batches", "at once"])
def test_the_record_tells_the_loss_of_the_held_out_samples(
    logits_held: int, save_random_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_model, "_LOGITS_HELD", logits_held)
    folder, original = save_random_model(V2)
    chosen = draw_set(folder)
    made = calibrate(calibration_of(folder, chosen), Goal(recipe=recipe(("*", "int4-g128"))))
    checkpoint, loss = open_checkpoint(made), read_record(made).loss
    before, after = [], []
    for ids in chosen.held_out:
        with torch.no_grad():
            logits = original(torch.from_numpy(ids)[None]).logits[0].numpy()
        before.append(negative_log_likelihood(logits[:-1], ids[1:]))
        after.append(negative_log_likelihood(streamed_logits(checkpoint, ids)[:-1], ids[1:]))
    assert loss.num_tokens == sum(len(ids) - 1 for ids in chosen.held_out)
    assert loss.perplexity_before == pytest.approx(perplexity(np.concatenate(before)), rel=1e-4)
    assert loss.perplexity_after == pytest.approx(perplexity(np.concatenate(after)), rel=1e-4)
    assert loss.kl_divergence > 0


class Stopped(Exception):
    """Ends a run between two layers."""


def stop_before(layer: int) -> Callable[[str, int, int], None]:
    def on_progress(stage: str, done: int, total: int) -> None:
        if done == layer:
            raise Stopped

    return on_progress


@pytest.fixture
def llama(save_random_model: SaveModel) -> Path:
    """The folder of a small Llama."""
    return save_random_model(LLAMA)[0]


def test_a_second_run_goes_on_where_the_first_stopped(llama: Path) -> None:
    chosen, goal = draw_set(llama), Goal(recipe=recipe(("*.0.*", "int8-a8"), ("*", "int4-g64")))
    with pytest.raises(Stopped):
        calibrate(calibration_of(llama, chosen, on_progress=stop_before(2)), goal)
    (work,) = (llama.parent / "engines" / "model").iterdir()
    shards = sorted((work / "checkpoint").glob("model-*"))
    assert json.loads((work / "progress.json").read_text())["finished"] == len(shards) == 2
    # what a run that was killed in the middle of the third layer may have left
    (work / "checkpoint" / ".model-00003-of-00004.safetensors").write_bytes(b"half")
    (work / ".layer-statistics-00002").write_bytes(b"half")
    (work / ".progress.json").write_text("{")
    (work / "quantized-states-3").write_bytes(b"\xff" * 1000)
    (work / "quantized-states-1").write_bytes(b"left over")
    before = {path.name: path.stat().st_mtime_ns for path in shards}
    steps: list[int] = []
    again = calibrate(calibration_of(llama, chosen, on_progress=lambda stage, done, total: steps.append(done)), goal)
    assert steps == [2, 3]
    assert {name: (again / name).stat().st_mtime_ns for name in before} == before
    assert [path.name for path in again.parent.iterdir()] == [again.name]

    resumed = contents(again)
    again.rename(llama.parent / "resumed")
    assert contents(calibrate(calibration_of(llama, chosen), goal)) == resumed


def test_a_run_that_was_killed_after_its_last_step_is_not_done_again(llama: Path) -> None:
    chosen, goal = draw_set(llama), Goal(recipe=recipe(("*", "int8")))
    folder = calibrate(calibration_of(llama, chosen), goal)
    whole = contents(folder)
    work = folder.with_name(f".quantizing-{folder.name.partition('-')[2]}")
    work.mkdir()
    folder.rename(work / "checkpoint")
    assert calibrate(calibration_of(llama, chosen, on_progress=stop_before(0)), goal) == folder
    assert contents(folder) == whole
    assert not work.exists()


def test_a_run_beside_another_is_refused(llama: Path) -> None:
    chosen, goal = draw_set(llama), Goal(recipe=recipe(("*", "int8")))
    with pytest.raises(Stopped):
        calibrate(calibration_of(llama, chosen, on_progress=stop_before(1)), goal)
    (work,) = (llama.parent / "engines" / "model").iterdir()
    before = contents(work)
    with working_folder(work), pytest.raises(CalibrationError, match=r"same checkpoint .*at work in .*\.quantizing-"):
        calibrate(calibration_of(llama, chosen), goal)
    assert contents(work) == before
    assert calibrate(calibration_of(llama, chosen), goal).is_dir()


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """Keeps what is alive already out of the collector's sight, where it would be looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_what_another_machine_left_is_not_gone_on_from(llama: Path) -> None:
    chosen, goal = draw_set(llama), Goal(recipe=recipe(("*", "int8")))
    with pytest.raises(Stopped):
        calibrate(calibration_of(llama, chosen, on_progress=stop_before(2)), goal)
    (progress,) = (llama.parent / "engines" / "model").glob("*/progress.json")
    for left in (json.dumps(json.loads(progress.read_text()) | {"computed_on": ["cpu", "AVX9", 64]}), "{"):
        progress.write_text(left)
        steps: list[int] = []

        def on_progress(stage: str, done: int, total: int, steps: list[int] = steps) -> None:
            steps.append(done)
            stop_before(1)(stage, done, total)

        with pytest.raises(Stopped):
            calibrate(calibration_of(llama, chosen, on_progress=on_progress), goal)
        assert steps == [0, 1]


def test_a_checkpoint_that_another_run_finished_first_is_taken(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, goal = draw_set(llama), Goal(recipe=recipe(("*", "int8")))
    folder = calibrate(calibration_of(llama, chosen), goal)
    whole = contents(folder)
    aside = folder.rename(llama.parent / "aside")

    def finish_first(work: Path) -> AbstractContextManager[Path]:
        aside.rename(folder)
        return working_folder(work)

    monkeypatch.setattr(checkpoint_maker, "working_folder", finish_first)
    assert calibrate(calibration_of(llama, chosen, on_progress=stop_before(0)), goal) == folder
    assert contents(folder) == whole
    assert list(folder.parent.iterdir()) == [folder]


def live_bytes() -> int:
    """Bytes of all tensors that are alive and new."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_memory_is_bounded_by_a_layer(
    save_random_model: SaveModel, monkeypatch: pytest.MonkeyPatch, only_new_objects: None
) -> None:
    write_shard = quantize_model.write_shard
    peaks = {}
    for num_layers in (2, 8):
        config = transformers.LlamaConfig(**LLAMA.to_diff_dict() | {"num_hidden_layers": num_layers})
        folder = save_random_model(config)[0]  # the model itself is not kept
        seen: list[int] = []

        # when a layer is written, its weights, its Hessians and what is stored of it are all there
        def measure(path: Path, tensors: dict[str, torch.Tensor], seen: list[int] = seen) -> None:
            if path.name.startswith("model-"):
                seen.append(live_bytes())
            write_shard(path, tensors)

        monkeypatch.setattr(quantize_model, "write_shard", measure)
        calibrate(calibration_of(folder, draw_set(folder)), Goal(recipe=recipe(("*", "int4-g64"))))
        peaks[num_layers] = max(seen[:-1])  # the last shard is that of the embeddings
    layer = sum(4 * out * inner for out, inner in [(128, 128)] * 2 + [(64, 128)] * 2 + [(192, 128)] * 3)
    assert layer < peaks[2]
    assert peaks[8] - peaks[2] < layer


def test_experts_that_no_token_reached_are_named_and_calibrated_all_the_same(save_random_model: SaveModel) -> None:
    folder, model = save_random_model(V3)
    with torch.no_grad():
        for number, expert in ((1, 0), (2, 3)):
            bias = model.model.layers[number].mlp.gate.e_score_correction_bias
            bias.zero_()
            bias[expert] = -100.0
    model.save_pretrained(folder)
    lines: list[str] = []
    chosen = draw_set(folder)
    goal = Goal(recipe=recipe(("*", "int4-g64")))
    made = calibrate(calibration_of(folder, chosen, say=lines.append), goal)
    names = ["model.layers.1.mlp.experts.0", "model.layers.2.mlp.experts.3"]
    assert read_record(made).unreached_experts == names
    assert any(all(name in line for name in names) for line in lines)
    for name, values in tensors_of(made).items():
        if name.endswith("weight_scale"):
            assert torch.isfinite(values).all(), name
            assert (values > 0).all(), name
    # they were shown the tokens that came nearest
    maxima = load_file(made / STATISTICS_NAME)
    assert all((maxima[f"{name}.gate_up.input_maxima"] > 0).any() for name in names)


def set_value(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[7] = value

    return edit


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.input_layernorm.weight", 3e38, r"model\.layers\.1 computes NaN or infinite"),
        ("model.layers.2.self_attn.o_proj.weight", 1e9, r"layers\.2\.self_attn\.o_proj.*exceeds half precision"),
    ],
)
def test_weights_that_cannot_be_calibrated_are_named(name: str, value: float, words: str, llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    set_value(name, value)(tensors)
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CalibrationError, match=words) as raised:
        quantize(llama, ("*", "int8"))
    assert raised.value.hint
    assert not list((llama.parent / "engines" / "model").glob("quantized-*"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", float("nan")),
        ("model.norm.weight", float("inf")),
        ("model.layers.2.mlp.up_proj.weight", float("nan")),
    ],
)
@pytest.mark.parametrize("bits", [None, 5.0])
def test_weights_that_are_not_finite_are_named_before_work(
    name: str, value: float, bits: float | None, llama: Path
) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    began = stop_before(0)
    goal = Goal(bits=bits) if bits else Goal(recipe=recipe(("*", "int8")))
    with pytest.raises(CalibrationError, match=f"^{name} has a NaN or infinite value") as raised:
        calibrate(calibration_of(llama, draw_set(llama), on_progress=began), goal)
    assert raised.value.hint


def test_a_folder_that_holds_another_checkpoint_is_not_taken(llama: Path) -> None:
    chosen = draw_set(llama)
    folder = calibrate(calibration_of(llama, chosen), Goal(recipe=recipe(("*", "int8"))))
    other = calibrate(calibration_of(llama, chosen), Goal(recipe=recipe(("*", "int4-g64"))))
    shutil.rmtree(folder)
    other.rename(folder)
    whole = contents(folder)
    with pytest.raises(CalibrationError, match=f"holds another checkpoint: {other.name[10:]}, .* {folder.name[10:]}"):
        calibrate(calibration_of(llama, chosen, on_progress=stop_before(0)), Goal(recipe=recipe(("*", "int8"))))
    assert contents(folder) == whole


def test_samples_of_one_token_tell_no_loss(llama: Path) -> None:
    chosen = replace(draw_set(llama), held_out=(np.array([3]), np.array([5])))
    with pytest.raises(CalibrationError, match="one token"):
        calibrate(calibration_of(llama, chosen, on_progress=stop_before(0)), Goal(recipe=recipe(("*", "int8"))))
