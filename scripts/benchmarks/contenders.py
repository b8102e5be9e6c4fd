"""Ways to quantize the decoder linears of a model, each at its count of stored bits.

Owns what a contender is, round to nearest, and checkpoints of ours; NNCF and llama.cpp have modules of their own. A
contender gives back dequantized weights: what the arithmetic of its own kernels would add is not measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quality_model import QualityModel

from harness.build.checkpoint import QuantizedCheckpoint
from harness.build.lowering.quantize import quantize_rows
from harness.recipe import Precision, Recipe
from harness.weight_source import FloatArray


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Decoder linears `(out, in)` as a contender leaves them, by module name.

    `bits_per_weight`: stored bits, scales and zero points included, over the number of weights. `note`: what the
    contender could not do, or did otherwise.
    """

    weights: dict[str, FloatArray]
    bits_per_weight: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A named way to quantize. `family` is what the plot joins; `version` of the software, so that results are kept."""

    name: str
    family: str
    version: str
    quantize: Callable[[QualityModel], Quantized]


def round_to_nearest(precision: str) -> Contender:
    """One precision for all decoder linears, symmetric."""
    recipe = Recipe(name=precision, rules=(("*", Precision.parse(precision)),))

    def quantize(model: QualityModel) -> Quantized:
        resolved = recipe.resolve(model.spec)
        weights = {m: quantize_rows(model.weight(m), resolved[m]).dequantized() for m in model.linears}
        bits = sum(out * inner * resolved[m].bits_per_weight(inner) for m, (out, inner) in model.linears.items())
        return Quantized(weights=weights, bits_per_weight=bits / num_weights(model))

    return Contender(name=f"round to nearest {precision}", family="round to nearest", version="1", quantize=quantize)


def checkpoint(label: str, opened: QuantizedCheckpoint) -> Contender:
    """A quantized checkpoint that harness-build made of the model scored."""
    record = opened.record

    def quantize(model: QualityModel) -> Quantized:
        weights = {module: opened.read(f"{module}.weight") for module in model.linears}
        return Quantized(weights=weights, bits_per_weight=record.recipe.decoder_bits_per_weight)

    return Contender(
        name=label or f"ours {record.recipe.decoder_bits_per_weight:.2f} bits, {record.target}",
        family=f"ours, {record.target}",
        version=opened.fingerprint(),
        quantize=quantize,
    )


def num_weights(model: QualityModel) -> int:
    """Weights in all decoder linears."""
    return sum(out * inner for out, inner in model.linears.values())
