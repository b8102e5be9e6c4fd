"""What a calibration set is made of, as data, as text for a terminal and as JSON.

Owns the figures and their presentation, and nothing of how the set is chosen. Lengths are those of whole prompts,
before any window is taken, and each request counts as often as it came: they describe production, not the set.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.calib.redact import redact
from harness.calib.selection import prompt_hash

LENGTH_BOUNDS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ANSWER_TOKENS = 1024
MODEL_LEN_STEP = 1024
PROMPT_CHARS_SHOWN = 60
# a secret that begins in what is shown ends within these, or is recognised by its beginning
PROMPT_CHARS_REDACTED = 1024
NAMES_LISTED = 32
BAR_CHARS = 40


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of whole prompts, in tokens. `histogram` holds `(upper bound, requests)`, the bound None for the rest.

    `suggested_max_model_len` is P99 and 1024 tokens for the answer, rounded up to a multiple of 1024.
    """

    histogram: tuple[tuple[int | None, int], ...]
    p50: int
    p90: int
    p99: int
    longest: int
    suggested_max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """How often a kind occurs, from 0 to 1: in the distinct requests read, and in the samples calibrated on."""

    name: str
    of_traffic: float
    of_set: float


@dataclass(frozen=True, kw_only=True)
class SetReport:
    """The figures of one set: shares of the set are of its samples as they were cut, counts are of requests."""

    label: str
    num_samples: int
    num_held_out: int
    num_tokens: int
    max_tokens: int
    lengths: Lengths
    languages: tuple[Share, ...]
    system_prompts: tuple[Share, ...]
    system_prompt_share: float
    num_requests: int
    num_distinct: int
    num_duplicates: int
    num_near_duplicates: int
    num_prompts_added: int
    num_refused: int
    num_truncated: int
    num_short: int
    redactions: Mapping[str, int]
    num_bad_lines: int
    bad_lines: tuple[str, ...]
    num_broken_encodings: int
    has_chat_template: bool
    warnings: tuple[str, ...]


