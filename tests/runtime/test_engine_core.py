"""The core against a model whose KV is real: whatever is wrong with a block, a table or a hit changes its answers.

`ToyModel` keeps a digest of the prefix in each slot of its KV blocks. A new token's digest is made from the slot before
it, and its logits from all slots up to it, both read through the block table. `reference` computes the same without
blocks, one sequence at a time, so batched, chunked, cached and preempted answers have one oracle.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.calib.measure import log_softmax
from harness.errors import EngineError, OverloadedError, RequestError
from harness.runtime.engine_core import EngineCore
from harness.runtime.executor import TOKENS_PER_BLOCK, SchedulerOutput, StepOutput
from harness.runtime.request import FinishReason, Request, SamplingParams, TokenChunk, TokenLogprob
from harness.runtime.sampler import sample
from harness.runtime.scheduler import SchedulerConfig
from harness.runtime.sequence import LogitRow, Sequence

VOCAB = 48
EOS = 0
BROKEN = 47  # a sequence that begins with this token gets logits that are not finite


def digest(data: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(data, digest_size=8).digest(), "little"))


def next_state(previous: np.uint64, token_id: int) -> np.uint64:
    return digest(previous.tobytes() + token_id.to_bytes(4, "little"))


def logits_of(states: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    if states[0] == next_state(np.uint64(0), BROKEN):
        return np.full(VOCAB, np.nan, np.float32)
    noise = np.frombuffer(blake2b(states.tobytes(), digest_size=VOCAB).digest(), np.uint8)
    return (noise / 32).astype(np.float32)


class ToyModel:
    """An executor that also checks what it is asked for."""

    vocab_size = VOCAB

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.kv = np.zeros((num_blocks, TOKENS_PER_BLOCK), np.uint64)
        self.max_tokens_in_step = 0
        self.fail_next = False
        self.first_request_id = ""
        self.wanted: set[tuple[str, int]] = set()  # of which request logits were asked for, and where

    def execute(self, scheduled: SchedulerOutput) -> StepOutput:
        if self.fail_next:
            self.fail_next = False
            raise EngineError("the device was lost")
        self.first_request_id = scheduled.sequences[0].request_id
        self.max_tokens_in_step = max(self.max_tokens_in_step, sum(len(part.token_ids) for part in scheduled.sequences))
        written: list[int] = []
        rows = []
        for part in scheduled.sequences:
            start, end = part.num_computed_tokens, part.num_computed_tokens + len(part.token_ids)
            assert part.logit_positions[-1:] == [len(part.token_ids) - 1] or end % TOKENS_PER_BLOCK == 0
            wanted = {(part.request_id, start + position) for position in part.logit_positions}
            assert not wanted & self.wanted, "the same logits are asked for twice"
            self.wanted |= wanted
            written += part.block_table[start // TOKENS_PER_BLOCK : -(-end // TOKENS_PER_BLOCK)]
            for position, token_id in enumerate(part.token_ids, start):
                previous = self.kv[self.slot(part.block_table, position - 1)] if position else np.uint64(0)
                self.kv[self.slot(part.block_table, position)] = next_state(previous, token_id)
            states = self.kv[part.block_table].reshape(-1)
            rows += [logits_of(states[: start + position + 1]) for position in part.logit_positions]
        tables = [block_id for part in scheduled.sequences for block_id in part.block_table]
        assert all(tables.count(block_id) == 1 for block_id in written), "a block is written that another one reads"
        return StepOutput(logits=np.array(rows, np.float32).reshape(-1, VOCAB))

    @staticmethod
    def slot(block_table: list[int], position: int) -> tuple[int, int]:
        return block_table[position // TOKENS_PER_BLOCK], position % TOKENS_PER_BLOCK


def reference(request: Request, limit: int) -> tuple[list[int], FinishReason]:
    """The answer to one request, without a scheduler."""
    sequence = Sequence(request, max_tokens=limit)
    sampling = request.sampling
    max_tokens = min(sampling.max_tokens, limit - len(request.prompt_token_ids))
    states = [np.uint64(0)]
    for token_id in request.prompt_token_ids:
        states.append(next_state(states[-1], token_id))
    while sequence.num_generated_tokens < max_tokens:
        (sampled,) = sample(logits_of(np.array(states[1:], np.uint64))[None], [LogitRow(sequence)])
        answer = sequence.token_ids[len(request.prompt_token_ids) :]
        if sampled is None:
            return answer, FinishReason.ERROR
        if sampled.token_id in sampling.stop_token_ids or (sampled.token_id == EOS and not sampling.ignore_eos):
            return answer, FinishReason.STOP
        sequence.append(sampled.token_id)
        states.append(next_state(states[-1], sampled.token_id))
    return sequence.token_ids[len(request.prompt_token_ids) :], FinishReason.LENGTH


def reference_report(prompt: list[int]) -> list[float | None]:
    """Log-probabilities of a prompt's tokens, without a scheduler and without our sampler."""
    states: list[np.uint64] = []
    report: list[float | None] = [None]
    for token_id, following in pairwise(prompt):
        states.append(next_state(states[-1] if states else np.uint64(0), token_id))
        report.append(float(log_softmax(logits_of(np.array(states, np.uint64))[None])[0, following]))
    return report


