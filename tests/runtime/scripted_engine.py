"""An engine process without a model, for tests of what is around it: every token is followed by the next number.

Run as `scripted_engine.py BEHAVIOUR ADDRESS LOG_LEVEL`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from harness.errors import CapacityError
from harness.runtime.config import ResolvedConfig
from harness.runtime.engine_core import EngineCore, warm_up
from harness.runtime.engine_process import run
from harness.runtime.executor import SchedulerOutput, StepOutput

VOCAB_SIZE = 1000
STEP_SECONDS = 0.01


class Counting:
    """An executor whose likeliest next token is one more than the last."""

    num_blocks = 64
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        self.num_steps += 1
        time.sleep(STEP_SECONDS)
        lasts = [s.token_ids[p] for s in scheduled.sequences for p in s.logit_positions]
        if VOCAB_SIZE - 1 in lasts:
            raise RuntimeError("the last token is this executor's poison")
        logits = np.zeros((len(lasts), VOCAB_SIZE), np.float32)
        logits[np.arange(len(lasts)), np.array(lasts, np.int64) + 1] = 50.0
        return StepOutput(logits=logits)


def load(config: ResolvedConfig) -> EngineCore:
    behaviour = sys.argv[1]
    if behaviour == "fails":
        raise CapacityError("no room for it", "buy memory")
    if behaviour == "crashes":
        os._exit(3)
    if behaviour == "hangs":
        time.sleep(600)
    if behaviour.startswith("second-fails="):
        tally = Path(behaviour.partition("=")[2])
        tally.write_text(tally.read_text() + "|" if tally.exists() else "|")
        if tally.read_text() == "||":
            raise CapacityError("no room this time")
    executor = Counting()
    warm_up(executor)
    assert executor.num_steps == 2
    return EngineCore(executor, config.scheduler, [])


if __name__ == "__main__":
    run(load, sys.argv[2])
