"""Engines of committed and fetched models, rounded to nearest; imported by the fixtures of several folders."""

from __future__ import annotations

from pathlib import Path

from harness.build.cpu_engine import build_cpu_engine
from harness.build.open_source import open_source
from harness.recipe import preset


def build_preset_engine(model: Path, out: Path, precision: str) -> Path:
    """Build `model` under the preset `precision`; returns the folder `out`."""
    source = open_source(str(model))
    return build_cpu_engine(source, preset(precision, source.spec), engines_dir=out.parent, out=out).engine_dir
