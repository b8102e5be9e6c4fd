"""`harness-build` as hostile and unlucky users meet it.

Every refusal says what is wrong and what to do, leaves with the right code, shows no traceback and leaves nothing
behind. Faults in files are tried in this process; signals, a full disk and the two output streams with real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openvino
import pytest
import torch
import transformers
from cli_process import RUN, Done, process
from safetensors.torch import load_file, save_file

from harness.manifest import EngineManifest
from harness.tokenizer import TokenizerFiles

Edit = Callable[[Path], object]
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
SCHEMA = Path(__file__).parents[2] / "docs" / "manifest.schema.json"


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[..., TokenizerFiles]) -> Path:
    """A Llama of two layers as a Hugging Face folder. Not to be changed: `model` is a copy."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
    )
    folder = tmp_path_factory.mktemp("random") / "tiny"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    files = make_tokenizer()
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(files.special_tokens))
    return folder


@pytest.fixture
def model(model_files: Path, tmp_path: Path) -> Path:
    """A copy of the small model, in the folder that commands run in."""
    return Path(shutil.copytree(model_files, tmp_path / "tiny"))


def files_under(folder: Path) -> set[Path]:
    """All files, and folders of unfinished builds."""
    return {path for path in folder.rglob("*") if path.is_file() or path.name.startswith(".building-")}


def edit_json(name: str, **changes: Any) -> Edit:
    """Sets fields of a JSON file; None removes one."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    """Changes the tensors of the weights file."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


def with_tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return edit_tensors(lambda tensors: tensors.update({name: make(tensors[name]).contiguous()}))


def with_value(name: str, value: float) -> Edit:
    return edit_tensors(lambda tensors: tensors[name].view(-1)[7].fill_(value))


def without_tensor(name: str) -> Edit:
    return edit_tensors(lambda tensors: tensors.pop(name))


def write(name: str, content: str | bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def cut(name: str, num_bytes: int) -> Edit:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - num_bytes)


