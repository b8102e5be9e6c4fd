"""Measured sensitivity, against transformers' model with the same weights replaced, and a unit made to suffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.calib import sensitivity
from harness.calib.measure import kl_divergence
from harness.calib.quantizer import round_to_nearest
from harness.calib.sensitivity import (
    OutputErrors,
    estimate_harm,
    measure_divergence,
    measure_output_errors,
    shortlisted,
)
from harness.calib.units import Unit, decision_units, input_key
from harness.recipe import Precision

_SAMPLES = [np.random.default_rng(seed).integers(0, 320, length) for seed, length in enumerate((60, 90, 10))]
_CANDIDATES = [Precision.parse(text) for text in ("int4-g128", "int4-g32", "int8")]
_LOWEST = _CANDIDATES[0]


def _fragile(model: Any) -> None:
    """Row by row one weight so large that four bits leave nothing of the others."""
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[:, 5] = 40 * weight.abs().max()
    # what the large weights multiply is small, so that the others matter
    model.model.layers[1].mlp.up_proj.weight[5] *= 1e-3


_FRAGILE = "model.layers.1.mlp.down"


class _Progress:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.seen.append((stage, done, total))


@pytest.fixture
def measured(
    random_model: Callable[..., Any], tmp_path: Path
) -> Callable[..., tuple[Any, list[Unit], OutputErrors, dict[str, float]]]:
    """Both measurements of a family's model; `of` names the units whose divergence is measured."""

    def measure(
        family: str, edit: Any = None, of: list[str] | None = None
    ) -> tuple[Any, list[Unit], OutputErrors, dict[str, float]]:
        model = random_model(family, edit=edit)
        # experts of all layers in one unit, and int4 in all widths
        units = [replace(unit, portable=False) for unit in decision_units(model.source.spec, portable=True)]
        work, progress = tmp_path / "work", _Progress()
        work.mkdir()
        errors = measure_output_errors(model.decoder, _SAMPLES, units, _CANDIDATES, work, progress)
        chosen = shortlisted(units, errors, _LOWEST) if of is None else [u for u in units if u.name in of]
        divergence = measure_divergence(model.decoder, _SAMPLES, chosen, _LOWEST, errors.second_moments, work, progress)
        assert list(work.iterdir()) == []
        stages = ("output errors", "logit divergence")
        assert progress.seen == [(stage, n + 1, 3) for stage in stages for n in range(3)]
        return model, units, errors, divergence

    return measure


def _inputs(model: Any, module: str) -> torch.Tensor:
    """What a module of transformers' model is given, over all samples, `(tokens, in)` in float64."""
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(module).register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0].reshape(-1, inputs[0].shape[-1]).double())
    )
    for ids in _SAMPLES:
        model(torch.from_numpy(ids)[None])
    hook.remove()
    return torch.cat(seen)


@torch.no_grad()
def test_output_error_is_that_of_the_outputs(measured: Callable[..., Any]) -> None:
    """But for some per cent: the layers run with products in bfloat16, where the CPU has them."""
    model, units, errors, _ = measured("llama", of=[])
    for unit in units:
        x = _inputs(model.reference, unit.modules[0])
        moments = (x**2).mean(dim=0)
        torch.testing.assert_close(
            errors.second_moments[input_key(unit.modules[0])].double(), moments, rtol=0.1, atol=0.0
        )
        for candidate in _CANDIDATES:
            error, energy = 0.0, 0.0
            for module in unit.modules:
                weight = model.reference.get_submodule(module).weight
                rounded = round_to_nearest(module, weight, moments.float(), candidate.fit(weight.shape[1])).dequantize()
                error += float((x @ (rounded - weight).double().T).square().sum())
                energy += float((x @ weight.double().T).square().sum())
            assert errors.relative[unit.name][str(candidate)] == pytest.approx(error / energy, rel=0.1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama tied, all biases", ["model.layers.0.self_attn.q+k+v", "model.layers.2.mlp.down"]),
        ("v2 query latent, groups, yarn", ["model.layers.1.self_attn.q_b", "experts of all layers"]),
    ],
)
def test_divergence_is_that_of_transformers_with_the_unit_rounded(
    family: str, names: list[str], measured: Callable[..., Any]
) -> None:
    model, units, errors, divergence = measured(family, of=names)
    assert set(divergence) == set(names)

    def logits() -> np.ndarray[Any, Any]:
        rows = [model.reference(torch.from_numpy(ids)[None]).logits[0] for ids in _SAMPLES]
        # the first positions of a sequence are left out, but of a short one its last is kept
        return torch.cat([r[min(16, len(r) - 1) :] for r in rows]).numpy()

    baseline = logits()
    for unit in (u for u in units if u.name in names):
        state = {name: values.clone() for name, values in model.reference.state_dict().items()}
        for module in unit.modules:
            weight = torch.from_numpy(model.source.read(f"{module}.weight"))
            rounded = round_to_nearest(
                module, weight, errors.second_moments[input_key(module)], _LOWEST.fit(weight.shape[1])
            )
            _weight_of(model.reference, module).copy_(rounded.dequantize())
        expected = kl_divergence(baseline, logits()).mean()
        model.reference.load_state_dict(state)
        assert expected > 1e-4
        assert divergence[unit.name] == pytest.approx(expected, rel=1e-3)


