"""An engine core over TensorRT-LLM's executor, which schedules, batches in flight and keeps the paged KV itself.

Owns the link between our request ids and the executor's, and what each request has been told. Has the interface of
`EngineCore`, so the process around it is the same. The executor works in a thread of its own; a step here collects
what it has made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from harness.errors import EngineError, OverloadedError, RequestError
from harness.runtime.backend import BackendStats
from harness.runtime.request import FinishReason, Request, TokenChunk, TokenLogprob
from harness.runtime.request_check import check_request
from harness.runtime.scheduler import SchedulerConfig
from harness.runtime.tensorrt_llm.request_mapping import RequestMapper
from harness.runtime.tensorrt_llm.stats import StatsCollector

_decisions = logging.getLogger("harness.decisions")

# A step waits no longer than this for tokens, since requests and cancellations are taken in between two steps. It is
# less than one decode step of the models served, so that nobody notices, and leaves 200 wake-ups a second at most.
POLL = timedelta(milliseconds=5)

_QUEUE_IS_FULL = "Maximum queue size"
_OF_ONE_REQUEST = "Encountered an error when fetching new request"


@dataclass(kw_only=True)
class _Running:
    request: Request
    stop_token_ids: frozenset[int]
    num_generated: int = 0
    num_cached_tokens: int | None = None  # not known before its first tokens

    def chunk(self, token_ids: list[int], **fields: Any) -> TokenChunk:
        return TokenChunk(
            request_id=self.request.request_id,
            token_ids=token_ids,
            num_cached_tokens=self.num_cached_tokens or 0,
            **fields,
        )


class TrtllmCore:
    """Completes requests on one executor. Not thread-safe: one thread calls everything.

    Args:
        executor: a loaded `tensorrt_llm.bindings.executor.Executor`, of rank 0 where there are several.
        mapper: makes its requests.
        config: limits; `max_model_len` is enforced here, the others are the executor's.
        max_prompt_len: longest prompt that the engine takes.
        tokens_per_block: of its KV cache.
        gpu_memory: bytes in use and in all of its GPUs.
    """

    def __init__(
        self,
        executor: Any,
        mapper: RequestMapper,
        config: SchedulerConfig,
        *,
        max_prompt_len: int,
        tokens_per_block: int,
        gpu_memory: Callable[[], tuple[int, int]],
    ) -> None:
        self._executor = executor
        self._mapper = mapper
        self._config = config
        self._max_prompt_len = max_prompt_len
        self._tokens_per_block = tokens_per_block
        self._running: dict[int, _Running] = {}  # by the executor's ids
        self._ids: dict[str, int] = {}
        self._cancelled: set[int] = set()  # the executor's last word on them is still to come
        self._stats = StatsCollector(has_prefix_cache=config.prefix_cache, gpu_memory=gpu_memory)
        reasons = mapper.api.FinishReason
        self._finish_reasons = {
            reasons.END_ID: FinishReason.STOP,
            reasons.STOP_WORDS: FinishReason.STOP,
            reasons.LENGTH: FinishReason.LENGTH,
        }

    @property
    def has_work(self) -> bool:
        """Whether the executor has anything to tell, or will have."""
        return bool(self._running or self._cancelled)

    def add_request(self, request: Request) -> None:
        """Hand a request to the executor. `max_tokens` is cut to what fits beside the prompt; it then ends with LENGTH.

        Raises:
            RequestError: the prompt is empty or too long, a token unknown, the id taken, or a field asks for what this
                engine cannot do.
            OverloadedError: the executor's queue is full.
        """
        prompt = request.prompt_token_ids
        if request.request_id in self._ids:
            raise RequestError(f"request id {request.request_id!r} is in use", code="duplicate_request_id")
        check_request(
            request,
            max_model_len=self._config.max_model_len,
            vocab_size=self._mapper.vocab_size,
            has_priorities=True,
        )
        if len(prompt) > self._max_prompt_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; this engine takes {self._max_prompt_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        self._mapper.check(request.sampling)
        max_tokens = min(request.sampling.max_tokens, self._config.max_model_len - len(prompt))
        try:
            executor_id = self._executor.enqueue_request(self._mapper.request(request, max_tokens))
        except RuntimeError as error:
            if _QUEUE_IS_FULL in str(error):
                message = f"{self._config.max_waiting} requests are waiting, the most allowed"
                raise OverloadedError(message, "try again after a while") from None
            raise
        stop_token_ids = self._mapper.stop_token_ids(request.sampling)
        self._running[executor_id] = _Running(request=request, stop_token_ids=stop_token_ids)
        self._ids[request.request_id] = executor_id

    def cancel(self, request_id: str) -> TokenChunk | None:
        """Have the executor end a request and free its blocks; its last chunk, or None if there is none of that id."""
        executor_id = self._ids.pop(request_id, None)
        if executor_id is None:
            return None
        self._executor.cancel_request(executor_id)
        self._cancelled.add(executor_id)
        return self._running.pop(executor_id).chunk([], finish_reason=FinishReason.CANCELLED)

    def step(self) -> list[TokenChunk]:
        """What the executor has made since, waiting for it no longer than `POLL`.

        Raises:
            EngineError: the executor failed as a whole: what CUDA has broken stays broken for the process.
        """
        if not self.has_work:
            return []
        responses = self._executor.await_responses(timeout=POLL)
        chunks = [chunk for chunk in map(self._take, responses) if chunk is not None]
        self._stats.add_iterations(self._executor.get_latest_iteration_stats())
        return chunks

    def stats(self) -> BackendStats:
        """Current counts."""
        return self._stats.snapshot(len(self._running))

    def _take(self, response: Any) -> TokenChunk | None:
        executor_id = response.request_id
        if response.has_error():
            if not response.error_msg.startswith(_OF_ONE_REQUEST):
                raise EngineError(f"TensorRT-LLM's executor failed: {response.error_msg}", "its log says more")
            self._cancelled.discard(executor_id)
            failed = self._forget(executor_id)
            error = response.error_msg
            return None if failed is None else failed.chunk([], finish_reason=FinishReason.ERROR, error=error)
        result = response.result
        running = self._running.get(executor_id)
        if running is None:  # cancelled
            if result.is_final:
                self._cancelled.discard(executor_id)
            return None
        if running.num_cached_tokens is None:
            running.num_cached_tokens = self._num_cached_tokens(result, running.request)
            num_prompt_tokens = len(running.request.prompt_token_ids)
            self._stats.add_prompt(num_prompt_tokens, running.num_cached_tokens)
            _decisions.debug(
                "KV_CACHE request=%s hit_tokens=%d of=%d",
                running.request.request_id,
                running.num_cached_tokens,
                num_prompt_tokens,
            )
        finish: dict[str, Any] = self._finish(result) if result.is_final else {}
        token_ids = list(result.output_token_ids[0])
        # of the tokens that end a request the executor leaves out its end id, and no other
        if finish.get("finish_reason") is FinishReason.STOP and token_ids and token_ids[-1] in running.stop_token_ids:
            token_ids.pop()
        logprobs = self._logprobs(result, running, len(token_ids))
        running.num_generated += len(token_ids)
        self._stats.add_generated(len(token_ids))
        if finish:
            self._forget(executor_id)
        elif not token_ids:
            return None
        return running.chunk(token_ids, logprobs=logprobs, **finish)

    def _forget(self, executor_id: int) -> _Running | None:
        running = self._running.pop(executor_id, None)
        if running is not None:
            del self._ids[running.request.request_id]
        return running

    def _finish(self, result: Any) -> dict[str, Any]:
        reason = result.finish_reasons[0]
        known = self._finish_reasons.get(reason)
        if known is None:
            return {"finish_reason": FinishReason.ERROR, "error": f"the executor ended the request with {reason}"}
        return {"finish_reason": known}

    def _num_cached_tokens(self, result: Any, request: Request) -> int:
        """Whole blocks were reused, and perhaps the last one up to the token before the last, which is always computed.

        That is exact because partial matches of other blocks are switched off.
        """
        num_blocks = result.request_perf_metrics.kv_cache_metrics.num_reused_blocks
        return min(int(num_blocks) * self._tokens_per_block, len(request.prompt_token_ids) - 1)

    def _logprobs(self, result: Any, running: _Running, num_tokens: int) -> list[TokenLogprob] | None:
        if running.request.sampling.logprobs is None or not num_tokens:
            return None
        start = running.num_generated  # the executor gives those of all tokens so far
        values = result.log_probs[0][start : start + num_tokens]
        if len(values) != num_tokens:
            raise EngineError(f"the executor gave {len(values)} log-probabilities for {num_tokens} tokens")
        return [TokenLogprob(logprob=value, top=[]) for value in values]
