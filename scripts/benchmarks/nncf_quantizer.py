"""NNCF's weight compression with its calibrated parts, AWQ and scale estimation, on the torch model.

Zero points, group 128 and int8 backup layers chosen by NNCF's own sensitivity, as its documentation recommends for
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

_GROUP_SIZE = 128
_OTHERS = [".*embed_tokens.*", ".*lm_head.*", ".*kv_b_proj.*", ".*/gate/.*"]  # not every model has all of them
_HOOK = re.compile(r"post_hooks\.(.+):weight__\d+")


def contenders() -> list[Contender]:
    """All in four bits, and two mixes with int8."""
    targets = {"int4": None, "mixed 4.5": 4.5, "mixed 5.0": 5.0}
    return [
        Contender(
            name=f"NNCF {name}, AWQ + scale estimation",
            family="NNCF",
            version=f"{nncf.__version__} torch {torch.__version__}",
            quantize=partial(_quantize, target_bits=target),
        )
        for name, target in targets.items()
    ]


def _quantize(model: QualityModel, target_bits: float | None) -> Quantized:
    nncf.set_log_level(logging.WARNING)
    compressed = nncf.compress_weights(
        copy.deepcopy(model.torch_model),
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        ratio=1.0 if target_bits is None else _ratio(model, target_bits),
        group_size=_GROUP_SIZE,
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


def _ratio(model: QualityModel, target_bits: float) -> float:
    """Share of weights in int4 at which the whole has the bits wanted: int4 has a scale and a 4-bit zero point a group,
    int8 a scale and an 8-bit zero point a row."""
    low = 4 + (16 + 4) / _GROUP_SIZE
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
