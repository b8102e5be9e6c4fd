"""The memory ledger: where the bytes of a served model go, before anything is loaded.

It owns four sums: weights by precision, KV cache by attention type, the reserve of the runtime, and what is left of a
memory for requests. All are pure functions of a model's description and its resolved recipe. It does not measure: once
an engine is compiled, the true KV shapes are the executor's to read.

    memory = weights + reserve + KV,    KV = bytes per token x concurrency x length

Sources: GQA (arXiv 2305.13245), MLA (2405.04434), asymmetric 8-bit KV with the key's scales by channel (2402.02750).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.recipe import Precision, linear_shapes
from harness.spec import MlaSpec, ModelSpec

GIB = 2**30

RESERVE_FRACTION = 0.12
"""Share of memory kept for activations, compiled code, buffers and fragmentation; 10-15 % is usual."""

GPU_KV_FRACTION = 0.9
"""Share of the GPU memory left beside weights and reserve that KV takes, unless a server is told otherwise."""

TOKENS_PER_BLOCK = 32
"""Tokens in one KV block: fixed by OpenVINO's paged attention on a CPU."""

KvDtype = Literal["u8", "f16", "bf16", "f32"]
_ELEMENT_BYTES = {"f16": 2, "bf16": 2, "f32": 4}
_SCALE_AND_ZERO_BYTES = 8  # one f32 scale and one f32 zero point


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """What one token leaves in the KV cache: in each layer, `num_kv_heads` keys of `key_dim` and values of `value_dim`.

    `value_dim` is 0 where the value is read out of the key.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_block(self, dtype: KvDtype) -> int:
        """Bytes of `TOKENS_PER_BLOCK` tokens over all layers.

        u8 keeps scale and zero point for each channel of a block's keys, and for each token of its values: for a head
        of 128 the key block is (32 + 8) x 128 bytes, the value block 32 x (128 + 8).
        """
        if dtype == "u8":
            key = (TOKENS_PER_BLOCK + _SCALE_AND_ZERO_BYTES) * self.key_dim
            value = TOKENS_PER_BLOCK * (self.value_dim + _SCALE_AND_ZERO_BYTES) if self.value_dim else 0
            return self.num_layers * self.num_kv_heads * (key + value)
        values = TOKENS_PER_BLOCK * (self.key_dim + self.value_dim)
        return self.num_layers * self.num_kv_heads * values * _ELEMENT_BYTES[dtype]

    def bytes_per_token(self, dtype: KvDtype) -> int:
        """Bytes of one token over all layers, its share of the block's scales included, rounded up."""
        return math.ceil(self.bytes_per_block(dtype) / TOKENS_PER_BLOCK)


def kv_layout(spec: ModelSpec, *, mla: Literal["latent", "latent-once", "expanded"] = "latent") -> KvLayout:
    """The KV cache of a model.

    Args:
        mla: for models with MLA alone. `latent`: the latent joined with the rotary key is the only key head, and the
            latent again the value, as a paged attention with separate key and value caches needs it. `latent-once`:
            the kernel reads the value out of the key. `expanded`: full heads, as without MLA.
    """
    a = spec.attention
    if not isinstance(a, MlaSpec):
        heads, key, value = a.num_kv_heads, a.head_dim, a.head_dim
    elif mla == "expanded":
        heads, key, value = a.num_heads, a.qk_head_dim, a.v_head_dim
    else:
        heads, key = 1, a.kv_lora_rank + a.qk_rope_head_dim
        value = a.kv_lora_rank if mla == "latent" else 0
    return KvLayout(num_layers=spec.num_layers, num_kv_heads=heads, key_dim=key, value_dim=value)


def matrix_bytes(shape: tuple[int, int], precision: Precision) -> int:
    """Bytes of one weight matrix `(out, in)`, scales and zero points included."""
    out, inner = shape
    return round(out * inner * precision.bits_per_weight(inner) / 8)


