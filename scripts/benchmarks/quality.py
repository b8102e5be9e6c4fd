"""Perplexity and KL divergence of quantized decoder linears beside round to nearest, NNCF and llama.cpp.

Scores are kept as they come, so that an interrupted run goes on; a contender's new version is scored again. Standard
errors and intervals are over windows of 256 tokens, and ratios are paired: both contenders saw the same windows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import llama_cpp_quantizer
import nncf_quantizer
import numpy as np
import numpy.typing as npt
import quality_plot
import texts
import torch
from contenders import Contender, checkpoint, round_to_nearest
from quality_model import WINDOW, QualityModel

from harness.build.checkpoint import open_checkpoint
from harness.build.open_source import open_source
from harness.calib.measure import perplexity

CACHE = texts.REPOSITORY / ".cache" / "quality"
CALIBRATION = CACHE / "calibration.jsonl"
_FEW_WINDOWS = 8
MODELS = {
    "tiny Llama": ("tests/models/tiny-llama", 32),
    "tiny DeepSeek-V2": ("tests/models/tiny-deepseek-v2", 32),
    "Qwen2.5-Coder-0.5B, dequantized": (".cache/weights/Qwen2.5-Coder-0.5B-Instruct.gguf", _FEW_WINDOWS),
}
"""Path, and how many windows of each domain are scored."""
REFERENCE = "llama.cpp Q4_K_M"
_CALIBRATION_TEXTS = 54  # of each domain: 128 samples, and some that harness-build holds out for itself
_CALIBRATION_CHARS = {"code": 2000, "english": 2000, "chinese": 800}

Record = dict[str, Any]


def write_calibration(path: Path) -> None:
    """Pieces of training documents, equally many of each domain; held-out text has no overlap with them."""
    lines = []
    for domain, length in _CALIBRATION_CHARS.items():
        long_enough = [d.text for d in texts.split(domain).train if len(d.text) >= length]
        pieces = random.Random(0).sample(long_enough, _CALIBRATION_TEXTS)
        lines += [json.dumps({"text": piece[:length]}, ensure_ascii=False) + "\n" for piece in pieces]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def held_out_texts(domain: str) -> list[str]:
    """Held-out documents in an order that mixes their sources."""
    documents = texts.held_out_documents(domain)
    return random.Random(0).sample(documents, len(documents))


def contenders(checkpoints: Sequence[tuple[str, str]], content_hash: str) -> list[Contender]:
    """All contenders, with those of the given checkpoints `(label, folder)` that are of the model with that hash."""
    opened = [(label, open_checkpoint(Path(folder))) for label, folder in checkpoints]
    return [
        *(round_to_nearest(precision) for precision in ("int4-g128", "int4-g64", "int4-g32", "int8")),
        *nncf_quantizer.contenders(),
        *llama_cpp_quantizer.contenders(),
        *(checkpoint(label, c) for label, c in opened if c.record.model.content_hash == content_hash),
    ]


def record_of(model: QualityModel, contender: Contender, folder: Path) -> Record:
    """The scores of a contender, from the folder where they are there."""
    calibration = b"".join(tokens.tobytes() for tokens in model.calibration)
    content = f"{model.key} {contender.name} {contender.version} {hashlib.sha256(calibration).hexdigest()}"
    path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"
    if path.is_file():
        record: Record = json.loads(path.read_text())
        return record
    start = time.monotonic()
    quantized = contender.quantize(model)
    scores = model.score(quantized.weights)
    record = {
        "contender": contender.name,
        "family": contender.family,
        "version": contender.version,
        "bits_per_weight": quantized.bits_per_weight,
        "note": quantized.note,
        "seconds": time.monotonic() - start,
        "domains": {domain: asdict(score) for domain, score in scores.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return record


def divergences(record: Record) -> npt.NDArray[np.float64]:
    """KL divergence of each window, all domains in a row."""
    return np.concatenate([score["kl_divergence"] for score in record["domains"].values()])


def mean_divergence(record: Record) -> float:
    """Over the domains, each with the same weight."""
    return float(np.mean([np.mean(score["kl_divergence"]) for score in record["domains"].values()]))


def ratio_interval(record: Record, reference: Record) -> tuple[float, float, float]:
    """Ratio of two mean divergences with its 95% bootstrap interval over windows."""
    ours, theirs = divergences(record), divergences(reference)
    picks = np.random.default_rng(0).integers(0, len(ours), (4000, len(ours)))
    low, high = np.quantile(ours[picks].mean(1) / theirs[picks].mean(1), [0.025, 0.975])
    return float(ours.mean() / theirs.mean()), float(low), float(high)


def table(model: Record) -> str:
    """Markdown, a row a contender, by bits."""
    domains = list(model["tokens"])
    rows = [
        f"| | bits | {' | '.join(f'KL {d}' for d in domains)} | of {REFERENCE}'s KL | top-1 "
        f"| perplexity {' / '.join(domains)} |",
        "|---|---|" + "---|" * (len(domains) + 3),
    ]
    reference = next((r for r in model["records"] if r["contender"] == REFERENCE), None)
    for record in sorted(model["records"], key=lambda r: r["bits_per_weight"]):
        scores = record["domains"].values()
        cells = [f"{np.mean(s['kl_divergence']):.5f} ± {_standard_error(s['kl_divergence']):.5f}" for s in scores]
        of_reference = "{:.2f} [{:.2f}, {:.2f}]".format(*ratio_interval(record, reference)) if reference else ""
        top1 = np.mean([s["top1"] for s in scores])
        perplexities = " / ".join(f"{perplexity(np.array(s['loss'])):.2f}" for s in scores)
        rows.append(
            f"| {record['contender']} | {record['bits_per_weight']:.2f} | {' | '.join(cells)} | {of_reference} "
            f"| {top1:.3f} | {perplexities} |"
        )
    return "\n".join(rows)


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def measure(name: str, checkpoints: Sequence[tuple[str, str]], pattern: str) -> Record:
    """The contenders of one model whose name fits, each as it comes on the terminal."""
    path, num_windows = MODELS.get(name, (name, _FEW_WINDOWS))
    model = QualityModel(
        name,
        open_source(path),
        held_out={domain: held_out_texts(domain) for domain in texts.DOMAINS},
        calibration=CALIBRATION,
        num_windows=num_windows,
        cache=CACHE / "logits",
    )
    chosen = [c for c in contenders(checkpoints, model.source.fingerprint()) if fnmatchcase(c.name, pattern)]
    records = []
    for i, contender in enumerate(chosen, 1):
        print(f"{name}, {i} of {len(chosen)}: {contender.name}", flush=True)
        record = record_of(model, contender, CACHE / "scores")
        print(f"  {record['bits_per_weight']:.2f} bits, KL {mean_divergence(record):.5f}, {record['seconds']:.0f} s")
        records.append(record)
    unquantized = model.score({})
    return {
        "model": name,
        "key": model.key,
        "tokens": {domain: windows.size for domain, windows in model.windows.items()},
        "calibration_tokens": sum(map(len, model.calibration)),
        "perplexity": {domain: perplexity(np.array(score.loss)) for domain, score in unquantized.items()},
        "records": records,
    }


def main() -> None:
    """Measure, write JSON and the plot, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(map(repr, MODELS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help=f"{names}, or a path")
    parser.add_argument("--contenders", default="*", metavar="PATTERN", help="shell pattern of names; default: all")
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="[LABEL=]DIR",
        help="a quantized checkpoint of one of the models; may be repeated",
    )
    parser.add_argument("--threads", type=int, help="one is fastest on a machine that others use; default: all cores")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    write_calibration(CALIBRATION)
    print(f"calibration texts, for harness-build --no-system-prompts --calib: {CALIBRATION}")
    checkpoints = [tuple(given.rpartition("=")[::2]) for given in arguments.checkpoint]
    report = {
        "machine": platform.processor() or platform.machine(),
        "window": WINDOW,
        "models": [measure(name, checkpoints, arguments.contenders) for name in arguments.models],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "quality.json").write_text(json.dumps(report, indent=1) + "\n")
    quality_plot.save(report["models"], arguments.out / "quality.svg")
    for model in report["models"]:
        tokens = ", ".join(f"{count} {domain}" for domain, count in model["tokens"].items())
        unquantized = " / ".join(f"{value:.2f}" for value in model["perplexity"].values())
        print(f"\n{model['model']}: {tokens} tokens; perplexity unquantized {unquantized}\n\n{table(model)}")


if __name__ == "__main__":
    main()
