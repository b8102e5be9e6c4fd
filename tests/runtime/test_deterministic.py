"""How a step is cut into calls of the model: rows stay in the window, nothing is lost, no query row is alone."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from harness.errors import EngineError
from harness.runtime.deterministic import Compute, DeterministicSteps, RowWindow, find_row_window
from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence

Logits = npt.NDArray[np.float32]


def _sequence(start: int, num_tokens: int, first_block: int = 0, logits: list[int] | None = None) -> ScheduledSequence:
    num_blocks = -(-(start + num_tokens) // TOKENS_PER_BLOCK)
    return ScheduledSequence(
        request_id=str(first_block),
        token_ids=list(range(1000 * first_block + start, 1000 * first_block + start + num_tokens)),
        num_computed_tokens=start,
        block_table=list(range(first_block, first_block + num_blocks)),
        logit_positions=[num_tokens - 1] if logits is None else logits,
    )


def _kernel(*boundaries: int) -> Compute:
    """A fake model whose bits change where the number of rows crosses a boundary."""

    def compute(sequences: list[ScheduledSequence]) -> Logits:
        num_rows = sum(len(s.token_ids) for s in sequences)
        return np.full((num_rows, 2), sum(num_rows >= boundary for boundary in boundaries), np.float32)

    return compute


@pytest.mark.parametrize(
    ("boundaries", "num_blocks", "window"),
    [
        ((), 8, RowWindow(least=2, most=64)),
        ((2,), 8, RowWindow(least=2, most=64)),
        ((5, 80), 8, RowWindow(least=6, most=64)),
        ((13, 33), 8, RowWindow(least=16, most=32)),
        ((), 1, RowWindow(least=2, most=32)),
    ],
)
def test_window_ends_where_bits_change(boundaries: tuple[int, ...], num_blocks: int, window: RowWindow) -> None:
    assert find_row_window(_kernel(*boundaries), vocab_size=50, num_blocks=num_blocks) == window


def test_a_change_in_the_last_rows_alone_is_noticed() -> None:
    def compute(sequences: list[ScheduledSequence]) -> Logits:
        num_rows = sum(len(s.token_ids) for s in sequences)
        rows = np.zeros((num_rows, 2), np.float32)
        rows[32:] = 1  # a kernel for what remains after blocks of 32
        return rows

    assert find_row_window(compute, vocab_size=50, num_blocks=8).most == 32


@pytest.mark.parametrize("boundaries", [(13, 17), (12, 14, 16, 17)])
def test_a_machine_without_a_window_is_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="deterministic"):
        find_row_window(_kernel(*boundaries), vocab_size=50, num_blocks=8)


def test_a_machine_that_never_repeats_itself_is_refused() -> None:
    calls = iter(range(100))
    with pytest.raises(EngineError, match="deterministic"):
        find_row_window(
            lambda s: np.full((len(s[0].token_ids), 2), next(calls), np.float32), vocab_size=50, num_blocks=8
        )


def test_a_lone_token_is_computed_with_the_one_before_it() -> None:
    steps = DeterministicSteps(8, RowWindow(least=2, most=64))
    steps.calls([_sequence(0, 40)])
    [[piece]] = steps.calls([_sequence(40, 1)])
    assert (piece.token_ids, piece.num_computed_tokens, piece.logit_positions) == ([39, 40], 39, [1])


def test_few_rows_are_filled_up_with_copies_without_logits() -> None:
    steps = DeterministicSteps(8, RowWindow(least=6, most=64))
    [call] = steps.calls([_sequence(0, 2)])
    assert [p.token_ids for p in call] == [[0, 1]] * 3
    assert [p.logit_positions for p in call] == [[1], [], []]
    assert steps.fill_logit_rows([5]) == [5] * 6
    assert steps.fill_logit_rows([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_every_token_and_logit_once(seed: int) -> None:
    rng = random.Random(seed)
    window = RowWindow(least=rng.choice([2, 6, 12, 16]), most=rng.choice([17, 32, 64]))
    steps = DeterministicSteps(200, window)
    sequences = []
    for number in range(rng.randint(1, 9)):
        start = 32 * rng.randint(0, 2)
        if start:
            steps.calls([_sequence(0, start, 10 * number)])
        num_tokens = rng.choice([1, 2, 3, 33, 100])
        wanted = sorted(rng.sample(range(num_tokens), rng.randint(0, min(3, num_tokens))))
        sequences.append(_sequence(start, num_tokens, 10 * number, wanted))
    computed: dict[str, set[int]] = {s.request_id: set() for s in sequences}
    logits: list[tuple[str, int]] = []
    for call in steps.calls(sequences):
        num_rows = sum(len(p.token_ids) for p in call)
        assert window.least <= num_rows <= window.most
        for piece in call:
            assert len(piece.token_ids) >= 2
            positions = range(piece.num_computed_tokens, piece.num_computed_tokens + len(piece.token_ids))
            # what lies before a piece was computed before it
            assert len(piece.block_table) == -(-positions.stop // TOKENS_PER_BLOCK)
            computed[piece.request_id] |= set(positions)
            logits += [(piece.request_id, positions[p]) for p in piece.logit_positions]
    for sequence in sequences:
        start = sequence.num_computed_tokens
        assert computed[sequence.request_id] >= set(range(start, start + len(sequence.token_ids)))
    assert logits == [(s.request_id, s.num_computed_tokens + p) for s in sequences for p in s.logit_positions]
