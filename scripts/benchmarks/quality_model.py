"""A model whose decoder linears are exchanged for a contender's, and what that costs on held-out text.

Every contender is scored by one and the same float32 forward of transformers, on identical tokens, against logits of
the unquantized model that are computed once and kept. Only decoder linears differ: embeddings, lm_head, norms, routers
and MLA's kv_b_proj are the original's in all of them. How weights are quantized is the contenders' business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import nn

from harness.calib.calibration_set import make_calibration_set
from harness.calib.measure import kl_divergence, negative_log_likelihood
from harness.recipe import in_decoder, linear_shapes
from harness.tokenizer import Tokenizer
from harness.weight_source import FloatArray, WeightSource

WINDOW = 256
_TOKENS_OF_A_DOCUMENT = 4 * WINDOW  # so that no document rules its domain
_CHUNK_POSITIONS = 64  # float64 copies of logits are large where the vocabulary is

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DomainScore:
    """Of one domain. `kl_divergence` and `loss`: each window's mean, nats per token; `top1`: share of positions."""

    kl_divergence: list[float]
    loss: list[float]
    top1: float


class LinearExperts(nn.ModuleList):
    """Routed experts as linears of their own, named as checkpoints name them; transformers joins them into one tensor.

    Each expert computes all tokens, those not routed to it as zeros: the graph does not depend on the data, and an
    expert's inputs are zero or its own.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        def linear(weight: torch.Tensor) -> nn.Linear:
            made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            made.weight = nn.Parameter(weight.clone(), requires_grad=False)
            return made

        def expert(gate_and_up: torch.Tensor, last: torch.Tensor) -> nn.ModuleDict:
            gate, up = gate_and_up.chunk(2)
            return nn.ModuleDict({"gate_proj": linear(gate), "up_proj": linear(up), "down_proj": linear(last)})

        super().__init__(expert(*pair) for pair in zip(gate_up.detach(), down.detach(), strict=True))

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Hidden states `(tokens, hidden)`, expert ids and their weights `(tokens, top_k)`."""
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            chosen = top_k_index == number
            inputs = hidden * chosen.any(-1, keepdim=True)
            inner = nn.functional.silu(expert["gate_proj"](inputs)) * expert["up_proj"](inputs)
            out = out + expert["down_proj"](inner) * (top_k_weights * chosen).sum(-1, keepdim=True)
        return out


