"""The engine beside OpenVINO GenAI, and the server beside the bare engine, on one machine in one run.

Random weights in the shape of DeepSeek-R1-Distill-Qwen-1.5B: speed depends on shapes. GenAI runs the same model.xml,
compile properties, token budget and KV memory. Contenders take turns within a round and swap the order from one round
to the next; figures are medians over rounds, ratios are medians of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openvino as ov
import psutil
from random_source import R1_DISTILL_QWEN_1_5B, RandomSource

from harness.build.cpu_engine import build_cpu_engine
from harness.machine import num_usable_cores
from harness.manifest import EngineManifest, read_manifest
from harness.recipe import preset
from harness.runtime.engine_core import EngineCore
from harness.runtime.openvino_executor import OpenVinoExecutor
from harness.runtime.request import Request, SamplingParams
from harness.runtime.scheduler import SchedulerConfig

TOKEN_BUDGET = 512
KV_GIB = 1
PROMPT, ANSWER = 32, 64  # tokens of the streams
Measure = Callable[[], float]


def token_ids(rng: np.random.Generator, count: int) -> list[int]:
    """A prompt that shares no prefix with another."""
    return [int(t) for t in rng.integers(1000, 100000, count)]


class Harness:
    """Our scheduler and executor in this process."""

    def __init__(self, engine_dir: Path, manifest: EngineManifest, num_threads: int, *, deterministic: bool) -> None:
        executor = OpenVinoExecutor(
            engine_dir,
            manifest,
            deterministic=deterministic,
            kv_cache_bytes=KV_GIB << 30,
            num_threads=num_threads,
        )
        config = SchedulerConfig(max_model_len=4096, max_num_batched_tokens=TOKEN_BUDGET)
        self._core = EngineCore(executor, config)
        self._count = 0

    def run(self, prompts: list[list[int]], num_tokens: int) -> None:
        for prompt in prompts:
            self._count += 1
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            self._core.add_request(Request(request_id=str(self._count), prompt_token_ids=prompt, sampling=sampling))
        while self._core.has_work:
            self._core.step()


class GenAi:
    """OpenVINO GenAI's continuous batching on the same files."""

    def __init__(self, engine_dir: Path, manifest: EngineManifest, num_threads: int, work_dir: Path) -> None:
        import openvino_genai

        self._library = openvino_genai
        _genai_folder(engine_dir, work_dir)
        config = openvino_genai.SchedulerConfig()
        config.cache_size = KV_GIB
        config.max_num_batched_tokens = TOKEN_BUDGET
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = True
        properties = {
            **manifest.compile_settings["fast"],
            "INFERENCE_NUM_THREADS": num_threads,
            "ENABLE_CPU_PINNING": True,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(work_dir), config, "CPU", properties)
        self._count = 0

    def run(self, prompts: list[list[int]], num_tokens: int) -> None:
        handles = []  # a request whose handle is dropped is cancelled
        for prompt in prompts:
            self._count += 1
            config = self._library.GenerationConfig()
            config.max_new_tokens = num_tokens
            config.ignore_eos = True
            config.do_sample = False
            tokens = ov.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._count, tokens, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        for handle in handles:
            [output] = handle.read_all()
            if len(output.generated_ids) != num_tokens:
                raise SystemExit(f"GenAI gave {len(output.generated_ids)} tokens instead of {num_tokens}")


def _genai_folder(engine_dir: Path, work_dir: Path) -> None:
    """The folder that GenAI wants: its file names, and a tokenizer as a graph."""
    from openvino_tokenizers import convert_tokenizer
    from transformers import PreTrainedTokenizerFast

    work_dir.mkdir(parents=True, exist_ok=True)
    for suffix in ("xml", "bin"):
        link = work_dir / f"openvino_model.{suffix}"
        link.unlink(missing_ok=True)
        link.symlink_to((engine_dir / f"model.{suffix}").resolve())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(engine_dir / "tokenizer.json"), eos_token="<｜end▁of▁sentence｜>"
    )
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(encoder, work_dir / "openvino_tokenizer.xml")
    ov.save_model(decoder, work_dir / "openvino_detokenizer.xml")


