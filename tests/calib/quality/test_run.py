"""Whole reports on real engines: what a broken one is blamed for, and what a report leaves behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from broken_engine import Scales, break_scales, change_chat_template
from preset_engine import build_preset_engine
from safetensors.torch import load_file, save_file

from harness.calib.quality.report import QualityReport
from harness.calib.quality.run import Measurement, measure_quality, write_report
from harness.calib.quality.suite import DEFAULT_SUITE, Suite, load_suite
from harness.errors import CapacityError, QualityError, SuiteError
from harness.manifest import read_manifest, verify_files

TASKS = [
    {
        "name": "capitals",
        "layer": "tasks",
        "description": "one word",
        "source": "ours",
        "file": "capitals.jsonl",
        "scorer": "short_answer",
        "max_tokens": 12,
    },
    {
        "name": "copies",
        "layer": "adversarial",
        "description": "digits",
        "source": "ours",
        "file": "copies.jsonl",
        "scorer": "contains",
        "max_tokens": 12,
    },
]


@pytest.fixture
def small_suite(tmp_path: Path) -> Callable[..., Suite]:
    """The default suite with little text and the tasks given."""

    def make(**changes: Any) -> Suite:
        content = yaml.safe_load(DEFAULT_SUITE.read_text("utf-8"))
        content["text"]["domains"] = {
            name: str(DEFAULT_SUITE.parent / path) for name, path in content["text"]["domains"].items()
        }
        content["text"]["quick"] = content["text"]["full"] = {"windows": 3, "tokens": 192}
        content |= {"tasks": [], "speed": {"prompt_tokens": 64, "generated_tokens": 8, "rounds": 1}, **changes}
        path = tmp_path / "suite.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return load_suite(path)

    return make


def measured(engine: Path, baseline: Path, suite: Suite, **options: Any) -> QualityReport:
    plan = Measurement(
        engine_dir=engine, baseline_dir=baseline, suite=suite, **{"full": False, "compared": {}, **options}
    )
    return measure_quality(plan, lambda stage, done, total: None)


def fired(report: QualityReport) -> set[str]:
    return {gate.gate for gate in report.gates if gate.verdict == "fail"}


def test_an_engine_that_is_its_own_baseline_passes(llama_f16: Path, small_suite: Callable[..., Suite]) -> None:
    report = measured(llama_f16, llama_f16, small_suite())
    assert report.verdict == "pass"
    assert report.baseline_is_engine
    assert {error.relative_error for error in report.weights} == {0}


def test_doubled_scales_of_one_layer_fail_and_are_named(
    llama_int4: Path, llama_f16: Path, small_suite: Callable[..., Suite], tmp_path: Path
) -> None:
    whole = measured(llama_int4, llama_f16, small_suite())
    assert whole.verdict != "fail"
    module = "model.layers.2.mlp.down_proj"
    broken = break_scales(llama_int4, tmp_path / "broken", module, lambda scales, _: scales * 2)
    report = measured(broken, llama_f16, small_suite())
    assert report.verdict == "fail"
    assert fired(report) >= {"perplexity change", "weight error"}
    worst, second, *_ = sorted(report.weights, key=lambda error: -error.relative_error)
    assert (worst.module, worst.layer) == (module, 2)
    assert worst.relative_error > 4 * second.relative_error


def test_any_expert_of_zeros_fails_and_is_named(
    tiny_deepseek_path: Path, deepseek_f16: Path, small_suite: Callable[..., Suite], tmp_path: Path
) -> None:
    """The f16 engine of this model has no scales, so an int8 one is broken."""

    int8 = build_preset_engine(tiny_deepseek_path, tmp_path / "int8", "int8")

    def zero(scales: Scales, number: int) -> Scales:
        scales[number] = 0
        return scales

    assert measured(int8, deepseek_f16, small_suite()).verdict == "pass"
    for number, expert in enumerate(("layers.2.mlp.experts.7.down_proj", "layers.4.mlp.experts.0.down_proj")):
        broken = break_scales(int8, tmp_path / f"broken-{number}", f"model.{expert}", zero)
        report = measured(broken, deepseek_f16, small_suite())
        (gate,) = (gate for gate in report.gates if gate.gate == "weight error")
        assert (gate.verdict, gate.where) == ("fail", f"model.{expert}")


def test_weights_of_another_release_are_no_fault(
    tiny_llama_path: Path, llama_f16: Path, small_suite: Callable[..., Suite], tmp_path: Path
) -> None:
    """Only a baseline of the same weights says what the weights should be."""
    release = tmp_path / "release"
    shutil.copytree(tiny_llama_path, release)
    tensors = load_file(release / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= -1
    save_file(tensors, release / "model.safetensors", {"format": "pt"})
    engine = build_preset_engine(release, tmp_path / "f16", "f16")
    report = measured(engine, llama_f16, small_suite())
    assert max(error.relative_error for error in report.weights) == pytest.approx(2)
    assert "weight error" not in {gate.gate for gate in report.gates}


def test_another_chat_template_fails_and_is_told(
    smollm2_engine: Path, small_suite: Callable[..., Suite], tmp_path: Path
) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    changed = change_chat_template(smollm2_engine, tmp_path / "changed", template)
    report = measured(changed, smollm2_engine, small_suite())
    assert fired(report) == {"chat template"}


def test_a_quantized_engine_is_no_baseline_of_its_own(llama_int4: Path, small_suite: Callable[..., Suite]) -> None:
    with pytest.raises(QualityError, match="its own baseline"):
        measured(llama_int4, llama_int4, small_suite())


def test_measuring_again_changes_nothing(llama_int4: Path, llama_f16: Path, small_suite: Callable[..., Suite]) -> None:
    first, second = (measured(llama_int4, llama_f16, small_suite()) for _ in range(2))
    timeless: Mapping[str, Any] = {"created": "", "seconds": 0}
    assert first.model_copy(update=timeless) == second.model_copy(update=timeless)


def test_a_report_lies_in_the_engine_and_leaves_it_whole(
    llama_int4: Path, llama_f16: Path, small_suite: Callable[..., Suite]
) -> None:
    suite = small_suite()
    before = read_manifest(llama_int4)
    report = measured(llama_int4, llama_f16, suite)
    page = write_report(report, llama_int4)
    after = read_manifest(llama_int4)
    verify_files(llama_int4, after)
    assert after.quality.verdict == report.verdict
    assert after.quality.suite_sha256 == suite.sha256
    assert after.quality.baseline_engine_id == read_manifest(llama_f16).engine_id
    assert page == llama_int4 / str(after.quality.report)
    assert after.model_copy(update={"quality": before.quality}) == before
    assert QualityReport.model_validate_json((page.parent / "report.json").read_bytes()) == report
    assert (page.parent / "summary.md").read_text("utf-8").startswith("#")


def test_engines_of_other_models_do_not_compare(
    llama_f16: Path, smollm2_engine: Path, small_suite: Callable[..., Suite]
) -> None:
    with pytest.raises(QualityError, match="do not compare: the tokenizer differs"):
        measured(llama_f16, smollm2_engine, small_suite())


def test_what_does_not_fit_beside_its_baseline_is_refused(
    llama_f16: Path, small_suite: Callable[..., Suite], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.calib.quality.engines.available_memory_bytes", lambda: 20 << 20)
    with pytest.raises(CapacityError, match=r"about 0\.04 GiB, 0\.02 GiB of memory is available"):
        measured(llama_f16, llama_f16, small_suite())


def test_a_full_report_has_tasks_speed_and_further_engines(
    smollm2_engine: Path, smollm2_f16_engine: Path, small_suite: Callable[..., Suite], tmp_path: Path
) -> None:
    items = {
        "capitals": [
            {"id": c, "prompt": f"What is the capital of {c}? One word.", "answers": [a]}
            for c, a in (("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"))
        ],
        "copies": [{"id": n, "prompt": f"Repeat exactly: {n}", "expected": [n]} for n in ("4071", "99321")],
    }
    for name, lines in items.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    report = measured(
        smollm2_engine,
        smollm2_f16_engine,
        small_suite(tasks=TASKS),
        full=True,
        compared={"again": smollm2_engine},
        system_prompts=("You are terse.",),
    )
    assert [task.name for task in report.tasks] == ["capitals", "copies"]
    assert report.tasks[0].num_items == 3
    assert any("would not show a loss at the limit" in note and "capitals" in note for note in report.notes)
    assert [row.role for row in report.table] == ["baseline", "engine", "compared"]
    baseline, engine, again = report.table
    assert baseline.kl_mean is None
    assert engine.kl_mean == again.kl_mean  # the same engine
    assert engine.engine.weight_bytes < 0.6 * baseline.engine.weight_bytes
    for row in report.table:
        assert row.speed is not None
        assert row.speed.num_rounds == 1
        assert 0 < row.speed.tpot_s.low <= row.speed.tpot_s.mean <= row.speed.tpot_s.high
        assert row.speed.peak_memory_bytes is not None
        assert row.speed.peak_memory_bytes > row.engine.weight_bytes
    assert report.suite.num_system_prompts == 1


def test_a_suite_is_checked_before_an_engine_is_loaded(tmp_path: Path, small_suite: Callable[..., Suite]) -> None:
    with pytest.raises(SuiteError, match=r"capitals\.jsonl cannot be read"):
        small_suite(tasks=TASKS)
