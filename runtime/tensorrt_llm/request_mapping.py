"""From a `Request` to one of TensorRT-LLM's, in the names of `tensorrt_llm.bindings.executor` 1.2.1.

What the executor cannot do as it is meant is refused here, before anything is queued. Sampling differs from our own in
two ways that the mapping takes care of: without a seed the executor draws the same tokens each time, and its presence
and frequency penalties count the prompt unless they are told how much of it to ignore.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from harness.errors import RequestError
from harness.runtime.request import Request, SamplingParams

MAX_TOP_K = 1024
"""Candidates of the executor's top-k kernel; it cuts a greater `top_k` without a word."""

_GREEDY_BELOW = 1e-5
_NO_END_ID = -1
_SEED_MASK = 2**64 - 1


def salt_id(salt: str) -> int | None:
    """The 64 bits by which the executor tells tenants' KV blocks apart; None for the empty salt.

    A cryptographic hash, so that nobody finds a salt that meets another's.
    """
    if not salt:
        return None
    digest = blake2b(salt.encode(), digest_size=8, person=b"kv-cache-salt").digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, kw_only=True)
class RequestMapper:
    """Makes executor requests.

    Args:
        api: the module `tensorrt_llm.bindings.executor`.
        vocab_size: of the model.
        eos_token_ids: end every request that does not ignore them.
        has_lookahead: whether the engine decodes with lookahead, which is greedy.
    """

    api: Any
    vocab_size: int
    eos_token_ids: Sequence[int]
    has_lookahead: bool

    def check(self, sampling: SamplingParams) -> None:
        """Refuse what this executor cannot do.

        Raises:
            RequestError: names the field.
        """
        if sampling.prompt_logprobs is not None:
            raise _unsupported("prompt_logprobs", "log-probabilities of the prompt are not to be had on this engine")
        if sampling.logprobs:
            raise _unsupported("logprobs", "this engine reports the chosen token alone, without alternatives")
        if MAX_TOP_K < sampling.top_k < self.vocab_size:
            raise _unsupported("top_k", f"top_k is {sampling.top_k}; allowed on this engine: 0 to {MAX_TOP_K}")
        if sampling.logprobs is not None:
            self._check_logprobs(sampling)
        if self.has_lookahead and not _is_greedy(sampling):
            raise _unsupported("temperature", "this engine decodes with lookahead, which is greedy; give temperature 0")
        if self.has_lookahead and (penalties := _changed(sampling, *_PENALTIES)):
            raise _unsupported(penalties[0], f"this engine decodes with lookahead, which knows no {penalties[0]}")

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        if self.has_lookahead:
            raise _unsupported("logprobs", "this engine decodes with lookahead, which reports no log-probabilities")
        changed = _changed(sampling, "temperature", "min_p", *_PENALTIES)
        if _is_greedy(sampling):
            changed = [name for name in changed if name != "temperature"]
        if changed:
            raise _unsupported(
                "logprobs",
                f"log-probabilities of this engine are those after {', '.join(changed)}; ask for them with temperature "
                "0 or 1, without min_p and penalties",
            )

    def stop_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end a request, and are not delivered."""
        return frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)))

    def request(self, request: Request, max_tokens: int) -> Any:
        """The executor's `Request`: streamed, with the figures of its cache hit."""
        sampling = request.sampling
        first, *others = [_NO_END_ID] if sampling.ignore_eos else [*self.eos_token_ids] or [_NO_END_ID]
        stop_words = [[token_id] for token_id in (*others, *sampling.stop_token_ids)]
        return self.api.Request(
            request.prompt_token_ids,
            max_tokens,
            streaming=True,
            sampling_config=self._sampling_config(sampling, len(request.prompt_token_ids)),
            output_config=self.api.OutputConfig(
                return_log_probs=sampling.logprobs is not None,
                exclude_input_from_output=True,
                return_perf_metrics=True,
            ),
            end_id=first,
            stop_words=stop_words or None,
            priority=request.priority,
            cache_salt_id=salt_id(request.cache_salt),
        )

    def _sampling_config(self, sampling: SamplingParams, num_prompt_tokens: int) -> Any:
        penalties: dict[str, float | int] = {name: getattr(sampling, name) for name in _changed(sampling, *_PENALTIES)}
        if penalties.keys() & {"presence_penalty", "frequency_penalty"}:
            penalties["prompt_ignore_length"] = num_prompt_tokens
        if _is_greedy(sampling):
            return self.api.SamplingConfig(top_k=1, **penalties)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & _SEED_MASK
        return self.api.SamplingConfig(
            temperature=sampling.temperature,
            top_k=sampling.top_k if sampling.top_k < self.vocab_size else 0,
            top_p=sampling.top_p,
            min_p=sampling.min_p or None,
            seed=seed,
            **penalties,
        )


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NEUTRAL = SamplingParams(max_tokens=1)


def _changed(sampling: SamplingParams, *names: str) -> list[str]:
    """Those fields that are not at the value that changes nothing."""
    return [name for name in names if getattr(sampling, name) != getattr(_NEUTRAL, name)]


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _GREEDY_BELOW


def _unsupported(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_value")
