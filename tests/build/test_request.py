"""What a user asks of `harness-build`: which flags go together, and every way from a model to a calibrated engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_process import Done, process
from small_quantized import LLAMA, V2, contents, write_traffic

from harness.calib import checkpoint as checkpoint_writer
from harness.manifest import EngineManifest, read_manifest

SaveModel = Callable[[transformers.PretrainedConfig], tuple[Path, transformers.PreTrainedModel]]
Build = Callable[..., Done]

CALIBRATION_FLAGS = (
    ("--calib", "t.jsonl"),
    ("--system-prompt", "s.txt"),
    ("--no-system-prompts",),
    ("--for", "cpu"),
    ("--optimize", "prefill"),
    ("--calib-samples", "128"),
    ("--calib-tokens", "512"),
    ("--calib-device", "cpu"),
)
PRECISIONS = (("--precision", "int8"), ("--bits", "4.5"), ("--max-loss", "1%"), ("--recipe", "r.yaml"))
EXCLUSIONS = [
    *((*a, *b) for i, a in enumerate(PRECISIONS) for b in PRECISIONS[i + 1 :]),
    *(("--no-calib", *flag) for flag in (*CALIBRATION_FLAGS, PRECISIONS[1], PRECISIONS[2])),
    *(("--precision", "f16", *flag) for flag in CALIBRATION_FLAGS),
    ("--system-prompt", "s.txt", "--no-system-prompts"),
]
OF_A_CHECKPOINT = [("--model", "nowhere"), ("--no-calib",), *PRECISIONS[:3], *CALIBRATION_FLAGS]


@pytest.mark.parametrize("flags", EXCLUSIONS, ids=" ".join)
def test_flags_that_exclude_each_other(flags: tuple[str, ...], build: Build, tmp_path: Path) -> None:
    done = build("--model", "nowhere", *flags)
    named = [flag for flag in flags if flag.startswith("--")]
    done.says("exclude each other", "give one of them", *named, code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", OF_A_CHECKPOINT, ids=" ".join)
def test_a_checkpoint_is_lowered_as_it_is(flags: tuple[str, ...], build: Build) -> None:
    build("--checkpoint", "nowhere", *flags).says("--checkpoint and", flags[0], "quantized already", code=2)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--bits", "3.9"), 2, "--bits 3.9 is not between 4 and 16"),
        (("--bits", "16.5"), 2, "--bits 16.5 is not between 4 and 16"),
        (("--bits", "nan"), 2, "--bits nan is not between"),
        (("--max-loss", "1"), 2, "--max-loss '1' is not a percentage"),
        (("--max-loss", "0%"), 2, "not a percentage"),
        (("--max-loss", "101%"), 2, "not a percentage"),
        (("--max-loss", ""), 2, "not a percentage"),
        (("--for", "gpu"), 2, "unknown --for 'gpu'"),
        (("--optimize", "both"), 2, "unknown --optimize 'both'"),
        (("--optimize", "prefill", "--precision", "int4"), 2, "--optimize goes with --bits"),
        (("--optimize", "prefill", "--recipe", "r.yaml"), 2, "--optimize goes with --bits"),
        (("--calib-device", "tpu"), 2, "unknown --calib-device 'tpu'"),
        (("--calib-device", "cpu"), 1, "nothing at 'nowhere'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_bad_value_is_refused_before_the_model_is_looked_at(
    flags: tuple[str, ...], code: int, words: str, build: Build
) -> None:
    build("--model", "nowhere", *flags).says(words, code=code)


@pytest.mark.parametrize("flags", [("--calib-samples", "0"), ("--calib-tokens", "15"), ("--bits", "few")])
def test_a_number_out_of_range_is_refused(flags: tuple[str, ...], build: Build) -> None:
    done = build("--model", "nowhere", *flags)
    assert done.code == 2
    assert flags[0] in done.err


@pytest.fixture
def model(save_random_model: SaveModel, tmp_path: Path) -> Path:
    """A small Llama and traffic for it, in the folder that commands run in."""
    write_traffic(tmp_path / "t.jsonl")
    return save_random_model(LLAMA)[0]


QUICK = ("--model", "model", "--calib-samples", "8", "--calib-tokens", "32")
TRAFFIC = (*QUICK, "--calib", "t.jsonl")


def built(done: Done, folder: Path) -> EngineManifest:
    """The manifest of the engine of a build; its path is all that is on stdout."""
    assert done.code == 0, done.err
    engine = folder / done.out.removesuffix("\n")
    assert done.out == f"engines/model/{engine.name}\n"
    return read_manifest(engine)


def checkpoints(folder: Path) -> set[Path]:
    return set((folder / "engines" / "model").glob("quantized-*"))


def test_one_checkpoint_is_made_found_given_and_edited(build: Build, model: Path, tmp_path: Path) -> None:
    first = build(*TRAFFIC, "--bits", "5")
    manifest = built(first, tmp_path)
    (checkpoint,) = checkpoints(tmp_path)
    assert manifest.recipe.decoder_bits_per_weight <= 5
    assert manifest.calibration.checkpoint_id == checkpoint.name.removeprefix("quantized-")
    for words in ("8 samples of at most 32 tokens", "int8 layers are weight-only", str(checkpoint.name), "perplexity"):
        assert words in first.err
    engine = tmp_path / first.out.strip()
    seen = " ".join(build("inspect", "--engine", engine).out.split())
    assert "gptq on t.jsonl: 8 samples, 256 tokens, 100% with a system prompt" in seen
    assert str(manifest.calibration.checkpoint_id) in seen

    recipe = checkpoint / "recipe.yaml"
    for again in ((*TRAFFIC, "--bits", "5"), ("--checkpoint", checkpoint), (*TRAFFIC, "--recipe", recipe)):
        done = build(*again)
        assert (done.code, done.out) == (0, first.out), done.err
        assert "found for cpu" in done.err
    assert checkpoints(tmp_path) == {checkpoint}

    edited = recipe.read_text().replace("rules:\n", "rules:\n- match: '*.1.mlp.down_proj'\n  precision: f16\n")
    (tmp_path / "edited.yaml").write_text(edited)
    layers = built(build(*TRAFFIC, "--recipe", "edited.yaml"), tmp_path).recipe.layers
    down = "model.layers.1.mlp.down_proj"
    assert layers == manifest.recipe.layers | {down: "f16"}
    assert len(checkpoints(tmp_path)) == 2


def test_embeddings_do_not_make_another_checkpoint(build: Build, model: Path, tmp_path: Path) -> None:
    """They are stored in 16 bits whatever a recipe says of them, which is followed when an engine is lowered."""

    def write(name: str, embeddings: str, layers: str) -> str:
        rules = [{"match": "model.embed_tokens", "precision": embeddings}, {"match": "*", "precision": layers}]
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"version": 1, "name": name, "rules": rules}))
        return f"{name}.yaml"

    low, high = write("low", "int4-g64", "int8"), write("high", "f16", "int8")
    layers = {}
    for name in (low, high):
        manifest = built(build(*TRAFFIC, "--recipe", name), tmp_path)
        layers[name] = manifest.recipe.layers
        assert manifest.recipe.name == name.removesuffix(".yaml")
    (checkpoint,) = checkpoints(tmp_path)
    assert layers[high] == layers[low] | {"model.embed_tokens": "f16"}
    # the checkpoint's own recipe is the first; a search or a preset has its own embeddings
    for flags, expected in ((("--checkpoint", checkpoint), "int4-g64"), ((*TRAFFIC, "--precision", "int8"), "int8")):
        assert built(build(*flags), tmp_path).recipe.layers["model.embed_tokens"] == expected
    done = build("--checkpoint", checkpoint, "--recipe", high)
    assert built(done, tmp_path).recipe.layers == layers[high]
    assert "found for cpu" in done.err
    assert len(checkpoints(tmp_path)) == 1
    build("--checkpoint", checkpoint, "--recipe", write("other", "f16", "int4-g64")).says(
        "q_proj is int8 in the checkpoint", "the recipe asks for int4-g64", "embeddings and lm_head may differ"
    )


def test_a_rule_that_decides_nothing_is_told_before_calibration(build: Build, model: Path, tmp_path: Path) -> None:
    rules = [{"match": "*.q_prj", "precision": "f16"}, {"match": "*", "precision": "int8"}]
    (tmp_path / "r.yaml").write_text(json.dumps({"version": 1, "name": "misspelt", "rules": rules}))
    note = "note: the recipe's rule '*.q_prj' decides no layer of this model"
    told = build(*TRAFFIC, "--recipe", "r.yaml").err
    assert note in told[: told.index("quantizing")]
    (checkpoint,) = checkpoints(tmp_path)
    assert note in build("--checkpoint", checkpoint, "--recipe", "r.yaml").err
    assert note in build("--model", "model", "--no-calib", "--recipe", "r.yaml").err


def test_without_traffic_the_bundled_set_is_taken_and_named(build: Build, model: Path, tmp_path: Path) -> None:
    done = build(*QUICK)
    manifest = built(done, tmp_path)
    chosen = manifest.calibration.calibration_set
    assert chosen is not None
    assert chosen.label == "bundled default set"
    assert "bundled default set" in done.err
    assert f"{chosen.num_samples} samples of at most 32 tokens" in done.err
    assert set(manifest.recipe.layers.values()) == {"int8"}  # the default of a small model
    assert "bundled default set" in " ".join(build("inspect", "--engine", done.out.strip()).out.split())


def test_prefill_has_int8_activations_and_says_why(build: Build, model: Path, tmp_path: Path) -> None:
    done = build(*TRAFFIC, "--precision", "int8", "--optimize", "prefill")
    layers = built(done, tmp_path).recipe.layers
    assert {p for m, p in layers.items() if "layers" in m} == {"int8-a8"}
    assert "int8 layers are weight + activation: prefill is bound by" in done.err


def test_for_cpu(build: Build, model: Path, tmp_path: Path) -> None:
    rules = [{"match": "model.layers.*", "precision": "int4-g32-zp"}, {"match": "*", "precision": "int8"}]
    (tmp_path / "r.yaml").write_text(json.dumps({"version": 1, "name": "fine", "rules": rules}))
    build(*TRAFFIC, "--recipe", "r.yaml").says("q_proj is int4-g32-zp", "--for cpu")
    assert not (tmp_path / "engines").exists()
    manifest = built(build(*TRAFFIC, "--recipe", "r.yaml", "--for", "cpu"), tmp_path)
    assert {p for m, p in manifest.recipe.layers.items() if "layers" in m} == {"int4-g32-zp"}
    assert manifest.calibration.method == "gptq"


def test_the_smallest_within_a_loss(build: Build, model: Path, tmp_path: Path) -> None:
    done = build(*TRAFFIC, "--max-loss", "50%")
    assert built(done, tmp_path).recipe.name == "loss-50-percent"
    assert "round 1 of" in done.err


def test_int4_of_a_mixture_of_experts_is_portable(build: Build, save_random_model: SaveModel, tmp_path: Path) -> None:
    write_traffic(tmp_path / "t.jsonl")
    save_random_model(V2)
    layers = built(build(*TRAFFIC, "--precision", "int4"), tmp_path).recipe.layers
    assert {p for m, p in layers.items() if ".mlp.experts." in m} == {"int4-g128"}
    assert layers["model.layers.2.self_attn.o_proj"] == layers["model.layers.0.mlp.up_proj"] == "int8"
    assert layers["model.layers.1.self_attn.o_proj"] == "int4-g128"


def test_embeddings_alone_are_not_calibrated(build: Build, model: Path, tmp_path: Path) -> None:
    rules = [{"match": "model.layers.*", "precision": "f16"}, {"match": "*", "precision": "int8"}]
    (tmp_path / "r.yaml").write_text(json.dumps({"version": 1, "name": "ends", "rules": rules}))
    assert built(build("--model", "model", "--recipe", "r.yaml"), tmp_path).calibration.method == "round-to-nearest"
    assert not checkpoints(tmp_path)


def test_system_prompts_are_asked_for(build: Build, model: Path, tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": f"Tell me about number {n}."}]} for n in range(12)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    build(*TRAFFIC).says("has a system prompt", "--system-prompt FILE", "--no-system-prompts")
    build(*TRAFFIC, "--system-prompt", "gone.txt").says("gone.txt cannot be read")
    assert not (tmp_path / "engines").exists()
    (tmp_path / "s.txt").write_text("Be brief.")
    for flags, share in ((("--system-prompt", "s.txt"), 1), (("--no-system-prompts",), 0)):
        chosen = built(build(*TRAFFIC, "--precision", "int8", *flags), tmp_path).calibration.calibration_set
        assert chosen is not None
        assert chosen.system_prompt_share == share


# runs harness-build once for each list of arguments, without the packages of calibration, and prints how each ended
WITHOUT_EXTRA = """
import contextlib, io, json, sys
for name in ("torch", "transformers", "llmcompressor", "compressed_tensors", "detect_secrets"):
    sys.modules[name] = None  # as if it were not installed
