"""From a model to a GPU engine by the command line, with programs in the places of the driver and of `trtllm-build`."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import Done
from fake_nvml import FakeGpu, a100, h100, install
from trtllm_models import LLAMA, MIXED, recipe_of, write_model, write_quantized

from harness.manifest import EngineManifest, read_manifest, verify_files
from harness.tokenizer import TokenizerFiles

Build = Callable[..., Done]
FAKE = Path(__file__).with_name("fake_trtllm_build.py")


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine one with GPUs and TensorRT-LLM."""

    def make(*gpus: FakeGpu) -> None:
        install(monkeypatch, *gpus)
        programs = tmp_path / "programs"
        programs.mkdir(exist_ok=True)
        builder = programs / "trtllm-build"
        builder.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} "$@"\n')
        builder.chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=":")
        versions = {"tensorrt-llm": "1.2.1", "tensorrt": "10.14.1.48"}
        monkeypatch.setattr("harness.build.tensorrt_llm.request.missing_for_engines", list)
        monkeypatch.setattr("harness.build.tensorrt_llm.request.installed", versions.get)

    return make


@pytest.fixture
def model(tiny_llama_path: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_llama_path, path)
    return path


@pytest.fixture
def quantized_llama(tmp_path: Path, make_tokenizer: Callable[..., TokenizerFiles]) -> Path:
    """A quantized checkpoint of a random model."""
    model = write_model(tmp_path / "random", LLAMA, make_tokenizer())
    return write_quantized(model, tmp_path / "quantized", recipe_of(*MIXED))


def engine_of(done: Done, folder: Path) -> tuple[Path, EngineManifest]:
    assert done.code == 0, done.err
    path = folder / done.out.strip()
    manifest = read_manifest(path)
    verify_files(path, manifest)
    return path, manifest


def test_one_command_builds_where_the_gpu_is(
    build: Build, model: Path, gpu_machine: Callable[..., None], tmp_path: Path
) -> None:
    gpu_machine(h100(0))
    done = build("--model", model, "--precision", "f16", "--arch", "native", "--max-batch-size", 16)
    path, manifest = engine_of(done, tmp_path)
    assert path.name == f"sm_90-{manifest.engine_id}"
    assert (manifest.arch, manifest.backend) == ("sm_90", "tensorrt-llm")
    assert manifest.versions["tensorrt_llm"] == "1.2.1"
    assert manifest.versions["tensorrt"] == "10.14.1.48"
    assert manifest.max_model_len == 2048
    assert manifest.weight_bytes() > 0
    gpu = manifest.gpu
    assert gpu is not None
    assert (gpu.max_batch_size, gpu.num_ranks, gpu.kv_dtype) == (16, 1, "bfloat16")
    assert gpu.prefix_reuse
    assert gpu.chunked_context
    assert not gpu.context_logits
    assert "--max_input_len" in gpu.build_flags
    assert not any(str(tmp_path) in flag for flag in gpu.build_flags)
    assert {"tokenizer.json", "build.log", "config.json", "rank0.engine"} <= manifest.files.keys()
    assert "harness-run server --engine" in done.err
    again = build("--model", model, "--precision", "f16", "--arch", "sm_90", "--max-batch-size", 16)
    assert again.out == done.out
    assert "found for sm_90" in again.err


def test_two_halves_on_two_machines_make_the_same_engine(
    build: Build, model: Path, gpu_machine: Callable[..., None], tmp_path: Path
) -> None:
    asked = ("--precision", "f16", "--arch", "sm_90", "--tp", 2)
    left = build("--model", model, *asked)
    assert left.code == 0
    assert "the engine is left to do" in left.err
    assert "--stage engine --checkpoint" in left.err
    ahead = build("--model", model, *asked, "--lookahead", "7,7,7", "--max-batch-size", 3, "--out", "my engine")
    command = next(line for line in ahead.err.splitlines() if "--stage engine" in line)
    assert shlex.split(command)[-6:] == ["--lookahead", "7,7,7", "--max-batch-size", "3", "--out", "my engine"]
    half = build("--model", model, *asked, "--stage", "checkpoint")
    assert half.out == left.out
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / half.out.strip(), copied)
    shutil.rmtree(model)
    gpu_machine(h100(0), h100(1))
    done = build("--arch", "sm_90", "--stage", "engine", "--checkpoint", copied)
    _, manifest = engine_of(done, tmp_path)
    assert manifest.gpu is not None
    assert manifest.gpu.num_ranks == 2
    assert {"rank0.engine", "rank1.engine"} <= manifest.files.keys()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "4"], ["--tp is 4", "made with 2"]),
        (["--kv-cache-dtype", "int8"], ["--kv-cache-dtype is int8", "made with auto"]),
    ],
)
def test_flags_that_the_checkpoint_has_decided_otherwise_are_refused(
    flags: list[str], words: list[str], build: Build, model: Path, gpu_machine: Callable[..., None]
) -> None:
    half = build("--model", model, "--precision", "f16", "--arch", "sm_90", "--tp", 2, "--stage", "checkpoint")
    gpu_machine(h100(0), h100(1))
    asked = ("--arch", "sm_90", "--stage", "engine", "--checkpoint", half.out.strip())
    build(*asked, *flags).says(*words, code=2)


