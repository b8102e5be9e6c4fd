"""A request as the scheduler works on it: its tokens, how far their KV is computed, and where that lies.

    token_ids    [ prompt ....................... | generated ... ]
    computed     [ num_computed_tokens ........ )                      KV lies in block_table
    to compute                                  [ ................ )   num_tokens - num_computed_tokens

Prefill, decode and the return after a preemption are all the same: computed tokens drawn towards all tokens. Owns no
block and decides nothing.

A row of logits tells of the token that follows its position. That token is there already, and its log-probability goes
into the report on the prompt, or it is chosen now.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.runtime.executor import ScheduledSequence
from harness.runtime.request import FinishReason, Request, TokenChunk, TokenLogprob


class Sequence:
    """The state of one request from its arrival to its end.

    Args:
        request: as it came.
        max_tokens: tokens it may generate, its own wish cut to what context and KV memory hold.
        stop_token_ids: tokens that end it.
    """

    def __init__(self, request: Request, *, max_tokens: int, stop_token_ids: Iterable[int] = ()) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        sampling = request.sampling
        self.seed = (secrets.randbits(64) if sampling.seed is None else sampling.seed) % 2**64
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prompt tokens found at the first admission; None before it
        self.block_table: list[int] = []
        self.block_digests: list[bytes] = []  # of full blocks, as far as they were asked for
        has_penalty = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        self.token_counts = TokenCounts(request.prompt_token_ids, max_tokens) if has_penalty else None
        # an entry for each prompt token as far as it is computed; None where it is not wanted
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if sampling.prompt_logprobs is None else [None]

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt_token_ids)

    @property
    def first_logit_position(self) -> int:
        """The first position whose logits are still wanted: the last, unless the prompt is reported on."""
        if self.prompt_logprobs is not None and self.wants_prompt_logprobs:
            return len(self.prompt_logprobs) - 1
        return self.num_tokens - 1

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.token_ids.append(token_id)
        if self.token_counts is not None:
            self.token_counts.add(token_id)

    def part(self, num_tokens: int) -> ScheduledSequence:
        """Its part in a step that computes `num_tokens` more."""
        start = self.num_computed_tokens
        return ScheduledSequence(
            request_id=self.request.request_id,
            token_ids=self.token_ids[start : start + num_tokens],
            num_computed_tokens=start,
            block_table=list(self.block_table),
            logit_positions=list(range(self.first_logit_position - start, num_tokens)),
        )

    def logit_rows(self, part: ScheduledSequence) -> list[LogitRow]:
        """What the rows of logits of its part in a step are for."""
        next_positions = [part.num_computed_tokens + position + 1 for position in part.logit_positions]
        return [LogitRow(self, self.token_ids[p] if p < self.num_tokens else None) for p in next_positions]

    def chunk(
        self,
        token_ids: list[int],
        *,
        logprob: TokenLogprob | None = None,
        prompt_logprobs: list[TokenLogprob | None] | None = None,
        finish_reason: FinishReason | None = None,
        error: str | None = None,
    ) -> TokenChunk:
        """What its client is told of a step."""
        return TokenChunk(
            request_id=self.request.request_id,
            token_ids=token_ids,
            logprobs=None if logprob is None else [logprob],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens or 0,
            finish_reason=finish_reason,
            error=error,
        )


class LogitRow(NamedTuple):
    """What a row of logits is for: to choose the next token of `sequence`, or to score the prompt token given."""

    sequence: Sequence
    prompt_token_id: int | None = None


class TokenCounts:
    """The distinct tokens of a sequence and how often each was generated, kept as it grows for the penalties.

    Args:
        prompt_token_ids: counted as seen, not as generated.
        max_tokens: how many may be generated; sizes the arrays.
    """

    def __init__(self, prompt_token_ids: list[int], max_tokens: int) -> None:
        prompt = list(dict.fromkeys(prompt_token_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(prompt)}
        self._token_ids = np.zeros(len(prompt) + max_tokens, dtype=np.int64)
        self._token_ids[: len(prompt)] = prompt
        self._num_generated = np.zeros(len(prompt) + max_tokens, dtype=np.float64)

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        self._token_ids[slot] = token_id
        self._num_generated[slot] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens of prompt and answer, `(num_distinct,)`."""
        return self._token_ids[: len(self._slots)]

    @property
    def num_generated(self) -> npt.NDArray[np.float64]:
        """How often each of `token_ids` was generated, `(num_distinct,)`."""
        return self._num_generated[: len(self._slots)]
