"""Logits of text from an engine for a GPU, through the seam that a quality report measures."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import fake_trtllm
import numpy as np
import pytest

from harness.calib.quality.text import Domain, measure_text, window_logits
from harness.errors import EngineError
from harness.manifest import EngineManifest
from harness.runtime.config import ResolvedConfig
from harness.runtime.executor import ScheduledSequence, SchedulerOutput
from harness.runtime.tensorrt_llm.context_logits import ContextLogits
from harness.runtime.tensorrt_llm.load import make_executor

WINDOWS = [[5, 6, 7, 9, 1, 2, 3, 250], [9, 8, 7, 6, 5, 4, 3, 2]]


@pytest.fixture
def api() -> ModuleType:
    return fake_trtllm.make_module()


@pytest.fixture
def executor(
    api: ModuleType, gpu_manifest: Callable[..., EngineManifest], resolve: Callable[..., ResolvedConfig]
) -> ContextLogits:
    manifest = gpu_manifest(context_logits=True)
    config = resolve(manifest, prefix_cache=False)
    assert manifest.gpu is not None
    assert config.gpu is not None
    loaded = make_executor(api, config, manifest.gpu, config.gpu)
    return ContextLogits(api, loaded, vocab_size=fake_trtllm.VOCAB_SIZE, num_blocks=64)


def test_steps_and_neighbours_change_nothing(executor: ContextLogits) -> None:
    whole = [window_logits(executor, [window], [8])[0] for window in WINDOWS]
    beside = window_logits(executor, WINDOWS, [4, 2, 1, 1])
    for window, alone, together in zip(WINDOWS, whole, beside, strict=True):
        assert alone.shape == (8, fake_trtllm.VOCAB_SIZE)  # without the padding
        assert alone.dtype == np.float32
        assert alone.argmax(axis=1).tolist() == [(token + 1) % fake_trtllm.VOCAB_SIZE for token in window]
        np.testing.assert_array_equal(alone, together)


def test_a_report_measures_text_with_it(executor: ContextLogits) -> None:
    domains = [Domain(name="numbers", windows=[list(range(100)), list(range(50, 150))], num_overlapping=0)]
    text = measure_text(executor, executor, domains)
    assert text.overall.kl_mean.value == text.overall.noise_kl == 0
    assert text.overall.num_tokens == 2 * 99
    assert 1 < text.overall.perplexity < 5


def test_tokens_that_were_never_computed_are_refused(executor: ContextLogits) -> None:
    later = ScheduledSequence(
        request_id="a", token_ids=[1], num_computed_tokens=4, block_table=[0], logit_positions=[0]
    )
    with pytest.raises(EngineError, match="goes on from 4 tokens"):
        executor.execute(SchedulerOutput(sequences=[later]))


@pytest.mark.parametrize("last", [fake_trtllm.POISON, fake_trtllm.REFUSED])
def test_a_failing_executor_is_told(last: int, executor: ContextLogits) -> None:
    with pytest.raises(EngineError, match="TensorRT-LLM's executor failed"):
        window_logits(executor, [[1, 2, last]], [3])


def test_an_engine_without_logits_says_how_to_build_one(
    executor: ContextLogits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(token_ids: list[int]) -> Any:
        return None

    monkeypatch.setattr(fake_trtllm, "context_logits", none)
    with pytest.raises(EngineError, match="no logits of prompts") as refused:
        window_logits(executor, [[1, 2]], [2])
    assert "--context-logits" in refused.value.hint
