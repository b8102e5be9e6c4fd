"""Perplexity and KL divergence, against torch in float64 and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.calib.measure import (
    compare_logits,
    kl_divergence,
    log_softmax,
    negative_log_likelihood,
    perplexity,
)

# more positions than are computed at a time
_BASE = np.random.default_rng(0).normal(0, 3, (150, 40)).astype(np.float32)
_OTHER = _BASE + np.random.default_rng(1).normal(0, 1, (150, 40)).astype(np.float32)


def test_log_softmax_equals_torch_and_leaves_its_input_alone() -> None:
    before = _BASE.copy()
    expected = torch.from_numpy(_BASE).double().log_softmax(dim=-1).numpy()
    np.testing.assert_allclose(log_softmax(_BASE), expected, rtol=1e-13)
    np.testing.assert_array_equal(_BASE, before)


def test_large_logits_do_not_overflow() -> None:
    np.testing.assert_allclose(log_softmax(np.float32([[1e4, 1e4], [-1e4, 1e4]])), [[-math.log(2)] * 2, [-2e4, 0]])


def test_divergence_equals_torch() -> None:
    p, q = (torch.from_numpy(x).double().log_softmax(dim=-1) for x in (_BASE, _OTHER))
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(dim=-1).numpy()
    np.testing.assert_allclose(kl_divergence(_BASE, _OTHER), expected, rtol=1e-12)


def test_divergence_is_from_the_baseline() -> None:
    even, skewed = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    assert kl_divergence(even, skewed)[0] == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert kl_divergence(skewed, even)[0] == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))


def test_a_constant_added_to_logits_changes_nothing() -> None:
    assert np.abs(kl_divergence(_BASE.astype(np.float64), _BASE.astype(np.float64) + 100)).max() < 1e-12


def test_small_divergences_are_resolved() -> None:
    """Half the variance of the change, under the baseline: the second-order term."""
    change = np.random.default_rng(2).normal(0, 1e-3, _BASE.shape)
    p = np.exp(log_softmax(_BASE))
    variance = (p * change**2).sum(axis=1) - (p * change).sum(axis=1) ** 2
    seen = kl_divergence(_BASE, _BASE + change)
    assert seen.max() < 1e-5
    np.testing.assert_allclose(seen, variance / 2, rtol=0.02)


def test_losses_equal_torch() -> None:
    targets = np.random.default_rng(3).integers(0, 40, 150)
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(_BASE).double(), torch.from_numpy(targets), reduction="none"
    )
    np.testing.assert_allclose(negative_log_likelihood(_BASE, targets), expected.numpy(), rtol=1e-12)


def test_perplexity_of_a_guess_is_the_size_of_the_vocabulary() -> None:
    losses = negative_log_likelihood(np.zeros((3, 50), np.float32), np.array([0, 7, 49]))
    assert perplexity(losses) == pytest.approx(50)


def test_a_comparison_is_the_measures_one_by_one() -> None:
    rng = np.random.default_rng(7)
    baseline = rng.normal(0, 4, (150, 300)).astype(np.float32)
    logits = (baseline + rng.normal(0, 0.5, baseline.shape)).astype(np.float32)
    targets = rng.integers(0, 300, 150)
    seen = compare_logits(baseline, logits, targets)
    np.testing.assert_allclose(seen.kl_divergence, kl_divergence(baseline, logits), rtol=1e-9)
    np.testing.assert_allclose(seen.loss, negative_log_likelihood(logits, targets), rtol=1e-12)
    np.testing.assert_allclose(seen.baseline_loss, negative_log_likelihood(baseline, targets), rtol=1e-12)
    np.testing.assert_array_equal(seen.same_top1, baseline.argmax(axis=1) == logits.argmax(axis=1))
    assert (seen.num_non_finite, seen.baseline_finite) == (0, True)


def test_positions_that_are_not_finite_count_as_knowing_nothing() -> None:
    baseline = np.random.default_rng(8).normal(0, 4, (70, 100)).astype(np.float32)
    logits = baseline.copy()
    logits[3, 5], logits[66, 0] = np.nan, -np.inf
    seen = compare_logits(baseline, logits, np.zeros(70, np.int64))
    assert seen.num_non_finite == 2
    assert not seen.same_top1[[3, 66]].any()
    np.testing.assert_allclose(seen.loss[[3, 66]], np.log(100))
    assert seen.kl_divergence[[3, 66]].min() > 0
    np.testing.assert_allclose(np.delete(seen.kl_divergence, [3, 66]), 0, atol=1e-12)
    assert not compare_logits(logits, baseline, np.zeros(70, np.int64)).baseline_finite
