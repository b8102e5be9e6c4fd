"""The inner seam: what the scheduler asks of a model, and what it gets back.

An executor knows tokens, positions and KV blocks. It knows no requests, no sampling and no queue; the scheduler
imports no engine library. `harness.runtime.openvino_executor` is the one that runs a CPU engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from harness.ledger import TOKENS_PER_BLOCK as TOKENS_PER_BLOCK


@dataclass(frozen=True, kw_only=True)
class ScheduledSequence:
    """One sequence's part in a step.

    Tokens `num_computed_tokens .. num_computed_tokens + len(token_ids)` of the sequence are computed; the KV of all
    earlier ones lies in `block_table`, which also has room for the new ones. `logit_positions` are offsets into
    `token_ids` whose logits are wanted, ascending; empty in the middle of a prefill that nobody wants to see.
    """

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_table: list[int]
    logit_positions: list[int]


@dataclass(frozen=True, kw_only=True)
class SchedulerOutput:
    """All that one step computes. Prefill and decode differ in nothing but the number of tokens."""

    sequences: list[ScheduledSequence]


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """Logits of the wanted positions, `(num_logit_positions, vocab_size)` float32, in the order of the sequences.

    The array is the executor's own and is overwritten by its next step.
    """

    logits: npt.NDArray[np.float32]


class Executor(Protocol):
    """A model with its KV memory."""

    @property
    def num_blocks(self) -> int:
        """KV blocks it holds, numbered from 0."""

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        """Compute one step and write its KV into the blocks named.

        Raises:
            EngineError: a token id or block is out of range; nothing was computed.
        """
