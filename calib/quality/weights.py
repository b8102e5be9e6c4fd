"""Where an engine's weights are farthest from its baseline's: the part of a report that points at a layer.

A layer with wrong scales or an expert of zeros shows here by name, while the text tells only that something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from harness.calib.quality.report import ModuleError
from harness.calib.units import layer_of
from harness.recipe import Precision, in_decoder
from harness.runtime.engine_weights import module_weights


def weight_errors(engine_dir: Path, baseline_dir: Path, precisions: Mapping[str, str]) -> list[ModuleError]:
    """Relative error of the modules of both engines, in the order of the model.

    `precisions` are the engine's, by module. Of large modules evenly spread rows are compared. Modules with int8
    activations are left out: SmoothQuant (arXiv 2211.10438) moved factors between their weights and what precedes them.
    """
    errors = []
    for (module, weights), (name, expected) in zip(
        module_weights(engine_dir), module_weights(baseline_dir), strict=True
    ):
        assert module == name, "engines of one model list their modules alike"
        if Precision.parse(precisions.get(module, "f16")).int8_activations:
            continue
        norm = float(np.linalg.norm(expected))
        distance = float(np.linalg.norm(weights - expected))
        errors.append(
            ModuleError(
                module=module,
                layer=layer_of(module) if in_decoder(module) else None,
                precision=precisions.get(module, "f16"),
                relative_error=distance / norm if norm else float(distance > 0),
            )
        )
    return errors
