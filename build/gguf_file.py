"""The GGUF container: metadata and where the tensors lie, read without touching the tensors.

Every length in the file is checked against the file's size, so that a truncated or corrupt file is an error and nothing
else. Format: the GGUF specification of ggml (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from harness.errors import SourceError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_HINT = "download the file again, whole"


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor as stored: `shape` outermost axis first, `rows` its bytes, `(shape[0], bytes per row)` uint8, mapped."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    rows: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """An opened GGUF file: its metadata as Python values, its tensors by their own names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header of a file and map the rest.

        Raises:
            SourceError: not a GGUF file, of another version, truncated (names the tensors cut off), or corrupt.
        """
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise SourceError(f"{path} cannot be opened: {error}", _HINT) from None
        try:
            return _parse(path, data)
        except (IndexError, struct.error):
            raise SourceError(
                f"{path} is truncated: it has {data.size} bytes and ends within its header", _HINT
            ) from None
        except (ValueError, KeyError, OverflowError, RecursionError) as error:
            raise SourceError(f"{path} is not a readable GGUF file: {error}", _HINT) from None


def _parse(path: Path, data: npt.NDArray[np.uint8]) -> GgufFile:
    reader = _Reader(data)
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not begin with the letters GGUF")
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"it has version {version}; versions 2 and 3, little-endian, can be read")
    num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
    metadata = {reader.string(): reader.value() for _ in range(num_keys)}
    infos = [_tensor_info(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = math.ceil(reader.offset / alignment) * alignment
    ends = {name: start + offset + num_bytes for name, _, _, offset, num_bytes in infos}
    cut_off = [name for name, end in ends.items() if end > data.size]
    if cut_off:
        raise SourceError(
            f"{path} is truncated: its header describes {max(ends.values())} bytes, it has {data.size}; "
            f"{len(cut_off)} tensors are cut off, the first is {cut_off[0]}",
            _HINT,
        )
    tensors = {
        name: GgufTensor(
            type=kind, shape=shape, rows=data[start + offset : start + offset + num_bytes].reshape(shape[0], -1)
        )
        for name, kind, shape, offset, num_bytes in infos
    }
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _tensor_info(reader: _Reader) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int, int]:
    """Name, type, shape, offset and bytes of the next tensor."""
    name = reader.string()
    num_axes = reader.scalar("I")
    if not 1 <= num_axes <= 4:
        raise ValueError(f"tensor {name} has {num_axes} axes")
    shape = tuple(reversed([reader.scalar("Q") for _ in range(num_axes)]))
    kind, offset = GGMLQuantizationType(reader.scalar("I")), reader.scalar("Q")
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    row_size = shape[-1] if len(shape) > 1 else 1
    if not all(shape) or row_size % block_size:
        raise ValueError(f"tensor {name} of type {kind.name} cannot have shape {shape}")
    return name, kind, shape, offset, math.prod(shape) // block_size * block_bytes


class _Reader:
    """Takes values off the front of the file. Past the end it raises IndexError or struct.error."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data.data
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > len(self._data):
            raise IndexError
        taken = bytes(self._data[self.offset : end])
        self.offset = end
        return taken

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self) -> Any:
        return self._reader_of(self.scalar("I"))()

    def _array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:  # at once: vocabularies have 150,000 of them
            code = _SCALARS[kind]
            return list(struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize(code))))
        read = self._reader_of(kind)
        return [read() for _ in range(length)]

    def _reader_of(self, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self.string
        if kind == _ARRAY:
            return self._array
        code = _SCALARS[kind]
        return lambda: self.scalar(code)
