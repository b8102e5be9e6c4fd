"""Small random models that are calibrated in a second, and what the tests of calibration do with them.

Imported by several tests (pyproject.toml puts this folder on their path). Widths are multiples of 128, but for 192.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from harness.build.hf_source import HfFolderSource
from harness.calib.calibrate import Goal, calibrate
from harness.calib.calibration_set import CalibrationSet, make_calibration_set
from harness.calib.checkpoint_maker import Calibration, Target
from harness.calib.decoder import StreamedDecoder
from harness.recipe import Precision, Recipe
from harness.tokenizer import Tokenizer
from harness.weight_source import WeightSource

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA = transformers.LlamaConfig(**_COMMON, intermediate_size=192, num_key_value_heads=2, tie_word_embeddings=True)
_MLA: dict[str, Any] = _COMMON | {
    "intermediate_size": 256,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
V2 = transformers.DeepseekV2Config(**_MLA)
V3 = transformers.DeepseekV3Config(**_MLA, n_group=1, topk_group=1)

TOKENS = np.random.default_rng(7).integers(0, 256, 64)
_PLAIN = (("model.embed_tokens", "f16"), ("lm_head", "f16"))


def recipe(*rules: tuple[str, str], name: str = "mixed") -> Recipe:
    """Rules in writing; embeddings and output stay in half precision."""
    return Recipe(name=name, rules=tuple((pattern, Precision.parse(text)) for pattern, text in (*_PLAIN, *rules)))


def write_traffic(path: Path, *, seed: int = 0, num_requests: int = 24) -> Path:
    """Chats of random words under one system prompt."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefghij"), 5)) for _ in range(60)]
    chats = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " ".join(rng.choice(words, 20))}]
        for _ in range(num_requests)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def draw_set(folder: Path, *, seed: int = 0, num_samples: int = 16, max_tokens: int = 48) -> CalibrationSet:
    """A set of traffic of its own for the model in a folder."""
    source = HfFolderSource(folder)
    traffic = write_traffic(folder.parent / f"traffic-{seed}.jsonl", seed=seed)
    tokenizer = Tokenizer(source.tokenizer, source.generation_config)
    return make_calibration_set(tokenizer, traffic=[traffic], num_samples=num_samples, max_tokens=max_tokens)


def calibration_of(
    folder: Path,
    calibration_set: CalibrationSet,
    *,
    target: Target = "portable",
    say: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Calibration:
    """The inputs of a calibration of the model in a folder; its checkpoints go to `engines` beside it."""
    return Calibration(
        source=HfFolderSource(folder),
        calibration_set=calibration_set,
        target=target,
        optimize="decode",
        device=torch.device("cpu"),
        engines_dir=folder.parent / "engines",
        on_progress=on_progress,
        say=say,
    )


def quantize(folder: Path, *rules: tuple[str, str], target: Target = "portable") -> Path:
    """The quantized checkpoint of the model in a folder under some rules."""
    return calibrate(calibration_of(folder, draw_set(folder), target=target), Goal(recipe=recipe(*rules)))


def streamed_logits(source: WeightSource, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Logits `(tokens, vocab)` of a source's weights in torch; of a checkpoint, the fake-quantized model's."""
    decoder = StreamedDecoder(source, torch.device("cpu"))
    hidden = decoder.embed(token_ids)
    for number in range(source.spec.num_layers):
        with decoder.layer(number) as layer:
            hidden = decoder.run(layer, hidden)
    return np.asarray(decoder.logits(hidden[0]).numpy())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's shards."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
