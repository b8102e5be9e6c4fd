"""The tensors of a DeepSeek-V2 decoder layer in a TensorRT-LLM checkpoint: latent attention and routed experts, 16-bit.

The layout is that of `models/deepseek_v2/convert.py`. Two forms of one product are both written, because the engine's
code of different 1.x releases asks for the one or the other and ignores what it does not ask for: `fused_q_proj`, with
the keys' up-projection absorbed into the queries', and `k_b_proj_trans`, which lets the kernel do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from harness.build.safetensors_writer import StreamedTensor
from harness.build.tensorrt_llm.plan import Plan
from harness.build.tensorrt_llm.weights import RankWeights
from harness.spec import MlaSpec
from harness.weight_source import FloatArray, WeightSource


class LatentRankWeights(RankWeights):
    """Makes the tensors of one rank of a DeepSeek-V2."""

    def __init__(self, source: WeightSource, plan: Plan, tp_rank: int) -> None:
        super().__init__(source, plan, tp_rank)
        assert isinstance(plan.spec.attention, MlaSpec), "the family was checked"
        self._attention = plan.spec.attention
        self._heads = plan.ranks.share(self._attention.num_heads, tp_rank)

    def layer(self, layer: int, prefix: str) -> list[StreamedTensor]:
        """All of one decoder layer; `prefix` is its name on the rank."""
        module = f"model.layers.{layer}"
        tensors = self.norms(layer, prefix) + self._latent_attention(f"{module}.self_attn", f"{prefix}.attention")
        if self._plan.spec.is_moe_layer(layer):
            return tensors + self._experts(f"{module}.mlp", f"{prefix}.mlp")
        names = {"fc": "gate_proj", "gate": "up_proj", "proj": "down_proj"}
        return tensors + [self._split(f"{prefix}.mlp.{n}.weight", [f"{module}.mlp.{m}"]) for n, m in names.items()]

    def _latent_attention(self, module: str, name: str) -> list[StreamedTensor]:
        a = self._attention
        first = ["kv_a_proj_with_mqa"] if a.q_lora_rank is None else ["q_a_proj", "kv_a_proj_with_mqa"]
        compressed = [f"{module}.{part}.weight" for part in first]
        parts = [(tensor, slice(0, self._source.shape(tensor)[0])) for tensor in compressed]
        hidden = slice(0, self._plan.spec.hidden_size)
        norms = ["kv_a_layernorm"] if a.q_lora_rank is None else ["q_a_layernorm", "kv_a_layernorm"]
        query = f"{module}.{'q_proj' if a.q_lora_rank is None else 'q_b_proj'}.weight"
        width, num_heads = self._source.shape(query)[1], self._heads.stop - self._heads.start
        fused_shape = num_heads * (a.kv_lora_rank + a.qk_rope_head_dim), width
        trans_shape = num_heads * a.kv_lora_rank, a.qk_nope_head_dim
        up_shape = num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank
        return [
            self.stacked(f"{name}.fused_a.weight", parts, hidden),
            *(self.whole(f"{name}.{norm}.weight", f"{module}.{norm}.weight") for norm in norms),
            self._made(f"{name}.fused_q_proj", fused_shape, module, lambda: self._fused_query(module, query)),
            self.stacked(f"{name}.q_b_proj", [(query, self._head_rows(a.qk_head_dim))], slice(0, width)),
            self._made(f"{name}.kv_b_proj", up_shape, module, lambda: self._up_projection(module)),
            self._made(f"{name}.k_b_proj_trans", trans_shape, module, lambda: self._transposed_keys(module)),
            self._split(f"{name}.dense.weight", [f"{module}.o_proj"]),
        ]

    def _head_rows(self, rows_per_head: int) -> slice:
        return slice(self._heads.start * rows_per_head, self._heads.stop * rows_per_head)

    def _made(self, name: str, shape: tuple[int, ...], module: str, make: Callable[[], FloatArray]) -> StreamedTensor:
        return self.in_16_bits(name, shape, lambda: iter([make()]), f"{module}.kv_b_proj.weight")

    def _keys_and_values(self, module: str) -> tuple[FloatArray, FloatArray]:
        """Up-projections of keys `(heads, nope, rank)` and values `(heads, v, rank)`."""
        a = self._attention
        rows = self._head_rows(a.qk_nope_head_dim + a.v_head_dim)
        both = self._source.read(f"{module}.kv_b_proj.weight", rows)
        by_head = both.reshape(-1, a.qk_nope_head_dim + a.v_head_dim, a.kv_lora_rank)
        return by_head[:, : a.qk_nope_head_dim], by_head[:, a.qk_nope_head_dim :]

    def _up_projection(self, module: str) -> FloatArray:
        keys, values = (part.reshape(-1, self._attention.kv_lora_rank) for part in self._keys_and_values(module))
        return np.concatenate([keys, values])

    def _transposed_keys(self, module: str) -> FloatArray:
        keys, _ = self._keys_and_values(module)
        return keys.swapaxes(1, 2).reshape(-1, self._attention.qk_nope_head_dim)

    def _fused_query(self, module: str, query: str) -> FloatArray:
        a = self._attention
        keys, _ = self._keys_and_values(module)
        rows = self._source.read(query, self._head_rows(a.qk_head_dim))
        by_head = rows.reshape(-1, a.qk_head_dim, rows.shape[1])
        absorbed = keys.swapaxes(1, 2) @ by_head[:, : a.qk_nope_head_dim]
        return np.concatenate([absorbed, by_head[:, a.qk_nope_head_dim :]], axis=1).reshape(-1, rows.shape[1])

    def _experts(self, module: str, name: str) -> list[StreamedTensor]:
        spec, moe = self._plan.spec, self._plan.spec.moe
        assert moe is not None
        share = self._plan.ranks.share(moe.moe_intermediate_size, self._tp_rank)
        width, hidden = share.stop - share.start, spec.hidden_size
        router = f"{module}.gate.weight"

        def up_and_gate() -> Iterator[FloatArray]:
            for expert in range(moe.num_experts):
                for part in ("up_proj", "gate_proj"):
                    yield self._source.read(f"{module}.experts.{expert}.{part}.weight", share)

        def down() -> Iterator[FloatArray]:
            for expert in range(moe.num_experts):
                yield self._source.read(f"{module}.experts.{expert}.down_proj.weight")[:, share]

        shared = f"{module}.shared_experts"
        return [
            self.in_16_bits(
                f"{name}.fc.weight", (moe.num_experts, 2 * width, hidden), up_and_gate, f"{module}.experts"
            ),
            self.in_16_bits(f"{name}.proj.weight", (moe.num_experts, hidden, width), down, f"{module}.experts"),
            StreamedTensor(  # routing is computed in float32
                name=f"{name}.router.weight",
                dtype="F32",
                shape=self._source.shape(router),
                chunks=lambda: [self._source.read(router)],
            ),
            self._split(f"{name}.shared_expert.fc.weight", [f"{shared}.up_proj", f"{shared}.gate_proj"]),
            self._split(f"{name}.shared_expert.proj.weight", [f"{shared}.down_proj"]),
        ]

    def _split(self, name: str, modules: list[str]) -> StreamedTensor:
        """A rank's part of modules that are stacked: inputs of an output projection, outputs of any other."""
        out, inner = self._source.shape(f"{modules[0]}.weight")
        ranks = self._plan.ranks
        if modules[0].endswith(("o_proj", "down_proj")):
            return self.stacked(name, [(f"{modules[0]}.weight", slice(0, out))], ranks.share(inner, self._tp_rank))
        rows = ranks.share(out, self._tp_rank)
        return self.stacked(name, [(f"{module}.weight", rows) for module in modules], slice(0, inner))
