"""The limits of a GPU engine, from the ledger: all that `trtllm-build` would otherwise guess.

Its own defaults bite: prompts of at most 1,024 tokens, buffers for 2,048 sequences. Here each limit is what fits one
rank's memory beside its share of the weights, or what the user asked for, refused where it cannot fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.errors import CapacityError, UsageError
from harness.ledger import (
    GPU_KV_FRACTION,
    KvLayout,
    Ledger,
    gib,
    kv_cache_bytes,
    kv_layout,
    matrix_bytes,
    runtime_reserve,
)
from harness.ledger import unquantized_bytes as rest_bytes
from harness.recipe import F16, Precision, in_decoder, linear_shapes
from harness.spec import MlaSpec, ModelSpec

KvDtype = Literal["float16", "bfloat16", "int8"]

TYPICAL_LEN = 4096
"""Tokens of a sequence, by which the number of sequences is chosen: few requests use all of a long context."""
MOST_SEQUENCES = 256
DEFAULT_NUM_TOKENS = 8192
"""Tokens of a step; with logits of prompts fewer, since each has a row as wide as the vocabulary."""
NUM_LOGIT_TOKENS = 2048
_CUDA_BYTES = 3 << 29  # 1.5 GiB: context, kernels, and an engine's file beside its weights
_LOGIT_BYTES = 4  # float32
_MOST = {"max_batch_size": 1 << 16, "max_num_tokens": 1 << 20, "max_model_len": 1 << 24}
_WHOLE = 1024  # a context that was cut to fit is a multiple of it


@dataclass(frozen=True, kw_only=True)
class LimitWishes:
    """Limits as a user gives them; None means "choose for me".

    Raises:
        UsageError: a value is out of range.
    """

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("max_num_tokens", 64), ("max_model_len", 2)):
            value = getattr(self, name)
            if value is not None and not least <= value <= _MOST[name]:
                raise UsageError(f"--{name.replace('_', '-')} is {value}", f"allowed: {least} to {_MOST[name]}")

    def flags(self) -> list[str]:
        """As a command line gives them."""
        given = {name: getattr(self, name) for name in _MOST if getattr(self, name) is not None}
        return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of an engine: sequences and tokens of a step, tokens of a prompt, and of a prompt and its answer."""

    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int


def rank_weight_bytes(spec: ModelSpec, resolved: Mapping[str, Precision], *, tp_size: int, pp_size: int) -> int:
    """Bytes of weights on the fullest rank. Embeddings and `lm_head` are 16-bit and, to be safe, counted whole."""
    shapes = linear_shapes(spec)
    decoder = sum(matrix_bytes(shape, resolved[name]) for name, shape in shapes.items() if in_decoder(name))
    ends = sum(matrix_bytes(shape, F16) for name, shape in shapes.items() if not in_decoder(name))
    tied = 2 if spec.tie_word_embeddings else 1  # lm_head is written out
    return math.ceil((decoder + rest_bytes(spec)) / (tp_size * pp_size)) + tied * ends


def rank_kv_bytes_per_token(spec: ModelSpec, *, tp_size: int, pp_size: int, kv_dtype: KvDtype) -> int:
    """Bytes that a token leaves in the KV cache of the fullest rank. A latent is on every rank of a layer whole."""
    whole = kv_layout(spec, mla="latent-once")
    share = 1 if isinstance(spec.attention, MlaSpec) else tp_size
    layout = KvLayout(
        num_layers=math.ceil(whole.num_layers / pp_size),
        num_kv_heads=math.ceil(whole.num_kv_heads / share),
        key_dim=whole.key_dim,
        value_dim=whole.value_dim,
    )
    return layout.bytes_per_token("f16") // (2 if kv_dtype == "int8" else 1)