def measure_lengths(lengths: Sequence[int], counts: Sequence[int]) -> Lengths:
    """Percentiles and histogram of prompt lengths in tokens, each weighted by how often its request came."""
    every: npt.NDArray[np.int64] = np.repeat(np.asarray(lengths, dtype=np.int64), counts)
    bounds = [bound for bound in LENGTH_BOUNDS if bound < every.max()]
    numbers = np.bincount(np.searchsorted(bounds, every), minlength=len(bounds) + 1)
    p50, p90, p99 = (int(value) for value in np.percentile(every, (50, 90, 99), method="higher"))
    return Lengths(
        histogram=tuple(zip([*bounds, None], map(int, numbers), strict=True)),
        p50=p50,
        p90=p90,
        p99=p99,
        longest=int(every.max()),
        suggested_max_model_len=-(-(p99 + ANSWER_TOKENS) // MODEL_LEN_STEP) * MODEL_LEN_STEP,
    )


def measure_shares(traffic: Sequence[str], chosen: Sequence[str]) -> tuple[Share, ...]:
    """Shares of each name, the most common in traffic first; names past the 32nd stand together as `(others)`."""
    ranked = sorted(Counter(traffic).items(), key=lambda item: (-item[1], item[0]))
    rare = {name for name, _ in ranked[NAMES_LISTED:]}
    of_traffic, of_set = (Counter("(others)" if n in rare else n for n in names) for names in (traffic, chosen))
    return tuple(
        Share(name=name, of_traffic=of_traffic[name] / len(traffic), of_set=of_set[name] / max(len(chosen), 1))
        for name in sorted(
            of_traffic.keys() | of_set.keys(), key=lambda name: (name == "(others)", -of_traffic[name], name)
        )
    )


@lru_cache(maxsize=4096)
def name_of_prompt(system_prompt: str) -> str:
    """The first 60 characters of a system prompt, and its hash, which tells apart those that begin alike.

    Secrets are out, and so is what a terminal would obey: control and formatting characters.
    """
    if not system_prompt:
        return "(none)"
    spaced = " ".join(system_prompt[:PROMPT_CHARS_REDACTED].split())
    # before redaction, so that no character hides in a secret
    start, _ = redact("".join(filter(str.isprintable, spaced)))
    return f"{start[:PROMPT_CHARS_SHOWN]} [{prompt_hash(system_prompt)}]"


def as_json(report: SetReport) -> dict[str, Any]:
    """The report as plain JSON types; every field under its own name."""
    return {**dataclasses.asdict(report), "redactions": dict(report.redactions)}


def render_text(report: SetReport) -> str:
    """The report as Markdown that a terminal shows well."""
    parts = (_head(report), _lengths(report), _tables(report), _notes(report))
    return "\n\n".join("\n".join(part) for part in parts)


def _head(r: SetReport) -> list[str]:
    lines = [
        f"## Calibration set: {r.label}",
        "",
        f"{r.num_samples} samples of at most {r.max_tokens} tokens ({r.num_tokens} in all), {r.num_held_out} held out; "
        f"{r.system_prompt_share:.0%} of the samples hold a system prompt or part of one.",
        f"Drawn from {r.num_distinct} distinct requests of {r.num_requests} read: {r.num_duplicates} duplicates and "
        f"{r.num_near_duplicates} near-duplicates dropped.",
    ]
    if r.num_prompts_added:
        lines.append(f"{r.num_prompts_added} requests came without a system prompt and got one of --system-prompt.")
    return lines


def _lengths(r: SetReport) -> list[str]:
    most = max(number for _, number in r.lengths.histogram)
    width = len(str(most))
    lines = ["### Prompt lengths in tokens, before truncation", ""]
    for bound, number in r.lengths.histogram:
        name = f"<= {r.lengths.longest if bound is None else bound}"
        lines.append(f"    {name:>8}  {number:>{width}}  {'#' * -(-number * BAR_CHARS // most)}".rstrip())
    lines += [
        "",
        f"P50 {r.lengths.p50}, P90 {r.lengths.p90}, P99 {r.lengths.p99}, longest {r.lengths.longest}. Suggested: "
        f"--max-model-len {r.lengths.suggested_max_model_len} (P99 and {ANSWER_TOKENS} tokens for the answer, rounded "
        f"up to a multiple of {MODEL_LEN_STEP}; a model that reasons before it answers needs more).",
        f"Truncated to {r.max_tokens} tokens: {r.num_truncated} of {r.num_samples + r.num_held_out}. "
        f"Shorter than 16 tokens: {r.num_short}.",
    ]
    return lines


def _tables(r: SetReport) -> list[str]:
    lines: list[str] = []
    for title, shares in (("Language", r.languages), ("System prompt", r.system_prompts)):
        lines += ["", f"| {title} | traffic | set |", "| --- | ---: | ---: |"]
        lines += [f"| {s.name.replace('|', chr(92) + '|')} | {s.of_traffic:.1%} | {s.of_set:.1%} |" for s in shares]
    return lines[1:]


def _notes(r: SetReport) -> list[str]:
    redacted = ", ".join(f"{number} {kind}" for kind, number in sorted(r.redactions.items())) or "nothing found"
    lines = [f"Secrets and personal data replaced: {redacted}."]
    if not r.has_chat_template:
        lines.append("The model has no chat template: turns are joined with blank lines.")
    if r.num_refused:
        lines.append(f"{r.num_refused} requests left out: the chat template does not accept them.")
    if r.num_broken_encodings:
        lines.append(f"{r.num_broken_encodings} lines hold bytes that are not UTF-8; they were kept, as U+FFFD.")
    if r.num_bad_lines:
        lines += [f"{r.num_bad_lines} lines left out:", *(f"- {line}" for line in r.bad_lines)]
    return lines + [f"warning: {warning}" for warning in r.warnings]
