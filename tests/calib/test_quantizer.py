"""The quantizer against brute force, the recursion of its paper, and what every format can hold."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from harness.calib.quantizer import QuantizedMatrix, quantize_matrix, round_to_nearest
from harness.errors import CalibrationError
from harness.recipe import Precision

Array = npt.NDArray[np.float64]

INT4 = ["int4-g128", "int4-g64", "int4-g32", "int4-channel", "int4-g128-zp", "int4-g32-zp", "int4-channel-zp"]
ALL = [*INT4, "int8", "int8-a8"]


def _weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _hessian(columns: int, seed: int = 1) -> torch.Tensor:
    """Of inputs that go together: most of their variance lies in an eighth of the directions."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(max(1, columns // 8), columns, generator=random)
    x = torch.randn(4 * columns, len(mixing), generator=random) @ mixing
    x += 0.3 * torch.randn(x.shape, generator=random)
    x *= torch.empty(columns).uniform_(0.5, 2.0, generator=random)
    return x.T @ x / len(x)


def _output_error(weight: torch.Tensor, matrix: QuantizedMatrix, hessian: torch.Tensor) -> float:
    change = (matrix.dequantize() - weight).double()
    return float(((change @ hessian.double()) * change).sum())


@pytest.mark.parametrize("precision", [*INT4, "int8"])
def test_gptq_beats_rounding_on_correlated_inputs(precision: str) -> None:
    weight, hessian, parsed = _weight(48, 256), _hessian(256), Precision.parse(precision)
    calibrated = quantize_matrix("w", weight, hessian, parsed)
    rounded = round_to_nearest("w", weight, hessian.diagonal(), parsed)
    # the scales are the same: all that is gained comes from the integers
    assert torch.equal(calibrated.scale, rounded.scale)
    assert _output_error(weight, calibrated, hessian) < 0.5 * _output_error(weight, rounded, hessian)


# A tiny case: what GPTQ must reach, and what it cannot pass


def _every_row(columns: int) -> Array:
    """All integer vectors of 4 bits, `(16 ** columns, columns)`."""
    return np.array(list(itertools.product(range(-8, 8), repeat=columns)), np.float64)


def _least_error(weight: Array, scale: Array, hessian: Array) -> tuple[Array, Array]:
    """For each row the integers of least output error among all there are, and that error."""
    integers = _every_row(weight.shape[1])
    found, errors = [], []
    for row, step in zip(weight, scale[:, 0], strict=True):
        change = integers * step - row
        error = ((change @ hessian) * change).sum(axis=1)
        found.append(integers[error.argmin()])
        errors.append(error.min())
    return np.array(found), np.array(errors)


def test_with_independent_inputs_it_finds_the_best_of_all_integers() -> None:
    weight, hessian = _weight(6, 4), torch.diag(torch.tensor([4.0, 0.5, 2.0, 1.0]))
    seen = quantize_matrix("w", weight, hessian, Precision.parse("int4-channel"))
    best, _ = _least_error(weight.double().numpy(), seen.scale.double().numpy(), hessian.double().numpy())
    np.testing.assert_array_equal(seen.integers.numpy(), best)


@pytest.mark.parametrize("columns", [2, 4])
def test_with_correlated_inputs_it_comes_near_the_best_of_all_integers(columns: int) -> None:
    weight, precision = _weight(40, columns), Precision.parse("int4-channel")
    hessian = 0.9 * torch.ones(columns, columns) + 0.1 * torch.diag(torch.arange(1.0, columns + 1))
    calibrated = quantize_matrix("w", weight, hessian, precision)
    rounded = round_to_nearest("w", weight, hessian.diagonal(), precision)
    exact = weight.double().numpy(), calibrated.scale.double().numpy(), hessian.double().numpy()
    least = _least_error(*exact)[1].sum()
    reached = _output_error(weight, calibrated, hessian)
    assert least * (1 - 1e-9) <= reached < 1.5 * least
    assert _output_error(weight, rounded, hessian) > 1.2 * reached


