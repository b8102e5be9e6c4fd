"""Streamed safetensors files against the library that reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from harness.build.safetensors_writer import StreamedTensor, bfloat16_bits, write_safetensors


def test_the_library_reads_every_dtype_in_the_order_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {
        "F32": rng.normal(size=(3, 5)).astype(np.float32),
        "F16": rng.normal(size=(7,)).astype(np.float16),
        "I32": rng.integers(-(2**31), 2**31, (2, 2), np.int32),
        "I8": rng.integers(-128, 128, (5, 3), np.int8),
        "U8": rng.integers(0, 256, (4, 1), np.uint8),
    }
    wide = rng.normal(size=(6, 4)).astype(np.float32)
    tensors = [
        StreamedTensor(name=f"x.{dtype}", dtype=dtype, shape=array.shape, chunks=lambda a=array: (a[:2], a[2:]))  # type: ignore[misc]
        for dtype, array in values.items()
    ]
    bits = bfloat16_bits(wide)
    tensors.insert(2, StreamedTensor(name="x.BF16", dtype="BF16", shape=wide.shape, chunks=lambda: bits[:, None, :]))
    tensors.append(StreamedTensor(name="none", dtype="F32", shape=(0, 4), chunks=lambda: ()))
    path = tmp_path / "model.safetensors"
    written = list(write_safetensors(path, tensors, metadata={"format": "pt"}))
    assert written == [tensor.name for tensor in tensors]
    read = load_file(path)
    for dtype, array in values.items():
        np.testing.assert_array_equal(read[f"x.{dtype}"].numpy(), array)
        assert read[f"x.{dtype}"].numpy().dtype == array.dtype
    assert torch.equal(read["x.BF16"], torch.from_numpy(wide).bfloat16())
    assert read["none"].shape == (0, 4)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert path.stat().st_size == 8 + int.from_bytes(path.read_bytes()[:8], "little") + sum(
        t.num_bytes for t in tensors
    )


def test_values_that_do_not_fill_a_tensor_are_an_error(tmp_path: Path) -> None:
    short = StreamedTensor(name="x", dtype="I8", shape=(2, 2), chunks=lambda: (np.zeros((1, 2), np.int8),))
    with pytest.raises(AssertionError, match="x is not of shape"):
        list(write_safetensors(tmp_path / "f", [short], metadata={}))


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    patterns = np.random.default_rng(1).integers(0, 2**32, 1 << 20, np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([patterns, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bfloat16_bits(values), expected)