def index_of(weight_map: dict[str, str]) -> Edit:
    return write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def claim_huge_header(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(struct.pack("<Q", 64 << 30))
        file.truncate(65 << 30)  # sparse: takes no room


FAULTY_MODELS: dict[str, tuple[Edit, list[str]]] = {
    "no config": (remove("config.json"), ["config.json is missing"]),
    "config not JSON": (write("config.json", "{"), ["config.json is not JSON"]),
    "config too deep": (write("config.json", "[" * 100_000), ["config.json is not JSON"]),
    "unknown architecture": (edit_json("config.json", architectures=["GPT2LMHeadModel"]), ["GPT2", "LlamaForC"]),
    "served elsewhere": (edit_json("config.json", architectures=["DeepseekV32ForCausalLM"]), ["V32", "trtllm-serve"]),
    "architecture not a name": (edit_json("config.json", architectures=7), ["unknown architecture 7"]),
    "field missing": (edit_json("config.json", vocab_size=None), ["no field 'vocab_size'"]),
    "size a word": (edit_json("config.json", hidden_size="big"), ["hidden_size is 'big'"]),
    "size negative": (edit_json("config.json", hidden_size=-64), ["hidden_size is -64"]),
    "size broken": (edit_json("config.json", intermediate_size=96.5), ["intermediate_size is 96.5"]),
    "heads zero": (edit_json("config.json", num_attention_heads=0), ["num_heads is 0"]),
    "heads uneven": (edit_json("config.json", num_key_value_heads=3), ["num_key_value_heads is 3"]),
    "a billion layers": (edit_json("config.json", num_hidden_layers=10**9), ["1000000000 layers"]),
    "rope no object": (edit_json("config.json", rope_parameters="x"), ["rope parameters are 'x'"]),
    "rope stretched by 0": (
        edit_json("config.json", rope_parameters={"rope_type": "linear", "factor": 0}),
        ["factor is 0"],
    ),
    "quantization no object": (edit_json("config.json", quantization_config="fp8"), ["quantization_config is 'fp8'"]),
    "weights missing": (remove(WEIGHTS), ["neither model.safetensors nor"]),
    "weights truncated": (cut(WEIGHTS, 5), [WEIGHTS, "truncated", "cut off"]),
    "header huge": (claim_huge_header, [WEIGHTS, "broken header", str(64 << 30)]),
    "header too deep": (write(WEIGHTS, struct.pack("<Q", 200_000) + b"[" * 200_000), ["broken header"]),
    "shard missing": (index_of({"a": WEIGHTS, "b": "gone.safetensors"}), ["gone.safetensors is missing", "holds b"]),
    "index stale": (index_of({"ghost": WEIGHTS}), ["index.json is stale", "lacks ghost"]),
    "no head": (without_tensor("lm_head.weight"), ["lacks", "lm_head.weight"]),
    "no norm": (without_tensor("model.norm.weight"), ["lacks", "model.norm.weight"]),
    "layers missing": (edit_json("config.json", num_hidden_layers=3), ["lacks", "model.layers.2.", "6 more"]),
    "layers left over": (edit_json("config.json", num_hidden_layers=1), ["not speak of", "model.layers.1."]),
    "bias unread": (edit_tensors(lambda t: t.update({UP[:-6] + "bias": torch.ones(96)})), ["not speak of", "up_proj"]),
    "tied to another head": (edit_json("config.json", tie_word_embeddings=True), ["ties", "lm_head.weight is not"]),
    "rows missing": (with_tensor("model.embed_tokens.weight", lambda w: w[:-2]), ["embed_tokens", "(298, 64)"]),
    "transposed": (with_tensor(UP, lambda w: w.T), [UP, "(64, 96)", "(96, 64)"]),
    "flat": (with_tensor(UP, lambda w: w.reshape(-1)), [UP, "(6144,)"]),
    "norm of another width": (with_tensor("model.norm.weight", lambda w: w[:-1]), ["model.norm.weight", "(63,)"]),
    "wider than its norms": (edit_json("config.json", head_dim=32), ["q_proj.weight", "(128, 64)"]),
    "dtype": (with_tensor(UP, lambda w: w.to(torch.int64)), [UP, "I64"]),
    "NaN": (with_value(UP, float("nan")), [UP, "NaN"]),
    "infinite norm": (with_value("model.layers.1.input_layernorm.weight", float("inf")), ["1.input_layernorm", "NaN"]),
    "overflow": (with_value(UP, 1e9), [UP, "too large"]),
    "no tokenizer": (remove("tokenizer.json"), ["no tokenizer.json"]),
    "tokenizer broken": (write("tokenizer.json", "{"), ["tokenizer.json cannot be loaded"]),
    "tokenizer of another model": (edit_json("config.json", vocab_size=10), ["(300, 64)", "(10, 64)"]),
    "EOS unknown": (write("tokenizer_config.json", '{"eos_token": "<nope>"}'), ["'<nope>'"]),
    "EOS no id": (edit_json("generation_config.json", eos_token_id=[[1]]), ["eos_token_id is [[1]]"]),
}


@pytest.mark.parametrize("fault", FAULTY_MODELS)
def test_a_faulty_model_is_refused(fault: str, model: Path, tmp_path: Path, build: Callable[..., Done]) -> None:
    edit, words = FAULTY_MODELS[fault]
    edit(model)
    before = files_under(tmp_path)
    build("--no-calib", "--model", "tiny").says(*words)
    assert files_under(tmp_path) == before


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60),
        # one key, "a", whose value is an array of 2^60 strings; then of 2^62 numbers
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 62),
    ],
)
def test_a_gguf_file_with_absurd_counts_is_refused(content: bytes, tmp_path: Path, build: Callable[..., Done]) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    build("--no-calib", "--model", "m.gguf").says("m.gguf", "download the file again")


