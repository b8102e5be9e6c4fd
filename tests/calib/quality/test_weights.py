from pathlib import Path

import numpy as np
import pytest
from broken_engine import Scales, break_scales

from harness.build.cpu_engine import build_cpu_engine
from harness.build.open_source import open_source
from harness.calib.quality.weights import weight_errors
from harness.manifest import read_manifest
from harness.recipe import F16, INT8, Precision, Recipe
from harness.runtime.engine_weights import module_weights

EXPERT = "model.layers.3.mlp.experts.5.down_proj"
MIX = Recipe(
    name="every kind",
    rules=(
        ("*.experts.*", Precision.parse("int4-g32-zp")),
        ("*.o_proj", Precision.parse("int4-g64")),
        ("lm_head", F16),
        ("model.embed_tokens", INT8),
        ("*", INT8),
    ),
)


@pytest.fixture(scope="module")
def mixed(tiny_deepseek_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "mixed"
    return build_cpu_engine(open_source(str(tiny_deepseek_path)), MIX, engines_dir=out.parent, out=out).engine_dir


def errors(engine: Path, baseline: Path) -> dict[str, float]:
    layers = read_manifest(engine).recipe.layers
    return {error.module: error.relative_error for error in weight_errors(engine, baseline, layers)}


def test_what_an_unquantized_engine_stores_is_the_model(tiny_llama_path: Path, llama_f16: Path) -> None:
    source = open_source(str(tiny_llama_path))
    seen = dict(module_weights(llama_f16))
    assert seen.keys() == read_manifest(llama_f16).recipe.layers.keys()
    for module, weights in seen.items():
        whole = source.read(f"{module}.weight").astype(np.float16).astype(np.float32)
        rows = np.linspace(0, len(whole) - 1, len(weights)).round().astype(int)
        np.testing.assert_array_equal(weights, whole[rows])


def test_errors_are_those_of_each_precision(mixed: Path, deepseek_f16: Path) -> None:
    found = errors(mixed, deepseek_f16)
    assert found.keys() == read_manifest(mixed).recipe.layers.keys()
    for module, error in found.items():
        low, high = {
            "f16": (0, 0),
            "int8": (0.002, 0.02),
            "int4-g64": (0.05, 0.15),
            "int4-g32-zp": (0.04, 0.12),
        }[read_manifest(mixed).recipe.layers[module]]
        assert low <= error <= high, (module, error)


def test_one_expert_of_zeros_is_named(mixed: Path, deepseek_f16: Path, tmp_path: Path) -> None:
    def zero(scales: Scales, number: int) -> Scales:
        scales[number] = 0
        return scales

    found = errors(break_scales(mixed, tmp_path / "broken", EXPERT, zero), deepseek_f16)
    assert found.pop(EXPERT) == pytest.approx(1)
    assert max(found.values()) < 0.15


def test_doubled_scales_are_named(mixed: Path, deepseek_f16: Path, tmp_path: Path) -> None:
    module = "model.layers.2.self_attn.o_proj"
    found = errors(break_scales(mixed, tmp_path / "broken", module, lambda scales, _: scales * 2), deepseek_f16)
    assert found.pop(module) == pytest.approx(1, abs=0.02)
    assert max(found.values()) < 0.15
