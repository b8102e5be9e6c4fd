"""Layer 1: held-out text through two engines at once, and how far their predictions are apart.

Both engines are driven through the `Executor`, in the steps that a server would make. Windows are of one length, and a
window of which the calibration set holds a run of tokens is left out: it would flatter the engine (arXiv 2005.14165,
appendix C). The noise floor is the engine against itself, with the same windows computed in smaller pieces beside each
other: what moves there is batching and not quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from harness.calib.measure import Comparison, compare_logits
from harness.calib.overlap import ngram_hashes
from harness.calib.quality.paired import bootstrap_tokens, mean_interval
from harness.calib.quality.report import DomainResult, Interval, PositionKl, TextResult
from harness.calib.quality.suite import Suite, TextAmount
from harness.errors import QualityError
from harness.runtime.executor import TOKENS_PER_BLOCK, Executor, ScheduledSequence, SchedulerOutput
from harness.tokenizer import Tokenizer

Logits = npt.NDArray[np.float32]

STEP_TOKENS = 512  # the server's default budget of a step
WINDOWS_BESIDE = 4  # for the noise floor, computed beside each other
_NOISE_WINDOWS = 4  # of each domain
_POSITION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_OVERLAP = 0.05  # share of a window's n-grams from which on it counts as seen


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Windows `(num_tokens,)` of one domain, all of one length, and how many were left out."""

    name: str
    windows: list[list[int]]
    num_overlapping: int


def cut_windows(
    suite: Suite,
    tokenizer: Tokenizer,
    amount: TextAmount,
    *,
    max_model_len: int,
    calibration_ngrams: npt.NDArray[np.uint64],
) -> list[Domain]:
    """Windows of each domain of a suite, evenly spread over its text, each begun as a prompt is.

    Raises:
        QualityError: a domain has no window that the calibration set has not seen.
    """
    length = min(amount.tokens, max_model_len)
    prefix = tokenizer.encode("")
    domains = []
    for name in suite.content.text.domains:
        tokens = tokenizer.encode("\n\n".join(suite.documents(name)), add_special_tokens=False)
        step = min(length - len(prefix), len(tokens))
        all_windows = [[*prefix, *tokens[i : i + step]] for i in range(0, len(tokens) - step + 1, max(1, step))]
        unseen = [window for window in all_windows if _overlap(window, calibration_ngrams) < _OVERLAP]
        if not unseen or step < 2:
            raise QualityError(
                f"the text of domain {name!r} has {len(tokens)} tokens, and no window of it is left that the "
                "calibration set does not hold",
                "give the suite more text of this domain, or take the domain out",
            )
        chosen = np.linspace(0, len(unseen) - 1, min(amount.windows, len(unseen))).round().astype(int)
        domains.append(
            Domain(
                name=name,
                windows=[unseen[i] for i in dict.fromkeys(chosen.tolist())],
                num_overlapping=len(all_windows) - len(unseen),
            )
        )
    return domains


def _overlap(window: list[int], seen: npt.NDArray[np.uint64]) -> float:
    hashes = ngram_hashes(np.array(window))
    return float(np.isin(hashes, seen).mean()) if len(hashes) else 0.0


