"""Hidden states on disk: what was written is read, also by a run that comes after."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.calib.activations import Activations

_LENGTHS = [5, 1, 7]
_WRITTEN = [torch.randn(1, n, 8, generator=torch.Generator().manual_seed(n)) for n in _LENGTHS]


def test_what_was_written_is_read_also_by_a_later_run(tmp_path: Path) -> None:
    states = Activations(tmp_path / "states", _LENGTHS, 8)
    for number in (2, 0, 1):
        states.write(number, _WRITTEN[number])
    states.flush()
    later = Activations(tmp_path / "states", _LENGTHS, 8)
    for number, expected in enumerate(_WRITTEN):
        assert torch.equal(states.read(number), expected)
        assert torch.equal(later.read(number), expected)


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
    """A layer may work in place, and the next run of the same layer reads the same states."""
    states = Activations(tmp_path / "states", _LENGTHS, 8)
    states.write(0, _WRITTEN[0])
    states.read(0).zero_()
    assert torch.equal(states.read(0), _WRITTEN[0])
