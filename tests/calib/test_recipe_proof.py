"""The searched recipe against others of equal size, on models trained in full precision and text held out."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.build.hf_source import HfFolderSource
from harness.calib.calibration_set import CalibrationSet, make_calibration_set
from harness.calib.decoder import StreamedDecoder
from harness.calib.quantize_model import ModelQuantizer
from harness.calib.recipe_search import Assignment, as_recipe, bits_per_weight, cautious, search_assignment
from harness.calib.sensitivity import estimate_harm, measure_divergence, measure_output_errors, shortlisted
from harness.calib.units import Unit, decision_units
from harness.recipe import INT8, Precision
from harness.tokenizer import Tokenizer

INT4 = Precision.parse("int4-g128")
CANDIDATES = [INT4, INT8]
CPU = torch.device("cpu")


def silent(_stage: str, _done: int, _total: int) -> None:
    pass


def random_assignment(units: Sequence[Unit], bits: float, seed: int) -> Assignment:
    """int8 for units in random order, as long as the budget holds."""
    assignment = {unit.name: INT4 for unit in units}
    for unit in random.Random(seed).sample(list(units), len(units)):
        tried = assignment | {unit.name: INT8}
        if bits_per_weight(units, tried) <= bits:
            assignment = tried
    return assignment


class Trial:
    """One trained model, its sensitivity, and the held-out divergence of any assignment."""

    def __init__(self, folder: Path, held_out: dict[str, list[str]], work: Path) -> None:
        self.source = HfFolderSource(folder)
        tokenizer = Tokenizer(self.source.tokenizer, self.source.generation_config)
        texts = ["\n\n".join(documents) for documents in held_out.values()]
        windows = tuple(np.array(tokenizer.encode(text)[:640], np.int64) for text in texts)
        drawn = make_calibration_set(tokenizer, num_samples=16, max_tokens=192)
        self.set: CalibrationSet = replace(drawn, held_out=windows)
        self.units = decision_units(self.source.spec, portable=True)
        self.work = work
        decoder = StreamedDecoder(self.source, CPU)
        errors = measure_output_errors(decoder, drawn.samples, self.units, CANDIDATES, work, silent)
        worst = shortlisted(self.units, errors, INT4)
        divergence = measure_divergence(decoder, drawn.samples, worst, INT4, errors.second_moments, work, silent)
        harm = estimate_harm(self.units, CANDIDATES, errors, divergence)
        self.harm = cautious(self.units, harm, self.source.spec.num_layers)

    def searched(self, bits: float) -> Assignment:
        return search_assignment(self.units, CANDIDATES, self.harm, bits)

    def divergence(self, name: str, assignment: Assignment) -> float:
        resolved = as_recipe(name, self.units, assignment, self.source.spec).resolve(self.source.spec)
        linears = {module: p for module, p in resolved.items() if module.startswith("model.layers.")}
        work = self.work / name
        work.mkdir()
        return ModelQuantizer(self.source, self.set, linears, work, CPU).run(silent).loss.kl_divergence


@pytest.fixture(scope="module", params=["tiny_llama_path", "tiny_deepseek_path"])
def trial(
    request: pytest.FixtureRequest, held_out_documents: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Trial:
    return Trial(request.getfixturevalue(request.param), held_out_documents, tmp_path_factory.mktemp("trial"))


def test_the_search_beats_the_fixed_rule_of_first_and_last_layer(trial: Trial) -> None:
    outer = {0, trial.source.spec.num_layers - 1}
    fixed = {u.name: INT8 if u.layers <= outer else INT4 for u in trial.units}
    bits = bits_per_weight(trial.units, fixed)
    ours = trial.searched(bits)
    assert bits_per_weight(trial.units, ours) <= bits
    assert trial.divergence("ours-fixed", ours) < trial.divergence("fixed", fixed)


def test_the_search_beats_the_median_of_random_assignments(trial: Trial) -> None:
    bits = 4.75
    others = [trial.divergence(f"random-{n}", random_assignment(trial.units, bits, n)) for n in range(5)]
    ours = trial.searched(bits)
    assert bits_per_weight(trial.units, ours) <= bits
    assert trial.divergence("ours-random", ours) < statistics.median(others)
