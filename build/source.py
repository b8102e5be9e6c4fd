"""Where weights come from: one interface over Hugging Face folders, hub ids and GGUF files.

A source names its tensors as Hugging Face checkpoints do (`model.layers.0.self_attn.q_proj.weight`), whatever the file
calls them, and hands them out as float32, a slice of rows at a time, so that the builder never holds a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness.spec import ModelSpec

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What an engine needs to turn text into ids and back.

    `tokenizer_json` is the serialized form of the `tokenizers` library. `special_tokens` maps `bos_token`,
    `eos_token`, `pad_token` (those the model has) to their text.
    """

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]


class WeightSource(Protocol):
    """A model's weights, config and tokenizer, read lazily."""

    @property
    def name(self) -> str:
        """Short name for folders, such as `DeepSeek-R1-Distill-Qwen-1.5B`."""

    @property
    def config(self) -> dict[str, Any]:
        """The Hugging Face `config.json` dictionary."""

    @property
    def spec(self) -> ModelSpec:
        """The typed description of the model."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, or an empty dictionary. `eos_token_id` is an id or a list of ids."""

    @property
    def tokenizer(self) -> TokenizerFiles:
        """Tokenizer and chat template."""

    def names(self) -> frozenset[str]:
        """All tensor names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    def read(self, name: str, rows: slice | None = None) -> FloatArray:
        """A tensor, or the given rows of its first axis, as a new float32 array.

        Raises:
            SourceError: no such tensor, or its file ends too early; names both.
        """

    def fingerprint(self) -> str:
        """Hash of the weights, config and tokenizer, as 64 hex digits: equal only for equal content."""
