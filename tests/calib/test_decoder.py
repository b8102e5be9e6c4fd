"""The decoder that holds one layer at a time, against transformers' model of the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from harness.build.hf_source import HfFolderSource
from harness.calib.decoder import Experts, StreamedDecoder, bfloat16_products, linear_of
from harness.calib.statistics import LayerStatistics
from harness.calib.units import layer_modules
from harness.recipe import linear_shapes

_TOKENS = np.random.default_rng(0).integers(0, 320, 150)  # past the original context of yarn's 64

RandomModel = Callable[..., Any]


def _logits(decoder: StreamedDecoder) -> torch.Tensor:
    hidden = decoder.embed(_TOKENS)
    for number in range(decoder.spec.num_layers):
        with decoder.layer(number) as layer:
            hidden = decoder.run(layer, hidden)
    return decoder.logits(hidden[0])


def _expected(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.from_numpy(_TOKENS)[None]).logits[0]
    return logits


def test_logits_are_those_of_transformers(family: str, random_model: RandomModel) -> None:
    model = random_model(family)
    expected = _expected(model.reference)
    assert expected.std() > 0.5
    torch.testing.assert_close(_logits(model.decoder), expected, rtol=1e-5, atol=1e-4)


def test_configs_of_older_releases_are_read(random_model: RandomModel) -> None:
    """As DeepSeek publishes them: scaling apart from theta, keys that transformers does not know."""
    model = random_model("v3")
    folder = model.folder
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
        "torch_dtype": config.pop("dtype"),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    decoder = StreamedDecoder(HfFolderSource(folder), torch.device("cpu"))
    torch.testing.assert_close(_logits(decoder), _expected(model.reference), rtol=1e-5, atol=1e-4)


def test_the_output_matrix_is_read_in_parts(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_model("llama").decoder
    whole = _logits(decoder)
    monkeypatch.setattr("harness.calib.decoder._ROWS", 96)
    torch.testing.assert_close(_logits(decoder), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "v3"])
def test_only_the_layer_in_use_has_weights(name: str, random_model: RandomModel) -> None:
    decoder = random_model(name).decoder

    def loaded() -> list[int]:
        parameters = [[*layer.parameters(), *layer.buffers()] for layer in decoder._layers]
        assert all(len({p.is_meta for p in of_layer}) == 1 for of_layer in parameters)
        return [number for number, of_layer in enumerate(parameters) if not of_layer[0].is_meta]

    assert loaded() == []
    for number in (0, 2, 1, 1):
        with decoder.layer(number):
            assert loaded() == [number]
        assert loaded() == []
    with pytest.raises(ZeroDivisionError), decoder.layer(1):
        raise ZeroDivisionError
    assert loaded() == []


def test_modules_are_found_by_their_name_in_a_checkpoint(family: str, random_model: RandomModel) -> None:
    model = random_model(family)
    shapes = linear_shapes(model.source.spec)
    with model.decoder.layer(1) as layer:
        for module in layer_modules(model.source.spec, 1):
            weight = linear_of(layer, module).weight
            assert weight.shape == shapes[module]
            np.testing.assert_array_equal(weight.detach().numpy(), model.source.read(f"{module}.weight"))


def test_products_in_bfloat16_end_with_the_block() -> None:
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    with bfloat16_products():
        inside = matmul.fp32_precision
    assert inside == "bf16"
    assert matmul.fp32_precision == before != inside


# Experts


def _routed(num_tokens: int, num_experts: int, k: int) -> tuple[Experts, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts, inputs, and a routing in which the last expert is never chosen."""
    torch.manual_seed(0)
    experts = Experts(num_experts, 16, 24)
    logits = torch.randn(num_tokens, num_experts)
    logits[:, -1] -= 100
    weights, chosen = logits.softmax(dim=-1).topk(k)
    experts.router_logits = logits
    return experts, torch.randn(num_tokens, 16), chosen, weights


