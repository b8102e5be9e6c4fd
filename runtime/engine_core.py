"""The loop of an engine: schedule, execute, sample, update.

Owns the two halves that know nothing of each other, the scheduler and the executor. Does not own the process or the
thread it runs in, nor what becomes of a step that raises: that is its caller's.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.runtime.backend import BackendStats
from harness.runtime.executor import TOKENS_PER_BLOCK, Executor, ScheduledSequence, SchedulerOutput
from harness.runtime.request import Request, TokenChunk
from harness.runtime.sampler import sample
from harness.runtime.scheduler import Scheduler, SchedulerConfig


class EngineCore:
    """Completes requests on one executor, step by step. Not thread-safe: one thread calls everything.

    Args:
        executor: the model and its KV memory.
        config: limits of the scheduler.
        eos_token_ids: end every request that does not ignore them.
    """

    def __init__(self, executor: Executor, config: SchedulerConfig, eos_token_ids: Iterable[int] = ()) -> None:
        self._executor = executor
        self._scheduler = Scheduler(
            config, num_blocks=executor.num_blocks, vocab_size=executor.vocab_size, eos_token_ids=eos_token_ids
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return self._scheduler.has_work

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the prompt is empty, too long, or names unknown tokens; or the id is taken.
            OverloadedError: the queue is full.
        """
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> TokenChunk | None:
        """End a request now and free its blocks; its last chunk, or None if there is none of that id."""
        return self._scheduler.cancel(request_id)

    def step(self) -> list[TokenChunk]:
        """Compute one step; `[]` when there is no work, or when all of it was the middle of a prefill.

        Raises:
            HarnessError, RuntimeError: the executor failed. Nothing was accounted for.
        """
        if not self.has_work:
            return []
        scheduled = self._scheduler.schedule()
        logits = self._executor.execute(scheduled).logits
        sampled = sample(logits, self._scheduler.logit_rows(scheduled))
        return self._scheduler.update(scheduled, sampled)

    def stats(self) -> BackendStats:
        """Current counts."""
        return self._scheduler.stats()

    def check_integrity(self) -> None:
        """Assert that no block leaked and every sequence is in a state it may be in.

        Raises:
            AssertionError: one of our own invariants is broken.
        """
        self._scheduler.check_integrity()


def warm_up(executor: Executor) -> None:
    """Compute one block of tokens and one decode step, so that the first request does not pay for compilation.

    Writes into blocks 0 and 1, which belong to nobody yet.
    """
    for start, num_tokens in ((0, TOKENS_PER_BLOCK), (TOKENS_PER_BLOCK, 1)):
        sequence = ScheduledSequence(
            request_id="warm-up",
            token_ids=[0] * num_tokens,
            num_computed_tokens=start,
            block_table=list(range(start // TOKENS_PER_BLOCK + 1)),
            logit_positions=[num_tokens - 1],
        )
        if start // TOKENS_PER_BLOCK < executor.num_blocks:
            executor.execute(SchedulerOutput(sequences=[sequence]))
