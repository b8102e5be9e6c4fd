"""Which token each KV slot was computed from, so that a lone token can be computed together with the one before it.

Deterministic mode wants that because attention for one query row is another kernel than for many. Fast mode needs it
for latent attention: where a step holds as many sequences as there are threads, OpenVINO's kernel for one query row
computes wrong values there (2026.4.1: one KV head, keys wider than values). It is right for two rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence


class SlotTokens:
    """The tokens of all KV slots of an executor.

    Args:
        num_blocks: KV blocks of the executor.
    """

    def __init__(self, num_blocks: int) -> None:
        self._tokens = np.zeros((num_blocks, TOKENS_PER_BLOCK), np.int64)

    def remember(self, sequence: ScheduledSequence) -> None:
        """Note what a sequence is about to write."""
        start = sequence.num_computed_tokens
        positions = np.arange(start, start + len(sequence.token_ids))
        blocks = np.array(sequence.block_table)[positions // TOKENS_PER_BLOCK]
        self._tokens[blocks, positions % TOKENS_PER_BLOCK] = sequence.token_ids

    def two_rows(self, piece: ScheduledSequence) -> ScheduledSequence:
        """A lone token together with the one before it, whose keys and values come out as they are.

        A sequence's first token has none before it: it gets one behind it, in a slot that the next step overwrites.
        """
        if len(piece.token_ids) > 1:
            return piece
        if piece.num_computed_tokens == 0:
            return replace(piece, token_ids=piece.token_ids * 2)
        before = piece.num_computed_tokens - 1
        slot = piece.block_table[before // TOKENS_PER_BLOCK], before % TOKENS_PER_BLOCK
        return replace(
            piece,
            token_ids=[int(self._tokens[slot]), *piece.token_ids],
            num_computed_tokens=before,
            logit_positions=[p + 1 for p in piece.logit_positions],
        )