def _inputs_of(experts: Experts) -> list[list[torch.Tensor]]:
    """What each expert is shown from now on."""
    seen: list[list[torch.Tensor]] = [[] for _ in experts]
    for number, expert in enumerate(experts):
        expert.register_forward_pre_hook(lambda _module, inputs, number=number: seen[number].append(inputs[0]))
    return seen


@torch.no_grad()
def test_experts_give_the_weighted_sum_of_those_chosen() -> None:
    experts, x, chosen, weights = _routed(30, 6, 2)
    outputs = torch.stack([expert(x) for expert in experts], dim=1)
    expected = torch.stack([ws @ row[c] for row, c, ws in zip(outputs, chosen, weights, strict=True)])
    torch.testing.assert_close(experts(x, chosen, weights), expected)
    assert experts.num_routed == experts.num_observed == torch.bincount(chosen.flatten(), minlength=6).tolist()
    assert experts.num_routed[-1] == 0
    experts(x, chosen, weights)
    assert sum(experts.num_routed) == 2 * 30 * 2
    experts.reset()
    assert experts.num_routed == experts.num_observed == [0] * 6


@torch.no_grad()
def test_widened_experts_are_shown_more_and_give_the_same() -> None:
    experts, x, chosen, weights = _routed(30, 6, 2)
    plain = experts(x, chosen, weights)
    experts.reset()
    experts.widen_to = 12
    seen = _inputs_of(experts)
    torch.testing.assert_close(experts(x, chosen, weights), plain, rtol=1e-6, atol=1e-7)
    routed = torch.bincount(chosen.flatten(), minlength=6)
    assert experts.num_routed == routed.tolist()
    assert experts.num_observed == routed.clamp_min(12).tolist() == [len(shown[0]) for shown in seen]
    assert any(routed > 12)
    assert any(routed < 12)
    # those routed first, then the ones that came nearest
    assert experts.router_logits is not None
    for number, (shown,) in enumerate(seen):
        own = (chosen == number).any(dim=1)
        likely = experts.router_logits.log_softmax(dim=-1)[:, number]
        nearest = likely.masked_fill(own, -torch.inf).argsort(descending=True)
        order = torch.cat([own.nonzero()[:, 0], nearest[: len(shown) - int(own.sum())]])
        assert torch.equal(shown, x[order])


@torch.no_grad()
def test_widening_is_spread_over_samples_and_stops_at_those_there_are() -> None:
    experts, x, chosen, weights = _routed(10, 6, 2)
    counts = []
    for sample in range(4):
        experts.widen_to = 5 * (sample + 1)
        experts(x, chosen, weights)
        counts.append(experts.num_observed[-1])
    assert counts == [5, 10, 15, 20]
    before = list(experts.num_observed)
    experts.widen_to = 1000
    experts(x, chosen, weights)
    assert experts.num_observed == [count + 10 for count in before]
    assert experts.num_routed[-1] == 0


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_widening_a_layer_leaves_its_output_and_reaches_every_expert(name: str, random_model: RandomModel) -> None:
    decoder = random_model(name).decoder
    hidden = decoder.embed(_TOKENS)
    with decoder.layer(1) as layer:
        experts = layer.mlp.experts
        if name == "v3":
            with torch.no_grad():  # the router never picks this one
                layer.mlp.gate.e_score_correction_bias[5] = -100.0
        plain = decoder.run(layer, hidden)
        routed = experts.num_routed
        experts.reset()
        experts.widen_to = 70
        with LayerStatistics(layer, layer_modules(decoder.spec, 1)) as seen:
            widened = decoder.run(layer, hidden)
    torch.testing.assert_close(widened, plain, rtol=1e-5, atol=1e-5)
    assert routed == experts.num_routed
    assert sum(routed) == 3 * len(_TOKENS)
    assert min(routed) < 70
    assert (routed[5] == 0) == (name == "v3")
    assert experts.num_observed == [max(70, count) for count in routed]
    for number, count in enumerate(experts.num_observed):
        for key in ("gate_up", "down_proj"):
            assert seen.num_tokens[f"model.layers.1.mlp.experts.{number}.{key}"] == count
