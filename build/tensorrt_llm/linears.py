"""The linear layers of a decoder layer as TensorRT-LLM names and fuses them.

`q_proj`, `k_proj` and `v_proj` are one matrix, `attention.qkv`. Of a gated MLP `silu(fc(x)) * gate(x)`, so `mlp.fc` is
Hugging Face's `gate_proj` and `mlp.gate` its `up_proj`. Source: `layers/attention.py` and `layers/mlp.py` of 1.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.build.tensorrt_llm.ranks import Ranks
from harness.spec import GqaSpec, ModelSpec

LM_HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True)
class FusedLinear:
    """One linear layer of TensorRT-LLM.

    Attributes:
        name: within the decoder layer: `attention.qkv`.
        modules: what it is made of, by Hugging Face name, each with its shape `(out, in)`; outputs are stacked.
        row_parallel: whether ranks share its inputs; else its outputs.
        bias: whether its modules have biases.
        head_dim: of a fused query, key and value; None of any other.
    """

    name: str
    modules: dict[str, tuple[int, int]]
    row_parallel: bool = False
    bias: bool = False
    head_dim: int | None = None

    @property
    def first(self) -> str:
        """The first module, which stands for all: they have one precision and one input."""
        return next(iter(self.modules))

    def rows(self, ranks: Ranks, tp_rank: int) -> list[tuple[str, slice]]:
        """The rows of each module that a rank holds, in its order."""
        if self.row_parallel:
            return [(module, slice(0, out)) for module, (out, _) in self.modules.items()]
        shares = [(module, ranks.share(out, tp_rank)) for module, (out, _) in self.modules.items()]
        if self.head_dim is None:
            return shares
        query, *kv = shares
        return [query, *((module, self._kv_rows(module, ranks, tp_rank)) for module, _ in kv)]

    def columns(self, ranks: Ranks, tp_rank: int) -> slice:
        """The inputs that a rank holds."""
        inner = self.modules[self.first][1]
        return ranks.share(inner, tp_rank) if self.row_parallel else slice(0, inner)

    def rank_shape(self, ranks: Ranks, tp_rank: int = 0) -> tuple[int, int]:
        """`(out, in)` on a rank."""
        columns = self.columns(ranks, tp_rank)
        return sum(rows.stop - rows.start for _, rows in self.rows(ranks, tp_rank)), columns.stop - columns.start

    def _kv_rows(self, module: str, ranks: Ranks, tp_rank: int) -> slice:
        assert self.head_dim is not None
        heads = ranks.kv_heads(self.modules[module][0] // self.head_dim, tp_rank)
        return slice(heads.start * self.head_dim, heads.stop * self.head_dim)


def layer_linears(spec: ModelSpec, layer: int) -> list[FusedLinear]:
    """The linear layers of one decoder layer of a Llama or Qwen2."""
    a, hidden, width = spec.attention, spec.hidden_size, spec.intermediate_size
    assert isinstance(a, GqaSpec), "the family was checked"
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    query, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    qkv = {f"{attention}.{name}_proj": (rows, hidden) for name, rows in (("q", query), ("k", kv), ("v", kv))}
    output, down = {f"{attention}.o_proj": (hidden, query)}, {f"{mlp}.down_proj": (hidden, width)}
    return [
        FusedLinear(name="attention.qkv", modules=qkv, bias=a.qkv_bias, head_dim=a.head_dim),
        FusedLinear(name="attention.dense", modules=output, bias=a.o_bias, row_parallel=True),
        FusedLinear(name="mlp.fc", modules={f"{mlp}.gate_proj": (width, hidden)}, bias=spec.mlp_bias),
        FusedLinear(name="mlp.gate", modules={f"{mlp}.up_proj": (width, hidden)}, bias=spec.mlp_bias),
        FusedLinear(name="mlp.proj", modules=down, bias=spec.mlp_bias, row_parallel=True),
    ]


def all_linears(spec: ModelSpec, ranks: Ranks) -> Iterator[tuple[str, FusedLinear]]:
    """Every linear layer by the name it has on its ranks, which count the layers of their own stage from 0."""
    for stage in ranks.stages(spec.num_layers):
        for layer in stage:
            for linear in layer_linears(spec, layer):
                yield f"transformer.layers.{layer - stage.start}.{linear.name}", linear
