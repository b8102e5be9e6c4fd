"""Layer 1: held-out text through two engines at once, and how far their predictions are apart.

Both engines are driven through the `Executor`, in the steps that a server would make. Windows are of one length, and a
window of which the calibration set holds a run of tokens is left out: it would flatter the engine (arXiv 2005.14165,
appendix C). The noise floor is the engine against itself, with windows computed beside each other, in pieces, and at
their ends a token at a time, as answers are: what moves there is batching and not quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
WINDOWS_BESIDE = 4  # for the noise floor, of each domain
_DECODED = 48  # tokens at the end of a window that are computed one at a time there
_POSITION_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_MOST_NATS = 700.0  # a broken engine's perplexity stays a number, which JSON can hold
_LEAST_TOKENS = 32  # of a window
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
        if not unseen or step < _LEAST_TOKENS:
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


def window_logits(executor: Executor, windows: Sequence[list[int]], steps: Sequence[int]) -> list[Logits]:
    """Logits `(tokens, vocab)` of windows of one length, computed side by side, in steps of so many tokens of each."""
    length = len(windows[0])
    blocks_each = -(-length // TOKENS_PER_BLOCK)
    parts: list[list[Logits]] = [[] for _ in windows]
    for start, end in pairwise([0, *accumulate(steps)]):
        sequences = [
            ScheduledSequence(
                request_id=str(number),
                token_ids=window[start:end],
                num_computed_tokens=start,
                block_table=[number * blocks_each + block for block in range(-(-end // TOKENS_PER_BLOCK))],
                logit_positions=list(range(end - start)),
            )
            for number, window in enumerate(windows)
        ]
        logits = executor.execute(SchedulerOutput(sequences=sequences)).logits
        for number, part in enumerate(parts):
            part.append(logits[number * (end - start) : (number + 1) * (end - start)].copy())
    return [np.concatenate(part) for part in parts]


def steps_of(length: int, step_tokens: int = STEP_TOKENS) -> list[int]:
    """Tokens of each step in which a window of `length` is computed: full ones and what remains."""
    return [min(step_tokens, length - start) for start in range(0, length, step_tokens)]


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
            ends: list[Logits] = []
            for window in domain.windows:
                expected, seen = (window_logits(e, [window], steps_of(len(window)))[0] for e in (baseline, engine))
                pending.append(background.submit(compare_window, expected, seen, window))
                if len(ends) < WINDOWS_BESIDE:
                    ends.append(seen[-_num_decoded(len(window)) :].copy())
                if len(pending) > 1:
                    pending[-2].result()
                on_window()
            comparisons[domain.name] = [p.result() for p in pending]
            if not all(c.baseline_finite for c in comparisons[domain.name]):
                raise QualityError(
                    f"the baseline computes NaN or infinite logits on {domain.name} text", "give another --baseline"
                )
            noise[domain.name] = _noise(engine, domain.windows[:WINDOWS_BESIDE], ends)
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


def _num_decoded(length: int) -> int:
    return min(_DECODED, length // 2)


def _noise(engine: Executor, windows: Sequence[list[int]], ends: Sequence[Logits]) -> Comparison:
    """The engine against itself on the ends of windows; `ends` are their logits as parts of the whole."""
    num_decoded = _num_decoded(len(windows[0]))
    start = len(windows[0]) - num_decoded
    steps = [*steps_of(start, STEP_TOKENS // WINDOWS_BESIDE), *[1] * num_decoded]
    beside = window_logits(engine, windows, steps)
    parts = []
    for window, whole, decoded in zip(windows, ends, beside, strict=True):
        parts.append(compare_window(whole, decoded[start:], window[start:]))
    return Comparison.join(parts)


def _result(name: str, parts: Sequence[Comparison], noise: Comparison, num_overlapping: int) -> DomainResult:
    whole = Comparison.join(parts)
    rise = bootstrap_tokens(whole.loss - whole.baseline_loss)
    # what batching moves the mean of so many tokens by, in 95 % of cases
    moved = 1.96 * (noise.loss - noise.baseline_loss).std() / np.sqrt(len(whole.loss))
    return DomainResult(
        domain=name,
        num_windows=len(parts),
        num_tokens=len(whole.loss),
        num_overlapping=num_overlapping,
        perplexity_baseline=_perplexity(whole.baseline_loss.mean()),
        perplexity=_perplexity(whole.loss.mean()),
        perplexity_change=_as_change(rise),
        kl_mean=bootstrap_tokens(whole.kl_divergence),
        **_percentiles(whole),
        top1_agreement=bootstrap_tokens(whole.same_top1.astype(np.float64)),
        num_non_finite=whole.num_non_finite,
        noise_kl=float(noise.kl_divergence.mean()),
        noise_perplexity_change=float(np.expm1(moved)),
    )


def _perplexity(mean_loss: float) -> float:
    return float(np.exp(min(mean_loss, _MOST_NATS)))


def _percentiles(comparison: Comparison) -> dict[str, float]:
    median, p90, p99 = np.quantile(comparison.kl_divergence, (0.5, 0.9, 0.99)).tolist()
    return {"kl_median": median, "kl_p90": p90, "kl_p99": p99}


def _as_change(rise: Interval) -> Interval:
    value, low, high = np.expm1(np.minimum([rise.value, rise.low, rise.high], _MOST_NATS)).tolist()
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
        **{name: _perplexity(value) for name, value in logs.items()},
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
