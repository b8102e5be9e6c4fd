"""The command line of `trtllm-build`, and what is made of its log and its end."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import psutil
import pytest

from harness.build.tensorrt_llm.limits import EngineLimits
from harness.build.tensorrt_llm.trtllm_build import (
    EngineOptions,
    Lookahead,
    build_command,
    build_flags,
    is_fallback,
    run_trtllm_build,
)
from harness.errors import BuildError, UsageError

LIMITS = EngineLimits(max_batch_size=64, max_num_tokens=8192, max_input_len=32768, max_seq_len=32768)
GOLDEN = (
    "--max_batch_size 64 --max_num_tokens 8192 --max_input_len 32768 --max_seq_len 32768 --max_beam_width 1 "
    "--kv_cache_type paged --tokens_per_block 32 --remove_input_padding enable --context_fmha enable "
    "--use_paged_context_fmha enable --gpt_attention_plugin auto --gemm_plugin auto --multiple_profiles enable"
)


def test_every_limit_is_explicit() -> None:
    command = build_command(Path("c"), Path("e"), build_flags(LIMITS, EngineOptions()), num_workers=2)
    assert " ".join(command) == (
        f"trtllm-build --checkpoint_dir c --output_dir e --workers 2 --log_level info {GOLDEN}"
    )


def test_lookahead_is_by_flag_with_the_drafts_it_needs() -> None:
    flags = " ".join(build_flags(LIMITS, EngineOptions(lookahead=Lookahead.parse("7,7,7"))))
    # 83 is what TensorRT-LLM's own documentation gives for these sizes
    assert flags == f"{GOLDEN} --speculative_decoding_mode lookahead_decoding --max_draft_len 83"


def test_int8_kv_switches_paged_context_off_openly() -> None:
    flags = build_flags(LIMITS, EngineOptions(paged_context=False))
    assert flags[flags.index("--use_paged_context_fmha") + 1] == "disable"


def test_logits_of_prompts_and_drafts_exclude_each_other() -> None:
    assert "--gather_context_logits" in build_flags(LIMITS, EngineOptions(context_logits=True))
    with pytest.raises(UsageError, match="exclude each other"):
        EngineOptions(context_logits=True, lookahead=Lookahead.parse("2,2,2"))


def test_lookahead_without_a_verification_set_can_be_run() -> None:
    assert Lookahead.parse("4,3,0").num_draft_tokens == 7


@pytest.mark.parametrize(
    "text", ["7", "7,7", "7,7,7,7", "0,7,7", "65,2,2", "5,1,3", "1,1,0", "a,b,c", "7, 7, 7", "-1,2,3"]
)
def test_lookahead_is_three_small_numbers(text: str) -> None:
    with pytest.raises(UsageError, match="is not W,N,G"):
        Lookahead.parse(text)


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("[TRT-LLM] [W] Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.", True),
        ("[TensorRT-LLM][WARNING] Fall back to unfused MHA for data_type = bf16 in sm_103.", True),
        ("[TensorRT-LLM][WARNING] Falling back to the default kernel", True),
        ("[TRT-LLM] [W] Context FMHA is disabled, FP8 Context FMHA and Paged Context FMHA are disabled.", True),
        ("[TRT-LLM] [W] Overriding paged_state to False", False),
        ("[TRT-LLM] [W] Overriding reduce_fusion to False", False),
        ("[TRT-LLM] [I] Total time of building all engines: 00:01:09", False),
        ("[TRT-LLM] [I] Set context_fmha to True.", False),
    ],
)
def test_lines_that_tell_of_something_given_up_are_known(line: str, is_one: bool) -> None:
    assert is_fallback(line) is is_one


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the front of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def program(folder: Path, script: str) -> list[str]:
    path = folder / "trtllm-build"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return ["trtllm-build"]


def test_the_log_is_kept_and_searched(builder: Path) -> None:
    said = "echo one; echo 'Fall back to unfused MHA' >&2; echo 'Fall back to unfused MHA'; printf 'caf\\351\\n'"
    seen: list[str] = []
    found = run_trtllm_build(program(builder, said), builder / "log", seen.append)
    assert found == ["Fall back to unfused MHA"]
    assert len(seen) == 4
    assert (builder / "log").read_text("utf-8").splitlines()[0] == "one"


def test_a_failure_shows_the_last_lines(builder: Path) -> None:
    with pytest.raises(BuildError, match="exit code 3") as refused:
        run_trtllm_build(program(builder, "seq 30; echo no space for tactic; exit 3"), builder / "log", lambda _: None)
    assert "no space for tactic" in refused.value.message
    assert "\n       19\n" not in refused.value.message


def test_a_builder_that_was_killed_points_at_memory(builder: Path) -> None:
    with pytest.raises(BuildError, match="want of host memory"):
        run_trtllm_build(program(builder, "kill -9 $$"), builder / "log", lambda _: None)


def test_a_builder_that_is_not_there_points_at_the_doctor(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="not on PATH") as refused:
        run_trtllm_build(["trtllm-build"], tmp_path / "log", lambda _: None)
    assert "harness-build doctor" in refused.value.hint


def test_workers_that_heed_no_signal_are_killed(builder: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    worker = f"sh -c 'trap \"\" TERM; echo $$ > {builder}/pid; echo begun; while true; do sleep 0.1; done'"
    with pytest.raises(KeyboardInterrupt):
        run_trtllm_build(program(builder, f"{worker} & wait"), builder / "log", interrupt)
    pid = int((builder / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupted_builder_does_not_go_on_alone(builder: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    command = program(builder, f"trap 'touch {builder}/ended; exit' TERM; echo begun; while true; do sleep 0.1; done")
    with pytest.raises(KeyboardInterrupt):
        run_trtllm_build(command, builder / "log", interrupt)
    assert (builder / "ended").exists()
