"""Time and memory of a build: random weights in the shapes of real models, each in a process of its own.

Anonymous memory is what the process holds beside mapped files; the peak is sampled every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from random_source import R1_DISTILL_QWEN_1_5B, R1_DISTILL_QWEN_7B, RandomSource

from harness.build.cpu_engine import build_cpu_engine
from harness.recipe import preset

SHAPES: dict[str, dict[str, Any]] = {"1.5B": R1_DISTILL_QWEN_1_5B, "7B": R1_DISTILL_QWEN_7B}


class AnonymousPeak(threading.Thread):
    """Samples this process's anonymous memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_bytes = 0

    def run(self) -> None:
        process = psutil.Process()
        while True:
            memory = process.memory_info()
            self.num_bytes = max(self.num_bytes, memory.rss - memory.shared)
            time.sleep(0.02)


def measure(name: str, precision: str, work: Path) -> dict[str, Any]:
    """Build one shape."""
    peak = AnonymousPeak()
    peak.start()
    source = RandomSource(f"{name}-shape", SHAPES[name], Path(".cache/weights/deepseek-tokenizer.json"))
    start = time.perf_counter()
    engine_dir = build_cpu_engine(source, preset(precision, source.spec), engines_dir=work).engine_dir
    return {
        "shape": name,
        "precision": precision,
        "seconds": time.perf_counter() - start,
        "anonymous_gib": peak.num_bytes / 2**30,
        "engine_gib": (engine_dir / "model.bin").stat().st_size / 2**30,
    }


def main() -> None:
    """Measure the shapes, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    results = []
    for name in SHAPES:
        work = Path(".cache/bench-build")
        shutil.rmtree(work, ignore_errors=True)
        with get_context("spawn").Pool(1) as pool:
            results.append(pool.apply(measure, (name, "int4", work)))
        shutil.rmtree(work)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "build.json").write_text(json.dumps(results, indent=1) + "\n")
    print("| shape | precision | seconds | peak anonymous memory | model.bin |\n|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['shape']} | {r['precision']} | {r['seconds']:.0f} | {r['anonymous_gib']:.2f} GiB | "
            f"{r['engine_gib']:.2f} GiB |"
        )


if __name__ == "__main__":
    main()
