"""NNCF's weight compression with its calibrated parts, AWQ and scale estimation, on the torch model.

Zero points, and in the mixes int8 layers that NNCF's own sensitivity picks, as its documentation recommends for
language models. Embeddings, lm_head and whatever else is no decoder linear are out of its scope.
"""

from __future__ import annotations

import copy
import logging
import re
from functools import partial

import nncf
import torch
from contenders import Contender, Quantized, num_weights
from nncf.torch.quantization.layers import BaseWeightsDecompressor
from quality_model import QualityModel
from torch import nn

from harness.weight_source import FloatArray

_OTHERS = [".*embed_tokens.*", ".*lm_head.*", ".*kv_b_proj.*", ".*/gate/.*"]  # not every model has all of them
_HOOK = re.compile(r"post_hooks\.(.+):weight__\d+")


def contenders() -> list[Contender]:
    """All in four bits, by group size, and two mixes with int8."""
    uniform = [(f"int4-g{group}", group, None) for group in (128, 64, 32)]
    mixes = [(f"int4-g128 and int8, {bits} bits", 128, bits) for bits in (4.5, 5.0)]
    return [
        Contender(
            name=f"NNCF {name}",
            family="NNCF",
            version=f"{nncf.__version__} torch {torch.__version__}",
            quantize=partial(_quantize, group_size=group_size, target_bits=target),
        )
        for name, group_size, target in [*uniform, *mixes]
    ]


def _quantize(model: QualityModel, group_size: int, target_bits: float | None) -> Quantized:
    nncf.set_log_level(logging.WARNING)
    compressed = nncf.compress_weights(
        copy.deepcopy(model.torch_model),
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        ratio=1.0 if target_bits is None else _ratio(model, group_size, target_bits),
        group_size=group_size,
        awq=True,
        scale_estimation=True,
        dataset=nncf.Dataset(
            [{"input_ids": torch.from_numpy(tokens)[None], "use_cache": False} for tokens in model.calibration]
        ),
        subset_size=len(model.calibration),
        all_layers=True,
        ignored_scope=nncf.IgnoredScope(patterns=_OTHERS, validate=False),
    )
    weights, stored_bits = _read_back(compressed)
    if weights.keys() != model.linears.keys():
        differing = sorted(weights.keys() ^ model.linears.keys())
        raise RuntimeError(f"NNCF compressed another set of modules: {differing[:3]}")
    note = "routed experts as linears of their own" if model.spec.moe else ""
    return Quantized(weights=weights, bits_per_weight=stored_bits / num_weights(model), note=note)


def _ratio(model: QualityModel, group_size: int, target_bits: float) -> float:
    """Share of weights in int4 at which the whole has the bits wanted: int4 has a scale and a 4-bit zero point a group,
    int8 a scale and an 8-bit zero point a row."""
    low = 4 + (16 + 4) / group_size
    high = 8 + sum(out * (16 + 8) for out, _ in model.linears.values()) / num_weights(model)
    return (high - target_bits) / (high - low)


def _read_back(compressed: nn.Module) -> tuple[dict[str, FloatArray], int]:
    """Dequantized weights by module name, and the bits of all they are stored in."""
    weights, stored_bits = {}, 0
    for name, decompressor in compressed.named_modules():
        hook = _HOOK.search(name)
        if hook is None or not isinstance(decompressor, BaseWeightsDecompressor):
            continue
        module = hook[1].replace(":", ".")
        packed = compressed.get_parameter(f"{module}.weight")
        weights[module] = decompressor(packed).float().numpy()
        stored_bits += sum(8 * t.numel() * t.element_size() for t in (packed, *decompressor.buffers()))
    return weights, stored_bits
