"""What an executor leaves behind in its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from preset_engine import build_preset_engine

# two engines at once, as a quality report has them, then both gone; then a Ctrl-C
TWO_ENGINES = """
import gc, os, signal, sys
from pathlib import Path
from harness.manifest import read_manifest
from harness.runtime.openvino_executor import OpenVinoExecutor

folder = Path(sys.argv[1])
settings = {"deterministic": False, "kv_cache_bytes": 1 << 20, "num_threads": 1}
first, second = (OpenVinoExecutor(folder, read_manifest(folder), **settings) for _ in range(2))
del first
gc.collect()
del second
gc.collect()
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
os.kill(os.getpid(), signal.SIGINT)
print("alive")
"""


def test_signals_arrive_after_two_engines_were_loaded(tiny_llama_path: Path, tmp_path: Path) -> None:
    engine = build_preset_engine(tiny_llama_path, tmp_path / "int8", "int8")
    command = [sys.executable, "-c", TWO_ENGINES, engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\nalive\n"), done.stderr
