"""The sampler against definitions: brute-force filters and penalties, and frequencies of what is drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.runtime.request import Request, SamplingParams
from harness.runtime.sampler import SampledToken, sample
from harness.runtime.sequence import LogitRow, Sequence

Floats = npt.NDArray[np.float32]


def make_sequence(prompt: list[int], generated: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 1000} | sampling)
    request = Request(request_id="r", prompt_token_ids=prompt, sampling=params)
    sequence = Sequence(request, max_tokens=1000)
    for token_id in generated:
        sequence.append(token_id)
    return sequence


def make_logits(vocab_size: int, seed: int = 0, scale: float = 3.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * scale).astype(np.float32)


def choose(logits: Floats, sequences: list[Sequence]) -> list[SampledToken | None]:
    """The next token of each sequence."""
    return sample(logits, [LogitRow(sequence) for sequence in sequences])


def tokens(logits: Floats, sequences: list[Sequence]) -> list[int]:
    sampled = choose(logits, sequences)
    assert None not in sampled
    return [one.token_id for one in sampled if one is not None]


def draws(logits: Floats, count: int, generated: tuple[int, ...] = (), **sampling: Any) -> list[int]:
    """One token from each of `count` seeds."""
    sequences = [make_sequence([1, 2, 3], generated, seed=seed, **sampling) for seed in range(count)]
    return tokens(np.tile(logits, (count, 1)), sequences)


def penalized(logits: Floats, prompt: list[int], generated: tuple[int, ...], params: SamplingParams) -> list[float]:
    """The penalties, token by token, from the histories."""
    out = []
    for token_id, raw in enumerate(logits.tolist()):
        value = raw
        if token_id in prompt or token_id in generated:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * generated.count(token_id)
        value -= params.presence_penalty * (token_id in generated)
        out.append(value)
    return out


def probabilities(logits: Floats, generated: tuple[int, ...] = (), **sampling: Any) -> npt.NDArray[np.float64]:
    """What the next token's distribution is by definition."""
    params = SamplingParams(**{"max_tokens": 1000} | sampling)
    scaled = [value / params.temperature for value in penalized(logits, [1, 2, 3], generated, params)]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    kept, mass = [], 0.0
    for i in order:
        if mass < params.top_p * math.fsum(weight.values()) or params.top_p == 1:
            kept.append(i)
            mass += weight[i]
    kept = [i for i in kept if weight[i] >= params.min_p]
    out = np.zeros(len(logits))
    out[kept] = [weight[i] for i in kept]
    return np.asarray(out / out.sum())


def assert_drawn_from(drawn: list[int], expected: npt.NDArray[np.float64]) -> None:
    counts = np.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a token was drawn that cannot be"
    # Pearson's statistic over tokens expected 5 times or more, the rest taken as one
    want = expected * len(drawn)
    often = want >= 5
    got = np.append(counts[often], counts[~often].sum())
    want = np.append(want[often], want[~often].sum())
    got, want = got[want > 0], want[want > 0]
    freedom = max(len(want) - 1, 1)
    statistic = float(((got - want) ** 2 / want).sum())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), f"chi-square {statistic:.0f} at {freedom} degrees"


def test_greedy_is_the_argmax() -> None:
    logits = np.stack([make_logits(300, seed) for seed in range(8)])
    sequences = [make_sequence([1], temperature=temperature) for temperature in (0.0, 1e-9) * 4]
    before = logits.copy()
    assert tokens(logits, sequences) == logits.argmax(axis=1).tolist()
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 2},
        {"top_k": 5},
        {"top_k": 100_000},
        {"top_p": 0.7},
        {"top_p": 0.999, "temperature": 1.5},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
        {"top_p": 0.95, "min_p": 0.2, "temperature": 1.8},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7, "top_k": 30},
    ],
)
def test_draws_follow_the_distribution(sampling: dict[str, Any]) -> None:
    logits = make_logits(1300)
    generated = (7, 7, 9, 1, int(logits.argmax()), int(logits.argmax()))
    drawn = draws(logits, 4000, generated, **sampling)
    assert_drawn_from(drawn, probabilities(logits, generated, **sampling))


def test_the_positions_of_one_seed_are_independent_draws() -> None:
    logits = make_logits(40)
    sequence = make_sequence([1], seed=3)
    drawn = []
    for _ in range(5000):
        drawn += tokens(logits[None], [sequence])
        sequence.append(drawn[-1])
    assert_drawn_from(drawn, probabilities(logits))
    repeats = np.mean(np.asarray(drawn[1:]) == np.asarray(drawn[:-1]))
    assert repeats == pytest.approx(np.square(probabilities(logits)).sum(), abs=0.03)


