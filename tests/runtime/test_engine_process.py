"""What an engine process refuses to load, and its warm-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.errors import EngineError
from harness.runtime.engine_core import warm_up
from harness.runtime.executor import SchedulerOutput, StepOutput
from harness.runtime.openvino_engine import check_runnable


def test_an_engine_for_another_arch_says_both(make_manifest: Any) -> None:
    with pytest.raises(EngineError, match=r"built for sm_90.*runs cpu") as caught:
        check_runnable(make_manifest(arch="sm_90"), "1.0")
    assert "--arch cpu" in caught.value.hint


def test_an_engine_of_another_release_says_both(make_manifest: Any) -> None:
    check_runnable(make_manifest(openvino="1.0"), "1.0")
    with pytest.raises(EngineError, match=r"openvino 1\.0, installed is 2\.0"):
        check_runnable(make_manifest(openvino="1.0"), "2.0")


@pytest.mark.parametrize("num_blocks", [1, 2, 100])
def test_warm_up_stays_within_the_blocks_there_are(num_blocks: int) -> None:
    steps: list[tuple[int, int]] = []

    class Recorder:
        vocab_size = 4

        def __init__(self) -> None:
            self.num_blocks = num_blocks

        def execute(self, scheduled: SchedulerOutput) -> StepOutput:
            (sequence,) = scheduled.sequences
            end = sequence.num_computed_tokens + len(sequence.token_ids)
            assert len(sequence.block_table) * 32 >= end
            assert max(sequence.block_table) < num_blocks
            steps.append((sequence.num_computed_tokens, len(sequence.token_ids)))
            return StepOutput(logits=np.zeros((1, 4), np.float32))

    warm_up(Recorder())
    assert steps == [(0, 32), (32, 1)][: min(2, num_blocks)]