def _weight_of(model: Any, module: str) -> torch.Tensor:
    """The weight of a module, or where transformers stacks experts its part of theirs."""
    parent, _, kind = module.rpartition(".")
    stack, _, number = parent.rpartition(".")
    if not stack.endswith(".experts"):
        return model.get_submodule(module).weight  # type: ignore[no-any-return]
    experts = model.get_submodule(stack)
    if kind == "down_proj":
        return experts.down_proj[int(number)]  # type: ignore[no-any-return]
    gate, up = experts.gate_up_proj[int(number)].chunk(2)
    return gate if kind == "gate_proj" else up


def test_a_fragile_unit_comes_first_and_all_harm_is_finite(
    measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "SHORTLIST", 3)
    _, units, errors, divergence = measured("llama", edit=_fragile)
    at_lowest = {unit.name: errors.relative[unit.name][str(_LOWEST)] for unit in units}
    assert max(at_lowest, key=lambda name: at_lowest[name]) == _FRAGILE
    assert len(divergence) == 3
    assert max(divergence, key=lambda name: divergence[name]) == _FRAGILE
    harm = estimate_harm(units, _CANDIDATES, errors, divergence)
    assert list(harm) == [unit.name for unit in units]
    assert max(harm, key=lambda name: harm[name][0]) == _FRAGILE
    for rows in harm.values():
        assert np.isfinite(rows).all()
        assert rows[0] > rows[2] > 0


def test_harm_goes_with_output_error() -> None:
    """By hand: measured at the lowest, in proportion elsewhere, the median ratio for what was not measured."""
    relative = {
        "a": {"int4-g128": 0.1, "int4-g32": 0.05, "int8": 0.001},
        "b": {"int4-g128": 0.2, "int4-g32": 0.1, "int8": 0.002},
        "c": {"int4-g128": 0.4, "int4-g32": 0.1, "int8": 0.004},
        "off": {"int4-g128": 0.01, "int4-g32": 0.005, "int8": 0.0001},
        "unreached": {"int4-g128": 0.0, "int4-g32": 0.0, "int8": 0.0},
    }
    units = [Unit(name=name, modules=(), patterns=(), shapes=()) for name in relative]
    errors = OutputErrors(relative=relative, second_moments={})
    harm = estimate_harm(units, _CANDIDATES, errors, {"a": 0.01, "b": 0.06, "c": 0.2})
    assert harm["a"] == pytest.approx([0.01, 0.005, 0.0001])
    assert harm["c"] == pytest.approx([0.2, 0.05, 0.002])
    assert harm["off"] == pytest.approx([0.003, 0.0015, 0.00003])  # ratios 0.1, 0.3, 0.5
    assert harm["unreached"] == [0.0, 0.0, 0.0]


def test_only_so_many_samples_and_tokens_count(
    random_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("llama")
    units = decision_units(model.source.spec, portable=True)
    moments = measure_output_errors(model.decoder, _SAMPLES, units, _CANDIDATES, tmp_path, _Progress()).second_moments
    assert all(m.untyped_storage().nbytes() == m.nbytes for m in moments.values()), "a view keeps a Hessian alive"

    def divergence(samples: list[Any]) -> dict[str, float]:
        return measure_divergence(model.decoder, samples, units[:1], _LOWEST, moments, tmp_path, _Progress())

    whole, cut = divergence(_SAMPLES[1:2]), divergence([_SAMPLES[1][:40]])
    monkeypatch.setattr(sensitivity, "_LOGIT_SAMPLES", 1)
    monkeypatch.setattr(sensitivity, "_LOGIT_TOKENS", 40)
    assert divergence([_SAMPLES[1], _SAMPLES[0]]) == pytest.approx(cut, rel=1e-6) != pytest.approx(whole, rel=1e-6)