@pytest.mark.parametrize("seed", range(20))
def test_what_the_filters_keep(seed: int) -> None:
    """Every token that may be drawn is drawn at some uniform, and no other: few candidates, many draws."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, 12).astype(np.float32)  # with ties
    sampling: dict[str, Any] = {
        "top_k": int(rng.integers(0, 6)),
        "top_p": float(rng.choice([0.3, 0.6, 0.9, 1.0])),
        "min_p": float(rng.choice([0.0, 0.1, 0.4])),
        "temperature": 2.0,
    }
    assert set(draws(logits, 1500, **sampling)) == set(np.flatnonzero(probabilities(logits, **sampling)).tolist())


def test_top_k_of_one_and_a_tiny_top_p_are_greedy() -> None:
    logits = make_logits(700, scale=0.1)
    best = int(logits.argmax())
    assert set(draws(logits, 200, top_k=1)) == {best}
    assert set(draws(logits, 200, top_p=1e-9)) == {best}
    assert set(draws(np.zeros(700, np.float32), 200, top_k=1)) == {0}
    assert set(draws(np.zeros(700, np.float32), 200, top_p=1e-9)) == {0}


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"presence_penalty": -1.0},
        {"frequency_penalty": 0.8},
        {"frequency_penalty": -0.3, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    ],
)
@pytest.mark.parametrize("mean", [0.0, -9.0])
def test_penalties_as_they_accumulate(penalties: dict[str, Any], mean: float) -> None:
    """Greedy answers of 60 tokens from one row of logits: each token moves the row a little."""
    logits = make_logits(50, scale=1.5) + np.float32(mean)
    prompt = [3, 3, 4, int(logits.argmax())]
    sequence = make_sequence(prompt, temperature=0.0, **penalties)
    generated: tuple[int, ...] = ()
    for _ in range(60):
        (token_id,) = tokens(logits[None], [sequence])
        expected = penalized(logits, prompt, generated, sequence.request.sampling)
        assert expected[token_id] == pytest.approx(max(expected), abs=1e-6)
        sequence.append(token_id)
        generated = (*generated, token_id)


def test_a_seed_decides_alone() -> None:
    logits = np.stack([make_logits(2000, seed) for seed in range(6)])
    seeded = make_sequence([1], seed=-5, temperature=1.5)
    (alone,) = tokens(logits[2][None], [seeded])
    for _ in range(5):
        batch = [make_sequence([1]) for _ in range(6)]
        batch[2] = seeded
        assert tokens(logits, batch)[2] == alone
    assert len({tokens(logits[2][None], [make_sequence([1], seed=s, temperature=1.5)])[0] for s in range(30)}) > 5


def test_unseeded_requests_differ() -> None:
    logits = np.zeros((20, 5000), np.float32)
    drawn = tokens(logits, [make_sequence([1]) for _ in range(20)])
    assert len(set(drawn)) > 10


def test_logprobs_are_the_models_own() -> None:
    logits = make_logits(600)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.argsort(-expected, kind="stable")
    for num_top in (0, 1, 20):
        sequence = make_sequence([1], seed=1, logprobs=num_top, temperature=0.7, presence_penalty=1.0, top_k=50)
        (sampled,) = choose(logits[None], [sequence])
        assert sampled is not None
        assert sampled.logprob is not None
        assert sampled.logprob.logprob == pytest.approx(expected[sampled.token_id], abs=1e-5)
        assert [token_id for token_id, _ in sampled.logprob.top] == order[:num_top].tolist()
        np.testing.assert_allclose([p for _, p in sampled.logprob.top], expected[order[:num_top]], atol=1e-5)
    assert choose(logits[None], [make_sequence([1], temperature=0.0)]) == [SampledToken(token_id=int(order[0]))]


def test_a_given_token_is_scored_and_the_next_one_chosen_beside_it() -> None:
    logits = np.stack([make_logits(600, seed) for seed in range(3)])
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    scored = make_sequence([1, 5, 9], prompt_logprobs=2, temperature=0.5, repetition_penalty=1.5)
    plain = make_sequence([1], temperature=0.0)
    rows = [LogitRow(scored, 5), LogitRow(scored, 9), LogitRow(plain)]
    *given, chosen = sample(logits, rows)
    for row, result in enumerate(given):
        assert result is not None
        assert result.logprob is not None
        assert result.token_id == rows[row].prompt_token_id
        assert result.logprob.logprob == pytest.approx(expected[row, result.token_id], abs=1e-5)
        best = np.argsort(-expected[row])[:2].tolist()
        assert [token_id for token_id, _ in result.logprob.top] == best
        # a client sees by equality whether the given token is the likeliest
        (best_scored,) = sample(logits[row][None], [LogitRow(scored, best[0])])
        assert best_scored is not None
        assert best_scored.logprob is not None
        assert best_scored.logprob.logprob == best_scored.logprob.top[0][1]
    assert chosen == SampledToken(token_id=int(logits[2].argmax()))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_row_is_named_and_the_others_go_on(bad: float) -> None:
    logits = np.stack([make_logits(100, seed) for seed in range(3)])
    logits[1, 17] = bad
    sampled = choose(logits, [make_sequence([1], temperature=t) for t in (0.0, 1.0, 0.0)])
    assert sampled[1] is None
    assert sampled[0] == SampledToken(token_id=int(logits[0].argmax()))
    assert sampled[2] == SampledToken(token_id=int(logits[2].argmax()))


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 5e-324, "temperature": 1e-5, "top_p": 0.5},
        {"temperature": 1e-5},
        {"temperature": 1e-5, "top_k": 50},
        {"temperature": 1e-5, "top_p": 0.9},
        {"temperature": 1e-5, "min_p": 1.0},
        {"logprobs": 3},
    ],
)
@pytest.mark.parametrize("scale", [1.0, 3e38])
def test_extreme_values_still_give_a_token(sampling: dict[str, Any], scale: float) -> None:
    logits = np.linspace(-1, 1, 1000, dtype=np.float32) * np.float32(scale)
    assert all(0 <= token_id < 1000 for token_id in draws(logits, 20, (1, 999), **sampling))
