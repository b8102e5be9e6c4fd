"""scripts/gpu-acceptance without a GPU: its dry run as users run it, its verdicts, and its checks on a real server."""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from preset_engine import build_preset_engine
from small_quantized import calibration_of, draw_set

from harness.build.checkpoint import open_checkpoint
from harness.build.tensorrt_llm.checkpoint import build_trtllm_checkpoint
from harness.calib.calibrate import Goal, calibrate
from harness.recipe import load_recipe

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "acceptance"


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The modules of scripts/acceptance, which lie outside of the package."""
    names = ("acceptance", "asking", "checks", "load", "plan", "report", "servers", "steps", "tools")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def servers(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("report")
    (folder / "logs").mkdir()
    with scripts.servers.Servers(folder, ready_s=60) as servers:
        yield servers


@pytest.fixture(scope="module")
def cpu_engine(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preset_engine(tiny_llama_path, tmp_path_factory.mktemp("engine") / "int8", "int8")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: matrices this small only wait for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def calibrated(model: Path, variant: Any) -> None:
    """What the checkpoint step of a variant leaves, made in this process, which has torch already."""
    variant.folder.mkdir(parents=True)
    copy = shutil.copytree(model, variant.folder / "tiny-llama")
    calibration = calibration_of(copy, draw_set(copy, num_samples=8, max_tokens=32))
    quantized = open_checkpoint(calibrate(calibration, Goal(recipe=load_recipe(Path(variant.source[-1])))))
    build_trtllm_checkpoint(quantized, quantized.recipe, engines_dir=variant.folder, out=variant.checkpoint)
    variant.note()


@pytest.mark.usefixtures("one_thread")
def test_the_dry_run_does_all_that_needs_no_gpu_and_lists_the_rest(
    scripts: SimpleNamespace, tiny_llama_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    for name in ("mixed", "int8"):
        source = ("--model", str(tiny_llama_path), "--recipe", str(SCRIPTS / "recipes" / f"{name}.yaml"))
        calibrated(tiny_llama_path, scripts.tools.Variant(name=name, work=out / "work", source=source))
    command = [sys.executable, str(SCRIPTS / "acceptance.py"), "--dry-run", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    report = json.loads((out / "report.json").read_text("utf-8"))
    steps = {step["name"]: step for step in report["steps"]}
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out / 'report.md'}\n"
    assert report["verdict"] == "pass"
    assert report["int4_and_int8_in_one_engine"] == "not known: needs a GPU"
    by_verdict = {v: [s["name"] for s in steps.values() if s["verdict"] == v] for v in ("pass", "fail", "skipped")}
    assert by_verdict["fail"] == ["doctor"]
    assert "TensorRT-LLM 1.2.1" in steps["doctor"]["reason"]
    assert steps["doctor"]["tolerated"]
    assert by_verdict["skipped"] == []
    assert {"int8-kv-checkpoint", "pytorch-folder", "builder-arguments", "rehearsal"} <= set(by_verdict["pass"])
    assert steps["mixed-checkpoint"]["findings"] == {"found": "made by a former run"}
    arguments = steps["builder-arguments"]["findings"]
    assert arguments.keys() == {"mixed", "int4", "int8", "int8-kv", "lookahead"}
    assert "--use_paged_context_fmha disable" in arguments["int8-kv"]
    assert "--speculative_decoding_mode lookahead_decoding" in arguments["lookahead"]
    assert steps["rehearsal"]["findings"]["prefix_reuse"]["again"] > 0
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(out) in str(process.info["cmdline"])]

    page = (out / "report.md").read_text("utf-8")
    for step in steps.values():
        assert step["name"] in page
        assert (step["log"] is None) == (step["verdict"] == "not run")
        assert step["log"] is None or (out / step["log"]).is_file()
    left = shlex.split(steps["mixed-engine"]["command"])
    assert left[left.index("--stage") + 1] == "engine"
    assert left[left.index("--checkpoint") + 1] == str(out / "work" / "mixed" / "trtllm")
    assert list(steps).index("mixed-engine") == min(
        number for number, step in enumerate(steps.values()) if step["verdict"] == "not run"
    )


@pytest.fixture
def step(scripts: SimpleNamespace) -> Callable[..., Any]:
    def make(name: str, run: Callable[[Any], dict[str, Any]] = lambda log: {}, **fields: Any) -> Any:
        return scripts.steps.Step(name=name, what=f"{name} works", command=lambda: f"do {name}", run=run, **fields)

    return make


def test_a_failed_step_ends_only_those_that_need_it(
    scripts: SimpleNamespace, step: Callable[..., Any], tmp_path: Path
) -> None:
    def refuse(log: Any) -> dict[str, Any]:
        raise scripts.steps.StepFailed("3 of 4 are wrong", {"wrong": 3})

    def stumble(log: Any) -> dict[str, Any]:
        raise KeyError("usage")

    steps = [
        step("refused", refuse),
        step("stumbled", stumble),
        step("after-it", needs=("refused",)),
        step("after-that", needs=("after-it",)),
        step("alone", lambda log: {"seen": log.write("hello\n")}),
        step("tolerated", refuse, tolerated="it may"),
        step("on-a-gpu", needs=("refused",), gpu=True),
    ]
    results = scripts.steps.run_steps(steps, tmp_path, has_gpu=False, on_result=lambda results: None)
    assert [result.verdict for result in results] == ["fail", "fail", "skipped", "skipped", "pass", "fail", "not run"]
    assert [result.fails_the_run for result in results] == [True, True, *[False] * 5]
    assert results[0].findings == {"wrong": 3}
    assert results[1].reason == "KeyError: 'usage'"
    assert "Traceback" in (tmp_path / results[1].log).read_text()
    assert "refused" in results[2].reason
    assert (tmp_path / results[4].log).read_text().startswith("hello\n")


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_the_exit_code_is_the_verdict(
    fails: bool,
    code: int,
    scripts: SimpleNamespace,
    step: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(log: Any) -> dict[str, Any]:
        if fails:
            raise scripts.steps.StepFailed("no")
        return {}

    monkeypatch.setattr(scripts.acceptance, "plan", lambda wishes, servers: [step("first", run), step("second")])
    monkeypatch.setattr(scripts.acceptance.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gpu-acceptance", "--out", str(tmp_path / "out"), "--bits", "4.25"])
    assert scripts.acceptance.main() == code
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"] == ("fail" if fails else "pass")
    assert [s["verdict"] for s in report["steps"]] == ["fail" if fails else "pass", "pass"]
    assert "--bits 4.25" in (tmp_path / "out" / "report.md").read_text()


def test_a_run_that_is_cut_off_leaves_an_unfinished_report(
    scripts: SimpleNamespace, step: Callable[..., Any], tmp_path: Path
) -> None:
    def interrupted(log: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    def keep(results: list[Any]) -> None:
        scripts.report.write_report(tmp_path, results, {"machine": {}, "flags": ""}, is_whole=len(results) == 2)

    with pytest.raises(KeyboardInterrupt):
        scripts.steps.run_steps([step("done"), step("cut", interrupted)], tmp_path, has_gpu=True, on_result=keep)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "unfinished"
    assert [s["name"] for s in report["steps"]] == ["done"]


def test_a_command_that_hangs_is_stopped_with_all_it_started(scripts: SimpleNamespace, tmp_path: Path) -> None:
    program = "sleep 600 & echo $! >&2; wait"
    with (tmp_path / "log").open("w") as log, pytest.raises(scripts.steps.StepFailed, match="took more than 2 s"):
        scripts.steps.run_command(["sh", "-c", program], log, cwd=tmp_path, timeout_s=2)
    child = int((tmp_path / "log").read_text().split()[-1])
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_failed_command_is_told_by_its_error(scripts: SimpleNamespace, tmp_path: Path) -> None:
    program = "echo loading; echo 'error: it is too small' >&2; echo '  -> take a larger one' >&2; exit 1"
    with (tmp_path / "log").open("w") as log, pytest.raises(scripts.steps.StepFailed) as failed:
        scripts.steps.run_command(["sh", "-c", program], log, cwd=tmp_path, timeout_s=60)
    assert str(failed.value).startswith("exit code 1: error: it is too small / -> take a larger one")


def test_a_checkpoint_is_found_again_only_for_the_same_flags(scripts: SimpleNamespace, tmp_path: Path) -> None:
    def variant(*source: str, **fields: Any) -> Any:
        return scripts.tools.Variant(name="model", work=tmp_path, source=source, **fields)

    first = variant("--model", "/here/model", "--bits", "4.5")
    first.checkpoint.mkdir(parents=True)
    assert not first.is_made()
    (first.checkpoint / "trtllm-checkpoint.json").touch()
    first.note()
    assert variant("--model", "/copied/there/model", "--bits", "4.5").is_made()
    assert not variant("--model", "/here/model", "--bits", "5").is_made()
    assert not variant("--model", "/here/other", "--bits", "4.5").is_made()
    assert not variant("--model", "/here/model", "--bits", "4.5", tp=2).is_made()


def test_a_server_that_dies_is_told_by_its_log(scripts: SimpleNamespace, servers: Any) -> None:
    dying = [sys.executable, "-c", "print('error: wrong arch'); raise SystemExit(1)"]
    with pytest.raises(scripts.steps.StepFailed, match=r"exit code 1 .*error: wrong arch"):
        servers.only("dying", lambda port: dying)


def answers(*first: str) -> list[tuple[str, str]]:
    return [(token, f"{token} and more") for token in first]


def test_an_engine_whose_answers_are_others_fails(scripts: SimpleNamespace) -> None:
    compare, expected = scripts.checks.compare_answers, answers("a", "b", "c", "d")
    assert compare(answers("a", "b", "c", "x"), expected)["equal_first_tokens"] == 0.75
    with pytest.raises(scripts.steps.StepFailed, match="25% of the first tokens"):
        compare(answers("a", "x", "x", "x"), expected)
    with pytest.raises(scripts.steps.StepFailed, match="every answer is empty"):
        compare([("", " ")] * 4, [("", " ")] * 4)


def test_a_server_passes_the_checks_of_what_it_does_and_no_others(
    scripts: SimpleNamespace, servers: Any, cpu_engine: Path
) -> None:
    checks, failed = scripts.checks, scripts.steps.StepFailed
    server = servers.only("cached", scripts.tools.serve(cpu_engine))
    assert servers.only("cached", scripts.tools.serve(cpu_engine)) is server
    found = checks.prefix_reuse(server)
    assert found == {"cold": 0, "again": 1024, "other_tenant": 0, "other_tenant_again": 1024}
    with pytest.raises(failed, match="an engine without reuse"):
        checks.prefix_reuse(server, expected=False, prefix_len=512)
    assert checks.streaming(server)["events"] > 3
    assert checks.cancellation(server)["blocks_free"] > 0
    assert checks.in_flight_batching(server, most_time=math.inf)["most_running"] == 8
    with pytest.raises(failed, match="as long as one after another"):
        checks.in_flight_batching(server, num_tokens=32, most_time=0.01)
    with pytest.raises(failed, match="gpu_memory"):
        checks.gpu_memory(server)

    server = servers.only("uncached", scripts.tools.serve(cpu_engine, "--no-prefix-cache", "--max-num-seqs", "1"))
    assert checks.prefix_reuse(server, expected=False)["again"] == 0
    with pytest.raises(failed, match="of 1024 tokens sent again, 0 were reused"):
        checks.prefix_reuse(server)
    with pytest.raises(failed, match="never was above 1"):
        checks.in_flight_batching(server, num_tokens=64)


def test_two_servers_are_compared_in_rounds(scripts: SimpleNamespace, servers: Any, cpu_engine: Path) -> None:
    ours = servers.only("ours", scripts.tools.serve(cpu_engine))
    theirs = servers.beside("theirs", scripts.tools.serve(cpu_engine, "--max-model-len", "180"))
    found = scripts.load.compare(ours, theirs, concurrencies=(1, 4), rounds=2, num_tokens=32)
    assert found.keys() == {"1", "4"}
    assert len(found["4"]["samples"]) == 2
    figures = found["4"]["ttft_ms"]
    assert figures["ratio_min"] <= figures["ratio"] <= figures["ratio_max"]
    assert (
        min(figures["ours"], figures["theirs"], found["1"]["tpot_ms"]["ours"], found["1"]["tokens_per_s"]["ours"]) > 0
    )
    with pytest.raises(scripts.steps.StepFailed, match="a stream of theirs did not end with 64 tokens"):
        scripts.load.compare(ours, theirs, concurrencies=(1,), rounds=1, num_tokens=64)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("given", ["nothing", "model", "quantized", "trtllm"])
def test_every_step_needs_only_steps_before_it(
    given: str, dry_run: bool, scripts: SimpleNamespace, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    if given == "trtllm":
        (checkpoint / "trtllm-checkpoint.json").touch()
    wishes = scripts.plan.Wishes(
        arch="sm_90",
        work=tmp_path,
        dry_run=dry_run,
        model="some/model" if given == "model" else None,
        checkpoint=checkpoint if given in ("quantized", "trtllm") else None,
        recipe=None,
        bits="4.5",
        tp=2,
        calib_flags=("--calib", "traffic.jsonl"),
        calib_bin=None,
        rounds=1,
        timeout_s=1,
    )
    steps = scripts.plan.plan(wishes, SimpleNamespace())
    before: set[str] = set()
    for step in steps:
        assert before.issuperset(step.needs), step.name
        assert step.name not in before
        before.add(step.name)
    gpu = [step.name for step in steps if step.gpu]
    assert gpu[0] == "mixed-engine"
    assert not [step.name for step in steps if not step.gpu and set(step.needs) & set(gpu)]
    by_name = {step.name: step for step in steps}
    assert ("model-checkpoint" in before) == (given in ("model", "quantized"))
    assert ("model-engine" in before) == (given != "nothing")
    if "model-checkpoint" in before:
        assert "--tp 2" in by_name["model-checkpoint"].command()
        assert "--tp 1" in by_name["mixed-checkpoint"].command()
    assert ("rehearsal" in before) == dry_run


def test_steps_that_ask_a_gpu_engine_pass_on_a_cpu_engine_in_its_place(
    scripts: SimpleNamespace,
    servers: Any,
    step: Callable[..., Any],
    cpu_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_cpu(engine: Path, *flags: str, **gpu: Any) -> Callable[[int], list[str]]:
        assert flags in ((), ("--gpu-memory-fraction", "0.4"))  # which a CPU engine refuses
        return serve(engine)

    serve = scripts.tools.serve
    monkeypatch.setattr(scripts.asking, "serve", on_cpu)
    monkeypatch.setattr(scripts.asking, "trtllm_serve", lambda engine, tokenizer, **gpu: serve(engine))
    monkeypatch.setattr(scripts.asking, "TRTLLM_READY", "/ready")
    monkeypatch.setattr(scripts.asking, "CONCURRENCIES", (1, 2))
    variants = [scripts.tools.Variant(name=name, work=tmp_path) for name in ("int4", "lookahead")]
    for variant in variants:
        shutil.copytree(cpu_engine, variant.engine)
    plain, ahead = variants
    plain.cpu_engine.symlink_to(plain.engine)
    ask = scripts.asking.Asking(servers, rounds=1)
    made = [step(f"{name}") for name in ("int4-cpu-engine", "int4-engine", "lookahead-engine")]
    asked = [
        ask.cpu_answers(plain),
        ask.answers(plain),
        ask.lookahead_is_greedy(ahead, plain),
        *ask.serving(plain)[1:],
        ask.speed(plain),
    ]
    results = scripts.steps.run_steps([*made, *asked], tmp_path, has_gpu=True, on_result=lambda results: None)
    by_name = {result.name: result for result in results}
    failed = {name: result.reason for name, result in by_name.items() if result.verdict != "pass"}
    assert failed == {"gpu-memory": "harness_gpu_memory_used_bytes is not among the metrics"}
    assert by_name["int4-answers"].findings["equal_first_tokens"] == 1
    assert by_name["lookahead-is-greedy"].findings["prompts"] > 8
    assert by_name["speed"].findings["2"]["tokens_per_s"]["ours"] > 0
    tokenizer = json.loads((plain.folder / "tokenizer" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_trtllm_serve_gets_the_limits_of_the_engine(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(tp_size=2, max_batch_size=64, max_num_tokens=4096)
    manifest = SimpleNamespace(gpu=gpu, max_model_len=2048)
    monkeypatch.setattr(scripts.tools, "read_manifest", lambda folder: manifest)
    command = scripts.tools.trtllm_serve(tmp_path, tmp_path / "tokenizer", memory_fraction=0.4)(1234)
    given = dict(zip(command[3::2], command[4::2], strict=True))
    assert command[1:3] == ["serve", str(tmp_path)]
    assert given == {
        "--backend": "tensorrt",
        "--tokenizer": str(tmp_path / "tokenizer"),
        "--host": "127.0.0.1",
        "--port": "1234",
        "--tp_size": "2",
        "--max_batch_size": "64",
        "--max_num_tokens": "4096",
        "--max_seq_len": "2048",
        "--kv_cache_free_gpu_memory_fraction": "0.4",
    }
    manifest.gpu = None
    with pytest.raises(scripts.steps.StepFailed, match="is not an engine for GPUs"):
        scripts.tools.trtllm_serve(tmp_path, tmp_path, memory_fraction=0.4)


@pytest.mark.parametrize(
    ("built", "answered", "words"),
    [
        ("pass", "pass", "yes: "),
        ("pass", "fail", "its answers are not right"),
        ("fail", "skipped", r"no: no kernel.*int4 alone: pass, int8 alone: fail.*--recipe .*int4\.yaml"),
        ("skipped", "skipped", "not known"),
    ],
)
def test_the_open_question_is_answered_in_a_sentence(
    built: str, answered: str, words: str, scripts: SimpleNamespace
) -> None:
    verdicts = {"mixed-engine": built, "mixed-answers": answered, "int4-engine": "pass", "int8-engine": "fail"}
    results = [
        scripts.steps.Result(name=name, what="", verdict=verdict, reason="no kernel")
        for name, verdict in verdicts.items()
    ]
    assert re.search(words, scripts.report.mixed_verdict(results))
    assert re.search(r"not known", scripts.report.mixed_verdict([]))
