"""A decoder in torch of which one layer at a time has weights: calibration's way to run a model it could not hold.

Layers are transformers' own modules, so that every family is computed as its authors' code does; their experts are
replaced by ones with a linear module each, which hooks can observe and a quantizer can fill. Needs torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness.calib.units import layer_of
from harness.errors import CalibrationError
from harness.recipe import in_decoder
from harness.spec import ModelSpec
from harness.weight_source import WeightSource

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
_RUNS_PER_TRIM = 16  # the heap grows by megabytes a run and would keep them
_ROWS = 1 << 14  # rows of a matrix held at a time


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Let CPUs that can multiply bfloat16 round the operands of float32 products to it, and add up in float32.

    Twice as fast, and exact enough for statistics of activations; not for comparing logits.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class Expert(nn.Module):
    """One expert (SwiGLU) with the names of a checkpoint."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(tokens, hidden)` to the same."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Experts(nn.ModuleList):
    """The routed experts of a layer; takes the place of transformers' stacked ones.

    Where calibration gives an expert fewer tokens than `widen_to`, spread evenly over the samples, it is also shown
    the tokens that the router came nearest to sending it. Their outputs are not used: only what hooks observe grows.

    `num_routed`: tokens that the router sent to each expert since the start.
    """

    def __init__(self, num_experts: int, hidden_size: int, width: int) -> None:
        super().__init__([Expert(hidden_size, width) for _ in range(num_experts)])
        self.num_routed = [0] * num_experts
        self.num_observed = [0] * num_experts
        self.widen_to = 0
        self.router_logits: torch.Tensor | None = None

    def reset(self) -> None:
        """Count from zero."""
        self.num_routed = [0] * len(self)
        self.num_observed = [0] * len(self)

    def keep_router_logits(self, _module: nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        """A forward hook for the router, whose first output is its logits `(tokens, experts)`."""
        self.router_logits = output[0]

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """`(tokens, hidden)` through the chosen experts `(tokens, k)`, weighted and summed."""
        output = torch.zeros_like(x)
        for number, expert in enumerate(self):
            tokens, position = torch.where(top_k_index == number)
            self.num_routed[number] += len(tokens)
            shown = self._widened(number, tokens)
            self.num_observed[number] += len(shown)
            if not len(shown):
                continue
            result = expert(x[shown])[: len(tokens)]
            output.index_add_(0, tokens, result * top_k_weights[tokens, position, None])
        return output

    def _widened(self, number: int, tokens: torch.Tensor) -> torch.Tensor:
        missing = self.widen_to - self.num_observed[number] - len(tokens)
        if missing <= 0 or self.router_logits is None:
            return tokens
        scores = self.router_logits.log_softmax(dim=-1)[:, number].clone()
        scores[tokens] = -torch.inf
        others = scores.numel() - len(tokens)
        return torch.cat([tokens, scores.topk(min(missing, others)).indices])


def linear_of(layer: nn.Module, module: str) -> nn.Linear:
    """The linear module of a loaded layer by its name in a checkpoint, `model.layers.N.mlp.down_proj`."""
    linear = layer.get_submodule(module.split(".", 3)[3])
    assert isinstance(linear, nn.Linear)
    return linear


def check_finite(source: WeightSource) -> None:
    """Read all weights that the model computes with, and check each value: they may be used hours later.

    Raises:
        CalibrationError: one is NaN or infinite; names the tensor.
    """
    for name in sorted(source.names()):
        if in_decoder(name) and layer_of(name) >= source.spec.num_layers:
            continue
        num_rows = source.shape(name)[0]
        for start in range(0, num_rows, _ROWS):
            if not np.isfinite(source.read(name, slice(start, start + _ROWS))).all():
                raise CalibrationError(
                    f"{name} has a NaN or infinite value", "take the weights from their release again"
                )


def _give_back_memory() -> None:
    """Return what is freed to the system: glibc would keep gigabytes in a heap that tensors of all sizes cut up."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class StreamedDecoder:
    """A model whose layers are loaded one at a time from a source, in float32.

    Args:
        source: the weights; MLA's `kv_b_proj`, norms and routers included.
        device: where the loaded layer lives.
    """

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self.source = source
        self.spec: ModelSpec = source.spec
        self.device = device
        self._num_runs = 0
        fields = {k: v for k, v in source.config.items() if k not in ("model_type", "quantization_config", "dtype")}
        config = AutoConfig.for_model(_MODEL_TYPES[self.spec.architecture], **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        self._layers = model.model.layers
        self._norm = model.model.norm
        self._rotary = type(model.model.rotary_emb)(config=config).to(device)
        for layer in self._layers:
            self._open_experts(layer)
        model.requires_grad_(False)

    def _open_experts(self, layer: nn.Module) -> None:
        moe = self.spec.moe
        mlp = layer.get_submodule("mlp")
        if moe is None or not hasattr(mlp, "experts"):
            return
        with torch.device("meta"):
            mlp.experts = Experts(moe.num_experts, self.spec.hidden_size, moe.moe_intermediate_size)
        mlp.get_submodule("gate").register_forward_hook(mlp.experts.keep_router_logits)

    @contextmanager
    def layer(self, number: int) -> Iterator[nn.Module]:
        """Decoder layer `number` with its weights, for as long as the block runs."""
        layer = self._layers[number].to_empty(device=self.device).eval()
        try:
            self._load(layer, f"model.layers.{number}.")
            yield layer
        finally:
            layer.to("meta")
            _give_back_memory()

    def _load(self, module: nn.Module, prefix: str) -> None:
        with torch.no_grad():
            for name, values in [*module.named_parameters(), *module.named_buffers()]:
                values.copy_(torch.from_numpy(self.source.read(prefix + name)))

    @torch.no_grad()
    def embed(self, token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """Embeddings `(1, tokens, hidden)`."""
        rows = [self.source.read("model.embed_tokens.weight", slice(int(t), int(t) + 1)) for t in token_ids]
        return torch.from_numpy(np.concatenate(rows))[None].to(self.device)

    @torch.no_grad()
    def run(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """One loaded layer over one sequence `(1, tokens, hidden)` from position 0; causal."""
        self._num_runs += 1
        if self._num_runs % _RUNS_PER_TRIM == 0:
            _give_back_memory()
        positions = torch.arange(hidden.shape[1], device=self.device)[None]
        return layer(  # type: ignore[no-any-return]
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self._rotary(hidden, position_ids=positions),
            use_cache=False,
        )

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `(rows, vocab)` of the last layer's outputs `(rows, hidden)`, on the CPU."""
        norm = self._norm.to_empty(device=self.device)
        self._load(norm, "model.norm.")
        normed = norm(hidden)
        tied = self.spec.tie_word_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        logits = torch.empty(len(hidden), self.spec.vocab_size)
        for start in range(0, self.spec.vocab_size, _ROWS):
            rows = torch.from_numpy(self.source.read(name, slice(start, start + _ROWS))).to(self.device)
            logits[:, start : start + _ROWS] = normed @ rows.T
        return logits
