"""Perplexity and KL divergence of logits: the one place where both are computed.

Everything is in nats and per position. numpy alone: the logits may come from torch, from an engine, or from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ROWS = 64  # positions at a time: a large vocabulary in float64 is a megabyte a position


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Log probabilities `(positions, vocab)`, in float64: differences of 1e-6 nats are measured."""
    wide = _shifted(logits)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def _shifted(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Logits in float64, the greatest of each row 0."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide


def kl_divergence(baseline: npt.NDArray[np.floating], logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """KL divergence of the baseline from the other, `(positions,)`, both logits `(positions, vocab)`."""
    divergence = np.empty(len(baseline))
    for start in range(0, len(baseline), _ROWS):
        rows = slice(start, start + _ROWS)
        log_p, log_q = log_softmax(baseline[rows]), log_softmax(logits[rows])
        divergence[rows] = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return divergence


def negative_log_likelihood(
    logits: npt.NDArray[np.floating], targets: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """`-log p(target)` at each position: logits `(positions, vocab)`, targets `(positions,)` token ids."""
    losses = np.empty(len(targets))
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        losses[rows] = -np.take_along_axis(log_softmax(logits[rows]), targets[rows, None], axis=-1)[:, 0]
    return losses


def perplexity(losses: npt.NDArray[np.floating]) -> float:
    """`exp` of the mean negative log likelihood over all positions."""
    return float(np.exp(losses.mean()))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models' logits beside each other, per position `(positions,)`, in nats.

    A position whose logits hold NaN or infinity counts as one that finds every token equally likely.
    """

    baseline_loss: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]
    kl_divergence: npt.NDArray[np.float64]
    same_top1: npt.NDArray[np.bool_]
    num_non_finite: int
    baseline_finite: bool

    @classmethod
    def join(cls, parts: Sequence[Comparison]) -> Comparison:
        """Several stretches of positions as one."""
        return cls(
            baseline_loss=np.concatenate([p.baseline_loss for p in parts]),
            loss=np.concatenate([p.loss for p in parts]),
            kl_divergence=np.concatenate([p.kl_divergence for p in parts]),
            same_top1=np.concatenate([p.same_top1 for p in parts]),
            num_non_finite=sum(p.num_non_finite for p in parts),
            baseline_finite=all(p.baseline_finite for p in parts),
        )


def compare_logits(
    baseline: npt.NDArray[np.floating], logits: npt.NDArray[np.floating], targets: npt.NDArray[np.integer]
) -> Comparison:
    """All of a `Comparison` in one pass: both logits `(positions, vocab)`, targets `(positions,)` token ids."""
    parts = []
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        finite = np.isfinite(logits[rows]).all(axis=-1)
        seen = logits[rows] if finite.all() else np.where(finite[:, None], logits[rows], 0)
        baseline_finite = bool(np.isfinite(baseline[rows]).all())
        expected = baseline[rows] if baseline_finite else np.zeros_like(seen)
        # one exponential for each logit: large vocabularies make this the longest part of a quick report
        a, b = (_shifted(logits) for logits in (expected, seen))
        weight_a, weight_b = np.exp(a), np.exp(b)
        sum_a, sum_b = weight_a.sum(axis=-1), weight_b.sum(axis=-1)
        log_a, log_b = np.log(sum_a), np.log(sum_b)
        target = targets[rows, None]
        parts.append(
            Comparison(
                baseline_loss=log_a - np.take_along_axis(a, target, axis=-1)[:, 0],
                loss=log_b - np.take_along_axis(b, target, axis=-1)[:, 0],
                kl_divergence=np.einsum("ij,ij->i", weight_a, a - b) / sum_a - log_a + log_b,
                same_top1=expected.argmax(axis=-1) == np.where(finite, seen.argmax(axis=-1), -1),
                num_non_finite=int((~finite).sum()),
                baseline_finite=baseline_finite,
            )
        )
    return Comparison.join(parts)
