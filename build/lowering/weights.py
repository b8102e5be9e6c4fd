"""Weights on their way from a source into OpenVINO constants, a slice of rows at a time.

Finished constants are written to a spool file and mapped back, so that anonymous memory is bounded by one matrix and
not by the model. The decompression subgraphs are those that the CPU plugin keeps compressed in memory:
`i8 -> Convert(f16) -> Multiply(scale)`, and for 4 bits the same on `[.., in / group, group]` with a Reshape after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from harness.build.checkpoint import QuantizedCheckpoint
from harness.build.lowering.quantize import QuantizedRows, pack_nibbles, quantize_rows
from harness.errors import BuildError
from harness.manifest import weights_node_name
from harness.recipe import F16, Precision
from harness.weight_source import FloatArray, WeightSource

_CHUNK_ELEMENTS = 1 << 22  # f32 values read and quantized at a time: 16 MiB


class Spool:
    """A scratch file of finished constants, mapped back as OpenVINO tensors. Deleted on exit.

    A full disk shows as OSError on `add`, not as a fault when mapped pages are touched.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._tensors: list[ov.Tensor] = []  # a constant shares its tensor's memory but does not keep it alive

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, array: npt.NDArray[Any], shape: Sequence[int], element_type: ov.Type) -> Any:
        """Append an array's bytes; returns a constant node of `shape` and `element_type` over them."""
        self._file.write(b"\0" * (-self._file.tell() % 64))
        offset = self._file.tell()
        data = np.ascontiguousarray(array)
        self._file.write(data.data.cast("B"))
        self._file.flush()
        mapped = np.memmap(self._path, dtype=np.uint8, mode="r", offset=offset, shape=(data.nbytes,))
        tensor = ov.Tensor(mapped, ov.Shape(list(shape)), element_type)
        self._tensors.append(tensor)
        return ops.constant(tensor, shared_memory=True)


class WeightLowering:
    """Reads tensors from a source and turns them into constants under a recipe.

    What a quantized checkpoint stores is taken as it is; everything else is rounded to nearest.
    """

    def __init__(self, source: WeightSource, recipe: dict[str, Precision], spool: Spool) -> None:
        self._source = source
        self._checkpoint = source if isinstance(source, QuantizedCheckpoint) else None
        self._recipe = recipe
        self._spool = spool

    def vector(self, name: str, *parts: str) -> Any:
        """A float32 constant of one tensor, or of several joined along their first axis. Raises as `read`."""
        return ops.constant(np.concatenate([self.read(n) for n in (name, *parts)]))

    def read(self, name: str) -> FloatArray:
        """A whole tensor as float32.

        Raises:
            BuildError: a value is NaN or infinite; names the tensor.
        """
        values = self._source.read(name)
        if not np.isfinite(values).all():
            raise BuildError(f"{name} has a NaN or infinite value", "take the weights from their release again")
        return values

    def half(self, name: str, values: FloatArray) -> Any:
        """An f16 constant widened to f32, of values made from tensor `name`. Raises as `matrix`."""
        return self._decompress(_quantize(name, values.reshape(values.shape[0], -1), F16), F16, values.shape)

    def matrix(self, *modules: str, orders: Sequence[npt.NDArray[np.int64] | None] = (), stacked: bool = False) -> Any:
        """Weights of several modules, decompressed to f32 in the graph.

        They are joined along the output axis, `(out, in)`, or, of equal shapes, `stacked`: `(modules, out, in)`.
        `orders` picks the rows of each module by index.

        Raises:
            BuildError: a weight cannot be quantized, or not be taken from its checkpoint; names the tensor.
        """
        shapes = [self._source.shape(f"{module}.weight") for module in modules]
        shape = (len(modules), *shapes[0]) if stacked else (sum(out for out, _ in shapes), shapes[0][1])
        rows = _join([part for m, order in zip_longest(modules, orders) for part in self._rows(m, order)])
        values = self._decompress(rows, self._recipe[modules[0]], shape)
        values.set_friendly_name(weights_node_name({m: out for m, (out, _) in zip(modules, shapes, strict=True)}))
        return values

    def _rows(self, module: str, order: npt.NDArray[np.int64] | None) -> Iterator[QuantizedRows]:
        num_rows, in_features = self._source.shape(f"{module}.weight")
        step = max(1, _CHUNK_ELEMENTS // in_features)
        chunks = (self._chunk(module, slice(start, start + step)) for start in range(0, num_rows, step))
        if order is None:
            yield from chunks
        else:
            yield _join(list(chunks)).reordered(order)

    def _chunk(self, module: str, rows: slice) -> QuantizedRows:
        if self._checkpoint is not None and module in self._checkpoint.quantized:
            return self._checkpoint.stored(module, rows)
        name = f"{module}.weight"
        return _quantize(name, self._source.read(name, rows), self._recipe[module])

    def _decompress(self, quantized: QuantizedRows, precision: Precision, shape: Sequence[int]) -> Any:
        shape = list(shape)
        if precision.dtype == "f16":
            return ops.convert(self._spool.add(quantized.data, shape, ov.Type.f16), "f32")
        assert quantized.scale is not None
        if precision.group_size is None:
            grouped, scale_shape = shape, [*shape[:-1], 1]
        else:
            num_groups = shape[-1] // precision.group_size
            grouped = [*shape[:-1], num_groups, precision.group_size]
            scale_shape = [*shape[:-1], num_groups, 1]
        stored = {"int8": ov.Type.i8, "int4": ov.Type.i4 if precision.symmetric else ov.Type.u4}[precision.dtype]
        values = ops.convert(self._spool.add(quantized.data, grouped, stored), "f16")
        if quantized.zero_point is not None:
            flat = quantized.zero_point.reshape(-1)
            packed = pack_nibbles(np.pad(flat, (0, flat.size % 2)))
            values = ops.subtract(values, ops.convert(self._spool.add(packed, scale_shape, ov.Type.u4), "f16"))
        values = ops.multiply(values, self._spool.add(quantized.scale, scale_shape, ov.Type.f16))
        if grouped != shape:
            values = ops.reshape(values, ops.constant(np.array(shape, np.int64)), False)
        return ops.convert(values, "f32")


def _quantize(name: str, weight: FloatArray, precision: Precision) -> QuantizedRows:
    try:
        return quantize_rows(weight, precision)
    except BuildError as error:
        raise BuildError(f"{name} {error.message}", error.hint) from None


def _join(parts: list[QuantizedRows]) -> QuantizedRows:
    def joined(arrays: list[Any]) -> Any:
        return None if arrays[0] is None else np.concatenate(arrays)

    return QuantizedRows(
        data=joined([p.data for p in parts]),
        scale=joined([p.scale for p in parts]),
        zero_point=joined([p.zero_point for p in parts]),
    )
