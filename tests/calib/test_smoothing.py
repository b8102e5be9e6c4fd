"""Smoothing changes where a layer's outliers are, not what the layer computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.calib.decoder import StreamedDecoder
from harness.calib.smoothing import smooth_layer
from harness.calib.statistics import LayerStatistics
from harness.calib.units import layer_modules
from harness.recipe import Precision

_TOKENS = np.random.default_rng(0).integers(0, 320, 60)
_PREFIX = "model.layers.1."
_NORMS = ("input_layernorm", "post_attention_layernorm")
_OUTLIER = 7  # this channel's


def _with_outliers(model: Any) -> None:
    for norm in _NORMS:
        model.model.layers[1].get_submodule(norm).weight[_OUTLIER] *= 64.0


def _observed(decoder: StreamedDecoder, layer: nn.Module) -> tuple[torch.Tensor, LayerStatistics]:
    with LayerStatistics(layer, layer_modules(decoder.spec, 1)) as seen:
        output = decoder.run(layer, decoder.embed(_TOKENS))
    return output, seen


def _precisions(decoder: StreamedDecoder, precision: str) -> dict[str, Precision]:
    return {module: Precision.parse(precision) for module in layer_modules(decoder.spec, 1)}


def _weights(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: values.detach().clone() for name, values in layer.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "qwen2", "v2", "v2 query latent, groups, yarn"])
def test_the_layer_computes_the_same(name: str, random_model: Callable[..., Any]) -> None:
    decoder = random_model(name, edit=_with_outliers).decoder
    with decoder.layer(1) as layer:
        output, seen = _observed(decoder, layer)
        before = _weights(layer)
        smooth_layer(layer, _PREFIX, _precisions(decoder, "int8-a8"), seen)
        after = _weights(layer)
        same, again = _observed(decoder, layer)
    assert torch.equal(output, same)  # powers of two: not a bit is lost
    norms = _NORMS[:1] if decoder.spec.moe else _NORMS
    assert {n for n, values in after.items() if "norm" in n and not torch.equal(values, before[n])} == {
        f"{norm}.weight" for norm in norms
    }
    for norm in norms:
        factors = before[f"{norm}.weight"] / after[f"{norm}.weight"]
        assert torch.equal(factors, torch.exp2(factors.log2().round()))
        assert factors.unique().numel() > 2
    # the statistics are those that the smoothed layer gives
    for key, hessian in again.hessians.items():
        torch.testing.assert_close(seen.hessians[key], hessian, rtol=1e-6, atol=0)
        assert torch.equal(seen.input_maxima[key], again.input_maxima[key])


@pytest.mark.parametrize("name", ["llama", "v2"])
def test_outliers_move_into_the_weights(name: str, random_model: Callable[..., Any]) -> None:
    decoder = random_model(name, edit=_with_outliers).decoder
    with decoder.layer(1) as layer:
        _, seen = _observed(decoder, layer)
        before = {key: maxima.clone() for key, maxima in seen.input_maxima.items()}
        smooth_layer(layer, _PREFIX, _precisions(decoder, "int8-a8"), seen)
    key = f"{_PREFIX}self_attn.first"

    def excess(maxima: torch.Tensor) -> float:
        return float(maxima[_OUTLIER] / maxima.median())

    assert excess(before[key]) > 30
    assert excess(seen.input_maxima[key]) < excess(before[key]) / 4


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_a_mixture_of_experts_is_left_alone(name: str, random_model: Callable[..., Any]) -> None:
    """Its norm feeds the router too, and all experts: shared ones are not smoothed either."""
    decoder = random_model(name).decoder
    with decoder.layer(1) as layer:
        _, seen = _observed(decoder, layer)
        before = _weights(layer)
        smooth_layer(layer, _PREFIX, _precisions(decoder, "int8-a8"), seen)
        after = _weights(layer)
    changed = {name for name, values in after.items() if not torch.equal(values, before[name])}
    first = {"self_attn.q_proj.weight"} if name == "v2" else {"self_attn.q_a_proj.weight"}
    assert changed == {"input_layernorm.weight", "self_attn.kv_a_proj_with_mqa.weight", *first}


@pytest.mark.parametrize("precision", ["int8", "int4-g64", "f16"])
def test_layers_without_int8_activations_are_left_alone(precision: str, random_model: Callable[..., Any]) -> None:
    decoder = random_model("llama").decoder
    with decoder.layer(1) as layer:
        _, seen = _observed(decoder, layer)
        before = _weights(layer)
        smooth_layer(layer, _PREFIX, _precisions(decoder, precision), seen)
        assert all(torch.equal(values, before[name]) for name, values in _weights(layer).items())


def test_a_channel_that_never_moves_stays_finite(random_model: Callable[..., Any]) -> None:
    def silence(model: Any) -> None:
        model.model.layers[1].input_layernorm.weight[3] = 0.0
        model.model.layers[1].self_attn.q_proj.weight[:, 5] = 0.0
        model.model.layers[1].self_attn.k_proj.weight[:, 5] = 0.0
        model.model.layers[1].self_attn.v_proj.weight[:, 5] = 0.0

    decoder = random_model("llama", edit=silence).decoder
    with decoder.layer(1) as layer:
        output, seen = _observed(decoder, layer)
        smooth_layer(layer, _PREFIX, _precisions(decoder, "int8-a8"), seen)
        assert all(torch.isfinite(values).all() for values in _weights(layer).values())
        assert torch.equal(output, _observed(decoder, layer)[0])
    assert all(torch.isfinite(hessian).all() for hessian in seen.hessians.values())
