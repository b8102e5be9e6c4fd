"""What is computed in each step, for whom, and in which KV blocks.

There is no prefill phase and no decode phase. A step has a budget of tokens; each sequence is given as many as draw its
computed tokens up to all its tokens, the running ones first and then those that wait, in order of arrival. In-flight
batching, chunked prefill and the return after a preemption all follow from this one rule.

    add() --> waiting --------- schedule(): the whole of it fits ---------> running -- update(): finished --> gone
                 ^                                                             |
                 +--- preempted: blocks released, generated tokens kept -------+

What always holds (`check_integrity` asserts it):
- Running and then waiting sequences stand in order of arrival. Preemption takes the newest running one back to the head
  of the queue, so the oldest request advances in every step and there is no livelock.
- All running sequences but the newest have one token to compute: nobody starts behind a prefill that was cut.
- A prefill is cut on a block boundary only, since 8-bit KV depends on how a block was filled.
- Where log-probabilities of the prompt are wanted, no token of it goes by without its own, and none is reported twice.

Owns the queue, the running sequences and their block tables. Knows no model, no text and no clock.

In-flight batching is from Orca (Yu et al., OSDI 2022), prefill in chunks from Sarathi-Serve (arXiv 2403.02310), block
tables from PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import islice

from harness.errors import OverloadedError, RequestError
from harness.runtime.backend import BackendStats
from harness.runtime.block_pool import BlockPool, num_blocks_for
from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence, SchedulerOutput
from harness.runtime.prefix_cache import PrefixCache
from harness.runtime.request import FinishReason, Request, TokenChunk
from harness.runtime.request_check import check_request
from harness.runtime.sampler import SampledToken
from harness.runtime.sequence import LogitRow, Sequence

_decisions = logging.getLogger("harness.decisions")

# Rows of logits that prompts may take in one step, in whole blocks: one of a vocabulary of 150k is 600 kB.
MAX_PROMPT_LOGITS = 4 * TOKENS_PER_BLOCK


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    `max_model_len` counts prompt and generated tokens of one request; `max_waiting` is the length of the queue.

    Raises:
        ValueError: a limit is not positive, or the budget cannot hold a token of every running sequence and a block of
            prefill beside them.
    """

    max_model_len: int
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    max_waiting: int = 256
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_model_len", 2), ("max_num_seqs", 1), ("max_waiting", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {least} or more")
        least = TOKENS_PER_BLOCK + self.max_num_seqs
        if self.max_num_batched_tokens < least:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; allowed: {least} or more "
                f"(a token for each of {self.max_num_seqs} sequences, and one KV block)"
            )