class Server:
    """`harness-run server` in a process of its own, asked over HTTP with streaming."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    def run(self, prompts: list[list[int]], num_tokens: int) -> None:
        asyncio.run(self._run(prompts, num_tokens))

    async def _run(self, prompts: list[list[int]], num_tokens: int) -> None:
        limits = httpx.Limits(max_connections=len(prompts))
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            await asyncio.gather(*(self._stream(client, prompt, num_tokens) for prompt in prompts))

    async def _stream(self, client: httpx.AsyncClient, prompt: list[int], num_tokens: int) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        last = b""
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            async for part in response.aiter_bytes():
                last = (last + part)[-600:]
        if f'"completion_tokens":{num_tokens}'.encode() not in last:
            raise SystemExit(f"the server's stream did not end with {num_tokens} tokens: {last!r}")


@contextlib.contextmanager
def running_server(engine_dir: Path, num_threads: int) -> Iterator[Server]:
    """Start the server, wait until it is ready, and stop it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(Path(sys.executable).parent / "harness-run"), "server", "--engine", str(engine_dir)),
        *("--port", str(port), "--max-model-len", "4096", "--max-num-batched-tokens", str(TOKEN_BUDGET)),
        *("--kv-cache-memory", f"{KV_GIB}GiB", "--threads", str(num_threads), "--served-model-name", "bench"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit("the server ended before it was ready")
            time.sleep(0.2)
        yield Server(url, "bench")
    finally:
        process.terminate()
        process.wait(timeout=60)


def measures(contender: Any, rng: np.random.Generator) -> dict[str, Measure]:
    """What is measured, by line of the table. Tokens a second; for the cached line prompts a second."""

    def timed(prompts: list[list[int]], num_tokens: int) -> float:
        start = time.perf_counter()
        contender.run(prompts, num_tokens)
        return time.perf_counter() - start

    def streams(count: int) -> float:
        return count * ANSWER / timed([token_ids(rng, PROMPT) for _ in range(count)], ANSWER)

    def cached() -> float:
        prefix = token_ids(rng, 1024)
        contender.run([prefix], 1)
        return 1 / timed([prefix + token_ids(rng, 16)], 1)

    return {
        "decode, 1 stream (tokens/s)": lambda: streams(1),
        "prefill 1024 (tokens/s)": lambda: 1024 / timed([token_ids(rng, 1024)], 1),
        "8 streams (tokens/s)": lambda: streams(8),
        "16 streams (tokens/s)": lambda: streams(16),
        "1024 cached + 16 new (prompts/s)": cached,
    }


def compare(ours: dict[str, Measure], theirs: dict[str, Measure], rounds: int) -> dict[str, dict[str, Any]]:
    """Interleaved rounds after one for warming up."""
    samples: dict[str, list[tuple[float, float]]] = {line: [] for line in theirs}
    for number in range(rounds + 1):
        for line in theirs:
            if number % 2:
                first, second = ours[line](), theirs[line]()
            else:
                second, first = theirs[line](), ours[line]()
            if number:
                samples[line].append((first, second))
                print(f"round {number} {line}: {first:.2f} / {second:.2f}", file=sys.stderr, flush=True)
    return {line: _summary(pairs) for line, pairs in samples.items()}


def _summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    ratios = [a / b for a, b in pairs]
    return {
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "samples": pairs,
    }


def table(results: dict[str, dict[str, Any]], ours: str, theirs: str) -> str:
    """A Markdown table of medians and ratios with their spread."""
    rows = [f"| | {ours} | {theirs} | ratio (min - max of rounds) |", "|---|---|---|---|"]
    rows += [
        f"| {line} | {r['ours']:.1f} | {r['theirs']:.1f} | **{r['ratio']:.3f}** "
        f"({r['ratio_min']:.2f} - {r['ratio_max']:.2f}) |"
        for line, r in results.items()
    ]
    return "\n".join(rows)


def main() -> None:
    """Build, measure, write JSON and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (one more warms up)")
    parser.add_argument("--precision", default="int4", choices=["int8", "int4"])
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for engine.json and engine.md")
    arguments = parser.parse_args()
    work = Path(".cache/bench")
    source = RandomSource(
        "R1-Distill-Qwen-1.5B-shape", R1_DISTILL_QWEN_1_5B, Path(".cache/weights/deepseek-tokenizer.json")
    )
    recipe = preset(arguments.precision, source.spec)
    print("building the engine", file=sys.stderr)
    engine_dir = build_cpu_engine(source, recipe, engines_dir=work).engine_dir
    manifest = read_manifest(engine_dir)
    num_threads = num_usable_cores()
    rng = np.random.default_rng(0)
    harness = Harness(engine_dir, manifest, num_threads, deterministic=False)
    genai = GenAi(engine_dir, manifest, num_threads, work / "genai")
    beside_genai = compare(measures(harness, rng), measures(genai, rng), arguments.rounds)
    del genai
    line = "16 streams (tokens/s)"
    with running_server(engine_dir, num_threads) as server:
        beside_core = compare(
            {line: measures(server, rng)[line]}, {line: measures(harness, rng)[line]}, arguments.rounds
        )
    exact = Harness(engine_dir, manifest, num_threads, deterministic=True)
    exact_lines = {k: v for k, v in measures(exact, rng).items() if not k.startswith("1024")}
    fast_lines = {k: v for k, v in measures(harness, rng).items() if not k.startswith("1024")}
    beside_fast = compare(exact_lines, fast_lines, max(1, arguments.rounds // 2))
    report = {
        "machine": _machine(num_threads),
        "model": {"shape": source.name, "precision": arguments.precision, "engine_id": manifest.engine_id},
        "settings": {"token_budget": TOKEN_BUDGET, "kv_gib": KV_GIB, "compile": manifest.compile_settings},
        "rounds": arguments.rounds,
        "engine_beside_genai": beside_genai,
        "server_beside_engine": beside_core,
        "deterministic_beside_fast": beside_fast,
    }
    text = "\n\n".join(
        [
            table(beside_genai, "harness", "OpenVINO GenAI"),
            table(beside_core, "harness-run server", "bare engine"),
            table(beside_fast, "deterministic", "fast"),
        ]
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "engine.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "engine.md").write_text(text + "\n")
    print(text)


def _machine(num_threads: int) -> dict[str, Any]:
    import openvino_genai

    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": num_threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "openvino": ov.get_version(),
        "openvino_genai": openvino_genai.__version__,
        "load_before": os.getloadavg()[0],
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