class QualityModel:
    """One model under test.

    Args:
        name: for tables.
        source: its weights.
        held_out: documents of each domain to score on.
        calibration: file of the texts that contenders with data may look at; the set drawn from it is that of
            `harness-build --calib FILE --no-system-prompts`.
        num_windows: of each domain, at most.
        cache: folder for the unquantized model's logits.
    """

    def __init__(
        self,
        name: str,
        source: WeightSource,
        *,
        held_out: Mapping[str, Sequence[str]],
        calibration: Path,
        num_windows: int,
        cache: Path,
    ) -> None:
        self.name, self.source, self.spec = name, source, source.spec
        self.linears = {m: shape for m, shape in linear_shapes(self.spec).items() if in_decoder(m)}
        """`(out, in)` of every decoder linear."""
        tokenizer = Tokenizer(source.tokenizer, source.generation_config)
        self.windows = {d: _windows(tokenizer, texts, num_windows) for d, texts in held_out.items()}
        drawn = make_calibration_set(tokenizer, traffic=[calibration], allow_no_system_prompts=True)
        self.calibration = [np.asarray(sample, np.int64) for sample in drawn.samples]
        content = [source.fingerprint().encode(), *(tokens.tobytes() for tokens in self.windows.values())]
        self.key = hashlib.sha256(b"".join(content)).hexdigest()[:16]
        """Of the weights and the tokens scored."""
        self._logits = cache / self.key

    def weight(self, module: str) -> FloatArray:
        """The unquantized weight `(out, in)` of a decoder linear."""
        return self.source.read(f"{module}.weight")

    @cached_property
    def torch_model(self) -> nn.Module:
        """The model in float32, without experts that are joined into one tensor; its weights are the original's."""
        transformers.utils.logging.disable_progress_bar()
        config = transformers.AutoConfig.for_model(**self.source.config)
        architecture = getattr(transformers, self.spec.architecture)
        state = {name: torch.from_numpy(self.source.read(name)) for name in self.source.names()}
        # sdpa and one dtype: the forward is the same for all
        model: nn.Module = architecture.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, attn_implementation="sdpa"
        )
        for name, module in list(model.named_modules()):
            if name.endswith("mlp.experts"):
                model.set_submodule(name, LinearExperts(module.gate_up_proj, module.down_proj))
        return model.eval().requires_grad_(False)

    def score(self, weights: Mapping[str, FloatArray]) -> dict[str, DomainScore]:
        """Scores by domain with the given decoder linears `(out, in)` in place of the original's."""
        baseline = {domain: self._baseline(domain) for domain in self.windows}  # before anything is exchanged
        with self._exchanged(weights):
            return {domain: self._score(domain, kept) for domain, kept in baseline.items()}

    @cached_property
    def input_second_moments(self) -> dict[str, FloatArray]:
        """Mean square of each input `(in,)` of every decoder linear over the calibration set."""
        sums = {module: torch.zeros(shape[1]) for module, shape in self.linears.items()}

        def add(total: torch.Tensor, inputs: torch.Tensor) -> None:
            total += inputs.reshape(-1, inputs.shape[-1]).square().sum(0)

        hooks = [
            self.torch_model.get_submodule(module).register_forward_pre_hook(lambda _, args, t=total: add(t, args[0]))
            for module, total in sums.items()
        ]
        for tokens in self.calibration:
            self._forward(tokens)
        for hook in hooks:
            hook.remove()
        count = sum(map(len, self.calibration))
        return {module: (total / count).numpy() for module, total in sums.items()}

    @contextmanager
    def _exchanged(self, weights: Mapping[str, FloatArray]) -> Iterator[None]:
        assert weights.keys() <= self.linears.keys(), "only decoder linears are exchanged"
        try:
            for module, weight in weights.items():
                self._set(module, weight)
            yield
        finally:
            for module in weights:
                self._set(module, self.weight(module))

    def _set(self, module: str, weight: FloatArray) -> None:
        self.torch_model.get_parameter(f"{module}.weight").copy_(torch.from_numpy(weight))

    def _forward(self, tokens: Tokens) -> FloatArray:
        with torch.no_grad():
            logits = self.torch_model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
        return np.asarray(logits.numpy())

    def _baseline(self, domain: str) -> npt.NDArray[np.float32]:
        """Logits `(windows, positions, vocab)` of the unquantized model."""
        path = self._logits / f"{domain}.npy"
        if not path.is_file():
            self._logits.mkdir(parents=True, exist_ok=True)
            windows, unfinished = self.windows[domain], path.with_suffix(".unfinished")
            shape = (*windows.shape, self.spec.vocab_size)
            out = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.float32, shape=shape)
            for row, tokens in zip(out, windows, strict=True):
                row[:] = self._forward(tokens)
            out.flush()
            unfinished.rename(path)
        return np.asarray(np.load(path, mmap_mode="r"))

    def _score(self, domain: str, baseline: npt.NDArray[np.float32]) -> DomainScore:
        divergences, losses, agreements = [], [], []
        for tokens, wanted in zip(self.windows[domain], baseline, strict=True):
            seen = self._forward(tokens)
            chunks = [slice(i, i + _CHUNK_POSITIONS) for i in range(0, WINDOW, _CHUNK_POSITIONS)]
            divergences.append(np.concatenate([kl_divergence(wanted[c], seen[c]) for c in chunks]).mean())
            loss = [negative_log_likelihood(seen[:-1][c], tokens[1:][c]) for c in chunks]
            losses.append(np.concatenate(loss).mean())
            agreements.append((wanted.argmax(-1) == seen.argmax(-1)).mean())
        return DomainScore(
            kl_divergence=[float(x) for x in divergences],
            loss=[float(x) for x in losses],
            top1=float(np.mean(agreements)),
        )


def _windows(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> Tokens:
    """Tokens `(windows, WINDOW)` of documents end to end."""
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer.encode(text)[:_TOKENS_OF_A_DOCUMENT]
        if len(tokens) >= most * WINDOW:
            break
    count = min(most, len(tokens) // WINDOW)
    return np.array(tokens[: count * WINDOW], np.int64).reshape(count, WINDOW)
