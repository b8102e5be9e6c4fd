from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from harness.calib.measure import kl_divergence
from harness.calib.overlap import load_ngrams, ngram_hashes, save_ngrams
from harness.calib.quality.report import TextResult
from harness.calib.quality.suite import TextAmount, load_suite
from harness.calib.quality.text import Domain, cut_windows, measure_text, steps_of, window_logits
from harness.checkpoint_record import NGRAMS_NAME
from harness.errors import QualityError
from harness.manifest import read_manifest
from harness.runtime.executor import Executor, SchedulerOutput, StepOutput
from harness.runtime.openvino_executor import OpenVinoExecutor
from harness.tokenizer import Tokenizer

AMOUNT = TextAmount(windows=3, tokens=192)
NOTHING = np.empty(0, np.uint64)


def load(engine: Path, *, deterministic: bool = False, num_threads: int = 2) -> OpenVinoExecutor:
    return OpenVinoExecutor(
        engine, read_manifest(engine), deterministic=deterministic, kv_cache_bytes=32 << 20, num_threads=num_threads
    )


def windows_of(engine: Path, amount: TextAmount = AMOUNT, seen: np.ndarray = NOTHING) -> list[Domain]:
    tokenizer = Tokenizer.from_dir(engine)
    return cut_windows(load_suite(), tokenizer, amount, max_model_len=4096, calibration_ngrams=seen)


