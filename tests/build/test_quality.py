"""The quality report as users of the two commands meet it: verdicts, exit codes, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from broken_engine import break_scales
from cli_process import Done

from harness.calib.quality.suite import DEFAULT_SUITE
from harness.errors import EngineError
from harness.manifest import read_manifest, write_manifest
from harness.runtime.cli import check_quality


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    content = yaml.safe_load(DEFAULT_SUITE.read_text("utf-8"))
    content["text"]["domains"] = {"code": str(DEFAULT_SUITE.parent / "held_out" / "code.jsonl")}
    content["text"]["quick"] = content["text"]["full"] = {"windows": 3, "tokens": 192}
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump({**content, "tasks": []}), encoding="utf-8")
    return path


def test_a_build_reports_and_the_next_one_knows(tiny_llama_path: Path, suite: Path, build: Callable[..., Done]) -> None:
    asked = ("--model", tiny_llama_path, "--no-calib", "--precision", "int8", "--report", "quick", "--suite", suite)
    first = build(*asked)
    engine = Path(first.out.strip())
    assert first.code == 0, first.err
    assert "quality: pass" in first.err
    assert "\N{REPLACEMENT CHARACTER}" not in first.err
    assert read_manifest(engine).quality.verdict == "pass"
    assert "suite_sha256" in json.dumps(read_manifest(engine).quality.model_dump())
    second = build(*asked)
    assert (second.code, second.out) == (0, first.out)
    assert "quality: pass, measured before" in second.err
    # the verb finds the f16 engine that the build left beside
    again = build("quality", "--engine", engine, "--suite", suite, "--quick")
    assert again.code == 0, again.err
    assert "measured before" in again.err
    suite.write_text(suite.read_text("utf-8").replace("warn: 0.01", "warn: 0.011"), encoding="utf-8")
    other = build("quality", "--engine", engine, "--suite", suite, "--quick")
    assert "measured before" not in other.err  # other gates


def test_a_failed_gate_is_exit_code_3_and_the_engine_is_kept(
    tiny_llama_path: Path, suite: Path, build: Callable[..., Done], tmp_path: Path
) -> None:
    engine = Path(build("--model", tiny_llama_path, "--no-calib", "--precision", "int8").out.strip())
    assert read_manifest(engine).quality.verdict == "not_run"
    module = "model.layers.1.mlp.up_proj"
    broken = break_scales(engine, tmp_path / "broken", module, lambda scales, _: scales * 2)
    done = build("quality", "--engine", broken, "--baseline", tiny_llama_path, "--suite", suite, "--quick")
    assert (done.code, done.out) == (3, "")
    assert re.search(r"fail: perplexity change of code is \+[\d.]+ %: above the limit of \+3 %", done.err)
    assert read_manifest(broken).quality.verdict == "fail"
    manifest = read_manifest(broken)
    lenient = manifest.quality.model_copy(update={"verdict": "pass", "suite_sha256": "0" * 64})
    write_manifest(broken, manifest.model_copy(update={"quality": lenient}))
    again = build("quality", "--engine", broken, "--baseline", tiny_llama_path, "--suite", suite, "--quick")
    assert "the former verdict was pass, of a quick report with another suite; it is replaced" in again.err
    assert build("verify", "--engine", broken).code == 0
    assert "fail (quick report" in build("inspect", "--engine", broken).out
    with pytest.raises(EngineError, match=r"failed its quality report: see .*report\.html") as refused:
        check_quality(broken, read_manifest(broken), allow_failed=False)
    assert "--allow-failed-quality" in refused.value.hint


def test_an_engine_that_was_not_measured_is_served_with_a_warning(
    llama_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_quality(llama_engine, read_manifest(llama_engine), allow_failed=False)
    assert "no quality report" in capsys.readouterr().err
    manifest = read_manifest(llama_engine)
    failed = manifest.model_copy(update={"quality": manifest.quality.model_copy(update={"verdict": "fail"})})
    write_manifest(llama_engine, failed)
    check_quality(llama_engine, failed, allow_failed=True)
    assert "failed a gate" in capsys.readouterr().err


def test_no_baseline_is_said(llama_engine: Path, build: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "manifest.json").write_text('{"schema_version": 1}')  # beside it, and nobody's business
    build("quality", "--engine", llama_engine).says("no f16 engine of the same weights", "--baseline MODEL")
    build("quality", "--engine", llama_engine, "--baseline", "nothing-here").says("nothing at 'nothing-here'")
    missing = llama_engine.parent / "f16"
    build("quality", "--engine", llama_engine, "--baseline", missing).says(f"there is no {missing}", code=2)
    build("quality", "--engine", llama_engine, "--baseline", llama_engine, "--compare", "int3").says(
        "--compare 'int3'", code=2
    )
    build("quality", "--engine", llama_engine, "--baseline", llama_engine, "--compare", "int8").says(
        "built of a model", code=2
    )


def test_a_suite_that_is_none_stops_a_build_before_it_begins(
    tiny_llama_path: Path, build: Callable[..., Done], tmp_path: Path
) -> None:
    (tmp_path / "suite.yaml").write_text("name: mine\n", encoding="utf-8")
    asked = ("--model", tiny_llama_path, "--no-calib", "--report")
    build(*asked, "quick", "--suite", tmp_path / "suite.yaml").says("not a valid suite", "default.yaml")
    build(*asked, "quick", "--suite", tmp_path / "none.yaml").says("is no file", "default.yaml", code=2)
    build(*asked, "long").says("unknown --report 'long'", "none, quick, full", code=2)
    assert not (tmp_path / "engines").exists()


@pytest.fixture
def llama_engine(tiny_llama_path: Path, tmp_path: Path, build: Callable[..., Done]) -> Path:
    return Path(
        build("--model", tiny_llama_path, "--no-calib", "--precision", "int8", "--out", tmp_path / "e").out.strip()
    )
