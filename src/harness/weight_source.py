"""Where weights come from: one interface over Hugging Face folders, hub ids and GGUF files.

A source names its tensors as Hugging Face checkpoints do (`model.layers.0.self_attn.q_proj.weight`), whatever the file
calls them, and hands them out as float32, a slice of rows at a time, so that the builder never holds a model.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness.spec import ModelSpec
from harness.tokenizer import TokenizerFiles as TokenizerFiles

FloatArray = npt.NDArray[np.float32]


def safe_name(text: str) -> str:
    """A model's name as one path component: letters, digits, `.`, `_` and `-`, not hidden, never empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "model"


def some(names: Collection[str]) -> str:
    """Up to three names, in order, and how many more there are."""
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def row_range(shape: tuple[int, ...], rows: slice | None) -> tuple[int, int]:
    """First row and one past the last of a slice of the first axis, clipped as Python clips slices.

    Raises:
        ValueError: the slice has a step, or the tensor has no axis.
    """
    if not shape or (rows is not None and rows.step not in (None, 1)):
        raise ValueError(f"cannot take rows {rows} of shape {shape}: rows are contiguous and along the first axis")
    start, stop, _ = (rows or slice(None)).indices(shape[0])
    return start, max(start, stop)


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
        """`generation_config.json`; without one, the token ids that the config names. `eos_token_id`: id or list."""

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