def window_logits(executor: Executor, windows: Sequence[list[int]], step_tokens: int) -> list[Logits]:
    """Logits `(tokens, vocab)` of each window, computed side by side, `step_tokens` of each at a time."""
    blocks_each = max(-(-len(window) // TOKENS_PER_BLOCK) for window in windows)
    parts: list[list[Logits]] = [[] for _ in windows]
    for start in range(0, max(map(len, windows)), step_tokens):
        sequences = [
            ScheduledSequence(
                request_id=str(number),
                token_ids=window[start : start + step_tokens],
                num_computed_tokens=start,
                block_table=list(range(number * blocks_each, (number + 1) * blocks_each))[
                    : -(-min(start + step_tokens, len(window)) // TOKENS_PER_BLOCK)
                ],
                logit_positions=list(range(len(window[start : start + step_tokens]))),
            )
            for number, window in enumerate(windows)
            if start < len(window)
        ]
        logits = executor.execute(SchedulerOutput(sequences=sequences)).logits
        begin = 0
        for sequence in sequences:
            end = begin + len(sequence.token_ids)
            parts[int(sequence.request_id)].append(logits[begin:end].copy())
            begin = end
    return [np.concatenate(part) for part in parts]


def measure_text(
    baseline: Executor, engine: Executor, domains: Sequence[Domain], on_window: Callable[[], None] = lambda: None
) -> TextResult:
    """Compare two executors of one vocabulary over all windows, window by window.

    `on_window` is called after each window, and after each group of windows of the noise floor; `num_windows` times.

    Raises:
        QualityError: the baseline computes values that are not finite.
    """
    comparisons: dict[str, list[Comparison]] = {}
    noise: dict[str, Comparison] = {}
    with ThreadPoolExecutor(1) as background:  # the next window is computed while one is compared
        for domain in domains:
            pending = []
            for window in domain.windows:
                expected, seen = (window_logits(e, [window], STEP_TOKENS)[0] for e in (baseline, engine))
                pending.append(background.submit(compare_window, expected, seen, window))
                if len(pending) > 1:
                    pending[-2].result()
                on_window()
            comparisons[domain.name] = [p.result() for p in pending]
            if not all(c.baseline_finite for c in comparisons[domain.name]):
                raise QualityError(
                    f"the baseline computes NaN or infinite logits on {domain.name} text", "give another --baseline"
                )
            noise[domain.name] = _noise(engine, domain.windows[:_NOISE_WINDOWS])
            on_window()
    results = [_result(d.name, comparisons[d.name], noise[d.name], d.num_overlapping) for d in domains]
    every = [c for parts in comparisons.values() for c in parts]
    return TextResult(
        window_tokens=max(len(w) for d in domains for w in d.windows),
        overall=_overall(results, every),
        domains=results,
        by_position=_by_position(every),
    )


def num_windows(domains: Sequence[Domain]) -> int:
    """How often `measure_text` calls `on_window`."""
    return sum(len(domain.windows) + 1 for domain in domains)


def compare_window(expected: Logits, seen: Logits, window: list[int]) -> Comparison:
    """Compare the logits of all positions of a window that have a next token."""
    return compare_logits(expected[:-1], seen[:-1], np.array(window[1:]))


def _noise(engine: Executor, windows: Sequence[list[int]]) -> Comparison:
    whole = [window_logits(engine, [window], STEP_TOKENS)[0] for window in windows]
    pieces = STEP_TOKENS // WINDOWS_BESIDE
    beside = [
        logits
        for start in range(0, len(windows), WINDOWS_BESIDE)
        for logits in window_logits(engine, windows[start : start + WINDOWS_BESIDE], pieces)
    ]
    return Comparison.join([compare_window(a, b, w) for a, b, w in zip(whole, beside, windows, strict=True)])


def _result(name: str, parts: Sequence[Comparison], noise: Comparison, num_overlapping: int) -> DomainResult:
    whole = Comparison.join(parts)
    rise = bootstrap_tokens(whole.loss - whole.baseline_loss)
    return DomainResult(
        domain=name,
        num_windows=len(parts),
        num_tokens=len(whole.loss),
        num_overlapping=num_overlapping,
        perplexity_baseline=float(np.exp(whole.baseline_loss.mean())),
        perplexity=float(np.exp(whole.loss.mean())),
        perplexity_change=_as_change(rise),
        kl_mean=bootstrap_tokens(whole.kl_divergence),
        **_percentiles(whole),
        top1_agreement=bootstrap_tokens(whole.same_top1.astype(np.float64)),
        num_non_finite=whole.num_non_finite,
        noise_kl=float(noise.kl_divergence.mean()),
        noise_perplexity_change=float(np.expm1(abs((noise.loss - noise.baseline_loss).mean()))),
    )


def _percentiles(comparison: Comparison) -> dict[str, float]:
    median, p90, p99 = np.quantile(comparison.kl_divergence, (0.5, 0.9, 0.99)).tolist()
    return {"kl_median": median, "kl_p90": p90, "kl_p99": p99}


def _as_change(rise: Interval) -> Interval:
    value, low, high = np.expm1([rise.value, rise.low, rise.high]).tolist()
    return Interval(value=value, low=low, high=high)


def _overall(results: Sequence[DomainResult], parts: Sequence[Comparison]) -> DomainResult:
    """The mean of the domains, which are independent samples; perplexities are averaged in the logarithm."""
    logs = {
        name: float(np.mean([np.log(getattr(r, name)) for r in results]))
        for name in ("perplexity", "perplexity_baseline")
    }
    rises = [Interval(**{k: float(np.log1p(v)) for k, v in r.perplexity_change.model_dump().items()}) for r in results]
    return DomainResult(
        domain="overall",
        num_windows=sum(r.num_windows for r in results),
        num_tokens=sum(r.num_tokens for r in results),
        num_overlapping=sum(r.num_overlapping for r in results),
        **{name: float(np.exp(value)) for name, value in logs.items()},
        perplexity_change=_as_change(mean_interval(rises)),
        kl_mean=mean_interval([r.kl_mean for r in results]),
        **_percentiles(Comparison.join(parts)),
        top1_agreement=mean_interval([r.top1_agreement for r in results]),
        num_non_finite=sum(r.num_non_finite for r in results),
        noise_kl=float(np.mean([r.noise_kl for r in results])),
        noise_perplexity_change=float(np.mean([r.noise_perplexity_change for r in results])),
    )


def _by_position(parts: Sequence[Comparison]) -> list[PositionKl]:
    """Position `p` predicts token `p + 1` of its window."""
    longest = max(len(part.kl_divergence) for part in parts)
    bounds = [0, *(b for b in _POSITION_BOUNDS if b < longest), longest]
    found = []
    for start, end in pairwise(bounds):
        values = np.concatenate([part.kl_divergence[start:end] for part in parts])
        found.append(PositionKl(start=start, end=end, mean=float(values.mean()), p90=float(np.quantile(values, 0.9))))
    return found
