"""Fixtures that several folders of tests share."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# models of tests are small: threads wait for each other longer than they compute. Before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tokenizers
import torch
import transformers
from preset_engine import build_preset_engine
from tokenizers import decoders, models, pre_tokenizers, processors

from harness.manifest import (
    CalibrationPart,
    EngineManifest,
    FilePart,
    KvPart,
    ModelPart,
    QualityPart,
    RecipePart,
    TokenizerPart,
)
from harness.tokenizer import TokenizerFiles

# what runs the tests in the background may have it ignored, and every process under test would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

_MODELS = Path(__file__).resolve().parent / "models"


@pytest.fixture(scope="session")
def weights_dir() -> Path:
    """Where scripts/fetch-weights put the real weights that tests use."""
    default = Path(__file__).resolve().parent.parent / ".cache" / "weights"
    return Path(os.environ.get("HARNESS_TEST_WEIGHTS") or default)


@pytest.fixture(scope="session")
def smollm2_path(weights_dir: Path) -> Path:
    """SmolLM2-135M-Instruct, a trained Llama, as a GGUF file."""
    return _present(weights_dir / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def deepseek_tokenizer_path(weights_dir: Path) -> Path:
    """A tokenizer.json of DeepSeek-V3's family."""
    return _present(weights_dir / "deepseek-tokenizer.json")


@pytest.fixture(scope="session")
def tiny_llama_path() -> Path:
    """A trained Llama of 5M parameters, committed with its training record (docs/tiny-models.md)."""
    return _MODELS / "tiny-llama"


@pytest.fixture(scope="session")
def tiny_deepseek_path() -> Path:
    """A trained DeepSeek-V2 of 9M parameters, MLA and 8 experts, committed with its training record."""
    return _MODELS / "tiny-deepseek-v2"


@pytest.fixture(scope="session")
def held_out_documents() -> dict[str, list[str]]:
    """Text that the tiny models have not seen: `code`, `english`, `chinese`."""
    files = sorted((_MODELS.parents[1] / "calib" / "suites" / "held_out").glob("*.jsonl"))
    return {f.stem: [json.loads(line)["text"] for line in f.read_text("utf-8").splitlines()] for f in files}


def _present(path: Path) -> Path:
    # missing weights must not turn into skipped tests
    if not path.is_file():
        pytest.fail(f"{path} is missing: run scripts/test, which fetches the weights of the tests")
    return path


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., TokenizerFiles]:
    """Builds a byte-level tokenizer of 256 bytes (but those `without`) and a few added tokens, without merges."""

    def make(
        *,
        chat_template: str | None = None,
        bos: str | None = "<bos>",
        add_bos: bool | None = None,
        post_processor_adds_bos: bool = False,
        special: tuple[str, ...] = ("<bos>", "<eos>", "<user>"),
        plain: tuple[str, ...] = (),
        without: str = "",
    ) -> TokenizerFiles:
        vocab = {symbol: i for i, symbol in enumerate(sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*without}))}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in special])
        tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in plain])
        if post_processor_adds_bos:
            pair = ("<bos>", tokenizer.token_to_id("<bos>"))
            tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[pair])
        tokens = {"bos_token": bos} if bos else {}
        return TokenizerFiles(
            tokenizer_json=tokenizer.to_str().encode(),
            chat_template=chat_template,
            special_tokens=tokens | {"eos_token": "<eos>"},
            add_bos=add_bos,
        )

    return make


@pytest.fixture
def save_random_model(
    tmp_path: Path, make_tokenizer: Callable[..., TokenizerFiles]
) -> Callable[[transformers.PretrainedConfig], tuple[Path, transformers.PreTrainedModel]]:
    """Writes a random model as a Hugging Face folder; weights are exact in half precision and attention matters."""

    def save(config: transformers.PretrainedConfig) -> tuple[Path, transformers.PreTrainedModel]:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, values in [*model.named_parameters(), *model.named_buffers()]:
                if "e_score_correction_bias" in name:
                    values.normal_(0.0, 0.2)
                elif name.endswith("bias"):
                    values.normal_(0.0, 0.3)
                elif values.ndim == 1 and "norm" in name:
                    values.uniform_(0.5, 1.5)
                elif values.ndim > 1:
                    values.mul_(4.0)
                if "inv_freq" not in name:
                    values.copy_(values.half().float())
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        files = make_tokenizer()
        (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
        (folder / "tokenizer_config.json").write_text(json.dumps(files.special_tokens))
        return folder, model

    return save


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M built for `cpu` in int8."""
    return build_preset_engine(smollm2_path, tmp_path_factory.mktemp("engines") / "int8", "int8")


@pytest.fixture(scope="session")
def smollm2_f16_engine(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M built for `cpu` in f16."""
    return build_preset_engine(smollm2_path, tmp_path_factory.mktemp("engines") / "f16", "f16")


@pytest.fixture
def make_manifest() -> Callable[..., EngineManifest]:
    """Makes manifests of engines that do not exist."""

    def make(
        *,
        weight_bytes: int = 1 << 20,
        kv_bytes_per_token: int = 1024,
        max_model_len: int = 128,
        arch: str = "cpu",
        openvino: str = "1.0",
    ) -> EngineManifest:
        digest = "0" * 64
        return EngineManifest(
            engine_id="abc",
            model=ModelPart(
                name="m",
                architecture="LlamaForCausalLM",
                content_hash=digest,
                num_parameters=1,
                num_layers=1,
                vocab_size=260,
                max_position_embeddings=max_model_len,
            ),
            arch=arch,
            backend="openvino",
            versions={"openvino": openvino},
            recipe=RecipePart(name="f16", layers={}, bits_per_weight=16, decoder_bits_per_weight=16),
            calibration=CalibrationPart(method="round-to-nearest"),
            kv=KvPart(
                kind="gqa",
                num_layers=1,
                num_kv_heads=1,
                key_dim=1,
                value_dim=1,
                tokens_per_block=32,
                bytes_per_token={"fast": kv_bytes_per_token, "deterministic": 4 * kv_bytes_per_token},
            ),
            max_model_len=max_model_len,
            tokenizer=TokenizerPart(sha256=digest, chat_template_sha256=None, bos_token_id=None, eos_token_ids=[]),
            compile_settings={"fast": {}, "deterministic": {}},
            quality=QualityPart(verdict="not_run"),
            files={"model.bin": FilePart(sha256=digest, num_bytes=weight_bytes)},
        )

    return make
