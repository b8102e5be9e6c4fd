"""Integers for one weight matrix: GPTQ where the layer's inputs are known, rounding to nearest where they are not.

Owns the rules that every stored matrix keeps: scales are finite, positive and exact in bfloat16 and in half precision
alike, and are rounded to that before the integers are chosen. The maths is llm-compressor's: GPTQ (arXiv 2210.17323)
with columns in order of activation and static groups, and scales by a search that weights each input by its second
moment. Needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.observers.imatrix import IMatrixMSEObserver

from harness.errors import CalibrationError
from harness.recipe import Precision

_DAMPING = 0.01  # of the mean of the Hessian's diagonal, the value of the GPTQ paper
_MORE_DAMPING = (_DAMPING, 0.1, 1.0)  # where a Hessian is too near to singular, the next is tried
_MOST_SHRINK, _SHRINK_STEPS, _ERROR_POWER = 0.4, 20, 2.4  # the search for a scale of four bits below the largest value
_SMALLEST_SCALE = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A weight `(out, in)` in integers.

    `integers`: int8 `(out, in)`, of 4 bits within [-8, 7]. `scale`: float32 `(out, groups)`, exact in bf16 and f16.
    `zero_point`: int8 `(out, groups)` within [-8, 7], None where symmetric.
    """

    precision: Precision
    integers: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None

    def dequantize(self) -> torch.Tensor:
        """The float32 weight `(out, in)` that the integers stand for."""
        return dequantize(  # type: ignore[no-any-return]
            self.integers, self.scale, self.zero_point, args=weight_args(self.precision)
        )


def weight_args(precision: Precision) -> QuantizationArgs:
    """A precision in the words of compressed-tensors."""
    group = precision.group_size
    return QuantizationArgs(
        num_bits=8 if precision.dtype == "int8" else 4,
        type="int",
        strategy="channel" if group is None else "group",
        group_size=group,
        symmetric=precision.symmetric,
        actorder="static",
    )


def quantize_matrix(name: str, weight: torch.Tensor, hessian: torch.Tensor, precision: Precision) -> QuantizedMatrix:
    """Quantize `weight` (out, in) so that the layer's output error on the calibration set is small.

    Args:
        name: what to call the weight in an error.
        hessian: `(in, in)`, the sum of outer products of the layer's inputs; any scale.

    Raises:
        CalibrationError: a weight or a scale is not finite or does not fit half precision.
    """
    args = weight_args(precision)
    scale, zero_point = _choose_scales(name, weight, hessian.diagonal(), args)
    for damping in _MORE_DAMPING:
        solved, _, fell_back = quantize_weight(
            weight[None].clone(), _revived(hessian)[None], scale[None], zero_point[None], None, args, percdamp=damping
        )
        if not fell_back.any():
            return _rounded(solved[0], scale, zero_point, precision)
    raise CalibrationError(
        f"the inputs of {name} have second moments that are not positive definite",
        "the weights or the calibration set hold extreme values: check them, or leave the layer at f16 in a --recipe",
    )


def round_to_nearest(
    name: str, weight: torch.Tensor, second_moments: torch.Tensor, precision: Precision
) -> QuantizedMatrix:
    """Quantize with the scales that GPTQ would use, without its error feedback: quick, for estimates.

    `second_moments`: `(in,)`, the mean square of each input. Raises as `quantize_matrix`.
    """
    return _rounded(weight, *_choose_scales(name, weight, second_moments, weight_args(precision)), precision)


def _choose_scales(
    name: str, weight: torch.Tensor, second_moments: torch.Tensor, args: QuantizationArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    if not torch.isfinite(weight).all():
        raise CalibrationError(f"{name} has a NaN or infinite value", "take the weights from their release again")
    observer = IMatrixMSEObserver("weight", args.model_copy())
    observer.maxshrink = _MOST_SHRINK if args.num_bits == 4 else 0.0
    observer.grid, observer.norm = _SHRINK_STEPS, _ERROR_POWER
    if second_moments.any():
        observer._imatrix_sum, observer._imatrix_count = second_moments.float(), torch.tensor(1)
    chosen = observer(weight).get_qparams()
    # rounding to one format after the other leaves a value that both hold
    scale = chosen["scale"].bfloat16().half().float().clamp_min(_SMALLEST_SCALE)
    if not torch.isfinite(scale).all():
        raise CalibrationError(f"{name} has values whose scale exceeds half precision", "check the weights")
    return scale, chosen["zero_point"].to(torch.int8)


def _rounded(
    weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, precision: Precision
) -> QuantizedMatrix:
    zero = None if precision.symmetric else zero_point
    integers = quantize(weight, scale, zero, args=weight_args(precision), dtype=torch.int8)
    return QuantizedMatrix(precision=precision, integers=integers, scale=scale, zero_point=zero)


def _revived(hessian: torch.Tensor) -> torch.Tensor:
    """A copy in which inputs that were always zero count a little: their weights are to be rounded, not erased."""
    copy = hessian.clone()
    diagonal = copy.diagonal()
    diagonal[diagonal == 0] = max(_DAMPING * float(diagonal.mean()), torch.finfo(torch.float32).tiny)
    return copy
