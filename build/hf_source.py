"""Hugging Face folders: safetensors files, one or in shards, with their config and tokenizer.

Owns the checks of such a folder and the decoding of its dtypes. Files are mapped, never read whole; a tensor is decoded
only for the rows asked for. Format: the safetensors README; block scales: DeepSeek-V3 (arXiv 2412.19437), section 3.3.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.build.fingerprint import fingerprint_files
from harness.build.hf_tokenizer import TOKENIZER_FILES, read_json, read_tokenizer
from harness.errors import SourceError, UnsupportedModelError
from harness.spec import ModelSpec
from harness.weight_source import FloatArray, TokenizerFiles, row_range, safe_name, some

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SCALE = "_scale_inv"
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_RAW_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8}
_DOWNLOAD_AGAIN = "download the folder again, whole"
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """Where a tensor lies: bytes `begin` to `end` of file `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class HfFolderSource:
    """A `WeightSource` over a folder.

    Args:
        path: the folder.
        name: the model's name where the folder's own does not say it.

    Raises:
        SourceError: not a folder, no or a broken config.json, a shard that is missing, truncated, or does not hold what
            the index says; names the file and the tensors.
        UnsupportedModelError: the weights are quantized in a way that cannot be read.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self._path = path
        if not path.is_dir():
            raise SourceError(f"{path} is not a folder", "give the folder that holds config.json")
        self.name = safe_name(name or Path(os.path.abspath(path)).name)  # a link's name is the one its user chose
        self.config = read_json(path / "config.json", required=True)
        self._tensors, self._shards = _open_weights(path)
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}
        self._block = self._check_quantization()

    @cached_property
    def spec(self) -> ModelSpec:
        """The typed description of the model."""
        return ModelSpec.from_hf_config(self.config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`; without one, the token ids that config.json names, as transformers does."""
        path = self._path / "generation_config.json"
        if path.is_file():
            return read_json(path, required=True)
        return {key: self.config[key] for key in ("bos_token_id", "eos_token_id") if self.config.get(key) is not None}

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """Tokenizer and chat template.

        Raises:
            TokenizerError: there is no tokenizer.json.
            SourceError: a file beside it is not JSON.
        """
        return read_tokenizer(self._path)

    def names(self) -> frozenset[str]:
        """All tensor names; scales of fp8 tensors belong to their tensor and have no name of their own."""
        return frozenset(name for name in self._tensors if not name.endswith(_SCALE))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._find(name).shape

    def read(self, name: str, rows: slice | None = None) -> FloatArray:
        """A tensor, or some rows of it, as a new float32 array; fp8 is multiplied by its block scales.

        Raises:
            SourceError: no such tensor, or its dtype or scales cannot be read.
        """
        tensor = self._find(name)
        if tensor.dtype not in _RAW_DTYPES:
            raise SourceError(
                f"{tensor.path}: tensor {name} is {tensor.dtype}; readable: {', '.join(_RAW_DTYPES)}",
                "take a release of the model in bf16, f16, f32 or DeepSeek's fp8",
            )
        if not tensor.shape:
            return _decode(self._raw(tensor)).reshape(())
        start, stop = row_range(tensor.shape, rows)
        raw = self._raw(tensor).reshape(tensor.shape)[start:stop]
        return self._decode_fp8(name, raw, start) if tensor.dtype == "F8_E4M3" else _decode(raw)

    def fingerprint(self) -> str:
        """Content hash of weights, config and tokenizer."""
        names = ("config.json", "generation_config.json", *TOKENIZER_FILES)
        files = {name: self._path / name for name in names if (self._path / name).is_file()}
        return fingerprint_files(files | {shard.name: shard for shard in self._shards})

    def _find(self, name: str) -> _Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise SourceError(
                f"{self._path} has no tensor {name}", "take weights and config from one and the same model"
            )
        return tensor

    def _bytes(self, tensor: _Tensor) -> npt.NDArray[np.uint8]:
        mapped = self._maps.get(tensor.path)
        if mapped is None:
            mapped = self._maps[tensor.path] = np.memmap(tensor.path, dtype=np.uint8, mode="r")
        return mapped[tensor.begin : tensor.end]

    def _raw(self, tensor: _Tensor) -> npt.NDArray[Any]:
        return self._bytes(tensor).view(_RAW_DTYPES[tensor.dtype])

    def _check_quantization(self) -> tuple[int, int] | None:
        quantization = self.config.get("quantization_config") or {}
        if not isinstance(quantization, dict):
            raise SourceError(f"{self._path}: quantization_config is {quantization!r}, not an object", _DOWNLOAD_AGAIN)
        method = quantization.get("quant_method")
        if method not in (None, "fp8"):
            hint = "take the unquantized release of the model; harness-build quantizes it"
            if method == "compressed-tensors":
                hint = f"give a checkpoint that harness-build made as --checkpoint; of any other, {hint}"
            raise UnsupportedModelError(f"{self._path}: weights quantized with {method!r} cannot be read", hint)
        fp8 = {name: tensor for name, tensor in self._tensors.items() if tensor.dtype == "F8_E4M3"}
        if not fp8:
            return None
        block = quantization.get("weight_block_size")
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise UnsupportedModelError(
                f"{self._path}: fp8 tensors need quantization_config.weight_block_size in config.json, seen: {block!r}",
                "only fp8 with block scales, as DeepSeek-V3 has it, can be read",
            )
        for name, tensor in fp8.items():
            self._check_scale(name, tensor, (block[0], block[1]))
        return block[0], block[1]

    def _check_scale(self, name: str, tensor: _Tensor, block: tuple[int, int]) -> None:
        scale = self._tensors.get(name + _SCALE)
        wanted = tuple(math.ceil(n / size) for n, size in zip(tensor.shape, block, strict=False))
        if len(tensor.shape) != 2 or scale is None or scale.shape != wanted or scale.dtype not in ("F32", "BF16"):
            seen = "is missing" if scale is None else f"is {scale.dtype} of shape {scale.shape}"
            raise SourceError(
                f"{tensor.path}: fp8 tensor {name} of shape {tensor.shape} needs {name + _SCALE}, F32 of shape "
                f"{wanted}, which {seen}",
                _DOWNLOAD_AGAIN,
            )

    def _decode_fp8(self, name: str, raw: npt.NDArray[np.uint8], start: int) -> FloatArray:
        assert self._block is not None, "opening checked that fp8 tensors have blocks"
        block_rows, block_columns = self._block
        out = np.empty(raw.shape, np.float32)
        np.take(_E4M3, raw, out=out, mode="clip")
        if not out.size:
            return out
        scale = self._tensors[name + _SCALE]
        scales = _decode(self._raw(scale)).reshape(scale.shape)
        num_rows, num_columns = raw.shape
        for block in range(start // block_rows, math.ceil((start + num_rows) / block_rows)):
            first, last = max(block * block_rows - start, 0), (block + 1) * block_rows - start
            out[first:last] *= np.repeat(scales[block], block_columns)[:num_columns]
        return out


def _decode(raw: npt.NDArray[Any]) -> FloatArray:
    if raw.dtype != np.uint16:
        return raw.astype(np.float32)
    # bfloat16 is the upper half of a float32
    halves = np.zeros((*raw.shape, 2), np.uint16)
    halves[..., 1 if np.little_endian else 0] = raw
    return halves.view(np.float32).reshape(raw.shape)


def _e4m3_table() -> FloatArray:
    """The 256 values of float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3_table()


