"""Which runs of tokens a calibration set holds, as hashes: enough to tell whether other text overlaps with it.

A checkpoint and its engines carry the hashes and never the text. Runs are of 13 tokens, as GPT-3's decontamination took
words (arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.checkpoint_record import NGRAMS_NAME
from harness.errors import EngineError

NGRAM = 13
_MULTIPLIER, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


def ngram_hashes(token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Hash of each run of 13 tokens `(tokens - 12,)`, in order; of a shorter text, of its whole."""
    ids = token_ids.astype(np.uint64) + np.uint64(1)
    width = min(NGRAM, len(ids))
    if width == 0:
        return np.empty(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, width)
    hashes = np.full(len(windows), width, np.uint64)
    for column in windows.T:  # unsigned products wrap, as they should
        hashes = (hashes ^ column) * _MULTIPLIER
        hashes = (hashes ^ (hashes >> _SHIFT)) * _MIX
    return hashes


def save_ngrams(path: Path, samples: Iterable[npt.NDArray[np.integer]]) -> None:
    """Write the distinct hashes of all samples, sorted, uint64."""
    parts = [ngram_hashes(sample) for sample in samples]
    np.save(path, np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64), allow_pickle=False)


def load_ngrams(folder: Path) -> npt.NDArray[np.uint64]:
    """The hashes that a checkpoint or an engine holds; none where it was made without a calibration set.

    Raises:
        EngineError: the file is not what `save_ngrams` writes.
    """
    path = folder / NGRAMS_NAME
    if not path.exists():
        return np.empty(0, np.uint64)
    try:
        hashes = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error}", "build the engine again") from None
    if hashes.dtype != np.uint64 or hashes.ndim != 1:
        raise EngineError(f"{path} holds {hashes.dtype} of {hashes.ndim} axes", "build the engine again")
    return np.asarray(hashes)