from harness.build.cli import main
ends = []
for arguments in json.loads(sys.argv.pop()):
    sys.argv[1:] = arguments
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main()
    except SystemExit as end:
        ends.append((end.code or 0, said.getvalue()))
print(json.dumps(ends))
"""


def test_only_calibration_takes_its_extra(model: Path, tmp_path: Path) -> None:
    refused = [["--model", "nowhere"], ["--model", "nowhere", "--bits", "5"]]
    done = [["--model", "model", "--no-calib"], ["--model", "model", "--precision", "f16"]]
    ended = process(json.dumps([*refused, *done]), cwd=tmp_path, code=WITHOUT_EXTRA)
    assert ended.code == 0, ended.err
    ends = json.loads(ended.out.splitlines()[-1])
    for code, said in ends[:2]:
        assert code == 1
        assert "calibration needs torch, transformers, llmcompressor, compressed_tensors, detect_secrets" in said
        assert "pip install 'deepseek-harness-engine[calib]'" in said
        assert "--no-calib" in said
    assert [code for code, _ in ends[2:]] == [0, 0], ends
    assert len(list((tmp_path / "engines" / "model").glob("cpu-*"))) == 2


# harness-build, killed while the shard of the number given is half written
KILLED = """
import os, signal, sys
import safetensors.torch
last, save_file = sys.argv.pop(1), safetensors.torch.save_file
def save(tensors, path, metadata):
    save_file(tensors, path, metadata)
    if last in path.name:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