class Client:
    """Keeps what was told of each request."""

    def __init__(self, model: ToyModel, **limits: Any) -> None:
        self.model = model
        config = SchedulerConfig(**{"max_model_len": 400} | limits)
        self.core = EngineCore(model, config, [EOS])
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.reports: dict[str, list[TokenLogprob | None]] = {}

    def add(self, request: Request) -> None:
        self.core.add_request(request)
        self.requests[request.request_id] = request
        self.answers[request.request_id] = []

    def take(self, chunk: TokenChunk) -> None:
        assert chunk.request_id not in self.ends, "told something after the end"
        if chunk.prompt_logprobs is not None:
            assert chunk.request_id not in self.reports, "reported on twice"
            assert self.answers[chunk.request_id] == [], "reported on late"
            self.reports[chunk.request_id] = chunk.prompt_logprobs
        self.answers[chunk.request_id] += chunk.token_ids
        if chunk.token_ids or chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.cached.setdefault(chunk.request_id, chunk.num_cached_tokens) == chunk.num_cached_tokens
        if chunk.finish_reason is not None:
            self.ends[chunk.request_id] = chunk.finish_reason

    def step(self) -> None:
        oldest = next((request_id for request_id in self.requests if request_id not in self.ends), None)
        for chunk in self.core.step():
            self.take(chunk)
        assert oldest in (None, self.model.first_request_id), "the oldest request did not advance"
        self.core.check_integrity()

    def cancel(self, request_id: str) -> None:
        chunk = self.core.cancel(request_id)
        assert chunk is not None
        self.take(chunk)
        self.core.check_integrity()

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def check_answers(self, limit: int = 400) -> None:
        for request_id, request in self.requests.items():
            expected = reference(request, limit)
            if self.ends[request_id] is FinishReason.CANCELLED:
                assert expected[0][: len(self.answers[request_id])] == self.answers[request_id]
            else:
                assert (self.answers[request_id], self.ends[request_id]) == expected, request_id
            self.check_report(request)

    def check_report(self, request: Request) -> None:
        is_told = request.sampling.prompt_logprobs is not None and (
            self.ends[request.request_id] is not FinishReason.ERROR and bool(self.answers[request.request_id])
        )
        assert not is_told or request.request_id in self.reports
        if request.request_id in self.reports:
            told = [None if one is None else one.logprob for one in self.reports[request.request_id]]
            assert told == pytest.approx(reference_report(request.prompt_token_ids), abs=1e-5)


def make_request(request_id: str, prompt: list[int], *, salt: str = "", **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | sampling)
    return Request(request_id=request_id, prompt_token_ids=prompt, sampling=params, cache_salt=salt)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, BROKEN) for _ in range(num_tokens)]


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 1.2, "seed": 7, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1},
]
REPORTED: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 3}


def test_batched_equals_single() -> None:
    client = Client(ToyModel(128))
    for i, sampling in enumerate(SAMPLINGS * 3):
        client.add(make_request(f"r{i}", prompt_of(5 + 17 * i, i), **sampling, **(REPORTED if i % 3 == 0 else {})))
    client.add(make_request("unseeded", prompt_of(30), temperature=1.0))
    client.run()
    del client.requests["unseeded"]
    client.check_answers()