def _open_weights(folder: Path) -> tuple[dict[str, _Tensor], list[Path]]:
    """All tensors of a folder, and its weight files."""
    index_path, single = folder / _INDEX, folder / _SINGLE
    if not index_path.is_file():
        if not single.is_file():
            raise SourceError(
                f"{folder} has neither {_SINGLE} nor {_INDEX}",
                "weights must be in safetensors format, or one GGUF file",
            )
        return _read_header(single), [single]
    weight_map = read_json(index_path, required=True).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise SourceError(f"{index_path} has no weight_map of tensor names to files", _DOWNLOAD_AGAIN)
    if single.is_file() and _SINGLE not in weight_map.values():
        raise SourceError(f"{index_path} is stale: it does not name {single}, which is there too", _DOWNLOAD_AGAIN)
    tensors: dict[str, _Tensor] = {}
    shards = [folder / shard for shard in sorted(set(weight_map.values()))]
    for shard in shards:
        listed = {name for name, file in weight_map.items() if file == shard.name}
        if not listed:  # "sub/x.safetensors" or "../x.safetensors"
            raise SourceError(f"{index_path} names {shard}, which is not a file of its own folder", _DOWNLOAD_AGAIN)
        if not shard.is_file():
            raise SourceError(f"{shard} is missing; {index_path} says it holds {some(listed)}", _DOWNLOAD_AGAIN)
        held = _read_header(shard)
        if held.keys() != listed:
            absent, extra = listed - held.keys(), held.keys() - listed
            parts = [f"it lacks {some(absent)}"] * bool(absent) + [f"it also holds {some(extra)}"] * bool(extra)
            raise SourceError(
                f"{index_path} is stale: {shard} is not what it describes: {'; '.join(parts)}", _DOWNLOAD_AGAIN
            )
        tensors |= held
    return tensors, shards


def _read_header(path: Path) -> dict[str, _Tensor]:
    """The tensors that a safetensors file declares, checked against its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if prefix == b"version ":
            raise SourceError(f"{path} is a Git LFS pointer, not weights", "run: git lfs pull")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            raise SourceError(f"{path} is truncated: it has {size} bytes and ends within its header", _DOWNLOAD_AGAIN)
        if length > _MOST_HEADER_BYTES:
            raise SourceError(f"{path} has a broken header: its length is said to be {length} bytes", _DOWNLOAD_AGAIN)
        header = file.read(length)
    try:
        tensors = {
            name: _tensor(path, entry, 8 + length)
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{path} has a broken header: {error}", _DOWNLOAD_AGAIN) from None
    cut_off = {name for name, tensor in tensors.items() if tensor.end > size}
    if cut_off:
        needed = max(tensor.end for tensor in tensors.values())
        raise SourceError(
            f"{path} is truncated: its header describes {needed} bytes, it has {size}; cut off: {some(cut_off)}",
            _DOWNLOAD_AGAIN,
        )
    return tensors


def _tensor(path: Path, entry: dict[str, Any], offset: int) -> _Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
        raise ValueError(f"{entry} has something else than whole numbers")
    num_bytes = math.prod(shape) * _ITEM_BYTES[entry["dtype"]]
    if end - begin != num_bytes:
        raise ValueError(f"{entry} does not describe {num_bytes} bytes")
    return _Tensor(path=path, dtype=entry["dtype"], shape=shape, begin=offset + begin, end=offset + end)