class Poisoned:
    """An executor whose logits of one row of each step are NaN."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.num_blocks, self.vocab_size = executor, executor.num_blocks, executor.vocab_size

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        logits = self.executor.execute(scheduled).logits.copy()
        logits[5:6, 7] = np.nan
        return StepOutput(logits=logits)


def test_an_engine_beside_itself_differs_in_nothing(llama_f16: Path) -> None:
    result = measure_text(load(llama_f16), load(llama_f16), windows_of(llama_f16))
    for domain in (result.overall, *result.domains):
        assert domain.kl_mean.value == pytest.approx(0, abs=1e-9)
        assert domain.perplexity_change.value == pytest.approx(0, abs=1e-9)
        assert domain.top1_agreement.value == 1
        assert domain.num_non_finite == 0


def test_perplexity_is_that_of_the_model_in_transformers(llama_f16: Path, tiny_llama_path: Path) -> None:
    domains = windows_of(llama_f16)
    exact = load(llama_f16, deterministic=True)
    result = measure_text(exact, exact, domains)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32)
    for domain, seen in zip(domains, result.domains, strict=True):
        losses = []
        for window in domain.windows:
            ids = torch.tensor([window])
            with torch.no_grad():
                losses.append(model(ids, labels=ids).loss.item())
        assert seen.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)


def test_a_quantized_engine_is_measured_to_be_worse(llama_f16: Path, llama_int4: Path) -> None:
    result = measure_text(load(llama_f16), load(llama_int4), windows_of(llama_f16))
    assert [d.domain for d in result.domains] == ["english", "chinese", "code"]
    for domain in (result.overall, *result.domains):
        assert 0.001 < domain.kl_mean.low <= domain.kl_mean.value <= domain.kl_mean.high < 0.1
        assert domain.kl_median < domain.kl_p90 < domain.kl_p99
        assert 0.8 < domain.top1_agreement.value < 1
        assert 0 < domain.noise_kl < domain.kl_mean.low
        assert 0 < domain.noise_perplexity_change < 0.01
        assert domain.perplexity == pytest.approx(
            domain.perplexity_baseline * (1 + domain.perplexity_change.value), rel=1e-6
        )
    assert result.by_position[0].start == 0
    assert result.by_position[-1].end == result.window_tokens - 1
    assert all(a.end == b.start for a, b in zip(result.by_position, result.by_position[1:], strict=False))


def test_the_same_measurement_again_gives_the_same_figures(llama_f16: Path, llama_int4: Path) -> None:
    first, second = (measure_text(load(llama_f16), load(llama_int4), windows_of(llama_f16)) for _ in range(2))
    assert first == second


def test_logits_that_are_not_finite_are_counted_and_count_as_knowing_nothing(llama_f16: Path) -> None:
    domains = windows_of(llama_f16)
    result = measure_text(load(llama_f16), Poisoned(load(llama_f16)), domains)
    assert result.overall.num_non_finite == 3 * AMOUNT.windows  # one a window
    assert result.overall.perplexity > result.overall.perplexity_baseline
    assert np.isfinite(result.overall.kl_mean.high)
    with pytest.raises(QualityError, match="baseline computes NaN"):
        measure_text(Poisoned(load(llama_f16)), load(llama_f16), domains)


class Shouting(Poisoned):
    """An executor that is sure of the wrong tokens, far beyond what an exponential can hold."""

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        return StepOutput(logits=-5000 * self.executor.execute(scheduled).logits)


def test_figures_of_an_engine_that_is_beyond_all_bounds_can_be_written(llama_f16: Path) -> None:
    result = measure_text(load(llama_f16), Shouting(load(llama_f16)), windows_of(llama_f16))
    assert result.overall.perplexity > 1e300
    assert TextResult.model_validate_json(result.model_dump_json()) == result


def test_windows_beside_each_other_and_in_pieces_are_those_computed_alone(llama_f16: Path) -> None:
    exact = load(llama_f16, deterministic=True)
    windows = [window for domain in windows_of(llama_f16) for window in domain.windows][:4]
    alone = [window_logits(exact, [window], steps_of(AMOUNT.tokens))[0] for window in windows]
    beside = window_logits(exact, windows, [64, 64, *[1] * 8, 56])
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(a, b)


def test_windows_are_distinct_and_of_one_length(llama_f16: Path) -> None:
    for domain in windows_of(llama_f16):
        assert {len(window) for window in domain.windows} == {AMOUNT.tokens}
        assert len({tuple(window) for window in domain.windows}) == AMOUNT.windows


def test_windows_that_the_calibration_set_holds_are_left_out(llama_f16: Path, tmp_path: Path) -> None:
    everything = TextAmount(windows=4096, tokens=192)
    english = windows_of(llama_f16, everything)[0]
    seen = english.windows[4][50:120]
    save_ngrams(tmp_path / NGRAMS_NAME, [np.array(seen)])
    left = windows_of(llama_f16, everything, load_ngrams(tmp_path))[0]
    assert left.num_overlapping == 1
    assert left.windows == [*english.windows[:4], *english.windows[5:]]
    save_ngrams(tmp_path / NGRAMS_NAME, [np.array(window) for window in english.windows])
    with pytest.raises(QualityError, match="'english'"):
        windows_of(llama_f16, everything, load_ngrams(tmp_path))


def test_equal_runs_have_equal_hashes_wherever_they_stand() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 500)
    hashes = ngram_hashes(ids)
    assert len(hashes) == 488
    assert len(set(hashes.tolist())) == 488
    np.testing.assert_array_equal(ngram_hashes(ids[100:200]), hashes[100:188])
    assert len(ngram_hashes(ids[:5])) == 1
    assert len(ngram_hashes(ids[:0])) == 0


def test_an_engine_without_calibration_has_seen_nothing(tmp_path: Path) -> None:
    assert len(load_ngrams(tmp_path)) == 0


def test_tokens_decoded_beside_each_other_are_those_of_a_whole_text(llama_f16: Path, deepseek_f16: Path) -> None:
    """In fast mode too, up to rounding: grouped-query attention, and latent attention, whose kernel has a fault."""
    for engine in (llama_f16, deepseek_f16):
        fast = load(engine)
        for domain in windows_of(engine):
            alone = [window_logits(fast, [window], steps_of(AMOUNT.tokens))[0] for window in domain.windows]
            beside = window_logits(fast, domain.windows, [100, *[1] * (AMOUNT.tokens - 100)])
            for a, b in zip(alone, beside, strict=True):
                assert kl_divergence(a, b).mean() < 0.002
        window = windows_of(engine)[0].windows[0]
        one_thread = load(engine, num_threads=1)
        whole = window_logits(one_thread, [window], steps_of(len(window)))[0]
        decoded = window_logits(one_thread, [window], [1] * len(window))[0]
        assert kl_divergence(whole, decoded).mean() < 0.002
