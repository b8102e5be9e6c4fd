"""How much each unit of a model suffers from each precision, measured on the calibration set.

Two measurements, both with rounding to nearest: the output error of every layer, for every unit and precision, in one
pass; and for the units where that is largest the KL divergence of the model's logits with that unit alone at the lowest
precision, all in one more pass. What was not measured is estimated from what was. Needs torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from harness.calib.activations import Activations
from harness.calib.decoder import StreamedDecoder, bfloat16_products, linear_of
from harness.calib.measure import kl_divergence
from harness.calib.quantizer import round_to_nearest
from harness.calib.statistics import LayerStatistics
from harness.calib.units import Unit, by_input, input_key, layer_modules, layer_of
from harness.recipe import Precision

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done, and the steps there are."""
TokenIds = npt.NDArray[np.int64]

SENSITIVITY_VERSION = 1
"""Part of the id under which measurements are kept. To be raised when they come out otherwise."""

_ERROR_SAMPLES = 16  # sequences for output errors
_LOGIT_SAMPLES, _LOGIT_TOKENS = 8, 192  # sequences for the divergence, and tokens of each
_LOGIT_VALUES = 40_000_000  # logits compared per unit at most
_WARM_UP = 16  # first positions of a sequence tell little
SHORTLIST = 24


@dataclass(frozen=True, kw_only=True)
class OutputErrors:
    """Squared error of the outputs of a unit's modules, relative to their square, `[unit][precision]`.

    `second_moments`: mean square of each input channel `(in,)`, by input key.
    """

    relative: dict[str, dict[str, float]]
    second_moments: dict[str, torch.Tensor]


def measure_output_errors(
    decoder: StreamedDecoder,
    samples: Sequence[TokenIds],
    units: Sequence[Unit],
    candidates: Sequence[Precision],
    work: Path,
    on_progress: OnProgress,
) -> OutputErrors:
    """Run samples through the unquantized model and compare every layer's outputs under every candidate."""
    samples = _spread(samples, _ERROR_SAMPLES)
    states = _embedded(decoder, samples, work / "error-states")
    unit_of = {module: unit for unit in units for module in unit.modules}
    errors = {unit.name: dict.fromkeys(map(str, candidates), 0.0) for unit in units}
    energy = dict.fromkeys(errors, 0.0)
    moments: dict[str, torch.Tensor] = {}
    for number in range(decoder.spec.num_layers):
        modules = layer_modules(decoder.spec, number)
        with decoder.layer(number) as layer:
            with bfloat16_products(), LayerStatistics(layer, modules) as seen:
                for i in range(len(samples)):
                    states.write(i, decoder.run(layer, states.read(i)))
            for key, members in by_input(modules).items():
                hessian, unit = seen.hessians[key], unit_of[members[0]]
                moments[key] = hessian.diagonal().cpu().clone()  # a view would keep the whole Hessian
                weight = torch.cat([linear_of(layer, m).weight.detach() for m in members])
                energy[unit.name] += float(((weight @ hessian) * weight).sum())
                for candidate in candidates:
                    fitted = unit.fit(candidate).fit(weight.shape[1])
                    change = round_to_nearest(members[0], weight, moments[key], fitted).dequantize() - weight
                    errors[unit.name][str(candidate)] += float(((change @ hessian) * change).sum())
        on_progress("output errors", number + 1, decoder.spec.num_layers)
    states.path.unlink()
    relative = {u: {c: e / max(energy[u], 1e-30) for c, e in by.items()} for u, by in errors.items()}
    return OutputErrors(relative=relative, second_moments=moments)


def shortlisted(units: Sequence[Unit], errors: OutputErrors, lowest: Precision) -> list[Unit]:
    """The units whose output suffers most at the lowest precision, in model order."""
    worst = sorted(units, key=lambda unit: -errors.relative[unit.name][str(lowest)])[:SHORTLIST]
    return [unit for unit in units if unit in worst]


