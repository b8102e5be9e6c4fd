"""From logits to tokens: penalties, temperature, top-k, top-p (arXiv 1904.09751), min-p (2407.01082), in this order.

A token is drawn by inverting the cumulative distribution at uniforms that depend on the request's seed and on how many
tokens it has generated, and on nothing else: neither the batch nor a preemption can change a seeded answer. They come
from Philox, a counter-based generator (Salmon et al., SC 2011).

Greedy rows cost one `argmax` for all of them. The others are worked on one at a time, vectorised over the vocabulary:
a row of 150k logits stays in cache that way, and a batch of them does not.

Rows of a prompt that is reported on are scored instead: their token is given.

Owns no state: what grows with a request lies in its `Sequence`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.runtime.request import SamplingParams, TokenLogprob
from harness.runtime.sequence import LogitRow, Sequence, TokenCounts

_Floats = npt.NDArray[np.float32]
_Ids = npt.NDArray[np.int64]

_GREEDY_BELOW = 1e-5  # temperatures under this are greedy; dividing by them would overflow
_SPAN = 512  # neighbouring tokens taken as one before looking inside: cumulating or sorting a whole row is slow
_LOGIT_LIMIT = 1e30  # keeps extreme penalties finite


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """A chosen or given token, and its log-probability where the request asks for it."""

    token_id: int
    logprob: TokenLogprob | None = None


def sample(logits: _Floats, rows: Rows[LogitRow]) -> list[SampledToken | None]:
    """Choose the token that follows each row, or score the one that is given.

    Args:
        logits: `(num_rows, vocab_size)`, not changed.
        rows: what each is for.

    Returns:
        One entry a row; None where it holds a value that is not finite.
    """
    best = logits.argmax(axis=1).tolist()
    # Extreme logits, penalties or temperatures overflow to a weight of zero, as they should.
    with np.errstate(over="ignore"):
        return [_sample_row(row, best[i], *rows[i]) if np.isfinite(row).all() else None for i, row in enumerate(logits)]


def _sample_row(logits: _Floats, best: int, sequence: Sequence, prompt_token_id: int | None) -> SampledToken:
    sampling = sequence.request.sampling
    if prompt_token_id is not None:
        scored = _logprob(logits, prompt_token_id, sampling.prompt_logprobs or 0)
        return SampledToken(token_id=prompt_token_id, logprob=scored)
    penalized = logits
    if sequence.token_counts is not None:
        penalized = _penalize(logits, sequence.token_counts, sampling)
        best = int(penalized.argmax())
    token_id = best
    if sampling.temperature >= _GREEDY_BELOW:
        scaled = (penalized - penalized[best]) / np.float32(sampling.temperature)
        token_id = _draw(scaled, sampling, _uniforms(sequence.seed, sequence.num_generated_tokens))
    logprob = None if sampling.logprobs is None else _logprob(logits, token_id, sampling.logprobs)
    return SampledToken(token_id=token_id, logprob=logprob)


def _penalize(logits: _Floats, counts: TokenCounts, sampling: SamplingParams) -> _Floats:
    x = logits[counts.token_ids].astype(np.float64)
    x = np.where(x > 0, x / sampling.repetition_penalty, x * sampling.repetition_penalty)
    x -= sampling.frequency_penalty * counts.num_generated
    x -= sampling.presence_penalty * (counts.num_generated > 0)
    penalized = logits.copy()
    penalized[counts.token_ids] = np.clip(x, -_LOGIT_LIMIT, _LOGIT_LIMIT)
    return penalized


def _draw(scaled: _Floats, sampling: SamplingParams, uniforms: tuple[float, float]) -> int:
    """Draw from `scaled` logits, whose greatest is 0: weights are relative to the best token's, which is 1."""
    weights = np.exp(scaled)
    if sampling.top_k or sampling.top_p < 1:
        candidates = _filter(scaled, weights, sampling)
        return int(candidates[_invert(weights[candidates], uniforms[0])])
    weights[weights < sampling.min_p] = 0
    span_weights = np.add.reduceat(weights, np.arange(0, weights.size, _SPAN))
    start = _invert(span_weights, uniforms[0]) * _SPAN
    return start + _invert(weights[start : start + _SPAN], uniforms[1])


def _filter(scaled: _Floats, weights: _Floats, sampling: SamplingParams) -> _Ids:
    """Tokens that pass top-k, top-p and min-p, best first. In that order each filter keeps a beginning of the list."""
    if sampling.top_k:
        candidates = _largest(scaled, sampling.top_k)
        total = weights[candidates].sum(dtype=np.float64)
    else:
        # What lies below this floor sums to less than 1 - top_p, so the nucleus needs none of it and less is sorted.
        total = weights.sum(dtype=np.float64)
        floor = float((1 - sampling.top_p) * total / weights.size)
        candidates = _best_first(scaled, np.flatnonzero(weights >= floor))
    kept = weights[candidates]
    num_kept = int(np.count_nonzero(kept >= sampling.min_p))
    if sampling.top_p < 1:
        num_nucleus = int(np.searchsorted(kept.cumsum(dtype=np.float64), sampling.top_p * total)) + 1
        num_kept = min(num_kept, num_nucleus)
    return candidates[:num_kept]


def _best_first(values: _Floats, ids: _Ids) -> _Ids:
    return ids[np.argsort(-values[ids], kind="stable")]


def _largest(values: _Floats, count: int) -> _Ids:
    """The `count` largest, best first; of equals the lower id."""
    count = min(count, values.size)
    if count == 0:
        return np.empty(0, dtype=np.int64)
    # `count` spans hold a value no less than their count-th greatest maximum, so nothing below that is wanted. Looking
    # among the maxima is ten times faster than among all values.
    maxima = np.maximum.reduceat(values, np.arange(0, values.size, _SPAN))
    floor = np.partition(maxima if count <= maxima.size else values, -count)[-count]
    return _best_first(values, np.flatnonzero(values >= floor))[:count]


def _invert(weights: _Floats, uniform: float) -> int:
    """The index at which the cumulative weight passes `uniform` of the whole; never one of weight zero."""
    cumulative = weights.cumsum(dtype=np.float64)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def _uniforms(seed: int, position: int) -> tuple[float, float]:
    first, second = np.random.Philox(key=seed, counter=position).random_raw(2).tolist()
    # 52 bits, not 53: the product of such a number and any total rounds to less than the total
    return (first >> 12) * 2.0**-52, (second >> 12) * 2.0**-52


def _logprob(logits: _Floats, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probabilities of the model itself, before penalties and temperature."""
    greatest = logits.max()
    log_sum = float(greatest) + math.log(np.exp(logits - greatest).sum(dtype=np.float64))
    top = _largest(logits, num_top)
    return TokenLogprob(
        logprob=float(logits[token_id]) - log_sum,
        top=[(i, value - log_sum) for i, value in zip(top.tolist(), logits[top].tolist(), strict=True)],
    )
