"""From a goal to a checkpoint: what is found again, what a budget buys, what a target refuses before work begins."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_quantized import LLAMA, V2, calibration_of, draw_set, recipe

from harness.build.hf_source import HfFolderSource
from harness.calib.calibrate import Goal, calibrate, int8_reasoning, torch_device
from harness.calib.calibration_set import CalibrationSet
from harness.calib.checkpoint_maker import CheckpointMaker, Made, Optimize
from harness.checkpoint_record import read_record
from harness.errors import CalibrationError, RecipeError
from harness.folder_lock import lock_folder
from harness.recipe import Precision, Recipe, load_recipe

SaveModel = Callable[[transformers.PretrainedConfig], tuple[Path, transformers.PreTrainedModel]]
INT8 = recipe(("*", "int8"))


@pytest.fixture
def llama(save_random_model: SaveModel) -> Path:
    """The folder of a small Llama."""
    return save_random_model(LLAMA)[0]


@pytest.fixture
def v2(save_random_model: SaveModel) -> Path:
    """The folder of a small DeepSeek-V2, one layer dense and one of experts."""
    return save_random_model(transformers.DeepseekV2Config(**V2.to_diff_dict() | {"num_hidden_layers": 2}))[0]


def no_work(stage: str, done: int, total: int) -> None:
    raise AssertionError(f"{stage} began")


def saved(model: Path, **changes: Any) -> Path:
    """The folder of a random model whose config differs from that of another in some fields."""
    config = transformers.AutoConfig.from_pretrained(model)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    return model


def test_equal_inputs_are_found_again_and_others_are_not(llama: Path) -> None:
    chosen, lines = draw_set(llama), []
    first = calibrate(calibration_of(llama, chosen), Goal(recipe=INT8))
    # neither the recipe's name nor the way it is written counts
    same = Recipe(name="other", rules=(("model.layers.*", INT8.rules[-1][1]), *INT8.rules))
    again = calibration_of(llama, draw_set(llama), on_progress=no_work, say=lines.append)
    assert calibrate(again, Goal(recipe=same)) == first
    assert any(str(first) in line for line in lines)
    others = [
        calibrate(calibration_of(llama, draw_set(llama, seed=1)), Goal(recipe=INT8)),
        calibrate(calibration_of(llama, chosen), Goal(recipe=recipe(("*.1.*", "int4-g64"), ("*", "int8")))),
        calibrate(calibration_of(llama, chosen, target="cpu"), Goal(recipe=INT8)),
    ]
    record = read_record(first)
    assert record.model.content_hash == calibration_of(llama, chosen).source.fingerprint()
    saved(llama)
    others.append(calibrate(calibration_of(llama, chosen), Goal(recipe=INT8)))
    assert len({path.name for path in (first, *others)}) == 5
    for path in others:
        assert read_record(path).checkpoint_id == path.name.removeprefix("quantized-")


def test_the_record_says_what_was_done(llama: Path) -> None:
    chosen = draw_set(llama)
    made = calibrate(calibration_of(llama, chosen), Goal(recipe=INT8))
    record = read_record(made)
    assert (record.method, record.target, record.optimize) == ("gptq", "portable", "decode")
    assert record.calibration_set.fingerprint == chosen.fingerprint
    assert record.calibration_set.num_samples == len(chosen.samples) == 16
    assert record.calibration_set.num_tokens == chosen.num_tokens
    assert record.calibration_set.system_prompt_share == 1
    assert set(record.recipe.layers.values()) == {"f16", "int8"}
    assert record.recipe.decoder_bits_per_weight < 8.2 < record.recipe.bits_per_weight
    assert record.unreached_experts == []
    assert {"torch", "llmcompressor", "compressed-tensors", "harness"} <= record.versions.keys()
    report = json.loads((made / "calibration-set.json").read_text())
    assert report["num_samples"] == 16


def test_budgets_are_met_and_sensitivity_measured_once(v2: Path) -> None:
    chosen, lines, stages = draw_set(v2), [], []
    calibration = calibration_of(
        v2, chosen, say=lines.append, on_progress=lambda stage, done, total: stages.append(stage)
    )
    for bits in (5.0, 4.25):
        made = calibrate(calibration, Goal(bits=bits))
        record = read_record(made)
        assert bits - 0.25 < record.recipe.decoder_bits_per_weight <= bits
        assert record.recipe.layers["model.embed_tokens"] == "int8"
        assert len({p for module, p in record.recipe.layers.items() if ".mlp.experts." in module}) == 1
        # the recipe beside the weights gives the same layers back
        assert load_recipe(made / "recipe.yaml").resolve(calibration.source.spec) == {
            module: Precision.parse(p) for module, p in record.recipe.layers.items()
        }
    assert list(dict.fromkeys(stages)) == ["output errors", "logit divergence", "quantizing"]
    assert stages.count("quantizing") == 6
    assert any("sensitivity found" in line for line in lines)


def test_for_cpu_a_budget_buys_smaller_groups_and_zero_points(llama: Path) -> None:
    made = calibrate(calibration_of(llama, draw_set(llama), target="cpu"), Goal(bits=4.6))
    layers = read_record(made).recipe.layers.values()
    assert any("g32" in precision for precision in layers)
    assert not list(made.parent.glob(".*"))


def test_a_budget_below_the_least_is_refused(llama: Path) -> None:
    with pytest.raises(RecipeError, match=r"4.05 bits per weight cannot be met: this model needs at least 4\.1"):
        calibrate(calibration_of(llama, draw_set(llama), on_progress=no_work), Goal(bits=4.05))


def test_a_broken_sensitivity_is_measured_again(llama: Path) -> None:
    chosen, stages = draw_set(llama), []
    calibration = calibration_of(llama, chosen, on_progress=lambda stage, done, total: stages.append(stage))
    made = calibrate(calibration, Goal(bits=5.0))
    (path,) = made.parent.glob("sensitivity-*.json")
    measured = path.read_text()
    for content in ("", "[]", '{"harm": {"model.layers.0.mlp.gate_up": {}}}'):
        path.write_text(content)
        stages.clear()
        assert calibrate(calibration, Goal(bits=5.0)) == made
        assert "output errors" in stages
        assert path.read_text() == measured


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_waits_for_another_that_measures_the_same(finished: bool, llama: Path) -> None:
    chosen, lines, stages = draw_set(llama), [], []
    made = calibrate(calibration_of(llama, chosen), Goal(bits=5.0))
    (path,) = made.parent.glob("sensitivity-*.json")
    measured = path.read_text()
    path.unlink()
    asked = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if "waiting for it" in line:
            asked.set()

    calibration = calibration_of(llama, chosen, say=say, on_progress=lambda stage, done, total: stages.append(stage))
    work = path.with_name(f".{path.stem}")
    held = lock_folder(work)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(calibrate, calibration, Goal(bits=4.25))
        assert asked.wait(60)
        assert not stages
        if finished:
            path.write_text(measured)
            shutil.rmtree(work)
        os.close(held)
        assert second.result(60) != made
    assert ("output errors" in stages) != finished
    assert any("sensitivity found" in line for line in lines) == finished
    assert path.read_text() == measured
    assert not list(made.parent.glob(".*"))


def test_the_smallest_within_a_loss(llama: Path) -> None:
    chosen, lines = draw_set(llama), []
    loose = read_record(calibrate(calibration_of(llama, chosen, say=lines.append), Goal(max_loss=0.5)))
    tight = read_record(calibrate(calibration_of(llama, chosen), Goal(max_loss=0.002)))
    for record, limit in ((loose, 0.5), (tight, 0.002)):
        assert record.loss.perplexity_after / record.loss.perplexity_before - 1 <= limit
    assert loose.recipe.decoder_bits_per_weight < 4.3
    assert loose.recipe.decoder_bits_per_weight < tight.recipe.decoder_bits_per_weight
    assert any("round 1 of" in line for line in lines)


def test_a_loss_that_nothing_keeps_is_refused_after_the_highest(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CheckpointMaker.make
    bits = []

    def worse(maker: CheckpointMaker, chosen: Recipe, sensitivity: Sequence[Mapping[str, object]]) -> Made:
        done = made(maker, chosen, sensitivity)
        bits.append(read_record(done.folder).recipe.decoder_bits_per_weight)
        return replace(done, loss=done.loss.model_copy(update={"perplexity_after": 2 * done.loss.perplexity_before}))

    monkeypatch.setattr(CheckpointMaker, "make", worse)
    with pytest.raises(RecipeError, match=r"not even the highest .* within 1\.00%"):
        calibrate(calibration_of(llama, draw_set(llama)), Goal(max_loss=0.01))
    assert bits == sorted(set(bits))
    assert bits[-1] > 8


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ((("*", "int4-g32"),), r"model\.layers\.0\.self_attn\.q_proj is int4-g32"),
        ((("*", "int4-g128-zp"),), "is int4-g128-zp"),
        ((("*", "int4-channel"),), "is int4-channel"),
        ((("*.experts.*.down_proj", "int8"), ("*", "int4-g64")), r"several precisions \(int4-g64, int8\)"),
        ((("*.mlp.experts.*", "int8-a8"), ("*", "int8")), "routed experts cannot have int8 activations"),
    ],
)
def test_what_is_not_portable_is_refused_before_work(rules: tuple[tuple[str, str], ...], words: str, v2: Path) -> None:
    with pytest.raises(RecipeError, match=words) as raised:
        calibrate(calibration_of(v2, draw_set(v2), on_progress=no_work), Goal(recipe=recipe(*rules)))
    assert "--for cpu" in raised.value.hint or "int8" in raised.value.hint
    assert not (v2.parent / "engines").exists()


@pytest.mark.parametrize(
    ("width", "portable", "for_cpu"),
    [(192, "int4-g64", "int4-g64"), (224, "int8", "int4-g32"), (100, "int8", "int4-channel"), (99, "int8", "int8")],
)
def test_widths_that_groups_do_not_divide_are_told_before_work(
    width: int, portable: str, for_cpu: str, llama: Path
) -> None:
    saved(llama, intermediate_size=width)
    downs = ", ".join(f"model.layers.{n}.mlp.down_proj" for n in range(3))
    chosen, goals = draw_set(llama), (Goal(bits=6.0), Goal(recipe=recipe(("*", "int4-g128"))))
    for target, precision in (("portable", portable), ("cpu", for_cpu)):
        for goal in goals:
            lines: list[str] = []

            def began(stage: str, done: int, total: int, lines: list[str] = lines) -> None:
                lines.append(stage)

            calibration = calibration_of(llama, chosen, target=target, say=lines.append, on_progress=began)
            layers = read_record(calibrate(calibration, goal)).recipe.layers
            told = f"{downs}: {precision} instead of int4-g128, so that groups divide the inputs"
            assert told in lines[: lines.index("quantizing")]
            if goal.recipe is not None:
                assert layers["model.layers.1.mlp.down_proj"] == precision
                assert layers["model.layers.1.mlp.up_proj"] == "int4-g128"  # its inputs are the hidden state


@pytest.mark.parametrize(("width", "expected"), [(64, "int4-g64"), (96, "int8")])
def test_experts_get_what_divides_all_their_inputs_and_others_their_own(width: int, expected: str, v2: Path) -> None:
    saved(v2, moe_intermediate_size=width, n_shared_experts=4)
    chosen = draw_set(v2)
    for goal in (Goal(bits=8.2), Goal(recipe=recipe(("*", "int4-g128")))):
        made = calibrate(calibration_of(v2, chosen), goal)
        layers = read_record(made).recipe.layers
        if goal.recipe is not None:
            assert {p for module, p in layers.items() if ".mlp.experts." in module} == {expected}
            others = {p for module, p in layers.items() if "layers" in module and ".mlp.experts." not in module}
            assert others == {"int4-g128"}
        assert load_recipe(made / "recipe.yaml").resolve(HfFolderSource(v2).spec) == {
            module: Precision.parse(p) for module, p in layers.items()
        }


def test_int8_layers_are_what_they_are_optimized_for(v2: Path) -> None:
    chosen = draw_set(v2)
    usual: dict[Optimize, str] = {"decode": "int8", "prefill": "int8-a8"}
    for optimize, expected in usual.items():
        made = calibrate(replace(calibration_of(v2, chosen), optimize=optimize), Goal(bits=16))
        layers = read_record(made).recipe.layers
        decoder = {m: p for m, p in layers.items() if m.startswith("model.layers.")}
        assert {p for m, p in decoder.items() if ".mlp.experts." in m} == {"int8"}
        assert {p for m, p in decoder.items() if ".mlp.experts." not in m} == {expected}
        assert ("weight-only" in int8_reasoning(optimize)) == (optimize == "decode")


def test_a_goal_is_one_thing() -> None:
    for fields in ({}, {"bits": 4.5, "max_loss": 0.01}, {"recipe": INT8, "bits": 4.5}):
        with pytest.raises(ValueError, match="one of"):
            Goal(**fields)  # type: ignore[arg-type]


def test_a_gpu_is_taken_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device("auto").type == torch_device("cpu").type == "cpu"
    with pytest.raises(CalibrationError, match="no CUDA"):
        torch_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert torch_device("auto").type == torch_device("cuda").type == "cuda"
    assert torch_device("cpu").type == "cpu"


def test_sets_that_differ_in_a_token_differ_in_fingerprint(llama: Path) -> None:
    sets: list[CalibrationSet] = [draw_set(llama), draw_set(llama, max_tokens=47), draw_set(llama, num_samples=15)]
    assert len({chosen.fingerprint for chosen in sets}) == 3
