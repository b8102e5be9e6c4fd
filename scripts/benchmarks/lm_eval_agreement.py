"""lm-evaluation-harness through `harness-run server`, beside the same likelihoods from the engine's own logits.

Two local tasks over the committed held-out text: perplexity of its documents, in windows, and which of four
continuations is a document's own. The oracle shares the model's arithmetic with the server and nothing else: layer 1 of
the quality report computes whole windows through the `Executor`; there is no scheduler, no HTTP and no lm-eval in it.
Exits with 1 if deterministic mode disagrees.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import yaml
from texts import DOMAINS, committed_documents

from harness.calib.measure import negative_log_likelihood, perplexity
from harness.calib.quality.text import steps_of, window_logits
from harness.machine import num_usable_cores
from harness.manifest import read_manifest
from harness.runtime.openvino_executor import OpenVinoExecutor
from harness.runtime.scheduler import MAX_PROMPT_LOGITS
from harness.tokenizer import Tokenizer

CONTEXT = 512  # tokens of a window with its prefix, and of the one that lm-eval has generated after it
TOLERANCE = 1e-4  # of a perplexity, and in nats of a choice
_CHARS = 3000  # of a document; more than fits one window
_PASSAGE, _CONTINUATION, _CHOICES = 200, 60, 4  # characters of a multiple choice, and how many there are
_COMMON = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
TASKS: dict[str, dict[str, Any]] = {
    "held_out_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "own_continuation": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
}
Losses = npt.NDArray[np.float64]
Record = dict[str, Any]


def write_tasks(folder: Path, num_documents: int) -> None:
    """The tasks as lm-eval reads them: a YAML and a JSON lines file each."""
    rng = random.Random(0)
    documents = [text[:_CHARS] for domain in DOMAINS for text in committed_documents(domain)[:num_documents]]
    passages = [text for text in documents if len(text) >= _PASSAGE + _CONTINUATION]
    questions = []
    for number, text in enumerate(passages):
        others = rng.sample([other for other in passages if other is not text], _CHOICES - 1)
        answer = number % _CHOICES
        sources = [*others[:answer], text, *others[answer:]]
        choices = [source[_PASSAGE : _PASSAGE + _CONTINUATION] for source in sources]
        questions.append({"context": text[:_PASSAGE], "choices": choices, "answer": answer})
    for name, items in (
        ("held_out_perplexity", [{"text": text} for text in documents]),
        ("own_continuation", questions),
    ):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items))
        task = {"task": name, **_COMMON, "dataset_kwargs": {"data_files": {"test": str(data)}}, **TASKS[name]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


@contextmanager
def serving(engine_dir: Path, log: Path, *options: str) -> Iterator[str]:
    """A server of the engine that is ready; its address."""
    command = [sys.executable, "-c", "from harness.runtime.cli import main; main()", "server", "--port", "0"]
    command += ["--engine", str(engine_dir), "--served-model-name", "engine", "--kv-cache-memory", "256MiB", *options]
    command += ["--max-model-len", str(CONTEXT)]
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            url = ""
            while not url or httpx.get(f"{url}/ready").status_code != 200:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended: {log.read_text()}")
                time.sleep(0.1)
                url = "".join(re.findall(r"^(http://\S+) serves", log.read_text(), re.MULTILINE))
            yield url
        finally:
            process.send_signal(signal.SIGTERM)


def run_lm_eval(url: str, folder: Path, tokenizer: Tokenizer) -> dict[str, list[Record]]:
    """Samples of each task, in the order of its items, as lm-eval logs them."""
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_ids[0]
    arguments = {
        "model": "engine",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(folder / "tokenizer"),
        "custom_prefix_token_id": prefix,
        "max_length": CONTEXT,
        "num_concurrent": 4,
        "max_retries": 1,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", *TASKS, "--include_path", str(folder), "--batch_size", "3"]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, check=True, env={**os.environ, **offline}, stdout=subprocess.DEVNULL)
    samples = {}
    for name in TASKS:
        (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        samples[name] = sorted(lines, key=lambda line: int(line["doc_id"]))
        path.unlink()
    return samples


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The engine's tokenizer as transformers loads it."""
    folder.mkdir()
    tokenizer.save(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


class Oracle:
    """Losses of tokens from logits of whole windows."""

    def __init__(self, engine_dir: Path, tokenizer: Tokenizer, *, deterministic: bool) -> None:
        self._tokenizer = tokenizer
        self._executor = OpenVinoExecutor(
            engine_dir,
            read_manifest(engine_dir),
            deterministic=deterministic,
            kv_cache_bytes=256 << 20,
            num_threads=num_usable_cores(),
        )
        is_bos = tokenizer.bos_token_id is not None
        self._prefix = tokenizer.bos_token_id if is_bos else tokenizer.eos_token_ids[0]

    def document(self, text: str) -> Losses:
        """Of every token, each window as long as the context allows; the last one reaches back to be as long."""
        tokens = [self._prefix, *self._encode(text)]
        length = CONTEXT - 2
        losses = []
        for start in range(0, len(tokens) - 1, length):
            end = min(start + length, len(tokens) - 1)
            losses.append(self._losses(tokens[max(end - length, 0) : end + 1])[start - end :])
        return np.concatenate(losses)

    def choice(self, context: str, continuation: str) -> float:
        """Log-likelihood of a continuation, cut into tokens as lm-eval does it.

        Space before a continuation is part of it. It has the tokens of the whole that go beyond the context's, even
        where the context by itself ends in other tokens.
        """
        whole, given = self._encode(context + continuation), self._encode(context.rstrip())
        return -float(self._losses([*given, *whole[len(given) :]])[len(given) - 1 :].sum())

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _losses(self, tokens: Sequence[int]) -> Losses:
        (logits,) = window_logits(self._executor, [list(tokens)], steps_of(len(tokens), MAX_PROMPT_LOGITS))
        return negative_log_likelihood(logits[:-1], np.array(tokens[1:]))


def compare(samples: dict[str, list[Record]], oracle: Oracle) -> Record:
    """Both sides' figures over all items."""
    texts, questions = (samples[name] for name in TASKS)
    losses = [oracle.document(sample["doc"]["text"]) for sample in texts]
    told = [-float(sample["resps"][0][0]) for sample in texts]
    ours, theirs, right = [], [], []
    for sample in questions:
        doc = sample["doc"]
        ours.append([oracle.choice(doc["context"], choice) for choice in doc["choices"]])
        theirs.append([float(answer[0][0]) for answer in sample["resps"]])
        right.append(int(doc["answer"]) == int(np.argmax(ours[-1])))
    num_tokens = sum(map(len, losses))
    return {
        "documents": len(texts),
        "tokens": num_tokens,
        "perplexity_lm_eval": float(np.exp(sum(told) / num_tokens)),
        "perplexity": perplexity(np.concatenate(losses)),
        "largest_document_difference": max(abs(a - b.sum()) / len(b) for a, b in zip(told, losses, strict=True)),
        "questions": len(questions),
        "accuracy_lm_eval": float(np.mean([sample["acc"] for sample in questions])),
        "accuracy": float(np.mean(right)),
        "largest_choice_difference": float(np.abs(np.array(ours) - np.array(theirs)).max()),
    }


def agrees(record: Record) -> bool:
    """Whether both sides gave the same figures, but for rounding."""
    return bool(
        abs(record["perplexity_lm_eval"] / record["perplexity"] - 1) < TOLERANCE
        and record["largest_document_difference"] < TOLERANCE
        and record["largest_choice_difference"] < TOLERANCE
        and record["accuracy_lm_eval"] == record["accuracy"]
    )


def main() -> None:
    """Measure both modes, write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, metavar="ENGINE")
    parser.add_argument("--documents", type=int, default=10, metavar="N", help="of each domain; default: 10")
    parser.add_argument("--modes", nargs="+", default=["deterministic", "fast"], choices=["deterministic", "fast"])
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_dir(arguments.engine)
    report = {}
    print("| mode | tokens | perplexity lm-eval / ours | choices | accuracy lm-eval / ours | most nats apart |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, arguments.documents)
        write_tokenizer(tokenizer, folder / "tokenizer")
        for mode in arguments.modes:
            options = ["--deterministic"] if mode == "deterministic" else []
            with serving(arguments.engine, folder / "server.log", *options) as url:
                samples = run_lm_eval(url, folder, tokenizer)
            oracle = Oracle(arguments.engine, tokenizer, deterministic=mode == "deterministic")
            report[mode] = r = compare(samples, oracle)
            print(
                f"| {mode} | {r['tokens']} | {r['perplexity_lm_eval']:.5f} / {r['perplexity']:.5f} | {r['questions']} "
                f"| {r['accuracy_lm_eval']:.3f} / {r['accuracy']:.3f} | {r['largest_choice_difference']:.1e} |"
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "lm-eval.json").write_text(json.dumps(report, indent=1) + "\n")
    if "deterministic" in report and not agrees(report["deterministic"]):
        raise SystemExit("deterministic mode disagrees")


if __name__ == "__main__":
    main()
