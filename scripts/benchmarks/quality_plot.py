"""KL divergence against bits per weight, a panel a model, a line a family of contenders."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot

MARKERS = "osD^vPX"
MOST_BITS = 6.2  # int8 would squeeze what is to be seen


def save(models: list[dict[str, Any]], path: Path) -> None:
    """Write the plot of `quality.json`'s models as SVG, with the same bytes for the same figures."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "quality"
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(5 * len(models), 4.2), squeeze=False, layout="constrained"
    )
    for panel, model in zip(panels[0], models, strict=True):
        families = defaultdict(list)
        for record in model["records"]:
            divergence = np.mean([np.mean(score["kl_divergence"]) for score in record["domains"].values()])
            if record["bits_per_weight"] <= MOST_BITS:
                families[record["family"]].append((record["bits_per_weight"], divergence))
        for (family, points), marker in zip(families.items(), MARKERS, strict=False):
            panel.plot(*zip(*sorted(points), strict=True), marker=marker, label=family)
        panel.set(title=model["model"], xlabel="bits per decoder linear weight", yscale="log")
        panel.grid(which="both", alpha=0.3)
    panels[0][0].set_ylabel("KL divergence, nats per token")
    panels[0][-1].legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
