"""How deterministic mode computes a step, so that a token's logits do not depend on what is computed beside it.

f32 everywhere is not enough: matrix kernels are chosen by the number of rows, and each kernel sums in an order of its
own; attention for one query row is another kernel than for many. So every call of the model stays inside a window of
row counts that was found to give equal bits on this machine, and no sequence has a single row in a call. A step of more
rows becomes several calls, one of fewer rows is filled up with copies, whose writes are the same bytes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.errors import EngineError
from harness.runtime.block_pool import num_blocks_for
from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence
from harness.runtime.slot_tokens import SlotTokens

Logits = npt.NDArray[np.float32]
Compute = Callable[[list[ScheduledSequence]], Logits]

_REFERENCE_ROWS = 16
_MORE_ROWS = (17, 24, 32, 33, 48, 64)
_FEWER_ROWS = (12, 8, 6, 4, 3, 2)


@dataclass(frozen=True, kw_only=True)
class RowWindow:
    """Numbers of rows of one call, from `least` to `most`, that give a row the same bits."""

    least: int
    most: int


def find_row_window(compute: Compute, *, vocab_size: int, num_blocks: int) -> RowWindow:
    """Try growing and shrinking numbers of rows until the bits change. Overwrites the first KV blocks.

    The reference is a text computed in pieces of 16 rows; the text computed whole must give the same bits in every row.

    Raises:
        EngineError: no two numbers of rows give equal bits.
    """

    def logits(start: int, num_rows: int) -> Logits:
        end = start + num_rows
        part = ScheduledSequence(
            request_id="probe",
            token_ids=[(7919 * i + 1) % vocab_size for i in range(start, end)],
            num_computed_tokens=start,
            block_table=list(range(num_blocks_for(end))),
            logit_positions=list(range(num_rows)),
        )
        return compute([part]).copy()

    most = min(_MORE_ROWS[-1], num_blocks * TOKENS_PER_BLOCK)
    reference = np.concatenate([logits(start, _REFERENCE_ROWS) for start in range(0, most, _REFERENCE_ROWS)])

    def last_equal(counts: Sequence[int]) -> int:
        last = _REFERENCE_ROWS
        for count in counts:
            if not np.array_equal(logits(0, count), reference[:count]):
                break
            last = count
        return last

    is_repeatable = np.array_equal(logits(0, _REFERENCE_ROWS), reference[:_REFERENCE_ROWS])
    window = RowWindow(least=last_equal(_FEWER_ROWS), most=last_equal([count for count in _MORE_ROWS if count <= most]))
    if not is_repeatable or window.most == window.least:
        raise EngineError(
            "this machine computes other logits for every number of rows: deterministic mode cannot be had on it",
            "run without --deterministic",
        )
    return window


class DeterministicSteps:
    """Turns a step into calls of the model inside a row window.

    Args:
        num_blocks: KV blocks of the executor.
        window: row counts that give equal bits.
    """

    def __init__(self, num_blocks: int, window: RowWindow) -> None:
        self._slots = SlotTokens(num_blocks)
        self._window = window

    def calls(self, sequences: Sequence[ScheduledSequence]) -> list[list[ScheduledSequence]]:
        """The calls that compute `sequences`, to be made in order; their logits joined are the step's."""
        calls: list[list[ScheduledSequence]] = [[]]
        num_rows = 0
        for sequence in sequences:
            self._slots.remember(sequence)
            done = 0
            while done < len(sequence.token_ids):
                if self._window.most - num_rows < 2:
                    calls.append([])
                    num_rows = 0
                count = min(len(sequence.token_ids) - done, self._window.most - num_rows)
                piece = self._slots.two_rows(_piece(sequence, done, count))
                calls[-1].append(piece)
                num_rows += len(piece.token_ids)
                done += count
        for call in calls:
            filler = replace(_piece(call[0], 0, 2), logit_positions=[])
            while sum(len(piece.token_ids) for piece in call) < self._window.least:
                call.append(filler)
        return calls

    def fill_logit_rows(self, indices: list[int]) -> list[int]:
        """Repeat an index until the vocabulary's matrix gets the least rows too."""
        return indices + indices[-1:] * (self._window.least - len(indices))


def _piece(sequence: ScheduledSequence, done: int, count: int) -> ScheduledSequence:
    start = sequence.num_computed_tokens + done
    return replace(
        sequence,
        token_ids=sequence.token_ids[done : done + count],
        num_computed_tokens=start,
        block_table=sequence.block_table[: num_blocks_for(start + count)],
        logit_positions=[p - done for p in sequence.logit_positions if done <= p < done + count],
    )
