"""What each part of fast mode costs in accuracy: logits under its settings, one by one, beside deterministic mode.

Text: Python's own heapq module, in stretches of 256 tokens. KL divergence is from deterministic mode, in nats a token.
"""

from __future__ import annotations

import argparse
import heapq
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.calib.measure import kl_divergence, negative_log_likelihood, perplexity
from harness.machine import num_usable_cores
from harness.manifest import EngineManifest, read_manifest
from harness.runtime.executor import TOKENS_PER_BLOCK, ScheduledSequence, SchedulerOutput
from harness.runtime.openvino_executor import OpenVinoExecutor
from harness.tokenizer import Tokenizer

Logits = npt.NDArray[np.float32]
STRETCH = 256
_F32, _NO_DQ = {"INFERENCE_PRECISION_HINT": "f32"}, {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
_F32_KV = {"KV_CACHE_PRECISION": "f32"}
VARIANTS: dict[str, dict[str, str]] = {
    "8-bit KV alone": _F32 | _NO_DQ,
    "quantized activations alone, groups of 128": _F32 | _F32_KV | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"},
    "quantized activations alone, groups of 32": _F32 | _F32_KV | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "32"},
    "native precision, 8-bit KV": _NO_DQ,
    "fast mode": {},
}


def compute_logits(executor: OpenVinoExecutor, tokens: list[int], chunk: int = STRETCH) -> Logits:
    """Logits `(tokens, vocab)`, each stretch computed on its own in chunks."""
    rows = []
    for start in range(0, len(tokens), STRETCH):
        for begin in range(0, STRETCH, chunk):
            end = min(begin + chunk, STRETCH)
            part = ScheduledSequence(
                request_id="text",
                token_ids=tokens[start + begin : start + end],
                num_computed_tokens=begin,
                block_table=list(range(-(-end // TOKENS_PER_BLOCK))),
                logit_positions=list(range(end - begin)),
            )
            rows.append(executor.execute(SchedulerOutput(sequences=[part])).logits.copy())
    return np.concatenate(rows)


def compare(reference: Logits, seen: Logits, tokens: list[int]) -> dict[str, float]:
    """KL divergence, agreement of the likeliest token, perplexity and its change."""
    divergence = kl_divergence(reference, seen)
    targets = np.array(tokens[1:])
    predicted = np.arange(1, len(tokens)) % STRETCH > 0  # the first token of a stretch has none before it
    after = perplexity(negative_log_likelihood(seen[:-1], targets)[predicted])
    before = perplexity(negative_log_likelihood(reference[:-1], targets)[predicted])
    return {
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "top1": float((reference.argmax(axis=1) == seen.argmax(axis=1)).mean()),
        "perplexity": after,
        "perplexity_change": after / before - 1,
    }


def measure(engine_dir: Path, num_stretches: int) -> dict[str, Any]:
    """All variants of one engine."""
    manifest = read_manifest(engine_dir)
    tokens = Tokenizer.from_dir(engine_dir).encode(Path(heapq.__file__).read_text())[: num_stretches * STRETCH]

    def executor(changes: dict[str, str], *, deterministic: bool = False) -> OpenVinoExecutor:
        settings = {**manifest.compile_settings, "fast": {**manifest.compile_settings["fast"], **changes}}
        changed: EngineManifest = manifest.model_copy(update={"compile_settings": settings})
        return OpenVinoExecutor(
            engine_dir,
            changed,
            deterministic=deterministic,
            kv_cache_bytes=256 << 20,
            num_threads=num_usable_cores(),
        )

    exact = compute_logits(executor({}, deterministic=True), tokens)
    results = {name: compare(exact, compute_logits(executor(c), tokens), tokens) for name, c in VARIANTS.items()}
    fast = executor({})
    whole = compute_logits(fast, tokens)
    results["fast mode, whole blocks beside whole"] = compare(whole, compute_logits(fast, tokens, 32), tokens)
    results["fast mode, token by token beside whole"] = compare(whole, compute_logits(fast, tokens, 1), tokens)
    return {"engine": manifest.model.name, "recipe": manifest.recipe.name, "tokens": len(tokens), "variants": results}


def main() -> None:
    """Measure the engines named, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path, nargs="+", help="engine folders")
    parser.add_argument("--stretches", type=int, default=8, help="stretches of 256 tokens")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    reports = [measure(engine, arguments.stretches) for engine in arguments.engines]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "modes.json").write_text(json.dumps(reports, indent=1) + "\n")
    for report in reports:
        print(f"\n{report['engine']}, {report['recipe']}, {report['tokens']} tokens\n")
        print("| | mean KL | P99 KL | top-1 | perplexity |\n|---|---|---|---|---|")
        for name, r in report["variants"].items():
            print(
                f"| {name} | {r['kl_mean']:.5f} | {r['kl_p99']:.4f} | {r['top1']:.3f} | "
                f"{r['perplexity']:.2f} ({r['perplexity_change']:+.2%}) |"
            )


if __name__ == "__main__":
    main()
