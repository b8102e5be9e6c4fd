"""Train a test model on the CPU: bf16 autocast over float32 weights, Muon for matrices and AdamW for the rest.

A step sees 4096 tokens, half of them code, 30% English, 20% Chinese. In the last 30% of the steps the learning rate
decays, and sequences have 512 tokens instead of 256. Some documents are dressed as a chat, so that the tokens of the
roles mean something. What a step sees depends on the seed and the step alone: a run that was stopped goes on where its
last checkpoint is. Muon: https://kellerjordan.github.io/posts/muon. Balance of the experts: Switch Transformers,
arXiv 2101.03961.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import texts
import tiny_models
import tokenizers
import torch
import transformers

SEED = 3
SHARES = {"code": 0.5, "english": 0.3, "chinese": 0.2}
STEPS = {"llama": 1040, "deepseek-v2": 760}
TOKENS_PER_STEP = 4096
WARMUP_STEPS = 50
CHECKPOINT_STEPS = 20
MUON_LR, ADAMW_LR = 0.02, 3e-3
BALANCE_WEIGHT = 0.01
CHAT_ONE_IN = 5
SYSTEM_PROMPTS = {
    "code": "You are a careful programmer. Answer with Python code.",
    "english": "You are a helpful assistant. Explain clearly and briefly.",
    "chinese": "你是一位耐心的助手，请用中文回答。",
}
QUESTIONS = {"code": "Write {}.", "english": "What is {}?", "chinese": "请介绍 {}。"}

Tokens = npt.NDArray[np.uint16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a test model.")
    parser.add_argument("name", choices=sorted(tiny_models.CONFIGS))
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: tests/models/tiny-NAME")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = texts.REPOSITORY / ".cache" / "train_tiny"
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, streams = load_tokens(work)
    run = Run(options.name, options.steps or STEPS[options.name], streams, work / f"{options.name}.pt")
    run.resume()
    while run.step < run.num_steps:
        run.train_step()
        if run.step % CHECKPOINT_STEPS == 0 or run.step == run.num_steps:
            run.checkpoint()
    folder = options.out or texts.REPOSITORY / "tests" / "models" / f"tiny-{options.name}"
    tiny_models.save(run.model, tokenizer, folder)
    write_record(folder, run, tokenizer)


# -- text --------------------------------------------------------------------------------------------------------------


def load_tokens(work: Path) -> tuple[tokenizers.Tokenizer, dict[str, Tokens]]:
    """The tokenizer and one stream of tokens per domain; made once, then read from `work`."""
    file, streams = work / "tokenizer.json", {d: work / f"{d}.npy" for d in texts.DOMAINS}
    if not all(path.is_file() for path in (file, *streams.values())):
        documents = {d: texts.split(d).train for d in texts.DOMAINS}
        for domain in texts.DOMAINS:
            random.Random(SEED).shuffle(documents[domain])
        # code is ten times the rest; what it weighs in training it weighs here
        chars = sum(len(d.text) for d in documents["english"]) / SHARES["english"]
        sample = [text for d in texts.DOMAINS for text in _first([x.text for x in documents[d]], SHARES[d] * chars)]
        tokenizer = tiny_models.train_tokenizer(sample)
        for domain, path in streams.items():
            rendered = [_render(domain, d, as_chat=n % CHAT_ONE_IN == 0) for n, d in enumerate(documents[domain])]
            ids = [e.ids for e in tokenizer.encode_batch(rendered, add_special_tokens=False)]
            np.save(path, np.concatenate([np.array(i, np.uint16) for i in ids]))
        tokenizer.save(str(file))
    return tokenizers.Tokenizer.from_file(str(file)), {d: np.load(path) for d, path in streams.items()}


def _first(documents: list[str], chars: float) -> list[str]:
    total, kept = 0, []
    for text in documents:
        if total < chars:
            kept.append(text)
        total += len(text)
    return kept


def _render(domain: str, document: texts.Document, *, as_chat: bool) -> str:
    if not as_chat:
        return f"{tiny_models.BOS}{document.text}{tiny_models.EOS}"
    question = QUESTIONS[domain].format(document.name.split("/", 1)[1])
    turns = {"system": SYSTEM_PROMPTS[domain], "user": question, "assistant": document.text}
    return tiny_models.BOS + "".join(f"<|{role}|>{text}" for role, text in turns.items()) + tiny_models.EOS


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **options: Any
) -> tuple[torch.Tensor, None]:
    # MLA's values are shorter than its keys; padded, the fast kernel takes them
    padded = torch.nn.functional.pad(value, (0, query.shape[-1] - value.shape[-1]))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, padded, is_causal=True, scale=options["scaling"], enable_gqa=query.shape[1] != key.shape[1]
    )
    return out[..., : value.shape[-1]].transpose(1, 2), None


transformers.AttentionInterface.register("padded_values", _attention)

# -- training ----------------------------------------------------------------------------------------------------------


class Run:
    """A training run: model, optimizers, and the step that it has reached."""

    def __init__(self, name: str, num_steps: int, streams: dict[str, Tokens], path: Path) -> None:
        torch.manual_seed(SEED)
        self.name = name
        self.num_steps = num_steps
        self.step = 0
        self.wall_s = self.cpu_s = 0.0
        self.losses: list[float] = []
        self._streams = streams
        self._path = path
        self.model = transformers.AutoModelForCausalLM.from_config(
            tiny_models.CONFIGS[name],
            dtype=torch.float32,
            attn_implementation="padded_values",
            **({"experts_implementation": "grouped_mm"} if name == "deepseek-v2" else {}),
        )
        self._matrices, others = _parameters(self.model)
        self._muon = torch.optim.Muon([m.weight for m in self._matrices], lr=MUON_LR, weight_decay=0.02, momentum=0.95)
        self._adamw = torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self._router_logits: list[torch.Tensor] = []
        for module in self.model.modules():
            if type(module).__name__.endswith("TopkRouter"):
                module.register_forward_hook(lambda _module, _inputs, out: self._router_logits.append(out[0]))

    def train_step(self) -> None:
        """One step on 4096 tokens."""
        wall, cpu = time.monotonic(), time.process_time()
        batch = self._batch()
        self._router_logits.clear()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        (loss + BALANCE_WEIGHT * sum(map(_imbalance, self._router_logits), torch.tensor(0.0))).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = self._lr_scale()
        for optimizer, lr in ((self._muon, MUON_LR), (self._adamw, ADAMW_LR)):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        for matrix in self._matrices:
            matrix.weight.grad = matrix.gradient()
        self._muon.step()
        self._adamw.step()
        self.model.zero_grad()
        self.step += 1
        self.losses.append(loss.item())
        self.wall_s += time.monotonic() - wall
        self.cpu_s += time.process_time() - cpu
        if self.step % 20 == 0:
            speed = self.step * TOKENS_PER_STEP / self.wall_s
            recent = np.mean(self.losses[-20:])
            print(f"{self.name} {self.step}/{self.num_steps} loss {recent:.3f} {speed:.0f} tok/s", file=sys.stderr)

    def _lr_scale(self) -> float:
        # constant until the last part: so far, a longer run and a shorter one are the same run
        left = (self.num_steps - self.step) / (self.num_steps - _decay_start(self.num_steps))
        return min(1.0, (self.step + 1) / WARMUP_STEPS, left)

    def _batch(self) -> torch.Tensor:
        rng = np.random.default_rng([SEED, self.step])
        length = 512 if self.step >= _decay_start(self.num_steps) else 256
        rows = []
        for domain in rng.choice(list(SHARES), TOKENS_PER_STEP // length, p=list(SHARES.values())):
            start = rng.integers(len(self._streams[domain]) - length)
            rows.append(self._streams[domain][start : start + length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))

    def checkpoint(self) -> None:
        """Write all that `resume` needs; the old checkpoint stays until the new one is whole."""
        state: dict[str, Any] = {k: getattr(self, k) for k in ("num_steps", "step", "wall_s", "cpu_s", "losses")}
        state |= {"model": self.model.state_dict(), "muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one. A run may be made longer or shorter until its rate decays."""
        if not self._path.is_file():
            return
        state = torch.load(self._path, weights_only=True)
        if state["num_steps"] != self.num_steps and state["step"] > min(
            _decay_start(state["num_steps"]), _decay_start(self.num_steps)
        ):
            sys.exit(f"{self._path} is of a run of {state['num_steps']} steps; remove it, or ask for as many")
        for key in ("step", "wall_s", "cpu_s", "losses"):
            setattr(self, key, state[key])
        self.model.load_state_dict(state["model"])
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


