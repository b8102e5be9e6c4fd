"""How TensorRT-LLM stores integers: layouts of single tensors, in numpy.

Sources: the readers of quantized linear layers in TensorRT-LLM 1.2.1 and the exporter of NVIDIA's modelopt 0.37.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack_row_pairs(values: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Signed 4-bit integers `(out, in)` as bytes `(out / 2, in)`: of each pair of rows the even one in the low half."""
    even, odd = values[0::2].view(np.uint8) & 0xF, values[1::2].view(np.uint8) & 0xF
    packed: npt.NDArray[np.uint8] = np.bitwise_or(even, np.left_shift(odd, 4))
    return packed


def unpack_row_pairs(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """What `pack_row_pairs` packed, `(out, in)` in int8."""
    low, high = packed << 4, packed & 0xF0
    rows = np.empty((2 * packed.shape[0], packed.shape[1]), np.int8)
    rows[0::2], rows[1::2] = low.view(np.int8) >> 4, high.view(np.int8) >> 4
    return rows