@pytest.mark.parametrize("precision", ["f16", "int8"])
def test_a_value_beyond_half_precision(precision: str, model: Path, build: Callable[..., Done]) -> None:
    with_value(UP, 1e6)(model)
    done = build("--no-calib", "--model", "tiny", "--precision", precision)
    if precision == "f16":
        done.says(UP, "too large for half precision", "--precision int8")
    else:
        assert done.code == 0  # 1e6 / 127 fits as a scale


BAD_RECIPES = {
    "rules: [": "not a recipe",
    "[" * 20_000: "not a recipe",
    "version: 1\nname: a\nrules: []": "no rule for model.embed_tokens",
    "version: 1\nname: a\nrules:\n- {match: '*.q_proj', precision: f16}\n- {match: '*', precision: int8}": "fused",
    "version: 1\nname: a\nrules: [{match: '*', precision: int5}]": "'int5'",
}


@pytest.mark.parametrize("text", BAD_RECIPES)
def test_a_bad_recipe_is_refused(text: str, model: Path, tmp_path: Path, build: Callable[..., Done]) -> None:
    (tmp_path / "r.yaml").write_text(text)
    build("--no-calib", "--model", "tiny", "--recipe", "r.yaml").says(BAD_RECIPES[text])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "Usage"),
        (["--arch", "cpu"], 2, "no model given"),
        (["--model", ""], 2, "no model given"),
        (["--modle", "tiny"], 2, "--modle"),
        (["--model", "tiny", "--arch", "sm_999"], 2, "unknown arch 'sm_999'"),
        (["--model", "tiny", "--precision", "int8", "--recipe", "r.yaml"], 2, "exclude each other"),
        # told before the model is looked at, which may be hours of download
        (["--model", "nowhere", "--precision", "int3"], 2, "allowed: f16, int8, int4"),
        (["--model", "nowhere", "--precision", ""], 2, "allowed: f16, int8, int4"),
        (["--model", "nowhere", "--recipe", "r.yaml"], 1, "cannot read the recipe r.yaml"),
        (["--model", "nowhere"], 1, "nothing at 'nowhere'"),
        (["--model", "x" * 5000], 1, "nothing"),
        (["--model", "~nobody-of-that-name/m"], 1, "nothing can be at"),
        (["--model", "a\0b"], 1, "nothing at"),
        (["--model", "tiny", "--out", "file"], 1, "exists and is not an engine"),
        (["--model", "tiny", "--out", "tiny"], 1, "exists and is not an engine"),
        (["--no-calib", "--model", "tiny", "--out", "file/engine"], 1, "cannot write file/engine"),
        (["--no-calib", "--model", "tiny", "--out", "/proc/engine"], 1, "cannot write /proc/engine"),
        (["--model", "tiny", "--out", "x" * 300], 1, "too long"),
        (["inspect", "--engine", "tiny"], 1, "no engine in tiny"),
        (["verify", "--engine", "nowhere"], 1, "there is no folder nowhere"),
    ],
)
def test_a_bad_command_line_is_refused(
    arguments: list[str], code: int, words: str, model: Path, tmp_path: Path, build: Callable[..., Done]
) -> None:
    (tmp_path / "file").write_text("mine")
    before = files_under(tmp_path)
    done = build(*arguments)
    assert done.code == code, done.err
    assert words in done.out + done.err
    assert "Traceback" not in done.err
    assert files_under(tmp_path) == before