class Scheduler:
    """Drives requests through steps: `schedule`, then `update` with what was sampled, and again.

    Args:
        config: its limits.
        num_blocks: KV blocks of the executor.
        vocab_size: token ids are below it.
        eos_token_ids: end every request that does not ignore them.
    """

    def __init__(
        self, config: SchedulerConfig, *, num_blocks: int, vocab_size: int, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self._config = config
        self._max_model_len = min(config.max_model_len, num_blocks * TOKENS_PER_BLOCK)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self._pool) if config.prefix_cache else None
        self._sequences: dict[str, Sequence] = {}  # every living one, in order of arrival
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_prefix_query_tokens = 0
        self._num_prefix_hit_tokens = 0
        self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is alive; if so, `schedule` gives at least one token to compute."""
        return bool(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request. `max_tokens` is cut to what fits beside the prompt; it then ends with LENGTH.

        Raises:
            RequestError: the prompt is empty or too long, it or the stop tokens are not in the vocabulary, or the id is
                taken.
            OverloadedError: the queue is full.
        """
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", code="duplicate_request_id")
        check_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size, has_priorities=False)
        if len(self._waiting) >= self._config.max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting, the most allowed", "try again after a while"
            )
        sampling = request.sampling
        sequence = Sequence(
            request,
            max_tokens=min(sampling.max_tokens, self._max_model_len - len(request.prompt_token_ids)),
            stop_token_ids={*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)},
        )
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> TokenChunk | None:
        """End a request, waiting or running, and release its blocks; None if there is none of that id."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._remove(sequence)
        return sequence.chunk([], finish_reason=FinishReason.CANCELLED)

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and allocate the blocks they need, preempting where there are too few.

        Computed tokens do not advance before `update`, so a step that failed can be scheduled again.
        """
        budget = self._config.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        # Preemption shortens the list behind the sequence at hand, so nothing scheduled above is taken back.
        for sequence in self._running:
            limit = _limit(sequence, budget, scheduled)
            num_tokens = _num_tokens_within(limit, sequence.num_tokens - sequence.num_computed_tokens)
            if not self._grow(sequence, num_tokens):
                break
            scheduled.append(sequence.part(num_tokens))
            budget -= num_tokens
        while (
            self._waiting
            and len(self._running) < self._config.max_num_seqs
            and (not scheduled or self._reaches_the_end(scheduled[-1]))
        ):
            num_tokens = self._admit(self._waiting[0], _limit(self._waiting[0], budget, scheduled))
            if num_tokens == 0:
                break
            scheduled.append(self._running[-1].part(num_tokens))
            budget -= num_tokens
        output = SchedulerOutput(sequences=scheduled)
        _decisions.debug(
            "BATCHING tokens=%d sequences=%d waiting=%d",
            self._config.max_num_batched_tokens - budget,
            len(scheduled),
            len(self._waiting),
        )
        return output

    def logit_rows(self, output: SchedulerOutput) -> list[LogitRow]:
        """What the rows of logits of this step are for, in their order."""
        return [row for part in output.sequences for row in self._sequences[part.request_id].logit_rows(part)]

    def update(self, output: SchedulerOutput, sampled: Rows[SampledToken | None]) -> list[TokenChunk]:
        """Account for a completed step: its KV can be found from now on, its tokens are delivered.

        Args:
            output: what was computed.
            sampled: one entry for each of `logit_rows(output)`; None ends its request with ERROR.

        Returns:
            A chunk for each sequence that took a token or ended.
        """
        rows = iter(sampled)
        chunks: list[TokenChunk] = []
        for part in output.sequences:
            sequence = self._sequences[part.request_id]
            sequence.num_computed_tokens += len(part.token_ids)
            if self._prefix_cache is not None:
                self._prefix_cache.publish(sequence, part.num_computed_tokens // TOKENS_PER_BLOCK)
            chunk = self._deliver(sequence, list(islice(rows, len(part.logit_positions))))
            if chunk is not None:
                chunks.append(chunk)
        self._num_steps += 1
        return chunks

    def stats(self) -> BackendStats:
        """Current counts. Prompt and hit tokens count when a request is first admitted, not when it comes back."""
        return BackendStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_published,
            prefix_query_tokens_total=self._num_prefix_query_tokens,
            prefix_hit_tokens_total=self._num_prefix_hit_tokens,
            evictions_total=self._pool.num_evictions,
            preemptions_total=self._num_preemptions,
            prompt_tokens_total=self._num_prompt_tokens,
            generated_tokens_total=self._num_generated_tokens,
            steps_total=self._num_steps,
        )

    def check_integrity(self) -> None:
        """Assert, between two steps, all that is said to hold at the top of this module.

        Raises:
            AssertionError: one of our own invariants is broken.
        """
        assert [*self._running, *self._waiting] == list(self._sequences.values()), "not in order of arrival"
        assert len(self._running) <= self._config.max_num_seqs
        self._pool.check_integrity(sequence.block_table for sequence in self._sequences.values())
        for sequence in self._waiting:
            assert (sequence.block_table, sequence.num_computed_tokens) == ([], 0), "a waiting sequence holds blocks"
        for sequence in self._running:
            num_computed, num_tokens = sequence.num_computed_tokens, sequence.num_tokens
            assert num_computed < num_tokens <= self._max_model_len
            assert num_computed <= sequence.first_logit_position, "a prompt token was computed and not reported"
            assert num_blocks_for(num_computed) <= len(sequence.block_table) <= num_blocks_for(num_tokens)
            assert num_computed == num_tokens - 1 or (
                sequence is self._running[-1] and num_computed % TOKENS_PER_BLOCK == 0
            ), "a prefill was cut inside a block or overtaken"

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Move the head of the queue to running if all its tokens fit; returns how many to compute now, or 0."""
        found = [] if self._prefix_cache is None else self._prefix_cache.find(sequence)
        num_found_tokens = len(found) * TOKENS_PER_BLOCK
        num_tokens = _num_tokens_within(budget, sequence.num_tokens - num_found_tokens)
        num_new = num_blocks_for(sequence.num_tokens) - len(found)
        num_available = self._pool.num_free - sum(map(self._pool.is_free, found))
        # One block to grow into is left for each running sequence, else the next to grow would undo the admission.
        if num_tokens == 0 or num_new + len(self._running) > num_available:
            return 0
        self._running.append(self._waiting.popleft())
        self._pool.acquire(found)
        sequence.block_table = found
        sequence.num_computed_tokens = num_found_tokens
        self._grow(sequence, num_tokens)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_found_tokens
            self._num_prompt_tokens += sequence.num_tokens
            if self._prefix_cache is not None and not sequence.wants_prompt_logprobs:
                self._num_prefix_query_tokens += sequence.num_tokens
            self._num_prefix_hit_tokens += num_found_tokens
        _decisions.debug(
            "KV_CACHE request=%s hit_tokens=%d of=%d",
            sequence.request.request_id,
            num_found_tokens,
            sequence.num_tokens,
        )
        return num_tokens

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence blocks for `num_tokens` more; False if it had to be preempted itself."""
        num_blocks = num_blocks_for(sequence.num_computed_tokens + num_tokens)
        while len(sequence.block_table) < num_blocks:
            if self._pool.num_free:
                sequence.block_table.append(self._pool.allocate())
            elif self._preempt_newest() is sequence:
                return False
        return True

    def _preempt_newest(self) -> Sequence:
        sequence = self._running.pop()
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        self._waiting.appendleft(sequence)
        self._num_preemptions += 1
        _decisions.debug("PREEMPT request=%s", sequence.request.request_id)
        return sequence

    def _reaches_the_end(self, part: ScheduledSequence) -> bool:
        return part.num_computed_tokens + len(part.token_ids) == self._sequences[part.request_id].num_tokens

    def _deliver(self, sequence: Sequence, results: list[SampledToken | None]) -> TokenChunk | None:
        """Take the results of its rows in this step: scores of prompt tokens first, then the next token."""
        for result in results:
            if result is None:
                # The KV behind such logits is not to be trusted, so nobody may find it.
                self._pool.forget(sequence.block_table)
                self._remove(sequence)
                error = f"the logits of token {sequence.first_logit_position + 1} are not finite"
                return sequence.chunk([], finish_reason=FinishReason.ERROR, error=error)
            if sequence.prompt_logprobs is None or not sequence.wants_prompt_logprobs:
                return self._append(sequence, result)
            sequence.prompt_logprobs.append(result.logprob)
        return None

    def _append(self, sequence: Sequence, sampled: SampledToken) -> TokenChunk:
        report = sequence.prompt_logprobs if sequence.num_generated_tokens == 0 else None
        is_scored_only = sequence.max_tokens == 0
        if is_scored_only or sampled.token_id in sequence.stop_token_ids:
            self._remove(sequence)
            reason = FinishReason.LENGTH if is_scored_only else FinishReason.STOP
            return sequence.chunk([], prompt_logprobs=report, finish_reason=reason)
        sequence.append(sampled.token_id)
        self._num_generated_tokens += 1
        is_full = sequence.num_generated_tokens == sequence.max_tokens
        if is_full:
            self._remove(sequence)
        return sequence.chunk(
            [sampled.token_id],
            logprob=sampled.logprob,
            prompt_logprobs=report,
            finish_reason=FinishReason.LENGTH if is_full else None,
        )

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        if sequence in self._running:
            self._running.remove(sequence)
            self._pool.release(sequence.block_table)
        else:
            self._waiting.remove(sequence)


def _limit(sequence: Sequence, budget: int, scheduled: Rows[ScheduledSequence]) -> int:
    """Tokens that a sequence may compute: of the budget, no more than there is room for in rows of logits."""
    if not sequence.wants_prompt_logprobs:
        return budget
    # each may have one row to choose its next token; what is beyond that is of prompts
    num_prompt_logits = sum(max(len(part.logit_positions) - 1, 0) for part in scheduled)
    return min(budget, MAX_PROMPT_LOGITS - num_prompt_logits)


def _num_tokens_within(budget: int, num_remaining: int) -> int:
    """Tokens to compute now: all that remain, or else as many whole blocks as the budget holds."""
    return num_remaining if num_remaining <= budget else budget - budget % TOKENS_PER_BLOCK
