"""What calibration learns of a layer while samples run through it. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from harness.calib.decoder import linear_of
from harness.calib.units import by_input

_BLOCK = 1024  # columns of a Hessian computed at a time; only blocks on and above the diagonal are
_CACHED = ("k_proj", "v_proj", "kv_a_proj_with_mqa")


class LayerStatistics:
    """Hessians and maxima of one loaded layer, collected by hooks for as long as the block runs.

    `hessians`: by input key, `(in, in)` float32, mean outer product of the inputs. `num_tokens`: inputs seen, by key.
    `input_maxima`: by input key, largest magnitude of each input channel, `(in,)`. `output_maxima`: the same of the
    outputs of the key and value projections, before norms and rotation, by module.

    Args:
        layer: decoder layer with its weights.
        modules: names of the linear modules to observe.
    """

    def __init__(self, layer: nn.Module, modules: Sequence[str]) -> None:
        self.hessians: dict[str, torch.Tensor] = {}
        self.num_tokens: dict[str, int] = {}
        self.input_maxima: dict[str, torch.Tensor] = {}
        self.output_maxima: dict[str, torch.Tensor] = {}
        self._layer = layer
        self._keys = by_input(modules)
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerStatistics:
        for key, modules in self._keys.items():
            first = linear_of(self._layer, modules[0])
            width = first.weight.shape[1]
            self.hessians[key] = torch.zeros(width, width, device=first.weight.device)
            self.input_maxima[key] = torch.zeros(width, device=first.weight.device)
            self.num_tokens[key] = 0
            self._hooks.append(first.register_forward_pre_hook(self._observer(key)))
            for name in modules:
                if name.endswith(_CACHED):
                    self._hooks.append(linear_of(self._layer, name).register_forward_hook(self._cache_observer(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        for key, hessian in self.hessians.items():
            hessian.copy_(hessian.triu() + hessian.triu(1).T)
            hessian /= max(1, self.num_tokens[key])

    def _observer(self, key: str) -> Any:
        hessian, maxima = self.hessians[key], self.input_maxima[key]

        def observe(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            for start in range(0, x.shape[1], _BLOCK):
                hessian[start : start + _BLOCK, start:] += x[:, start : start + _BLOCK].T @ x[:, start:]
            torch.maximum(maxima, x.abs().amax(dim=0), out=maxima)
            self.num_tokens[key] += len(x)

        return observe

    def _cache_observer(self, name: str) -> Any:
        def observe(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            seen = output.reshape(-1, output.shape[-1]).abs().amax(dim=0)
            self.output_maxima[name] = torch.maximum(self.output_maxima.get(name, seen), seen)

        return observe
