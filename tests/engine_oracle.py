"""What an engine holds and computes, read back by means that the builder does not share.

Imported by tests of building and of calibration (pyproject.toml puts this folder on their path).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

from harness.manifest import read_manifest
from harness.recipe import Precision
from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence, SchedulerOutput
from harness.runtime.openvino_core import openvino_core
from harness.runtime.openvino_executor import OpenVinoExecutor
from harness.spec import MlaSpec, ModelSpec

Array = npt.NDArray[Any]


def scheme_of(precision: Precision) -> QuantizationScheme:
    args = QuantizationArgs(
        num_bits=8 if precision.dtype == "int8" else 4,
        symmetric=precision.symmetric,
        strategy="channel" if precision.group_size is None else "group",
        group_size=precision.group_size,
    )
    return QuantizationScheme(targets=["Linear"], weights=args)


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """What the library reads back: signed integers `(out, in)`, scales and zero points `(out, groups)`."""

    integers: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    dequantized: torch.Tensor


def unpack(tensors: Mapping[str, torch.Tensor], module: str, precision: Precision) -> Unpacked:
    args = scheme_of(precision).weights
    assert args is not None
    parts = {k.removeprefix(f"{module}."): v for k, v in tensors.items() if k.startswith(f"{module}.")}
    scale, zero_point = parts["weight_scale"].float(), None
    if "weight" in parts:
        integers = parts["weight"]
    else:
        shape = torch.Size(parts["weight_shape"].tolist())
        integers = unpack_from_int32(parts["weight_packed"], args.num_bits, shape)
        if "weight_zero_point" in parts:
            packed = parts["weight_zero_point"]
            zero_point = unpack_from_int32(packed, 4, torch.Size([shape[0], scale.shape[1]]), packed_dim=0)
    whole = dequantize(integers, scale, zero_point, args)
    return Unpacked(integers=integers, scale=scale, zero_point=zero_point, dequantized=whole)


def joined_modules(spec: ModelSpec) -> Iterator[list[str]]:
    """Modules whose rows lie one after the other in one constant, in that order."""
    for layer in range(spec.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        if isinstance(spec.attention, MlaSpec):
            first = "q_proj" if spec.attention.q_lora_rank is None else "q_a_proj"
            yield [f"{attention}.{first}", f"{attention}.kv_a_proj_with_mqa"]
            yield from [[f"{attention}.q_b_proj"]] * (spec.attention.q_lora_rank is not None)
        else:
            yield [f"{attention}.{n}_proj" for n in "qkv"]
        yield [f"{attention}.o_proj"]
        if spec.moe is not None and spec.is_moe_layer(layer):
            for name in ("gate", "up", "down"):
                yield [f"{mlp}.experts.{e}.{name}_proj" for e in range(spec.moe.num_experts)]
            mlp += ".shared_experts"
        yield [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        yield [f"{mlp}.down_proj"]


def row_order(spec: ModelSpec, module: str, num_rows: int) -> list[int]:
    """DeepSeek's rotary rows come in neighbouring pairs; the engine has the even ones first."""
    a, name = spec.attention, module.rpartition(".")[2]
    if not isinstance(a, MlaSpec) or name not in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa"):
        return list(range(num_rows))
    plain = a.kv_lora_rank if name == "kv_a_proj_with_mqa" else a.qk_nope_head_dim
    rotary = [plain + i for start in (0, 1) for i in range(start, a.qk_rope_head_dim, 2)]
    head = [*range(plain), *rotary]
    return [start + row for start in range(0, num_rows, len(head)) for row in head]


def nibbles(packed: Array) -> Array:
    packed = packed.view(np.uint8).reshape(-1)
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.int8)


def engine_matrices(engine: Path) -> list[tuple[Array, Array, Array | None]]:
    """Integers, scales and zero points of every quantized matrix of an engine, flat, as signed numbers."""
    found = []

    def constant(node: Any) -> Any:
        return node if node.get_type_name() == "Constant" else None

    def signed(node: Any) -> Array:
        data, kind = node.get_data(), node.get_element_type()
        size = int(np.prod(list(node.shape)))
        if kind == ov.Type.i8:
            return np.asarray(data).reshape(-1)
        values = nibbles(data)[:size]
        return values - 8 if kind == ov.Type.u4 else np.where(values > 7, values - 16, values).astype(np.int8)

    def source(value: Any, index: int) -> Any:
        return value.input_value(index).get_node()

    for op in openvino_core().read_model(engine / "model.xml").get_ordered_ops():
        if op.get_type_name() != "Multiply" or op.get_element_type() != ov.Type.f16:
            continue
        values, scale, zero_point = source(op, 0), constant(source(op, 1)), None
        if values.get_type_name() == "Subtract":
            zero_point = signed(source(source(values, 1), 0))
            values = source(values, 0)
        assert values.get_type_name() == "Convert"
        found.append((signed(source(values, 0)), scale.get_data().reshape(-1), zero_point))
    return found


def assert_engine_holds(engine: Path, spec: ModelSpec, unpacked: Mapping[str, Unpacked]) -> None:
    """Checks that an engine's quantized matrices are those of the modules given, bit for bit, and no others."""
    seen = {integers.tobytes(): (scale, zero) for integers, scale, zero in engine_matrices(engine)}
    num_matrices = 0
    for modules in joined_modules(spec):
        if modules[0] not in unpacked:
            continue
        orders = {m: row_order(spec, m, len(unpacked[m].integers)) for m in modules}
        integers = torch.cat([unpacked[m].integers[orders[m]] for m in modules])
        scale, zero_point = seen[integers.numpy().tobytes()]
        expected = torch.cat([unpacked[m].scale[orders[m]] for m in modules])
        np.testing.assert_array_equal(scale.astype(np.float32), expected.flatten().numpy())
        zeros = [zero[orders[m]] for m in modules if (zero := unpacked[m].zero_point) is not None]
        assert (zero_point is None) == (not zeros)
        if zero_point is not None:
            np.testing.assert_array_equal(zero_point, torch.cat(zeros).flatten().numpy())
        num_matrices += 1
    assert num_matrices == len(seen)


def deterministic_logits(engine: Path, token_ids: list[int]) -> Array:
    """Logits `(tokens, vocab)` of one prompt."""
    executor = OpenVinoExecutor(
        engine, read_manifest(engine), deterministic=True, kv_cache_bytes=8 << 20, num_threads=2
    )
    num_blocks = -(-len(token_ids) // TOKENS_PER_BLOCK)
    sequence = ScheduledSequence(
        request_id="r",
        token_ids=token_ids,
        num_computed_tokens=0,
        block_table=list(reversed(range(num_blocks))),
        logit_positions=list(range(len(token_ids))),
    )
    return executor.execute(SchedulerOutput(sequences=[sequence])).logits.copy()


def min_cosine(a: Array, b: Array) -> float:
    """Of the rows of two matrices, the least that two are alike."""
    return float(((a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())