def _decay_start(num_steps: int) -> int:
    return num_steps * 7 // 10


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix that Muon steps: a parameter, or one expert of a fused parameter `(experts, rows, columns)`."""

    weight: torch.nn.Parameter
    parent: torch.nn.Parameter
    expert: int | None

    def gradient(self) -> torch.Tensor | None:
        """The gradient that the parent has collected."""
        gradient = self.parent.grad
        return gradient if gradient is None or self.expert is None else gradient[self.expert]


def _parameters(model: transformers.PreTrainedModel) -> tuple[list[Matrix], list[torch.nn.Parameter]]:
    # torch's Muon takes matrices only, so each expert becomes a parameter that shares the fused one's memory
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
            others.append(parameter)
        elif parameter.ndim == 2:
            matrices.append(Matrix(weight=parameter, parent=parameter, expert=None))
        else:
            for expert in range(len(parameter)):
                weight = torch.nn.Parameter(parameter.data[expert])
                matrices.append(Matrix(weight=weight, parent=parameter, expert=expert))
    return matrices, others


def _imbalance(router_logits: torch.Tensor) -> torch.Tensor:
    # 1 when every expert gets as many tokens, the number of experts when one gets them all
    probabilities = router_logits.float().softmax(dim=-1)
    chosen = probabilities.topk(2, dim=-1).indices
    share = torch.nn.functional.one_hot(chosen, probabilities.shape[-1]).float().mean(dim=(0, 1))
    return probabilities.shape[-1] * (share * probabilities.mean(dim=0)).sum()


# -- record ------------------------------------------------------------------------------------------------------------


def held_out_loss(model: transformers.PreTrainedModel, ids: list[int], length: int = 256) -> tuple[float, int]:
    """Mean negative log likelihood in nats over windows of `length` tokens, and the number of tokens predicted."""
    windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    total = 0.0
    with torch.no_grad():
        for window in windows.split(8):
            logits = model(window[:, :-1], use_cache=False).logits.float()
            targets = window[:, 1:].flatten()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    return total / (windows.numel() - len(windows)), windows.numel() - len(windows)


def write_record(folder: Path, run: Run, tokenizer: tokenizers.Tokenizer) -> None:
    """Write training-record.json beside the weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    committed: dict[str, Any] = {}
    kept_back: dict[str, Any] = {}
    for domain in texts.DOMAINS:
        packages = [d.text for d in texts.split(domain).held_out]
        # a test computes the first again, so it is short
        for losses, documents, most in (
            (committed, texts.committed_documents(domain), 4096),
            (kept_back, packages, None),
        ):
            ids = [i for e in tokenizer.encode_batch(documents) for i in e.ids]
            loss, count = held_out_loss(model, ids[:most])
            losses[domain] = {"loss_nats": round(loss, 4), "perplexity": round(math.exp(loss), 2), "tokens": count}
    record = {
        "model": run.name,
        "parameters": run.model.num_parameters(),
        "held_out_committed": committed,
        "held_out_of_packages": kept_back,
        "final_training_loss_nats": round(float(np.mean(run.losses[-50:])), 4),
        "steps": run.num_steps,
        "tokens_seen": run.num_steps * TOKENS_PER_STEP,
        "tokens_available": {d: len(run._streams[d]) for d in texts.DOMAINS},
        "domain_shares": SHARES,
        "seed": SEED,
        "wall_seconds": round(run.wall_s),
        "cpu_seconds": round(run.cpu_s),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sources": texts.sources(),
        "licence": "The weights are the project's own, Apache-2.0. No text of the sources is shipped with them.",
        "files": {p.name: texts.sha256(p) for p in sorted(folder.iterdir()) if p.name != "training-record.json"},
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (folder / "training-record.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
