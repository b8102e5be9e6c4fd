"""The forward that contenders are scored with, beside transformers' own, and what is left of a contender afterwards."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from harness.build.open_source import open_source

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"


@pytest.fixture(scope="module")
def contenders() -> Iterator[ModuleType]:
    """scripts/benchmarks/contenders.py, which lies outside of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("contenders")


@pytest.fixture(scope="module")
def model(
    contenders: ModuleType,
    tiny_deepseek_path: Path,
    held_out_documents: dict[str, list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    folder = tmp_path_factory.mktemp("quality")
    texts = held_out_documents["english"]
    calibration = folder / "calibration.jsonl"
    calibration.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[6:16]))
    return contenders.QualityModel(
        "tiny",
        open_source(str(tiny_deepseek_path)),
        held_out={"english": texts[:6]},
        calibration=calibration,
        num_windows=2,
        cache=folder,
    )


def test_forward_is_that_of_transformers(model: Any, tiny_deepseek_path: Path) -> None:
    tokens = torch.from_numpy(model.windows["english"][:1])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_deepseek_path, dtype=torch.float32)
    with torch.no_grad():
        expected, seen = theirs(tokens).logits, model.torch_model(tokens).logits
    np.testing.assert_allclose(seen.numpy(), expected.numpy(), atol=1e-4)


def test_fewer_bits_diverge_more_and_nothing_stays(model: Any, contenders: ModuleType) -> None:
    divergence = {}
    for precision in ("int4-g128", "int8"):
        quantized = contenders.round_to_nearest(precision).quantize(model)
        assert quantized.weights.keys() == model.linears.keys()
        divergence[precision] = np.mean(model.score(quantized.weights)["english"].kl_divergence)
    unquantized = model.score({})["english"]
    assert divergence["int4-g128"] > 10 * divergence["int8"] > 0
    assert unquantized.kl_divergence == [0, 0]
    assert unquantized.top1 == 1


def test_second_moments_are_those_of_the_inputs(model: Any) -> None:
    moments = model.input_second_moments
    assert moments.keys() == model.linears.keys()
    layer = "model.layers.0.self_attn"
    # one input, two linears
    np.testing.assert_array_equal(moments[f"{layer}.q_proj"], moments[f"{layer}.kv_a_proj_with_mqa"])
    with torch.no_grad():
        inputs = [
            model.torch_model.model.layers[0].input_layernorm(
                model.torch_model.model.embed_tokens(torch.from_numpy(tokens))
            )
            for tokens in model.calibration
        ]
    np.testing.assert_allclose(moments[f"{layer}.q_proj"], torch.cat(inputs).square().mean(0).numpy(), rtol=1e-4)
