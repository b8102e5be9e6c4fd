"""What travels between the server and an engine: requests in, token chunks out.

These are msgspec structs because they cross a process border; they carry token ids only, never text or HTTP.
"""

from __future__ import annotations

from enum import Enum

import msgspec

DEFAULT_PRIORITY = 0.5


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen, and when to stop.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch that filter off. Penalties as OpenAI defines them
    (presence, frequency: over generated tokens) and as CTRL does (repetition, arXiv 1909.05858: over prompt and
    generated tokens). `logprobs` is the number of alternatives reported beside the chosen token, None for no report;
    `prompt_logprobs` the same for the prompt's tokens. `max_tokens` may be 0 with it: the prompt alone is scored.

    Raises:
        ValueError: a value out of range; names the field, the value seen and the values allowed.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, 2**31 - 1)
        _check("temperature", self.temperature, 0.0, 2.0)
        _check("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above_low=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, 20)
        if self.prompt_logprobs is not None:
            _check("prompt_logprobs", self.prompt_logprobs, 0, 20)


def _check(name: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    # written so that NaN fails
    if not (low < value <= high if above_low else low <= value <= high):
        interval = f"{'(' if above_low else '['}{low}, {high}]"
        raise ValueError(f"{name} is {value}; allowed: {interval}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to complete.

    `cache_salt` separates tenants: KV blocks are shared only between requests of equal salt. Of requests that wait, an
    engine with priorities starts those of higher `priority`, 0 to 1, first.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: float = DEFAULT_PRIORITY


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a chosen or given token, and the `top` alternatives as `(token_id, logprob)`, best first."""

    logprob: float
    top: list[tuple[int, float]]


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request. The last chunk carries `finish_reason`, and `error` where that is ERROR.

    `num_cached_tokens` is how many prompt tokens were taken from the prefix cache. A stop token is not in `token_ids`
    unless the request asked to ignore end of sequence. `prompt_logprobs` comes with the first chunk of a request that
    asked for it, an entry a prompt token; the first token's is None, since nothing stands before it.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
