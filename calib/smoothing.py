"""SmoothQuant (arXiv 2211.10438): outliers of activations moved into the weights that follow, for int8 activations.

Factors are rounded to powers of two, so that dividing a norm's weights by them is exact in every float format. The
factors' maths is llm-compressor's. Needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from torch import nn

from harness.calib.decoder import linear_of
from harness.calib.statistics import LayerStatistics
from harness.calib.units import by_input
from harness.recipe import Precision

_STRENGTH = 0.5
_NORM_BEFORE = {"self_attn.first": "input_layernorm", "mlp.gate_up": "post_attention_layernorm"}


def smooth_layer(layer: nn.Module, prefix: str, precisions: Mapping[str, Precision], seen: LayerStatistics) -> None:
    """Smooth the inputs of the modules with int8 activations that follow a norm of their own.

    The norm's and the modules' weights change in place, and with them the statistics. A mixture of experts is left
    alone: its norm feeds the router too.
    """
    for key, modules in by_input(list(precisions)).items():
        norm_name = _NORM_BEFORE.get(key.removeprefix(prefix))
        if norm_name is None or not precisions[modules[0]].int8_activations:
            continue
        linears = [linear_of(layer, m) for m in modules]
        maths = SmoothQuantModifier(smoothing_strength=_STRENGTH)
        factors = maths._calculate_smoothing_scales(linears, seen.input_maxima[key])
        factors = torch.exp2(factors.clamp_min(1e-5).log2().round())
        norm_weight = layer.get_submodule(norm_name).get_parameter("weight")
        with torch.no_grad():
            norm_weight.div_(factors)
            for linear in linears:
                linear.weight.mul_(factors)
        seen.input_maxima[key] /= factors
        seen.hessians[key] /= factors * factors[:, None]
