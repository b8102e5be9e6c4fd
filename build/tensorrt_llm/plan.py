"""What becomes of a model's precisions and statistics in a TensorRT-LLM checkpoint, decided before a weight is read.

int8 layers multiply integers there, with one static scale for their inputs, which calibration observed. Where none was
observed they stay 16-bit, and that is said. Embeddings and `lm_head` are 16-bit always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from harness.build.checkpoint import QuantizedCheckpoint
from harness.build.tensorrt_llm.families import LATENT_FAMILY
from harness.build.tensorrt_llm.linears import LM_HEAD, all_linears, layer_linears
from harness.build.tensorrt_llm.ranks import Ranks
from harness.errors import RecipeError, SourceError, UsageError
from harness.recipe import F16, Precision, in_decoder
from harness.spec import ModelSpec
from harness.weight_source import WeightSource

Dtype = Literal["float16", "bfloat16"]
_Maxima = Mapping[str, npt.NDArray[np.float32]]
_INT8_RANGE = 127.0
_AGAIN = "make the quantized checkpoint again"
_W8A8 = Precision(dtype="int8", int8_activations=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checkpoint to be written.

    Attributes:
        precisions: of every module, as it will stand there.
        sixteen_bit: int8 modules that become 16-bit for want of a scale of their inputs.
        input_scales: of each int8 module, what its inputs are divided by.
        kv_scales: of each layer, what keys and values are divided by; empty with a 16-bit KV cache.
    """

    spec: ModelSpec
    ranks: Ranks
    dtype: Dtype
    precisions: dict[str, Precision]
    sixteen_bit: tuple[str, ...]
    input_scales: dict[str, float]
    kv_scales: dict[int, float]

    @cached_property
    def algorithms(self) -> dict[str, dict[str, Any] | None]:
        """How TensorRT-LLM calls what each linear layer is quantized by, under the names of the ranks.

        Raises:
            RecipeError: layers of two stages that have one name there differ.
        """
        found: dict[str, tuple[str, dict[str, Any] | None]] = {}
        for name, linear in all_linears(self.spec, self.ranks):
            algorithm = _algorithm(self.precisions[linear.first])
            first, known = found.setdefault(name, (linear.first, algorithm))
            if known != algorithm:
                raise RecipeError(
                    f"{first} is {self.precisions[first]} and {linear.first} {self.precisions[linear.first]}: with "
                    f"--pp {self.ranks.pp_size}, TensorRT-LLM calls both {name}, so they must be equal",
                    "give --pp 1 and more of --tp, or a recipe that is the same in each stage",
                )
        return {name: algorithm for name, (_, algorithm) in found.items()} | {LM_HEAD: None}


def make_plan(source: WeightSource, resolved: Mapping[str, Precision], ranks: Ranks, *, int8_kv: bool = False) -> Plan:
    """Decide all of a checkpoint but its weights.

    Raises:
        UsageError: an int8 KV cache without calibration.
        SourceError: the statistics cannot be read.
        RecipeError: as `Plan.algorithms`.
    """
    spec, maxima = source.spec, _read_maxima(source)
    precisions = {module: p if in_decoder(module) else F16 for module, p in resolved.items()}
    scales: dict[str, float] = {}
    sixteen_bit: list[str] = []
    for module, precision in precisions.items():
        if precision.dtype != "int8":
            continue
        largest = _largest(maxima, f"{_input_key(module)}.input_maxima")
        if largest > 0:
            scales[module] = largest / _INT8_RANGE
        else:
            sixteen_bit.append(module)
        precisions[module] = _W8A8 if largest > 0 else F16
    plan = Plan(
        spec=spec,
        ranks=ranks,
        dtype=_dtype(source),
        precisions=precisions,
        sixteen_bit=tuple(sixteen_bit),
        input_scales=scales,
        kv_scales=_kv_scales(spec, maxima) if int8_kv else {},
    )
    if spec.architecture != LATENT_FAMILY:
        _ = plan.algorithms
    return plan


def _dtype(source: WeightSource) -> Dtype:
    if source.spec.architecture == LATENT_FAMILY:
        return "bfloat16"  # no other has kernels
    named = source.config.get("torch_dtype") or source.config.get("dtype")
    return "bfloat16" if named == "bfloat16" else "float16"


def _algorithm(precision: Precision) -> dict[str, Any] | None:
    if precision.dtype == "int4":
        group = {"group_size": precision.group_size, "has_zero_point": False, "pre_quant_scale": True}
        return {"quant_algo": "W4A16_AWQ", **group}
    return {"quant_algo": "W8A8_SQ_PER_CHANNEL"} if precision.dtype == "int8" else None


def _input_key(module: str) -> str:
    """What calibration calls the input of a module; that of fused modules is one."""
    parent, _, kind = module.rpartition(".")
    if kind in ("q_proj", "k_proj", "v_proj"):
        return f"{parent}.first"
    return f"{parent}.gate_up" if kind in ("gate_proj", "up_proj") else module


def _read_maxima(source: WeightSource) -> _Maxima:
    """Largest magnitudes by channel; none without calibration."""
    path = source.statistics() if isinstance(source, QuantizedCheckpoint) else None
    if path is None:
        return {}
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}", _AGAIN) from None


def _largest(maxima: _Maxima, name: str) -> float:
    """0 where nothing was observed, or nothing finite."""
    seen = float(maxima[name].max(initial=0.0)) if name in maxima else 0.0
    return seen if math.isfinite(seen) else 0.0


def _kv_scales(spec: ModelSpec, maxima: _Maxima) -> dict[int, float]:
    scales, stretch = {}, spec.rope.cos_sin_factor()
    for layer in range(spec.num_layers):
        qkv = layer_linears(spec, layer)[0]
        _, key, value = (f"{module}.output_maxima" for module in qkv.modules)
        if min(_largest(maxima, key), _largest(maxima, value)) <= 0:
            raise UsageError(
                f"an int8 KV cache needs the largest keys and values of layer {layer}, which nobody observed",
                "calibrate (leave out --no-calib and --precision), or leave the KV cache 16-bit",
            )
        scales[layer] = (
            max(_largest_rotated(maxima[key], qkv.head_dim) * stretch, _largest(maxima, value)) / _INT8_RANGE
        )
    return scales


def _largest_rotated(keys: npt.NDArray[np.float32], head_dim: int | None) -> float:
    """What keys can be at most in the cache, where they lie rotated, by the maxima of their channels before that."""
    assert head_dim is not None
    if keys.size % head_dim:
        raise SourceError(f"the statistics of {keys.size} key channels are not of heads of {head_dim}", _AGAIN)
    halves = keys.astype(np.float32).reshape(-1, 2, head_dim // 2)
    return float(np.hypot(halves[:, 0], halves[:, 1]).max())
