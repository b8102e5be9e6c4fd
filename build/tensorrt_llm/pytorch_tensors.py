"""The tensors of a folder for the PyTorch backend of TensorRT-LLM, made from a source a slice of rows at a time.

Names are Hugging Face's. An int4 layer is `weight` uint8 `(out / 2, in)`, two rows a byte, `weight_scale`
`(out, in / group)`, and of layers that nothing is fused with `pre_quant_scale` `(in,)` of ones; an int8 layer is
`weight` int8 `(out, in)` and `weight_scale` `(out,)`. All else, and every scale, is in the model's 16-bit dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.build.checkpoint import QuantizedCheckpoint
from harness.build.lowering.quantize import unpack_nibbles
from harness.build.safetensors_writer import StreamedTensor, bfloat16_bits
from harness.build.tensorrt_llm.pytorch_config import Dtype
from harness.build.tensorrt_llm.tensors import pack_row_pairs
from harness.build.weight_check import expected_shapes
from harness.errors import BuildError
from harness.recipe import Precision
from harness.weight_source import FloatArray, WeightSource

_Array = npt.NDArray[Any]
_CHUNK_ELEMENTS = 1 << 22
_NAMES: dict[Dtype, str] = {"bfloat16": "BF16", "float16": "F16"}
_ALONE = (".o_proj", ".down_proj")


def folder_tensors(source: WeightSource, stored: Mapping[str, Precision], dtype: Dtype) -> list[StreamedTensor]:
    """Every tensor of a folder, in the order of the layers.

    Args:
        source: a `QuantizedCheckpoint` where `stored` has integers.
        stored: the precision of each module, as `stored_precisions` gives it.

    Reading them raises BuildError for a value that `dtype` cannot hold, or a scale that is not exact in it.
    """
    tensors: list[StreamedTensor] = []
    for name, shape in sorted(expected_shapes(source.spec).items(), key=lambda item: _position(item[0])):
        module = name.removesuffix(".weight")
        precision = stored.get(module)
        if name == module or precision is None or precision.dtype == "f16":
            tensors.append(_plain(source, name, shape, dtype))
        else:
            assert isinstance(source, QuantizedCheckpoint), "the folder's builder refuses integers of other sources"
            tensors += _quantized(source, module, precision, dtype)
    return tensors


def layer_of(name: str) -> int | None:
    """The decoder layer of a tensor or module; None outside of them."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


def _position(name: str) -> tuple[int, int]:
    layer = layer_of(name)
    if layer is not None:
        return 1, layer
    return (0, 0) if name.startswith("model.embed_tokens") else (2, 0)


def _plain(source: WeightSource, name: str, shape: tuple[int, ...], dtype: Dtype) -> StreamedTensor:
    def chunks() -> Iterator[_Array]:
        for rows in _row_chunks(shape):
            yield _half(name, source.read(name, rows), dtype)

    return StreamedTensor(name=name, dtype=_NAMES[dtype], shape=shape, chunks=chunks)


def _quantized(source: QuantizedCheckpoint, module: str, precision: Precision, dtype: Dtype) -> list[StreamedTensor]:
    out, inner = source.shape(f"{module}.weight")
    rows = _row_chunks((out, inner))
    scale, half = partial(_scale, source, module, dtype), _NAMES[dtype]

    def tensor(part: str, dtype: str, shape: tuple[int, ...], read: Callable[[slice], _Array]) -> StreamedTensor:
        return StreamedTensor(name=f"{module}.{part}", dtype=dtype, shape=shape, chunks=lambda: map(read, rows))

    if precision.dtype == "int8":
        weight = tensor("weight", "I8", (out, inner), lambda rows: source.stored(module, rows).data)
        return [weight, tensor("weight_scale", half, (out,), scale)]
    assert precision.group_size is not None, "int4 per channel is refused"
    parts = [
        tensor("weight", "U8", (out // 2, inner), partial(_row_pairs, source, module)),
        tensor("weight_scale", half, (out, inner // precision.group_size), scale),
    ]
    if module.endswith(_ALONE):
        ones = _half(module, np.ones(inner, np.float32), dtype)
        name = f"{module}.pre_quant_scale"
        parts.append(StreamedTensor(name=name, dtype=half, shape=(inner,), chunks=lambda: (ones,)))
    return parts


def _row_pairs(source: QuantizedCheckpoint, module: str, rows: slice) -> npt.NDArray[np.uint8]:
    nibbles = unpack_nibbles(source.stored(module, rows).data.view(np.uint8))
    return pack_row_pairs(nibbles.view(np.int8))


def _scale(source: QuantizedCheckpoint, module: str, dtype: Dtype, rows: slice) -> _Array:
    scale = source.stored(module, rows).scale
    assert scale is not None, "a quantized module has scales"
    wide, name = scale.astype(np.float32), f"{module}.weight_scale"
    stored = _half(name, wide, dtype)
    if dtype == "bfloat16" and (wide.view(np.uint32) & 0xFFFF).any():
        raise BuildError(
            f"{name} has scales that are not exact in bfloat16, the dtype of this model",
            "calibrate again, with a version that rounds scales to bfloat16 before it chooses the integers",
        )
    return stored


def _half(name: str, values: FloatArray, dtype: Dtype) -> _Array:
    """Values in the model's dtype, rounded to nearest; bfloat16 as its bits."""
    if not np.isfinite(values).all():
        raise BuildError(f"{name} has a NaN or infinite value", "take the weights from their release again")
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    if np.abs(values).max(initial=0) > np.finfo(np.float16).max:
        raise BuildError(
            f"{name} has a value too large for float16, which config.json names as the model's dtype",
            'write "torch_dtype": "bfloat16" into config.json, if that is what its weights are in',
        )
    return values.astype(np.float16)


def _row_chunks(shape: tuple[int, ...]) -> list[slice]:
    """Slices of rows, an even number in each but the last, that hold a bounded number of elements."""
    num_rows = max(2, _CHUNK_ELEMENTS // (shape[1] if len(shape) > 1 else 1) // 2 * 2)
    return [slice(start, start + num_rows) for start in range(0, shape[0], num_rows)]
