"""Weights as an engine stores them, by module: what a quality report compares with another engine's.

A matrix is found by the name that lowering gave its node, and computed from its integers, scales and zero points a few
rows at a time; the model is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from harness.manifest import parse_weights_node_name
from harness.runtime.openvino_core import openvino_core

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_MOST_ROWS = 256  # of a module


def module_weights(engine_dir: Path) -> Iterator[tuple[str, Floats]]:
    """Each module and some of its rows in float32, `(rows, in)`: 256 evenly spread ones, or all where it has fewer.

    Rows of a module are in the order of the engine, which is the same for all engines of a model and release.
    """
    model = openvino_core().read_model(engine_dir / "model.xml")
    for node in model.get_ordered_ops():
        num_rows = parse_weights_node_name(node.get_friendly_name())
        if num_rows is None:
            continue
        is_stacked = len(node.get_output_shape(0)) == 3
        start = 0
        for number, (module, rows) in enumerate(num_rows.items()):
            picked = np.linspace(0, rows - 1, min(rows, _MOST_ROWS)).round().astype(np.int64)
            if is_stacked:
                values = _evaluate(node, picked, stack=number)
            else:
                values = _evaluate(node, start + picked, stack=None)
                start += rows
            yield module, values.reshape(len(picked), -1)


def _evaluate(node: Any, rows: Rows, stack: int | None) -> Floats:
    """Some rows of the output of a decompression subgraph, of matrix `stack` where it holds several."""
    inputs = [value.get_node() for value in node.input_values()]
    kind = node.get_type_name()
    if kind == "Constant":
        return _constant_rows(node, rows, stack)
    if kind == "Multiply":
        left, right = (_evaluate(part, rows, stack) for part in inputs)
        return left * right
    if kind == "Subtract":
        left, right = (_evaluate(part, rows, stack) for part in inputs)
        return left - right
    assert kind in ("Convert", "Reshape"), kind
    return _evaluate(inputs[0], rows, stack)


def _constant_rows(node: Any, rows: Rows, stack: int | None) -> Floats:
    shape = list(node.get_output_shape(0))
    data = np.asarray(node.data)
    per_row = int(np.prod(shape[(1 if stack is None else 2) :]))
    flat_rows = rows if stack is None else stack * shape[1] + rows
    grouped = (len(rows), *shape[(1 if stack is None else 2) :])
    element = node.get_element_type()
    if element not in (ov.Type.i4, ov.Type.u4):
        return data.reshape(-1, per_row)[flat_rows].astype(np.float32).reshape(grouped)
    index = flat_rows[:, None] * per_row + np.arange(per_row)
    packed = data.view(np.uint8).reshape(-1)[index // 2]
    nibbles = np.where(index % 2, packed >> 4, packed & 15).astype(np.int8)
    if element == ov.Type.i4:
        nibbles -= 16 * (nibbles > 7).astype(np.int8)
    values: Floats = nibbles.astype(np.float32).reshape(grouped)
    return values