def rank_ledger(
    spec: ModelSpec,
    resolved: Mapping[str, Precision],
    *,
    tp_size: int,
    pp_size: int,
    kv_dtype: KvDtype,
    memory_bytes: int,
    num_logit_tokens: int = 0,
) -> Ledger:
    """The memory of the fullest rank, of a device with `memory_bytes`, as the server will divide it.

    What is kept back is more than the usual reserve: what CUDA and the engine's code take, logits of `num_logit_tokens`
    tokens of a step, and the share of the rest that the server leaves alone. So what fits here can be served.
    """
    weights = rank_weight_bytes(spec, resolved, tp_size=tp_size, pp_size=pp_size)
    reserve = runtime_reserve(memory_bytes) + _CUDA_BYTES + num_logit_tokens * spec.vocab_size * _LOGIT_BYTES
    left = max(0, memory_bytes - weights - reserve)
    return Ledger(
        memory_bytes=memory_bytes,
        weights_bytes=weights,
        reserve_bytes=reserve + math.ceil(left * (1 - GPU_KV_FRACTION)),
        kv_bytes_per_token=rank_kv_bytes_per_token(spec, tp_size=tp_size, pp_size=pp_size, kv_dtype=kv_dtype),
    )


def choose_limits(
    spec: ModelSpec,
    ledger: Ledger,
    wishes: LimitWishes,
    *,
    chunked_context: bool,
    num_draft_tokens: int = 0,
    num_tokens: int = DEFAULT_NUM_TOKENS,
) -> EngineLimits:
    """Limits that fit one rank's memory.

    Args:
        chunked_context: whether long prompts are computed in chunks; else a prompt must fit one step.
        num_draft_tokens: drafted for each sequence in a step.
        num_tokens: of a step, where nobody says otherwise.

    Raises:
        UsageError: `max_model_len` is more than the model was made for, or `max_num_tokens` less than a step needs.
        CapacityError: the weights, or one sequence of `max_model_len`, do not fit.
    """
    longest = _longest(ledger)
    if wishes.max_model_len is None:
        max_seq_len = min(spec.max_position_embeddings, longest)
    else:
        max_seq_len = wishes.max_model_len
        if max_seq_len > spec.max_position_embeddings:
            raise UsageError(
                f"--max-model-len {max_seq_len} is more than the model was made for",
                f"allowed: up to {spec.max_position_embeddings}",
            )
        if max_seq_len > longest:
            needed = kv_cache_bytes(kv_bytes_per_token=ledger.kv_bytes_per_token, length=max_seq_len)
            raise CapacityError(
                f"one sequence of {max_seq_len} tokens needs {gib(needed)} of KV cache on each GPU, "
                f"{gib(ledger.kv_cache_bytes)} are left beside the weights",
                f"give --max-model-len {longest}, or divide the model over more GPUs with --tp",
            )
    fitting = ledger.max_concurrency(min(max_seq_len, TYPICAL_LEN))
    max_batch_size = wishes.max_batch_size or max(1, min(MOST_SEQUENCES, fitting))
    least = max_batch_size * (num_draft_tokens + 1)
    max_num_tokens = wishes.max_num_tokens or max(num_tokens, least)
    if max_num_tokens < least:
        raise UsageError(
            f"--max-num-tokens {max_num_tokens} is less than a step of {max_batch_size} sequences needs",
            f"give {least} or more, or a smaller --max-batch-size",
        )
    return EngineLimits(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_input_len=max_seq_len if chunked_context else min(max_seq_len, max_num_tokens),
        max_seq_len=max_seq_len,
    )


def _longest(ledger: Ledger) -> int:
    """Longest sequence that fits alone."""
    if not ledger.fits(num_sequences=1, length=1):
        raise CapacityError(
            f"the weights need {gib(ledger.weights_bytes)} on each GPU, which has {gib(ledger.memory_bytes)}",
            "divide the model over more GPUs with --tp, or quantize it: --bits 4.5",
        )
    longest = ledger.kv_cache_bytes // ledger.kv_bytes_per_token
    return longest // _WHOLE * _WHOLE or longest
