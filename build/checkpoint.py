"""Quantized checkpoints: integers and scales that calibration chose, read exactly as they are stored.

Owns the checks of such a folder (hashes first, then every tensor against the recipe of its record) and the layout of
compressed-tensors: `pack-quantized`, 32-bit words of unsigned values offset by half their range, the earlier ones in
the lower bits; and `int-quantized`, plain int8. It needs no torch. What is not a decoder linear is read as from any
Hugging Face folder. Layout: `pack_to_int32` of github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.build.hf_source import HfFolderSource
from harness.build.hf_tokenizer import TOKENIZER_FILES
from harness.build.lowering.quantize import QuantizedRows, unpack_nibbles
from harness.checkpoint_record import (
    NGRAMS_NAME,
    RECORD_NAME,
    SENSITIVITY_NAME,
    STATISTICS_NAME,
    CheckpointRecord,
    read_record,
)
from harness.errors import BuildError, EngineError, RecipeError, SourceError
from harness.manifest import verify_file
from harness.recipe import Precision, Recipe, in_decoder, linear_shapes
from harness.weight_source import FloatArray, row_range, safe_name

_COPY_AGAIN = "copy the checkpoint again, whole, or remove its folder and build it again"
_READ_FILES = {"config.json", "generation_config.json", *TOKENIZER_FILES}
_FLOATS = ("BF16", "F16", "F32")

_Layout = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]


def open_checkpoint(path: Path) -> QuantizedCheckpoint:
    """Open the folder of a quantized checkpoint. Every file is hashed before any is read.

    Raises:
        SourceError: no checkpoint there, a file that is missing, altered or unknown, or a tensor that is not what the
            record says; names the file or the module.
        UnsupportedModelError: the model is not one this project lowers.
    """
    record = read_record(path)
    for file in sorted(path.iterdir()):
        if file.name not in record.files and (file.name in _READ_FILES or ".safetensors" in file.name):
            raise SourceError(f"{file} is not in the checkpoint's {RECORD_NAME}", f"remove it, or {_COPY_AGAIN}")
    files = [path / name for name in record.files]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            list(pool.map(verify_file, files, record.files.values()))
        except EngineError as error:
            raise SourceError(error.message, _COPY_AGAIN) from None
    return QuantizedCheckpoint(path, record)


class QuantizedCheckpoint(HfFolderSource):
    """A `WeightSource` that also hands out the stored integers of decoder linears. Made by `open_checkpoint`.

    Attributes:
        record: what the checkpoint says of itself.
        recipe: the record's recipe, one rule for each module.
        quantized: the precision of each module whose integers are stored; all others are in 16 or 32 bits.
    """

    def __init__(self, path: Path, record: CheckpointRecord) -> None:
        super().__init__(path)
        self.name = safe_name(record.model.name)
        self.record = record
        self._shapes = linear_shapes(self.spec)
        self.recipe = self._read_recipe()
        resolved = self.recipe.resolve(self.spec)
        # embeddings and lm_head are quantized when an engine is lowered
        self._linears = {module: p for module, p in resolved.items() if in_decoder(module)}
        self.quantized = {module: p for module, p in self._linears.items() if p.dtype != "f16"}
        self._module_of = {f"{module}.weight": module for module in self.quantized}
        self._names = self._check_modules()

    def names(self) -> frozenset[str]:
        """All tensor names; a quantized module has its `.weight`, however it is stored."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, of a quantized weight `(out, in)`, without reading it."""
        module = self._module_of.get(name)
        return super().shape(name) if module is None else self._shapes[module]

    def read(self, name: str, rows: slice | None = None) -> FloatArray:
        """A tensor, or some rows of it, as a new float32 array; a quantized weight as the values it stands for.

        Raises:
            SourceError: no such tensor, or its dtype cannot be read.
            BuildError: as `stored`.
        """
        module = self._module_of.get(name)
        return super().read(name, rows) if module is None else self.stored(module, rows).dequantized()

    def stored(self, module: str, rows: slice | None = None) -> QuantizedRows:
        """Some rows of a module of `quantized`, bit for bit.

        Raises:
            BuildError: a scale is not a positive number, or not exact in half precision; names the tensor.
        """
        precision, shape = self.quantized[module], self._shapes[module]
        start, stop = row_range(shape, rows)
        scale = self._scales(f"{module}.weight_scale", start, stop)
        if precision.int8_activations:
            plain = self._bytes(self._find(f"{module}.weight")).view(np.int8)
            return QuantizedRows(data=plain.reshape(shape)[start:stop], scale=scale)
        words = self._bytes(self._find(f"{module}.weight_packed")).reshape(shape[0], -1)
        # an offset of half the range differs from two's complement in the sign bit alone
        if precision.dtype == "int8":
            return QuantizedRows(data=(words[start:stop, : shape[1]] ^ 0x80).view(np.int8), scale=scale)
        nibbles = words[start:stop, : shape[1] // 2]
        if precision.symmetric:
            return QuantizedRows(data=nibbles ^ 0x88, scale=scale)
        zero_point = self._zero_points(f"{module}.weight_zero_point", start, stop)
        return QuantizedRows(data=nibbles, scale=scale, zero_point=zero_point)

    def with_ends_of(self, recipe: Recipe) -> Recipe:
        """The stored precisions of decoder linears, with embeddings and `lm_head` as another recipe has them."""
        ends = [(module, recipe.precision_of(module)) for module in self._shapes if not in_decoder(module)]
        return Recipe(name=recipe.name, rules=(*ends, *self._linears.items()))

    def evidence(self) -> list[Path]:
        """Files of the calibration that an engine carries, for its quality report."""
        return [path for name in (NGRAMS_NAME, SENSITIVITY_NAME) if (path := self._path / name).is_file()]

    def statistics(self) -> Path | None:
        """Maxima of layer inputs, keys and values over the calibration set; None where a checkpoint has none."""
        return self._path / STATISTICS_NAME if STATISTICS_NAME in self.record.files else None

    def fingerprint(self) -> str:
        """Hash of all that an engine is made from. That of the original weights is in `record.model`."""
        read = {n: f.sha256 for n, f in self.record.files.items() if n in _READ_FILES or n.startswith("model")}
        parts = [self.record.checkpoint_id, self.record.model.content_hash, sorted(read.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def check_recipe(self, resolved: Mapping[str, Precision]) -> None:
        """Check that a resolved recipe asks for what is stored.

        Raises:
            RecipeError: a decoder linear has another precision; names it.
        """
        for module, precision in self._linears.items():
            if resolved[module] != precision:
                raise RecipeError(
                    f"{module} is {precision} in the checkpoint {self._path}, the recipe asks for {resolved[module]}",
                    "take the checkpoint's own recipe (embeddings and lm_head may differ), or calibrate with this one",
                )

    def _scales(self, name: str, start: int, stop: int) -> npt.NDArray[np.float16]:
        values = self.read(name, slice(start, stop))
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        wrong = ~(np.isfinite(values) & (values > 0) & (half == values))
        if wrong.any():
            raise BuildError(
                f"{name} has a scale of {values[wrong][0]:.9g}: not a positive number that is exact in half precision",
                "calibrate again; scales are to be rounded to bf16 before the integers are chosen",
            )
        return half

    def _zero_points(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        # packed down the rows: a word holds eight rows of one group
        tensor = self._find(name)
        first, last = start // 8, math.ceil(stop / 8)
        words = self._bytes(tensor).reshape(*tensor.shape, 4)[first:last]
        rows = unpack_nibbles(words).swapaxes(1, 2).reshape(-1, tensor.shape[1])
        return rows[start - 8 * first : stop - 8 * first]

    def _check_quantization(self) -> None:
        quantization = self.config.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method != "compressed-tensors":
            raise SourceError(
                f"{self._path / 'config.json'} is not of a quantized checkpoint: its quantization_config has the "
                f"quant_method {method!r}, not 'compressed-tensors'",
                _COPY_AGAIN,
            )

    def _read_recipe(self) -> Recipe:
        record, layers = self._path / RECORD_NAME, self.record.recipe.layers
        differing = sorted(layers.keys() ^ self._shapes.keys())
        if differing:
            raise SourceError(f"the recipe in {record} is not of this model: {differing[0]}", _COPY_AGAIN)
        try:
            rules = tuple((module, Precision.parse(precision)) for module, precision in layers.items())
            recipe = Recipe(name=self.record.recipe.name, rules=rules)
            recipe.resolve(self.spec)
        except RecipeError as error:
            raise SourceError(f"the recipe in {record} cannot be followed: {error.message}", _COPY_AGAIN) from None
        return recipe

    def _check_modules(self) -> frozenset[str]:
        """Checks how each decoder linear is stored; returns the names of all tensors, each quantized one's as one."""
        parts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
        others = []
        for name, tensor in self._tensors.items():
            module, _, part = name.rpartition(".")
            if module in self._linears and part != "bias":
                parts[module][part] = tensor.dtype, tensor.shape
            else:
                others.append(name)
        for module, precision in self._linears.items():
            fault = _fault(_layout(precision, self._shapes[module]), parts[module])
            if not fault and "weight_shape" in parts[module]:
                fault = self._shape_fault(module)
            if fault:
                raise SourceError(f"{self._path}: {module} is not stored as {precision}: {fault}", _COPY_AGAIN)
        return frozenset(others) | {f"{module}.weight" for module in self._linears}

    def _shape_fault(self, module: str) -> str:
        written = tuple(self._bytes(self._find(f"{module}.weight_shape")).view("<i8").tolist())
        return "" if written == self._shapes[module] else f"weight_shape says {written}, not {self._shapes[module]}"


def _layout(precision: Precision, shape: tuple[int, int]) -> _Layout:
    """The tensors that a module of shape `(out, in)` is stored in: dtypes allowed and shape of each."""
    out, inner = shape
    if precision.dtype == "f16":
        return {"weight": (_FLOATS, shape)}
    num_groups = 1 if precision.group_size is None else inner // precision.group_size
    scale = (_FLOATS, (out, num_groups))
    if precision.int8_activations:
        return {"weight": (("I8",), shape), "weight_scale": scale}
    per_word = 4 if precision.dtype == "int8" else 8
    layout: _Layout = {
        "weight_packed": (("I32",), (out, math.ceil(inner / per_word))),
        "weight_scale": scale,
        "weight_shape": (("I64",), (2,)),
    }
    if not precision.symmetric:
        layout["weight_zero_point"] = (("I32",), (math.ceil(out / 8), num_groups))
    return layout


def _fault(layout: _Layout, seen: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    if layout.keys() != seen.keys():
        return f"it has {', '.join(sorted(seen)) or 'no tensors'}, not {', '.join(sorted(layout))}"
    for part, (dtypes, shape) in layout.items():
        dtype, seen_shape = seen[part]
        if dtype not in dtypes or seen_shape != shape:
            return f"{part} is {dtype} of shape {seen_shape}, not {' or '.join(dtypes)} of shape {shape}"
    return ""
