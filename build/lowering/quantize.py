"""Rows of a matrix in stored form, and round to nearest, the plainest way to make them.

Round to nearest needs no data. Scales are rounded to f16 before the integers are chosen, so that what is stored is
exact in every execution precision. Conventions are those of compressed-tensors: symmetric int4 spans [-8, 7] with scale
`absmax / 7.5`, int8 spans [-127, 127], zero points are unsigned 4-bit integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.errors import BuildError
from harness.recipe import Precision

_SMALLEST_SCALE = np.float16(2.0**-24)


@dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """Some rows of a matrix `(rows, in)` in stored form.

    `data`: f16 `(rows, in)`, int8 `(rows, in)`, or two int4 a byte `(rows, in / 2)`, the earlier one in the low half.
    `scale`: f16 `(rows, groups)`, None for f16 data. `zero_point`: two a byte, `(rows * groups / 2,)` when groups of a
    row are an even number; unpacked uint8 `(rows, groups)` here, packed when stored.
    """

    data: npt.NDArray[np.float16] | npt.NDArray[np.int8] | npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float16] | None = None
    zero_point: npt.NDArray[np.uint8] | None = None

    def reordered(self, order: npt.NDArray[np.int64]) -> QuantizedRows:
        """The rows picked by index."""
        return QuantizedRows(
            data=self.data[order],
            scale=None if self.scale is None else self.scale[order],
            zero_point=None if self.zero_point is None else self.zero_point[order],
        )

    def dequantized(self) -> npt.NDArray[np.float32]:
        """The weights `(rows, in)` that the stored form stands for; exact, as both factors are short."""
        if self.scale is None:
            return self.data.astype(np.float32)
        if self.data.dtype == np.int8:
            values = self.data.astype(np.float32)
        elif self.zero_point is None:
            values = (unpack_nibbles(self.data.view(np.uint8)) ^ 8).astype(np.float32) - 8
        else:
            values = unpack_nibbles(self.data.view(np.uint8)).astype(np.float32)
        num_rows, num_groups = self.scale.shape
        groups = values.reshape(num_rows, num_groups, values.shape[1] // num_groups)
        if self.zero_point is not None:
            groups -= self.zero_point[..., None]
        groups *= self.scale[..., None]
        return groups.reshape(values.shape)


def quantize_rows(weight: npt.NDArray[np.float32], precision: Precision) -> QuantizedRows:
    """Quantize rows of a weight `(rows, in)` by rounding to nearest.

    Raises:
        BuildError: a weight is not finite, or it or its scale does not fit half precision. The message is the
            predicate of a sentence: the caller knows the tensor's name.
    """
    if not np.isfinite(weight).all():
        raise BuildError("has a NaN or infinite value", "take the weights from their release again")
    if precision.dtype == "f16":
        if np.abs(weight).max(initial=0) > np.finfo(np.float16).max:
            raise BuildError("has a value too large for half precision", "build with --precision int8")
        return QuantizedRows(data=weight.astype(np.float16))
    groups = weight.reshape(weight.shape[0], -1, precision.group_size or weight.shape[1])
    if precision.dtype == "int8":
        scale = _f16_scale(np.abs(groups).max(axis=2) / 127.0)
        quantized = np.clip(np.rint(groups / scale[..., None].astype(np.float32)), -127, 127).astype(np.int8)
        return QuantizedRows(data=quantized.reshape(weight.shape), scale=scale)
    if precision.symmetric:
        scale = _f16_scale(np.abs(groups).max(axis=2) / 7.5)
        signed = np.clip(np.rint(groups / scale[..., None].astype(np.float32)), -8, 7).astype(np.int8)
        return QuantizedRows(data=pack_nibbles(signed.reshape(weight.shape)), scale=scale)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    scale = _f16_scale((high - low) / 15.0)
    wide_scale = scale.astype(np.float32)
    zero_point = np.clip(np.rint(-low / wide_scale), 0, 15)
    unsigned = np.clip(np.rint(groups / wide_scale[..., None]) + zero_point[..., None], 0, 15).astype(np.uint8)
    return QuantizedRows(
        data=pack_nibbles(unsigned.reshape(weight.shape)), scale=scale, zero_point=zero_point.astype(np.uint8)
    )


def _f16_scale(scale: npt.NDArray[np.floating]) -> npt.NDArray[np.float16]:
    # an all-zero group would divide by zero; a scale past f16 would be infinite
    if scale.max(initial=0) > np.finfo(np.float16).max:
        raise BuildError("has values too large to quantize: their scale exceeds half precision", "check the weights")
    return np.maximum(scale.astype(np.float16), _SMALLEST_SCALE)


def pack_nibbles(values: npt.NDArray[np.int8] | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack pairs along the last axis (even length) into bytes, the earlier value in the low half."""
    nibbles = values.view(np.uint8) & 0xF
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The inverse of `pack_nibbles`: unsigned values, twice as many along the last axis."""
    values = np.stack([packed & 0xF, packed >> 4], axis=-1)
    return values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
