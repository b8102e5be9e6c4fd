"""Writes safetensors files as a stream: the header from shapes alone, then each tensor a slice of rows at a time.

The library's own writer wants all tensors of a file in memory, and numpy has no bfloat16. Format: the safetensors
README; bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.weight_source import FloatArray

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I8": 1, "U8": 1}
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class StreamedTensor:
    """A tensor before its values exist.

    `dtype` is the format's name of it (`BF16`, `F16`, `F32`, `I32`, `I8`, `U8`). `chunks` makes the values in order, as
    arrays whose bytes are stored as they are: `BF16` comes as uint16 of `bfloat16_bits`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_safetensors(path: Path, tensors: Sequence[StreamedTensor], *, metadata: dict[str, str]) -> Iterator[str]:
    """Write a file in the order given; yields the name of each tensor once it is written.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            start = file.tell()
            for chunk in tensor.chunks():
                file.write(np.ascontiguousarray(chunk).data)
            assert file.tell() - start == tensor.num_bytes, f"{tensor.name} is not of shape {tensor.shape}"
            yield tensor.name


def bfloat16_bits(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Finite float32 values as the bits of the nearest bfloat16; past its range, those of infinity."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    return rounded
