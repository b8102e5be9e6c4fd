"""Random weights in the shape of a real model, made on the fly: speed and memory depend on shapes, not on values."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from harness.build.weight_check import expected_shapes
from harness.spec import ModelSpec
from harness.tokenizer import TokenizerFiles
from harness.weight_source import FloatArray

R1_DISTILL_QWEN_1_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
R1_DISTILL_QWEN_7B: dict[str, Any] = R1_DISTILL_QWEN_1_5B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


class RandomSource:
    """A `WeightSource` without weights; equal names give equal values.

    Args:
        name: of the model.
        config: its `config.json`.
        tokenizer_path: any tokenizer.json whose ids lie in the model's vocabulary; speed does not depend on it.
    """

    def __init__(self, name: str, config: dict[str, Any], tokenizer_path: Path) -> None:
        self.name = name
        self.config = config
        self.generation_config: dict[str, Any] = {}
        self.tokenizer = TokenizerFiles(
            tokenizer_json=tokenizer_path.read_bytes(),
            chat_template=None,
            special_tokens={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
            add_bos=None,
        )
        self.spec = ModelSpec.from_hf_config(config)
        self._noise = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
        self._shapes = expected_shapes(self.spec)

    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str, rows: slice | None = None) -> FloatArray:
        """Some rows: a stretch of one block of noise, scaled as an initializer would."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32) if name.endswith("norm.weight") else self._stretch(name, 0, shape)
        start, stop, _ = (rows or slice(None)).indices(shape[0])
        return self._stretch(name, start, (stop - start, shape[1])) * np.float32(shape[1] ** -0.5)

    def fingerprint(self) -> str:
        """Hash of the config, which decides the values."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()

    def _stretch(self, name: str, row: int, shape: tuple[int, ...]) -> FloatArray:
        seed = int.from_bytes(hashlib.sha256(f"{name}:{row}".encode()).digest()[:4], "little")
        size = int(np.prod(shape))
        repeats = -(-size // self._noise.size) + 1
        start = seed % self._noise.size
        return np.tile(self._noise, repeats)[start : start + size].reshape(shape)