def measure_divergence(
    decoder: StreamedDecoder,
    samples: Sequence[TokenIds],
    units: Sequence[Unit],
    lowest: Precision,
    second_moments: dict[str, torch.Tensor],
    work: Path,
    on_progress: OnProgress,
) -> dict[str, float]:
    """Mean KL divergence of the logits, in nats a token, with one unit at a time at the lowest precision."""
    samples = [ids[:_LOGIT_TOKENS] for ids in _spread(samples, _LOGIT_SAMPLES)]
    base = _embedded(decoder, samples, work / "base-states")
    lengths = [len(ids) for ids in samples]
    altered: dict[str, Activations] = {}
    for number in range(decoder.spec.num_layers):
        with decoder.layer(number) as layer:
            for position, unit in enumerate(units):
                if unit.name not in altered and number not in unit.layers:
                    continue
                start = altered.get(unit.name, base)
                if unit.name not in altered:
                    path = work / f"altered-states-{position}"
                    altered[unit.name] = Activations(path, lengths, decoder.spec.hidden_size)
                with _rounded(layer, number, unit, lowest, second_moments):
                    for i in range(len(samples)):
                        altered[unit.name].write(i, decoder.run(layer, start.read(i)))
            for i in range(len(samples)):
                base.write(i, decoder.run(layer, base.read(i)))
        on_progress("logit divergence", number + 1, decoder.spec.num_layers)
    reference = _logits(decoder, base, samples)
    found = {name: float(kl_divergence(reference, _logits(decoder, s, samples)).mean()) for name, s in altered.items()}
    for states in (base, *altered.values()):
        states.path.unlink()
    return found


def estimate_harm(
    units: Sequence[Unit],
    candidates: Sequence[Precision],
    errors: OutputErrors,
    divergence: dict[str, float],
) -> dict[str, list[float]]:
    """Expected KL divergence of each unit at each candidate, in nats a token.

    A unit's divergence goes with its squared output error, so the one measured at the lowest candidate gives the
    others; a unit off the shortlist gets the median ratio of divergence to error of those on it.
    """
    lowest = str(candidates[0])
    ratios = [divergence[u] / max(errors.relative[u][lowest], 1e-30) for u in divergence]
    usual = statistics.median(ratios) if ratios else 1.0
    harm = {}
    for unit in units:
        relative = errors.relative[unit.name]
        at_lowest = divergence.get(unit.name, usual * relative[lowest])
        harm[unit.name] = [at_lowest * relative[str(c)] / max(relative[lowest], 1e-30) for c in candidates]
    return harm


def _spread(samples: Sequence[TokenIds], number: int) -> list[TokenIds]:
    """Some of the samples, far apart: neighbours in a set are alike."""
    return [samples[i] for i in np.unique(np.linspace(0, len(samples) - 1, number).round().astype(int))]


def _embedded(decoder: StreamedDecoder, samples: Sequence[TokenIds], path: Path) -> Activations:
    states = Activations(path, [len(ids) for ids in samples], decoder.spec.hidden_size)
    for i, ids in enumerate(samples):
        states.write(i, decoder.embed(ids))
    return states


def _logits(decoder: StreamedDecoder, states: Activations, samples: Sequence[TokenIds]) -> npt.NDArray[np.float32]:
    """Logits at positions spread over all sequences, few enough for a large vocabulary."""
    rows = torch.cat([states.read(i)[0, min(_WARM_UP, len(ids) - 1) :] for i, ids in enumerate(samples)])
    step = max(1, -(-len(rows) * decoder.spec.vocab_size // _LOGIT_VALUES))
    return np.asarray(decoder.logits(rows[::step].to(decoder.device)).numpy())


@contextmanager
def _rounded(
    layer: nn.Module, number: int, unit: Unit, precision: Precision, moments: dict[str, torch.Tensor]
) -> Iterator[None]:
    """A layer whose modules of one unit hold rounded weights, for as long as the block runs."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for module in unit.modules:
            if layer_of(module) != number:
                continue
            parameter = linear_of(layer, module).weight
            kept.append((parameter, parameter.detach().clone()))
            fitted = unit.fit(precision).fit(parameter.shape[1])
            with torch.no_grad():
                second = moments[input_key(module)].to(parameter.device)
                parameter.copy_(round_to_nearest(module, parameter.detach(), second, fitted).dequantize())
        yield
    finally:
        with torch.no_grad():
            for parameter, values in kept:
                parameter.copy_(values)
