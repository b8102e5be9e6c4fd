"""Perplexity and KL divergence of logits: the one place where both are computed.

Everything is in nats and per position. numpy alone: the logits may come from torch, from an engine, or from a file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROWS = 64  # positions at a time: a large vocabulary in float64 is a megabyte a position


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Log probabilities `(positions, vocab)`, in float64: differences of 1e-6 nats are measured."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
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