safetensors.torch.save_file = save
from harness.build.cli import main
main()
"""
RECIPE = {
    "version": 1,
    "name": "mixed",
    "rules": [{"match": "*.0.mlp.*", "precision": "int8-a8"}, {"match": "*", "precision": "int4-g64"}],
}


def test_a_calibration_goes_on_through_every_signal(
    build: Build, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, SIGTERM and SIGKILL in turn, each a shard later; then the checkpoint is that of a run left alone."""
    (tmp_path / "r.yaml").write_text(json.dumps(RECIPE))
    command = (*TRAFFIC, "--recipe", "r.yaml")
    store = tmp_path / "engines" / "model"

    def interrupted(number: signal.Signals, at: str) -> Done:
        save_file = checkpoint_writer.save_file

        def save(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
            save_file(tensors, path, metadata)
            if at in path.name:
                os.kill(os.getpid(), number)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_writer, "save_file", save)
            return build(*command)

    def finished() -> list[str]:
        (work,) = store.iterdir()
        assert work.name.startswith(".quantizing-")
        return sorted(path.name for path in (work / "checkpoint").glob("model-*"))

    plain = {name: value for name, value in os.environ.items() if not name.startswith("LLM_COMPRESSOR")}
    for done, code in (
        (interrupted(signal.SIGINT, "model-00001"), 130),
        (interrupted(signal.SIGTERM, "model-00002"), 143),
        (process("model-00003", *command, cwd=tmp_path, code=KILLED, env=plain), -signal.SIGKILL),
    ):
        assert (done.code, done.out) == (code, ""), done.err
        assert "Traceback" not in done.err
    assert finished() == ["model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"]
    shards = {path: path.stat().st_mtime_ns for path in store.glob(".quantizing-*/checkpoint/model-*")}

    last = build(*command)
    built(last, tmp_path)
    (checkpoint,) = checkpoints(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in checkpoint.glob("model-0000[12]*")} == {
        path.name: time for path, time in shards.items()
    }
    whole = contents(checkpoint)
    checkpoint.rename(tmp_path / "resumed")
    assert build(*command).out == last.out
    assert contents(checkpoint) == whole
    assert {path.name[:4] for path in store.iterdir()} == {"cpu-", "quan"}