@pytest.mark.parametrize("budget", [36, 64, 100, 1000])
def test_chunked_equals_whole(budget: int) -> None:
    model = ToyModel(128)
    client = Client(model, max_num_batched_tokens=budget, max_num_seqs=4)
    for i, length in enumerate((1, 31, 32, 33, 64, 200, 333)):
        client.add(make_request(f"r{i}", prompt_of(length, i), **SAMPLINGS[i % 5]))
        client.add(make_request(f"reported{i}", prompt_of(length, i + 50), **SAMPLINGS[i % 5], **REPORTED))
    client.run()
    client.check_answers()
    assert len(client.reports) == 7
    assert model.max_tokens_in_step <= budget


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_cached_equals_cold(prefix_cache: bool) -> None:
    client = Client(ToyModel(64), prefix_cache=prefix_cache)
    system = prompt_of(100)
    turns = [system, [*system, 9, 8], [*system, 9, 9], system[:64], system[:65], [1, *system]]
    for i, prompt in enumerate(turns):
        client.add(make_request(f"r{i}", prompt, **SAMPLINGS[i % 5]))
        client.run()
    # a second turn of the conversation finds the first answer too
    follow_up = [*turns[1], *client.answers["r1"], *prompt_of(5, 9)]
    client.add(make_request("follow-up", follow_up))
    client.run()
    client.check_answers()
    hits = [0, 96, 96, 32, 64, 0, (102 + 39) // 32 * 32]
    assert list(client.cached.values()) == (hits if prefix_cache else [0] * 7)
    stats = client.core.stats()
    assert stats.prefix_hit_tokens_total == sum(client.cached.values())
    assert stats.prompt_tokens_total == sum(len(r.prompt_token_ids) for r in client.requests.values())


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_equals_undisturbed(prefix_cache: bool) -> None:
    client = Client(ToyModel(12), max_num_batched_tokens=64, max_num_seqs=8, prefix_cache=prefix_cache)
    for i in range(12):
        client.add(make_request(f"r{i}", prompt_of(20 + 9 * i, i), max_tokens=150, **SAMPLINGS[i % 5]))
    client.run()
    assert client.core.stats().preemptions_total > 5
    client.check_answers(limit=12 * TOKENS_PER_BLOCK)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_report_is_whole_after_a_preemption(prefix_cache: bool) -> None:
    """Older requests take more blocks than the one each that was kept for them, while a long prompt is computed."""
    model = ToyModel(45)
    client = Client(model, max_num_batched_tokens=36, max_num_seqs=4, max_model_len=1280, prefix_cache=prefix_cache)
    for i in range(3):
        client.add(make_request(f"older{i}", prompt_of(30, i), max_tokens=100))
    client.add(make_request("reported", prompt_of(1200, 1), **REPORTED))
    while client.core.stats().preemptions_total == 0:
        assert client.core.has_work
        client.step()
    assert sum(request_id == "reported" for request_id, _ in model.wanted) == 1152
    client.run()
    assert client.core.stats().preemptions_total == 1
    client.check_answers(limit=1280)
    assert len(client.reports["reported"]) == 1200


def test_seeded_requests_repeat_beside_unseeded_ones() -> None:
    client = Client(ToyModel(128))
    for i in range(10):
        seed = 11 if i % 2 else None
        client.add(make_request(f"r{i}", prompt_of(20), temperature=1.0, seed=seed))
    client.run()
    assert len({tuple(client.answers[f"r{i}"]) for i in range(1, 10, 2)}) == 1
    assert len({tuple(client.answers[f"r{i}"]) for i in range(0, 10, 2)}) == 5


def test_broken_logits_end_one_request_only() -> None:
    client = Client(ToyModel(64))
    client.add(make_request("bad", [BROKEN, *prompt_of(80)]))
    client.add(make_request("good", prompt_of(80)))
    client.run()
    assert client.ends == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    client.check_answers()


def test_a_failed_step_can_be_repeated() -> None:
    model = ToyModel(64)
    client = Client(model)
    client.add(make_request("a", prompt_of(80)))
    client.add(make_request("b", prompt_of(30, 1)))
    for _ in range(4):
        model.fail_next = True
        with pytest.raises(EngineError, match="the device was lost"):
            client.core.step()
        client.step()
    client.run()
    client.check_answers()


def test_no_work_is_no_step() -> None:
    client = Client(ToyModel(4))
    assert client.core.step() == []
    assert client.core.cancel("nobody") is None
    assert client.core.stats().steps_total == 0


def random_request(rng: random.Random, request_id: str) -> Request:
    shared = prompt_of(rng.choice((0, 0, 0, 40, 130)), seed=rng.randrange(3))
    prompt = shared + prompt_of(rng.randint(1, 20), seed=rng.randrange(10**6))
    if rng.random() < 0.1:
        prompt[0] = BROKEN
    return make_request(
        request_id,
        prompt,
        salt=rng.choice(("", "A", "B")),
        max_tokens=rng.choice((1, 60, 150, 250)),
        prompt_logprobs=1 if rng.random() < 0.2 else None,
        ignore_eos=rng.random() < 0.8,
        stop_token_ids=(3,) if rng.random() < 0.2 else (),
        **rng.choice(SAMPLINGS),
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_day_of_requests(seed: int) -> None:
    """Bursts, early leavers, bad input, failed steps: all is checked after each step, and every answer at the end."""
    rng = random.Random(seed)
    model = ToyModel(18)
    client = Client(model, max_num_batched_tokens=72, max_num_seqs=8, max_waiting=12, max_model_len=300)
    num_refused = 0
    for i in range(2000):
        for _ in range(rng.choice((0, 0, 0, 0, 1, 3)) if i % 300 < 100 else 0):
            try:
                client.add(random_request(rng, f"r{len(client.requests)}"))
            except OverloadedError:
                num_refused += 1
        living = sorted(client.requests.keys() - client.ends.keys())
        if living and rng.random() < 0.02:
            client.cancel(rng.choice(living))
        if rng.random() < 0.02:
            with pytest.raises(RequestError):
                client.core.add_request(make_request("bad", rng.choice(([], [VOCAB], [1] * 300))))
        if client.core.has_work and rng.random() < 0.02:
            model.fail_next = True
            with pytest.raises(EngineError):
                client.core.step()
        client.step()
    client.run()
    assert set(client.ends.values()) == set(FinishReason)
    client.check_answers(limit=300)
    assert len(client.reports) > 10
    stats = client.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 18)
    assert min(stats.preemptions_total, stats.evictions_total, stats.prefix_hit_tokens_total, num_refused) > 10
    assert stats.generated_tokens_total == sum(map(len, client.answers.values()))
    assert model.max_tokens_in_step <= 72
