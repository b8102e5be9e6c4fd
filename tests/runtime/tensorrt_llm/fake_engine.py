"""An engine process over the stand-in for TensorRT-LLM, on a GPU that is not there.

Run as `fake_engine.py ADDRESS LOG_LEVEL`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import fake_gpus
import fake_trtllm

from harness.runtime import engine_process
from harness.runtime.tensorrt_llm import load

if __name__ == "__main__":
    fake_trtllm.install(fake_trtllm.make_module(step_seconds=0.01))
    load.devices = lambda: [fake_gpus.device()]
    load.installed_version = fake_gpus.INSTALLED.get
    engine_process.main()