def unquantized_bytes(spec: ModelSpec) -> int:
    """Bytes of all that no recipe speaks of: norms, biases and the router in f32, MLA's `kv_b_proj` in f16."""
    a = spec.attention
    f32 = spec.hidden_size * (2 * spec.num_layers + 1)
    f16 = 0
    if isinstance(a, MlaSpec):
        f32 += spec.num_layers * (a.kv_lora_rank + (a.q_lora_rank or 0))
        f16 += spec.num_layers * a.num_heads * (a.qk_nope_head_dim + a.v_head_dim) * a.kv_lora_rank
        if a.bias:
            first = a.q_lora_rank or a.num_heads * a.qk_head_dim
            f32 += spec.num_layers * (first + a.kv_lora_rank + a.qk_rope_head_dim + spec.hidden_size)
    else:
        f32 += spec.num_layers * (2 * a.head_dim if a.qk_norm else 0)
        f32 += spec.num_layers * ((a.num_heads + 2 * a.num_kv_heads) * a.head_dim if a.qkv_bias else 0)
        f32 += spec.num_layers * (spec.hidden_size if a.o_bias else 0)
    if spec.mlp_bias:
        f32 += spec.num_layers * (2 * spec.intermediate_size + spec.hidden_size)
    if spec.moe is not None:
        has_bias = spec.moe.scoring == "sigmoid"
        f32 += _num_moe_layers(spec) * spec.moe.num_experts * (spec.hidden_size + has_bias)
    return 4 * f32 + 2 * f16


def weights_by_precision(spec: ModelSpec, resolved: Mapping[str, Precision]) -> dict[str, int]:
    """Bytes of a model's weights under each precision; `unquantized` is what no recipe speaks of.

    Args:
        resolved: the precision of every module, from `Recipe.resolve`.
    """
    sums: dict[str, int] = {}
    for name, shape in linear_shapes(spec).items():
        key = str(resolved[name])
        sums[key] = sums.get(key, 0) + matrix_bytes(shape, resolved[name])
    return sums | {"unquantized": unquantized_bytes(spec)}


def weights_bytes(spec: ModelSpec, resolved: Mapping[str, Precision]) -> int:
    """Bytes of all weights of a model under a resolved recipe."""
    return sum(weights_by_precision(spec, resolved).values())


def bytes_read_per_token(spec: ModelSpec, resolved: Mapping[str, Precision]) -> int:
    """Bytes of weights that one decode step of one sequence reads.

    That is all of them but the embedding table, of which one row is read (a tied one is read whole, as the output
    matrix), and but the experts the token is not routed to.
    """
    total = unquantized_bytes(spec)
    routed = 0
    for name, shape in linear_shapes(spec).items():
        size = matrix_bytes(shape, resolved[name])
        if ".experts." in name:
            routed += size
        elif name == "model.embed_tokens" and not spec.tie_word_embeddings:
            total += size // spec.vocab_size
        else:
            total += size
    if spec.moe is not None:
        total += routed * spec.moe.num_experts_per_tok // spec.moe.num_experts
    return total


def decode_floor_seconds(num_bytes: int, bandwidth: float) -> float:
    """The least time of a decode step that reads `num_bytes` at `bandwidth` bytes a second; 60-70 % of the speed this
    allows is what to expect."""
    return num_bytes / bandwidth


def runtime_reserve(memory_bytes: int, fraction: float = RESERVE_FRACTION) -> int:
    """Bytes of a memory to keep free of weights and KV.

    Raises:
        ValueError: `fraction` is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"reserve fraction is {fraction}; allowed: [0, 1)")
    return math.ceil(memory_bytes * fraction)


def kv_cache_bytes(*, kv_bytes_per_token: int, length: int, num_sequences: int = 1) -> int:
    """Bytes of KV that `num_sequences` sequences of `length` tokens hold, in whole blocks."""
    blocks = math.ceil(length / TOKENS_PER_BLOCK)
    return blocks * TOKENS_PER_BLOCK * kv_bytes_per_token * num_sequences


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """One memory and what is in it, in bytes.

    Raises:
        ValueError: a size is negative, or `kv_bytes_per_token` is 0.
    """

    memory_bytes: int
    weights_bytes: int
    reserve_bytes: int
    kv_bytes_per_token: int

    def __post_init__(self) -> None:
        for name, least in (("memory_bytes", 0), ("weights_bytes", 0), ("reserve_bytes", 0), ("kv_bytes_per_token", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {least} or more")

    @property
    def kv_cache_bytes(self) -> int:
        """What is left for KV; 0 where weights and reserve already fill the memory."""
        return max(0, self.memory_bytes - self.weights_bytes - self.reserve_bytes)

    def max_concurrency(self, length: int) -> int:
        """Sequences of `length` tokens that fit."""
        return self.kv_cache_bytes // kv_cache_bytes(kv_bytes_per_token=self.kv_bytes_per_token, length=length)

    def fits(self, *, num_sequences: int, length: int) -> bool:
        """Whether `num_sequences` sequences of `length` tokens fit."""
        return num_sequences <= self.max_concurrency(length)


def gib(num_bytes: int) -> str:
    """A size for people, `1.50 GiB`."""
    return f"{num_bytes / GIB:.2f} GiB"


def _num_moe_layers(spec: ModelSpec) -> int:
    return sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