def _optimal_brain_quantization(weight: Array, seen: QuantizedMatrix, hessian: Array) -> npt.NDArray[np.int64]:
    """The greedy recursion of GPTQ's paper in its plainest form: one column at a time, the inverse downdated.

    Columns go in order of their inputs' energy; 1 % of its mean is added to the diagonal first.
    """
    columns = weight.shape[1]
    per_scale = columns // seen.scale.shape[1]
    scale = np.repeat(seen.scale.double().numpy(), per_scale, axis=1)
    zero = np.zeros_like(scale)
    if seen.zero_point is not None:
        zero = np.repeat(seen.zero_point.double().numpy(), per_scale, axis=1)
    damped = hessian + 0.01 * np.trace(hessian) / columns * np.eye(columns)
    inverse, left = np.linalg.inv(damped), weight.copy()
    integers = np.zeros(weight.shape, np.int64)
    for i in np.argsort(-np.diag(hessian)):
        q = np.clip(np.round(left[:, i] / scale[:, i] + zero[:, i]), -8, 7)
        error = (left[:, i] - (q - zero[:, i]) * scale[:, i]) / inverse[i, i]
        left -= np.outer(error, inverse[i])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1.0  # done with: kept from dividing by zero
        integers[:, i] = q
    return integers


@pytest.mark.parametrize(
    ("columns", "precision"),
    [(2, "int4-channel"), (6, "int4-channel"), (64, "int4-g32"), (64, "int4-g32-zp"), (192, "int4-g64")],
)
def test_integers_are_those_of_the_recursion_written_out(columns: int, precision: str) -> None:
    """192 columns go through the quantizer in two blocks."""
    weight, hessian = _weight(16, columns), _hessian(columns)
    seen = quantize_matrix("w", weight, hessian, Precision.parse(precision))
    expected = _optimal_brain_quantization(weight.double().numpy(), seen, hessian.double().numpy())
    np.testing.assert_array_equal(seen.integers.numpy(), expected)


def test_rows_do_not_know_of_each_other() -> None:
    """So q, k and v can be solved as one matrix and stored as three."""
    weight, hessian, precision = _weight(24, 64), _hessian(64), Precision.parse("int4-g32-zp")
    whole = quantize_matrix("w", weight, hessian, precision)
    parts = [quantize_matrix("w", part, hessian, precision) for part in weight.split([8, 16])]
    assert torch.equal(whole.integers, torch.cat([p.integers for p in parts]))
    assert torch.equal(whole.scale, torch.cat([p.scale for p in parts]))


def test_only_proportions_of_the_hessian_matter_and_inputs_are_left_alone() -> None:
    weight, hessian, precision = _weight(8, 64), _hessian(64), Precision.parse("int4-g32")
    before = weight.clone(), hessian.clone()
    seen = quantize_matrix("w", weight, hessian, precision)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])
    assert torch.equal(seen.integers, quantize_matrix("w", weight, hessian * 2.0**20, precision).integers)


def test_scales_are_searched_for_the_inputs_that_count() -> None:
    """A weight far out on an input that never moves is worth clipping; on one that moves it is not."""
    weight = _weight(1, 32)
    weight[0, 5] = 3 * weight.abs().max()
    precision = Precision.parse("int4-channel")
    quiet, loud = torch.ones(32), torch.ones(32)
    quiet[5], loud[5] = 0.0, 100.0
    clipped = round_to_nearest("w", weight, quiet, precision).scale
    kept = round_to_nearest("w", weight, loud, precision).scale
    assert clipped.item() < 0.7 * kept.item()


# What every format can hold


def _awkward(columns: int = 256) -> torch.Tensor:
    """Rows of zeros, of almost nothing, of one sign, of one value, of thousands, and a group of zeros."""
    weight = _weight(10, columns)
    weight[0] = 0
    weight[1] *= 1e-9
    weight[2] *= 1e-6
    weight[3] = weight[3].abs() + 1
    weight[4] = -weight[4].abs() - 1
    weight[5] = 0.25
    weight[6] *= 1e4
    weight[7, :128] = 0
    weight[8, 1:] = 0
    return weight


_ALGORITHMS: dict[str, Callable[[torch.Tensor, Precision], QuantizedMatrix]] = {
    "gptq": lambda w, p: quantize_matrix("w", w, _hessian(w.shape[1]), p),
    "nearest": lambda w, p: round_to_nearest("w", w, torch.ones(w.shape[1]), p),
}


@pytest.mark.parametrize("algorithm", _ALGORITHMS)
@pytest.mark.parametrize("precision", ALL)
def test_scales_are_positive_and_exact_in_every_format(precision: str, algorithm: str) -> None:
    seen = _ALGORITHMS[algorithm](_awkward(), Precision.parse(precision))
    scale = seen.scale.numpy()
    assert scale.dtype == np.float32
    assert np.isfinite(scale).all()
    assert (scale > 0).all()
    assert torch.equal(seen.scale.bfloat16().float(), seen.scale)
    assert torch.equal(seen.scale.half().float(), seen.scale)
    # and by numpy: bfloat16 is the upper half of float32
    assert not (scale.view(np.uint32) & 0xFFFF).any()
    np.testing.assert_array_equal(scale.astype(np.float16).astype(np.float32), scale)


