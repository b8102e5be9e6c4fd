"""Hidden states of many sequences between two layers, on disk.

So memory stays bounded by a layer, and a run that was killed goes on from the last one. Needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch


class Activations:
    """Hidden states `(tokens, hidden)` float32 of sequences of given lengths, one after the other in a file."""

    def __init__(self, path: Path, lengths: Sequence[int], hidden_size: int) -> None:
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        shape = (int(self._starts[-1]), hidden_size)
        with path.open("ab") as file:  # room is taken now: on a full disk, writing to the map would kill the process
            try:
                os.posix_fallocate(file.fileno(), 0, 4 * shape[0] * shape[1])
            except OSError as error:  # of a number, it does not say which file
                raise OSError(error.errno, error.strerror, str(path)) from None
        self.path = path
        self._map: np.memmap[tuple[int, ...], np.dtype[np.float32]] = np.memmap(path, np.float32, "r+", shape=shape)

    def read(self, number: int) -> torch.Tensor:
        """One sequence, `(1, tokens, hidden)`, in memory of its own."""
        return torch.from_numpy(self._map[self._starts[number] : self._starts[number + 1]]).clone()[None]

    def write(self, number: int, hidden: torch.Tensor) -> None:
        """Set one sequence, `(1, tokens, hidden)`."""
        self._map[self._starts[number] : self._starts[number + 1]] = hidden[0].cpu().numpy()

    def flush(self) -> None:
        """Bring what was written to the disk."""
        self._map.flush()