def test_a_checkpoint_is_not_made_again(build: Build, model: Path) -> None:
    half = build("--model", model, "--precision", "f16", "--arch", "sm_90", "--stage", "checkpoint").out.strip()
    asked = ("--checkpoint", half, "--arch", "sm_90", "--stage", "checkpoint")
    build(*asked, "--out", "other").says("a TensorRT-LLM checkpoint already", "--stage engine", code=2)
    build(*asked, "--tp", 4).says("--tp is 4", "made with 1", code=2)


def test_an_engine_with_an_int8_kv_cache_says_what_it_lost(
    build: Build, gpu_machine: Callable[..., None], tmp_path: Path, quantized_llama: Path
) -> None:
    asked = ("--checkpoint", quantized_llama, "--arch", "sm_90", "--kv-cache-dtype", "int8")
    left = build(*asked)
    assert "no reuse of prefixes" in left.err
    command = next(line for line in left.err.splitlines() if "--stage engine" in line)
    gpu_machine(h100(0))
    done = build(*shlex.split(command)[1:])
    _, manifest = engine_of(done, tmp_path)
    assert "no reuse of prefixes" in done.err
    assert manifest.gpu is not None
    assert manifest.gpu.kv_dtype == "int8"
    assert not manifest.gpu.prefix_reuse
    assert not manifest.gpu.chunked_context
    assert manifest.gpu.max_input_len <= manifest.gpu.max_num_tokens


def test_forged_records_are_refused(build: Build, model: Path, gpu_machine: Callable[..., None]) -> None:
    half = Path(build("--model", model, "--precision", "f16", "--arch", "sm_90", "--stage", "checkpoint").out.strip())
    gpu_machine(h100(0))
    record = half / "trtllm-checkpoint.json"
    written = json.loads(record.read_text("utf-8"))
    for change, words in (
        ({"tp_size": 10**9, "pp_size": 10**9}, ["tp_size"]),
        ({"tp_size": 2}, ["lists no rank1"]),
        ({"kv_dtype": "int8"}, ["kv_cache_quant_algo", "was recorded"]),
        ({"dtype": "float16"}, ["dtype of config.json is 'bfloat16'"]),
        ({"recipe": written["recipe"] | {"layers": {"nonsense": "int4-g128"}}}, ["its recipe is not of this"]),
    ):
        record.write_text(json.dumps(written | change), encoding="utf-8")
        build("--arch", "sm_90", "--stage", "engine", "--checkpoint", half).says(*words)


def test_a_name_in_a_record_is_no_path(
    build: Build, model: Path, gpu_machine: Callable[..., None], tmp_path: Path
) -> None:
    half = Path(build("--model", model, "--precision", "f16", "--arch", "sm_90", "--stage", "checkpoint").out.strip())
    record = half / "trtllm-checkpoint.json"
    written = json.loads(record.read_text("utf-8"))
    written["model"]["name"] = "../../evil"
    record.write_text(json.dumps(written), encoding="utf-8")
    gpu_machine(h100(0))
    path, _ = engine_of(build("--arch", "sm_90", "--stage", "engine", "--checkpoint", half), tmp_path)
    assert path.parent.parent == tmp_path / "engines"


@pytest.mark.parametrize(
    "damage",
    ["del built['max_batch_size']", "built['max_num_tokens'] = '8192'", "del built['plugin_config']"],
)
def test_an_engine_that_is_not_as_known_is_refused(
    damage: str, build: Build, model: Path, gpu_machine: Callable[..., None], tmp_path: Path
) -> None:
    gpu_machine(h100(0))
    path = tmp_path / "programs" / "fake.py"
    path.write_text(FAKE.read_text("utf-8").replace("    for rank in range(", f"    {damage}\n    for rank in range("))
    builder = tmp_path / "programs" / "trtllm-build"
    builder.write_text(builder.read_text().replace(str(FAKE), str(path)))
    done = build("--model", model, "--precision", "f16", "--arch", "sm_90")
    assert done.code == 1
    assert "not as known" in done.err
    assert not list(tmp_path.glob("engines/*/sm_90-*"))


