"""Is a difference more than chance? Paired bootstrap over items or stretches of text, and what a sample can show.

Both sides see the same items, so what is resampled is the difference of each (Koehn, EMNLP 2004; Efron 1979). It is
seeded: the same differences give the same interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.calib.quality.report import Interval

_RESAMPLES = 2000
_BLOCK = 32  # neighbouring tokens are alike, so they are drawn together
_Z = 1.959964 + 0.841621  # two-sided test at 5 %, power 80 %


def bootstrap_mean(values: npt.NDArray[np.floating[Any]]) -> Interval:
    """Mean of `values` `(n,)`, each drawn on its own, with its 95 % percentile interval."""
    mean = float(values.mean())
    if len(values) == 1:
        return Interval(value=mean, low=mean, high=mean)
    draws = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), (0.025, 0.975))
    return Interval(value=mean, low=min(mean, float(low)), high=max(mean, float(high)))


def bootstrap_tokens(values: npt.NDArray[np.floating[Any]]) -> Interval:
    """As `bootstrap_mean`, of figures of successive tokens `(n,)`: stretches of 32 are drawn."""
    num_blocks = max(1, len(values) // _BLOCK)
    edges = [len(values) * i // num_blocks for i in range(num_blocks + 1)]
    means = np.array([values[start:end].mean() for start, end in itertools.pairwise(edges)])
    interval = bootstrap_mean(means)
    shift = float(values.mean()) - interval.value  # blocks differ in length by a token
    return Interval(value=interval.value + shift, low=interval.low + shift, high=interval.high + shift)


def mean_interval(intervals: Sequence[Interval]) -> Interval:
    """The mean of independent estimates."""
    count = len(intervals)
    value = sum(i.value for i in intervals) / count
    below = math.sqrt(sum((i.value - i.low) ** 2 for i in intervals)) / count
    above = math.sqrt(sum((i.high - i.value) ** 2 for i in intervals)) / count
    return Interval(value=value, low=value - below, high=value + above)


def detectable_difference(differences: npt.NDArray[np.floating[Any]]) -> float:
    """The smallest drop of a mean score that so many items show four times in five.

    Taken from the spread of the differences seen `(n,)`, and from one item changed where none was.
    """
    n = len(differences)
    spread = float(differences.std(ddof=1)) if n > 1 else 1.0
    return min(1.0, _Z * max(spread, 1 / math.sqrt(n)) / math.sqrt(n))