def test_a_hub_id_without_network(tmp_path: Path) -> None:
    done = process("--no-calib", "--model", "org/name", cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    done.says("org/name", "HF_HUB_OFFLINE")


def test_streams_and_places(model: Path, tmp_path: Path) -> None:
    """One build by a relative path with spaces, weights that are a link, ASCII streams: stdout is the path alone."""
    (model / WEIGHTS).rename(tmp_path / "blob")
    (model / WEIGHTS).symlink_to("../blob")
    place = tmp_path / "größe und 模型"
    place.mkdir()
    (place / "real").mkdir()
    (place / "link").symlink_to("real")
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = process("--no-calib", "--model", "../tiny/../tiny/", "--out", "./link", cwd=place, env=ascii_only)
    assert (done.code, done.out) == (0, "link\n"), done.err
    assert (place / "link").is_symlink()
    assert (place / "real" / "manifest.json").is_file()
    assert "layers" in done.err
    assert "harness-run server --engine link" in done.err
    again = process("--no-calib", "--model", "tiny", "--out", place / "link", cwd=tmp_path, env=ascii_only)
    assert (again.code, again.out) == (0, f"{place}/link\n"), again.err
    assert "found for cpu" in again.err
    assert not list(place.glob(".building-*"))


def test_an_engine_is_reused_by_its_content(model: Path, tmp_path: Path, build: Callable[..., Done]) -> None:
    first = build("--no-calib", "--model", "tiny")
    assert first.code == 0, first.err
    assert "built for cpu" in first.err
    again = build("--no-calib", "--model", model, "--arch", "cpu")
    assert (again.code, again.out) == (0, first.out)
    assert "found for cpu" in again.err
    engine = tmp_path / first.out.strip()
    assert engine.parent == tmp_path / "engines" / "tiny"
    other_recipe = build("--no-calib", "--model", "tiny", "--precision", "f16")
    with_value(UP, 0.25)(model)
    other_weights = build("--no-calib", "--model", "tiny")
    assert len({first.out, other_recipe.out, other_weights.out}) == 3
    build("--no-calib", "--model", "tiny", "--out", engine).says("holds another engine", "--out")
    assert build("verify", "--engine", engine).code == 0


def test_an_engine_that_is_damaged_or_old_is_not_reused(model: Path, build: Callable[..., Done]) -> None:
    assert build("--no-calib", "--model", "tiny", "--out", "e").code == 0
    cut("model.bin", 1)(Path("e"))
    build("--no-calib", "--model", "tiny", "--out", "e").says("cannot be reused", "model.bin has", "remove it")
    edit_json("manifest.json", schema_version=1)(Path("e"))
    build("--no-calib", "--model", "tiny", "--out", "e").says("cannot be reused", "of an older version", "remove it")
    write("manifest.json", "{")(Path("e"))
    build("--no-calib", "--model", "tiny", "--out", "e").says("cannot be reused", "is not valid", "remove it")


@pytest.fixture(scope="module")
def engine_files(model_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, built. Not to be changed: `engine` is a copy."""
    folder = tmp_path_factory.mktemp("built")
    done = process("--no-calib", "--model", model_files, "--out", "e", cwd=folder)
    assert done.code == 0, done.err
    return folder / "e"


@pytest.fixture
def engine(engine_files: Path, tmp_path: Path) -> Path:
    """A copy of the engine, in the folder that commands run in."""
    return Path(shutil.copytree(engine_files, tmp_path / "e"))


def flip_byte(folder: Path) -> None:
    path = folder / "model.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def list_file(name: str) -> Edit:
    def edit(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = manifest["files"].pop("model.bin")
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (flip_byte, ["model.bin is corrupt"]),
        (cut("model.bin", 1), ["model.bin has", "expected"]),
        (remove("model.xml"), ["model.xml is missing"]),
        (write("chat_template.jinja", "{{ messages }}"), ["chat_template.jinja is not in the manifest"]),
        (list_file("../model.bin"), ["outside the engine", "'../model.bin'"]),
        (list_file("/etc/passwd"), ["outside the engine"]),
        (list_file("x" * 5000), ["x" * 5000]),
        (
            edit_json("manifest.json", schema_version=1),
            ["of an older version", "schema_version is 1", "reads 2", "rebuild"],
        ),
        (edit_json("manifest.json", schema_version=None), ["of another version", "schema_version is None"]),
        (edit_json("manifest.json", files={}), ["model.xml is not in the manifest"]),
        (edit_json("manifest.json", kv=None), ["is not valid: kv"]),
        (edit_json("manifest.json", surprise=1), ["is not valid: surprise"]),
        (write("manifest.json", "[]"), ["is not valid"]),
        (write("manifest.json", "[" * 100_000), ["is not valid"]),
        (write("manifest.json", b"\xff"), ["is not valid"]),
    ],
)
def test_verify_finds_what_is_wrong(edit: Edit, words: list[str], engine: Path, build: Callable[..., Done]) -> None:
    assert build("verify", "--engine", "e").out == "e: 5 files are whole\n"
    edit(engine)
    build("verify", "--engine", "e").says(*words)


def test_inspect(engine: Path, build: Callable[..., Done]) -> None:
    done = build("inspect", "--engine", "e", "--json")
    assert (done.code, done.err) == (0, "")
    jsonschema.validate(json.loads(done.out), json.loads(SCHEMA.read_text()))
    manifest = EngineManifest.model_validate_json(done.out)
    assert (manifest.arch, manifest.model.vocab_size, manifest.max_model_len) == ("cpu", 300, 128)
    # text in a manifest is no markup
    edit_json("manifest.json", model=manifest.model.model_dump() | {"name": "[/x] [red]"})(engine)
    done = build("inspect", "--engine", "e")
    assert done.code == 0, done.err
    for words in ("[/x] [red]", "LlamaForCausalLM", "16 x int8", "128 tokens", manifest.engine_id, "lowering 2"):
        assert words in done.out


def test_a_manifest_cannot_speak_to_the_terminal(engine: Path, build: Callable[..., Done]) -> None:
    hostile = "a\x1b]0;title\x07\x9b2J\rb"
    edit_json("manifest.json", engine_id=hostile, versions={hostile: hostile}, arch=hostile)(engine)
    for arguments in (("inspect",), ("inspect", "--json")):
        done = build(*arguments, "--engine", "e")
        assert done.code == 0, done.err
        assert all(character.isprintable() for character in done.out.replace("\n", ""))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edit_json("manifest.json", arch="sm_90"), ["built for sm_90", "runs cpu", "harness-build", "--arch cpu"]),
        (edit_json("manifest.json", versions={"openvino": "1.2.3"}), ["openvino 1.2.3", "installed is", "rebuild"]),
        (flip_byte, ["model.bin is corrupt", "rebuild"]),
        (write("tokenizer.json", "{"), ["the tokenizer of e", "rebuild"]),
    ],
)
def test_the_server_does_not_start_on_it(edit: Edit, words: list[str], engine: Path, tmp_path: Path) -> None:
    edit(engine)
    run = "from harness.runtime.cli import main; main()"
    process("server", "--engine", "e", "--port", "0", cwd=tmp_path, code=run).says(*words)


# sends the signal of the first argument to itself once the first layer is lowered
INTERRUPTED = """
import os, sys
import harness.build.cpu_engine as engine
number, lower = int(sys.argv.pop(1)), engine.build_stateful_model
engine.build_stateful_model = lambda *a, on_layer: lower(*a, on_layer=lambda layer: os.kill(os.getpid(), number))
from harness.build.cli import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_leaves_nothing(number: signal.Signals, code: int, model: Path, tmp_path: Path) -> None:
    before = files_under(tmp_path)
    done = process(str(number.value), "--no-calib", "--model", "tiny", cwd=tmp_path, code=INTERRUPTED)
    assert (done.code, done.out) == (code, ""), done.err
    assert "Traceback" not in done.err
    assert files_under(tmp_path) == before


def test_what_a_killed_build_left_is_removed_by_the_next(
    model: Path, tmp_path: Path, build: Callable[..., Done]
) -> None:
    done = process(str(signal.SIGKILL.value), "--no-calib", "--model", "tiny", cwd=tmp_path, code=INTERRUPTED)
    assert done.code == -signal.SIGKILL
    store = tmp_path / "engines" / "tiny"
    assert [path.name[:10] for path in store.iterdir()] == [".building-"]
    assert build("--no-calib", "--model", "tiny").code == 0
    assert [path.name[:4] for path in store.iterdir()] == ["cpu-"]


def test_two_builds_of_one_engine_at_once(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, "--no-calib", "--model", "tiny", "--report", "none"]
    both = [subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    said = [running.communicate(timeout=60) for running in both]
    assert [running.returncode for running in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert len(list((tmp_path / "engines" / "tiny").iterdir())) == 1
    assert process("verify", "--engine", said[0][0].strip(), cwd=tmp_path).code == 0


# builds once for each limit on the size of files, which a full disk is like, and prints how each build ended
LIMITED = """
import contextlib, io, json, resource, sys
from harness.build.cli import main
ends = []
for limit in json.loads(sys.argv.pop(1)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main()
    except SystemExit as end:
        ends.append((end.code, said.getvalue()))
    except BaseException as error:
        ends.append((99, repr(error)))
print(json.dumps(ends))
"""


@pytest.mark.parametrize("precision", ["int8", "f16"])
def test_a_full_disk_is_an_error_wherever_it_strikes(
    precision: str, model: Path, tmp_path: Path, build: Callable[..., Done]
) -> None:
    tokenizer = model / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" " * 500_000)  # so that it is the last to fit
    assert build("--no-calib", "--model", "tiny", "--out", "whole", "--precision", precision).code == 0
    sizes = {name: (tmp_path / "whole" / name).stat().st_size for name in ("model.bin", "model.xml", "tokenizer.json")}
    before = files_under(tmp_path)
    limits = [0, 50_000, *(size - 100 for size in sizes.values())]
    done = process(
        json.dumps(limits),
        "--no-calib",
        "--model",
        "tiny",
        "--out",
        "e",
        "--precision",
        precision,
        cwd=tmp_path,
        code=LIMITED,
    )
    assert done.code == 0, done.err
    for limit, (code, said) in zip(limits, json.loads(done.out), strict=True):
        assert code == 1, (limit, said)
        assert "cannot write e: " in said
        assert "free some space" in said
    assert files_under(tmp_path) == before


def test_another_failure_to_write_is_not_called_a_full_disk(
    model: Path, tmp_path: Path, build: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_model(*arguments: object, **options: object) -> None:
        raise RuntimeError("Check 'friendly_name' failed")

    monkeypatch.setattr(openvino, "save_model", save_model)
    done = build("--no-calib", "--model", "tiny")
    done.says("cannot write the model: Check 'friendly_name' failed")
    assert "free some" not in done.err
    assert not (tmp_path / "engines").exists()


@contextmanager
def nobody() -> Iterator[None]:
    """Without root's rights, which know no permissions."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_files_without_permission(
    model_files: Path, build: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as place:  # other users may enter it, which pytest's folders do not allow
        here = Path(place)
        here.chmod(0o755)
        monkeypatch.chdir(here)
        for name in ("whole", "unreadable", "sealed"):
            shutil.copytree(model_files, here / name)
        (here / "whole" / WEIGHTS).chmod(0o644)
        (here / "unreadable" / WEIGHTS).chmod(0)
        (here / "sealed").chmod(0)
        (here / "read-only").mkdir(mode=0o555)
        with nobody():
            build("--no-calib", "--model", "unreadable").says(f"unreadable/{WEIGHTS}", "Permission denied")
            build("--no-calib", "--model", "sealed").says("sealed")
            build("--no-calib", "--model", "whole", "--out", "read-only/e").says(
                "cannot write read-only/e", "Permission denied"
            )
        (here / "sealed").chmod(0o755)  # so that it can be removed
        assert list((here / "read-only").iterdir()) == []