def test_what_is_drafted_and_measured_stands_in_the_manifest(
    build: Build, model: Path, gpu_machine: Callable[..., None], tmp_path: Path
) -> None:
    gpu_machine(a100(0))
    asked = ("--model", model, "--precision", "f16", "--arch", "sm_80")
    _, ahead = engine_of(build(*asked, "--lookahead", "7,7,7", "--max-batch-size", 4), tmp_path)
    assert ahead.gpu is not None
    assert ahead.gpu.lookahead == (7, 7, 7)
    assert ahead.gpu.max_num_tokens >= 4 * 84
    _, measured = engine_of(build(*asked, "--context-logits"), tmp_path)
    assert measured.gpu is not None
    assert measured.gpu.context_logits
    assert measured.engine_id != ahead.engine_id


def test_an_engine_that_cannot_be_measured_says_what_is_missing(
    build: Build, model: Path, gpu_machine: Callable[..., None], tmp_path: Path
) -> None:
    gpu_machine(h100(0))
    asked = ("--model", model, "--precision", "f16", "--arch", "sm_90", "--report", "quick")
    done = build(*asked)
    engine_of(done, tmp_path)
    assert "quality: not_run, no f16 engine of the same weights lies beside" in done.err
    refused = build(*asked, "--baseline", model)
    assert (refused.code, refused.out) == (2, done.out)
    assert "not built on the way" in refused.err
    assert "--context-logits" in refused.err


@pytest.mark.parametrize(
    ("gpus", "flags", "code", "words"),
    [
        ([a100(0)], ["--arch", "sm_86"], 1, ["sm_86", "A10", "A100", "sm_80", "--arch sm_80"]),
        ([h100(0)], ["--arch", "sm_90", "--tp", "2"], 1, ["2 ranks", "1 are visible"]),
        ([h100(0), a100(1)], ["--arch", "native"], 1, ["not of one arch", "--arch"]),
    ],
    ids=["another arch", "too few", "mixed"],
)
def test_the_devices_that_are_here_must_fit(
    gpus: list[FakeGpu],
    flags: list[str],
    code: int,
    words: list[str],
    build: Build,
    model: Path,
    gpu_machine: Callable[..., None],
) -> None:
    gpu_machine(*gpus)
    if "native" not in flags:
        half = build("--model", model, "--precision", "f16", "--stage", "checkpoint", *flags)
        flags = [*flags, "--stage", "engine", "--checkpoint", half.out.strip()]
        build(*flags).says(*words, code=code)
    else:
        build("--model", model, "--precision", "f16", *flags).says(*words, code=code)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "2"], ["--tp is of GPU engines"]),
        (["--context-logits"], ["--context-logits is of GPU engines"]),
        (["--arch", "sm_90", "--stage", "half"], ["unknown --stage 'half'", "all, checkpoint, engine"]),
        (["--arch", "sm_90", "--backend", "onnx"], ["unknown --backend", "trtllm-pytorch"]),
        (["--arch", "sm_90", "--tp", "0"], ["--tp is 0"]),
        (["--arch", "sm_90", "--lookahead", "7"], ["is not W,N,G"]),
        (["--arch", "sm_90", "--lookahead", "2,2,2", "--context-logits"], ["exclude each other"]),
        (["--arch", "sm_90", "--backend", "trtllm-pytorch", "--pp", "2"], ["--pp is of engines"]),
        (["--arch", "sm_90", "--stage", "checkpoint", "--max-batch-size", "4"], ["--max-batch-size is of engines"]),
        (["--arch", "sm_90", "--tp", "65"], ["--tp is 65", "1 to 64"]),
        (["--arch", "sm_90", "--stage", "engine"], ["builds from a TensorRT-LLM checkpoint"]),
        (["--arch", "sm_100"], ["sm_100 (B200, GB200)", "--precision f16"]),
        (["--arch", "sm_999"], ["unknown arch 'sm_999'"]),
    ],
)
def test_flags_that_cannot_be_are_refused_before_any_work(
    flags: list[str], words: list[str], build: Build, model: Path, tmp_path: Path
) -> None:
    build("--model", model, "--no-calib", *flags).says(*words, code=2)
    assert not (tmp_path / "engines").exists()


def test_native_without_a_gpu_is_refused(build: Build, model: Path) -> None:
    build("--model", model, "--no-calib", "--arch", "native").says("no NVIDIA driver")