@pytest.mark.parametrize("algorithm", _ALGORITHMS)
@pytest.mark.parametrize("precision", ALL)
def test_integers_stand_for_the_weight(precision: str, algorithm: str) -> None:
    weight, parsed = _awkward(), Precision.parse(precision)
    seen = _ALGORITHMS[algorithm](weight, parsed)
    groups = 1 if parsed.group_size is None else 256 // parsed.group_size
    limit = 7 if parsed.dtype == "int4" else 127
    assert seen.integers.dtype == torch.int8
    assert seen.scale.shape == (10, groups)
    assert seen.integers.min() >= -limit - 1
    assert seen.integers.max() <= limit
    assert (seen.zero_point is None) == parsed.symmetric
    zero = np.zeros((10, groups)) if seen.zero_point is None else seen.zero_point.numpy()
    assert zero.min() >= -8
    assert zero.max() <= 7
    by_group = seen.integers.numpy().reshape(10, groups, -1) - zero[..., None]
    expected = (by_group * seen.scale.numpy()[..., None]).reshape(10, 256)
    np.testing.assert_array_equal(seen.dequantize().numpy(), expected.astype(np.float32))
    assert not seen.dequantize()[0].any()
    if algorithm == "nearest":
        # half a step, and what clipping the range by two fifths (of int8, by a twentieth) can take
        step = seen.scale.repeat_interleave(256 // groups, dim=1)
        clipped = (0.42 if parsed.dtype == "int4" else 0.06) * weight.abs()
        assert ((seen.dequantize() - weight).abs() <= 0.52 * step + clipped).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, 1e8])
@pytest.mark.parametrize("precision", ["int4-g128", "int4-g32-zp", "int8"])
def test_weights_that_no_scale_can_hold_are_refused_by_name(precision: str, value: float) -> None:
    weight = _weight(4, 128)
    weight[2, 7] = value
    for algorithm in (quantize_matrix, round_to_nearest):
        moments = torch.eye(128) if algorithm is quantize_matrix else torch.ones(128)
        with pytest.raises(CalibrationError, match=re.escape("model.layers.3.mlp.down_proj")):
            algorithm("model.layers.3.mlp.down_proj", weight, moments, Precision.parse(precision))


@pytest.mark.parametrize("largest", [65400.0, 65450.0, 65500.0, 65520.0])
def test_a_scale_near_the_end_of_half_precision_is_finite_or_refused(largest: float) -> None:
    """Rounding to bfloat16 can carry a scale that half precision holds to one that it does not."""
    weight = torch.full((1, 32), 1.0)
    weight[0, 0] = largest * 127.5
    try:
        scale = round_to_nearest("w", weight, torch.ones(32), Precision.parse("int8")).scale
    except CalibrationError:
        assert largest > 65400
        return
    assert torch.isfinite(scale).all()
    assert torch.equal(scale.half().float(), scale)


# Inputs that calibration never saw


@pytest.mark.parametrize("precision", ["int4-g32", "int4-g32-zp", "int8"])
def test_an_input_that_was_always_zero_keeps_its_weights(precision: str) -> None:
    weight, hessian, parsed = _weight(16, 64), _hessian(64), Precision.parse(precision)
    dead = [3, 40]
    hessian[dead] = 0
    hessian[:, dead] = 0
    seen = quantize_matrix("w", weight, hessian, parsed)
    rounded = round_to_nearest("w", weight, hessian.diagonal(), parsed)
    assert torch.equal(seen.integers[:, dead], rounded.integers[:, dead])
    assert seen.dequantize()[:, dead].abs().max() > 0.5 * weight[:, dead].abs().max()
    assert _output_error(weight, seen, hessian) < _output_error(weight, rounded, hessian)


@pytest.mark.parametrize("precision", ["int4-g32", "int4-g32-zp", "int8"])
def test_without_any_input_it_rounds(precision: str) -> None:
    weight, parsed = _weight(16, 64), Precision.parse(precision)
    seen = quantize_matrix("w", weight, torch.zeros(64, 64), parsed)
    rounded = round_to_nearest("w", weight, torch.zeros(64), parsed)
    assert torch.equal(seen.integers, rounded.integers)
    assert torch.equal(seen.scale, rounded.scale)
