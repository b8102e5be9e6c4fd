"""Hessians and maxima of a layer, against what hooks of the test's own catch and float64 computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.calib.decoder import linear_of
from harness.calib.statistics import LayerStatistics
from harness.calib.units import by_input, layer_modules

_SAMPLES = [np.random.default_rng(seed).integers(0, 320, length) for seed, length in enumerate((50, 1, 33))]
_CACHED = ("k_proj", "v_proj", "kv_a_proj_with_mqa")


def _collect(
    layer: nn.Module, modules: list[str]
) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
    """Inputs and outputs of every module from now on, by its name."""
    inputs: dict[str, list[torch.Tensor]] = {module: [] for module in modules}
    outputs: dict[str, list[torch.Tensor]] = {module: [] for module in modules}
    for name in modules:

        def keep(_module: nn.Module, given: tuple[torch.Tensor], output: torch.Tensor, name: str = name) -> None:
            inputs[name].append(given[0].reshape(-1, given[0].shape[-1]))
            outputs[name].append(output.reshape(-1, output.shape[-1]))

        linear_of(layer, name).register_forward_hook(keep)
    return inputs, outputs


@pytest.mark.parametrize("block", [1024, 24])
def test_statistics_are_those_of_all_inputs(
    block: int, family: str, random_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 columns at a time divide none of the widths here."""
    monkeypatch.setattr("harness.calib.statistics._BLOCK", block)
    decoder = random_model(family).decoder
    modules = layer_modules(decoder.spec, 1)
    with decoder.layer(1) as layer:
        inputs, outputs = _collect(layer, modules)
        with LayerStatistics(layer, modules) as seen:
            for ids in _SAMPLES:
                decoder.run(layer, decoder.embed(ids))
        given = {name: torch.cat(parts).double() if parts else None for name, parts in inputs.items()}
        frozen = {key: hessian.clone() for key, hessian in seen.hessians.items()}
        decoder.run(layer, decoder.embed(_SAMPLES[0]))  # no longer watched
    assert set(seen.hessians) == set(seen.input_maxima) == set(seen.num_tokens) == set(by_input(modules))
    for key, members in by_input(modules).items():
        x = given[members[0]]
        assert x is not None
        for other in members[1:]:  # one key, one input
            assert torch.equal(given[other], x)
        assert seen.num_tokens[key] == len(x)
        expected = x.T @ x / len(x)
        torch.testing.assert_close(seen.hessians[key].double(), expected, rtol=1e-4, atol=1e-5 * float(expected.max()))
        assert torch.equal(seen.hessians[key], seen.hessians[key].T)
        assert torch.equal(seen.hessians[key], frozen[key])
        assert torch.equal(seen.input_maxima[key].double(), x.abs().amax(dim=0))
    assert set(seen.output_maxima) == {m for m in modules if m.endswith(_CACHED)}
    for module, maxima in seen.output_maxima.items():
        assert torch.equal(maxima, torch.cat(outputs[module][: len(_SAMPLES)]).abs().amax(dim=0))


def test_keys_tell_different_inputs_apart(random_model: Callable[..., Any]) -> None:
    decoder = random_model("v2 query latent, groups, yarn").decoder
    modules = layer_modules(decoder.spec, 0)
    with decoder.layer(0) as layer:
        inputs, _ = _collect(layer, modules)
        decoder.run(layer, decoder.embed(_SAMPLES[0]))
    firsts = [inputs[members[0]][0] for members in by_input(modules).values()]
    assert len(firsts) == 5
    for i, one in enumerate(firsts):
        assert not any(one.shape == other.shape and torch.equal(one, other) for other in firsts[:i])


def test_an_expert_that_no_token_reaches_has_zeros(random_model: Callable[..., Any]) -> None:
    decoder = random_model("v3").decoder
    modules = layer_modules(decoder.spec, 1)
    with decoder.layer(1) as layer:
        with torch.no_grad():
            layer.mlp.gate.e_score_correction_bias[5] = -100.0
        with LayerStatistics(layer, modules) as seen:
            decoder.run(layer, decoder.embed(_SAMPLES[0]))
    unreached = [key for key, count in seen.num_tokens.items() if not count]
    assert unreached == [f"model.layers.1.mlp.experts.{n}.{name}" for n in (4, 5) for name in ("gate_up", "down_proj")]
    assert not any(seen.hessians[key].any() or seen.input_maxima[key].any() for key in unreached)


def test_hooks_end_with_the_block_even_if_it_fails(random_model: Callable[..., Any]) -> None:
    decoder = random_model("llama").decoder
    modules = layer_modules(decoder.spec, 0)
    with decoder.layer(0) as layer:
        with pytest.raises(ZeroDivisionError), LayerStatistics(layer, modules) as seen:
            raise ZeroDivisionError
        decoder.run(layer, decoder.embed(_SAMPLES[0]))
    assert set(seen.num_tokens.values()) == {0}
