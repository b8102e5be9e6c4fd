"""What is scheduled, down to the block ids, in scenarios small enough to be read."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from harness.errors import OverloadedError, RequestError
from harness.runtime.executor import TOKENS_PER_BLOCK, SchedulerOutput
from harness.runtime.request import DEFAULT_PRIORITY, FinishReason, Request, SamplingParams, TokenChunk, TokenLogprob
from harness.runtime.sampler import SampledToken
from harness.runtime.scheduler import Scheduler, SchedulerConfig

VOCAB = 1000
EOS = 999


def make_scheduler(num_blocks: int = 64, **limits: Any) -> Scheduler:
    config = SchedulerConfig(**{"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128} | limits)
    return Scheduler(config, num_blocks=num_blocks, vocab_size=VOCAB, eos_token_ids=[EOS])


def make_request(request_id: str, prompt: list[int], *, salt: str = "", **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 16} | sampling)
    return Request(request_id=request_id, prompt_token_ids=prompt, sampling=params, cache_salt=salt)


def prompt_of(num_tokens: int, first: int = 0) -> list[int]:
    return [first + i % 500 for i in range(num_tokens)]


def tokens_of(output: SchedulerOutput) -> dict[str, int]:
    return {part.request_id: len(part.token_ids) for part in output.sequences}


def score_of(token_id: int) -> SampledToken:
    """A log-probability that tells which token it is of."""
    return SampledToken(token_id=token_id, logprob=TokenLogprob(logprob=-float(token_id), top=[]))


def report_on(prompt: list[int]) -> list[TokenLogprob | None]:
    return [None, *(score_of(token_id).logprob for token_id in prompt[1:])]


def step(scheduler: Scheduler, token_id: int = 7) -> tuple[SchedulerOutput, list[TokenChunk]]:
    """One step in which every sequence that may samples `token_id`."""
    output = scheduler.schedule()
    sampled = [
        SampledToken(token_id=token_id) if given is None else score_of(given)
        for _, given in scheduler.logit_rows(output)
    ]
    chunks = scheduler.update(output, sampled)
    scheduler.check_integrity()
    return output, chunks


def run_to_end(scheduler: Scheduler) -> list[TokenChunk]:
    chunks: list[TokenChunk] = []
    while scheduler.has_work:
        chunks += step(scheduler)[1]
    return chunks


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_model_len": 1}, "max_model_len is 1; allowed: 2 or more"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"max_num_batched_tokens": 35}, "max_num_batched_tokens is 35; allowed: 36 or more"),
    ],
)
def test_limits_are_checked(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**limits)


def test_a_queue_that_knows_no_priorities_says_so() -> None:
    urgent = Request(
        request_id="r", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=1), priority=DEFAULT_PRIORITY + 0.1
    )
    with pytest.raises(RequestError, match="in turn") as refused:
        make_scheduler().add(urgent)
    assert refused.value.param == "priority"


def test_one_request_from_prompt_to_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_of(40), max_tokens=3))
    output, chunks = step(scheduler, 5)
    (part,) = output.sequences
    assert (part.token_ids, part.num_computed_tokens) == (prompt_of(40), 0)
    assert (part.block_table, part.logit_positions) == ([0, 1], [39])
    assert chunks == [TokenChunk(request_id="a", token_ids=[5])]
    output, chunks = step(scheduler, 6)
    (part,) = output.sequences
    assert (part.token_ids, part.num_computed_tokens) == ([5], 40)
    assert (part.block_table, part.logit_positions) == ([0, 1], [0])
    assert step(scheduler, 8)[1] == [
        TokenChunk(request_id="a", token_ids=[8], finish_reason=FinishReason.LENGTH),
    ]
    assert not scheduler.has_work
    stats = scheduler.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks, stats.steps_total) == (64, 1, 3)
    assert (stats.prompt_tokens_total, stats.generated_tokens_total) == (40, 3)


def test_a_block_is_taken_when_the_last_one_is_full() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_of(31)))
    tables = [step(scheduler)[0].sequences[0].block_table for _ in range(4)]
    assert tables == [[0], [0], [0, 1], [0, 1]]


def test_chunks_end_on_block_boundaries() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    scheduler.add(make_request("a", prompt_of(10)))
    scheduler.add(make_request("b", prompt_of(230, first=300)))
    outputs = [step(scheduler)[0] for _ in range(4)]
    # 100 - 10 leaves 90, cut to 64; then 100 - 1 leaves 99, cut to 96; the last chunk ends where the prompt does
    assert [tokens_of(output) for output in outputs] == [
        {"a": 10, "b": 64},
        {"a": 1, "b": 96},
        {"a": 1, "b": 70},
        {"a": 1, "b": 1},
    ]
    assert [output.sequences[1].logit_positions for output in outputs] == [[], [], [69], [0]]
    assert [output.sequences[1].num_computed_tokens for output in outputs] == [0, 64, 160, 230]


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_seqs=3)
    for request_id, length in (("a", 60), ("b", 90), ("c", 1), ("d", 1)):
        scheduler.add(make_request(request_id, prompt_of(length), max_tokens=3))
    # 4 tokens of budget are left: not enough for a block of b, and c does not overtake it
    assert tokens_of(step(scheduler)[0]) == {"a": 60}
    # of b the first block is found; then max_num_seqs keeps d waiting
    assert tokens_of(step(scheduler)[0]) == {"a": 1, "b": 58, "c": 1}
    output, chunks = step(scheduler)
    assert tokens_of(output) == {"a": 1, "b": 1, "c": 1}
    assert [chunk.finish_reason for chunk in chunks] == [FinishReason.LENGTH, None, None]
    assert tokens_of(step(scheduler)[0]) == {"b": 1, "c": 1, "d": 1}


def test_a_prefill_that_was_cut_is_not_overtaken() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=60, prefix_cache=False)
    scheduler.add(make_request("long", prompt_of(80)))
    scheduler.add(make_request("short", prompt_of(4)))
    assert tokens_of(step(scheduler)[0]) == {"long": 32}
    assert tokens_of(step(scheduler)[0]) == {"long": 48, "short": 4}


def test_prefix_hits_are_exact() -> None:
    scheduler = make_scheduler()
    system = prompt_of(70)
    scheduler.add(make_request("a", [*system, 1, 2], salt="A", max_tokens=1))
    scheduler.add(make_request("b", [*system, 3], salt="A", max_tokens=1))
    # b came too early: nothing is found before the step that computes it is complete
    assert [chunk.num_cached_tokens for chunk in run_to_end(scheduler)] == [0, 0]
    scheduler.add(make_request("c", [*system, 4], salt="A", max_tokens=1))
    scheduler.add(make_request("d", [*system, 4], salt="B", max_tokens=1))
    output, chunks = step(scheduler)
    assert tokens_of(output) == {"c": 7, "d": 71}
    assert output.sequences[0].block_table[:2] == [0, 1]
    assert not set(output.sequences[1].block_table) & {0, 1}
    assert [chunk.num_cached_tokens for chunk in chunks] == [64, 0]
    stats = scheduler.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (72 + 71 + 71 + 71, 64)


def test_a_prompt_known_to_its_end_computes_its_last_block_again() -> None:
    scheduler = make_scheduler()
    for request_id in ("a", "b"):
        scheduler.add(make_request(request_id, prompt_of(64), max_tokens=1))
        output, chunks = step(scheduler)
    assert tokens_of(output) == {"b": 32}
    assert output.sequences[0].block_table == [0, 2]
    assert chunks[0].num_cached_tokens == 32


def test_generated_blocks_are_found_once_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_of(20), max_tokens=13))
    run_to_end(scheduler)
    answered = [*prompt_of(20), *[7] * 13]
    scheduler.add(make_request("b", [*answered, 1], max_tokens=1))
    assert step(scheduler)[1][0].num_cached_tokens == 32
    # of 20 + 12 tokens the last was never computed, so its block is not known
    fresh = make_scheduler()
    fresh.add(make_request("a", prompt_of(20), max_tokens=12))
    run_to_end(fresh)
    fresh.add(make_request("b", [*answered, 1], max_tokens=1))
    assert step(fresh)[1][0].num_cached_tokens == 0


def test_without_a_prefix_cache_nothing_is_found() -> None:
    scheduler = make_scheduler(prefix_cache=False)
    for request_id in ("a", "b"):
        scheduler.add(make_request(request_id, prompt_of(80), max_tokens=1))
        chunks = run_to_end(scheduler)
    assert chunks[0].num_cached_tokens == 0
    assert (scheduler.stats().num_cached_blocks, scheduler.stats().prefix_query_tokens_total) == (0, 0)


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", prompt_of(30), max_tokens=60))
    scheduler.add(make_request("b", prompt_of(40, first=400), max_tokens=30))
    outputs = [step(scheduler)[0] for _ in range(25)]
    assert [part.block_table for part in outputs[2].sequences] == [[0], [1, 2]]
    assert [part.block_table for part in outputs[3].sequences] == [[0, 3], [1, 2]]
    # b needs a third block for its token 65, and is the newest itself
    scheduler.add(make_request("c", prompt_of(1)))
    assert tokens_of(step(scheduler)[0]) == {"a": 1}
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks, stats.preemptions_total) == (1, 2, 2, 1)
    # c would fit, but b waits longer; a takes b's second block and keeps its first findable until it ends
    while len(output := step(scheduler)[0].sequences) == 1 and output[0].request_id == "a":
        assert output[0].block_table in ([0, 3], [0, 3, 2])
    assert [(part.request_id, len(part.token_ids), part.block_table) for part in output] == [("b", 33, [1, 2, 3])]
    # b was told 25 tokens before and is told 5 more; what it reports as cached is what its first admission found
    chunks = [chunk for chunk in run_to_end(scheduler) if chunk.request_id == "b"]
    assert [chunk.num_cached_tokens for chunk in chunks] == [0] * 4
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert scheduler.stats().prompt_tokens_total == 30 + 40 + 1
    assert scheduler.stats().generated_tokens_total == 60 + 30 + 16


def test_the_oldest_takes_blocks_from_the_newest() -> None:
    scheduler = make_scheduler(num_blocks=3, prefix_cache=False)
    scheduler.add(make_request("a", prompt_of(30), max_tokens=40))
    scheduler.add(make_request("b", prompt_of(32), max_tokens=40))
    tables = [[part.block_table for part in step(scheduler)[0].sequences] for _ in range(4)]
    assert tables == [[[0], [1]], [[0], [1, 2]], [[0], [1, 2]], [[0, 1]]]
    assert scheduler.stats().preemptions_total == 1
    while tokens_of(output := step(scheduler)[0]) == {"a": 1}:
        pass
    # its prompt and the 3 tokens it had generated
    assert tokens_of(output) == {"b": 35}


def test_an_admission_leaves_room_to_grow() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", prompt_of(31)))
    scheduler.add(make_request("b", prompt_of(31, first=400)))
    scheduler.add(make_request("c", prompt_of(31, first=200)))
    assert tokens_of(step(scheduler)[0]) == {"a": 31, "b": 31}
    run_to_end(scheduler)
    assert scheduler.stats().preemptions_total == 0


def test_a_long_prefill_runs_beside_a_growing_sequence() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=36)
    scheduler.add(make_request("a", prompt_of(30), max_tokens=100))
    step(scheduler)
    scheduler.add(make_request("b", prompt_of(190, first=300), max_tokens=2))
    # b needs 6 of 7 free blocks and leaves one for a, which takes it at its token 33
    assert [tokens_of(step(scheduler)[0]) for _ in range(6)] == [{"a": 1, "b": 32}] * 5 + [{"a": 1, "b": 30}]
    assert [chunk.request_id for chunk in run_to_end(scheduler) if chunk.finish_reason] == ["b", "a"]
    assert scheduler.stats().preemptions_total == 0


def test_stop_tokens_end_a_request_and_are_not_told() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("eos", prompt_of(4)))
    scheduler.add(make_request("stop", prompt_of(4), stop_token_ids=(5,)))
    scheduler.add(make_request("ignore", prompt_of(4), ignore_eos=True))
    chunks = {chunk.request_id: chunk for chunk in step(scheduler, EOS)[1]}
    assert chunks["eos"] == TokenChunk(request_id="eos", finish_reason=FinishReason.STOP)
    assert chunks["stop"] == TokenChunk(request_id="stop", finish_reason=FinishReason.STOP)
    assert chunks["ignore"] == TokenChunk(request_id="ignore", token_ids=[EOS])
    scheduler.add(make_request("stop", prompt_of(4), stop_token_ids=(5,), max_tokens=1))
    chunks = {chunk.request_id: chunk for chunk in step(scheduler, 5)[1]}
    assert chunks["ignore"].token_ids == [5]
    assert chunks["stop"] == TokenChunk(request_id="stop", finish_reason=FinishReason.STOP)


def test_logprobs_travel_with_their_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_of(4), logprobs=1))
    logprob = TokenLogprob(logprob=-0.5, top=[(3, -0.5)])
    chunks = scheduler.update(scheduler.schedule(), [SampledToken(token_id=3, logprob=logprob)])
    assert chunks[0].logprobs == [logprob]


def test_a_report_on_the_prompt_takes_logits_of_all_of_it_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=400)
    scheduler.add(make_request("a", prompt_of(300), prompt_logprobs=0, max_tokens=2))
    scheduler.add(make_request("b", prompt_of(10, first=400), max_tokens=2))
    steps = [step(scheduler) for _ in range(4)]
    # b has the budget, but does not overtake
    assert [tokens_of(output) for output, _ in steps] == [{"a": 128}, {"a": 128}, {"a": 44, "b": 10}, {"a": 1, "b": 1}]
    positions = [output.sequences[0].logit_positions for output, _ in steps]
    assert positions == [list(range(128)), list(range(128)), list(range(44)), [0]]
    assert [chunks for _, chunks in steps[:2]] == [[], []]
    first, second = steps[2][1][0], steps[3][1][0]
    assert first == TokenChunk(request_id="a", token_ids=[7], prompt_logprobs=report_on(prompt_of(300)))
    assert second == TokenChunk(request_id="a", token_ids=[7], finish_reason=FinishReason.LENGTH)


def test_reports_of_a_step_share_their_rows_of_logits() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=400)
    for request_id, length, report in (("a", 60, 1), ("b", 100, 1), ("c", 20, 1), ("d", 90, None)):
        prompt = prompt_of(length, first=ord(request_id))
        scheduler.add(make_request(request_id, prompt, prompt_logprobs=report, max_tokens=1))
    # of 128 rows a takes 60, one of which is for its next token; b gets two blocks of what is left
    outputs = []
    while scheduler.has_work:
        output, chunks = step(scheduler)
        outputs.append(tokens_of(output))
        assert sum(len(part.logit_positions) for part in output.sequences) <= 128 + len(output.sequences)
        assert all(chunk.prompt_logprobs is None for chunk in chunks if chunk.request_id == "d")
    assert outputs == [{"a": 60, "b": 64}, {"b": 36, "c": 20, "d": 90}]


def test_a_report_is_not_taken_from_the_prefix_cache_and_leaves_its_blocks_there() -> None:
    scheduler = make_scheduler()
    for request_id in ("a", "b"):
        scheduler.add(make_request(request_id, prompt_of(80), prompt_logprobs=0, max_tokens=1))
        output, (chunk,) = step(scheduler)
        assert tokens_of(output) == {request_id: 80}
        assert (chunk.num_cached_tokens, chunk.prompt_logprobs) == (0, report_on(prompt_of(80)))
    assert scheduler.stats().prefix_query_tokens_total == 0
    scheduler.add(make_request("c", prompt_of(80), max_tokens=1))
    assert step(scheduler)[1][0].num_cached_tokens == 64
    stats = scheduler.stats()
    assert (stats.prefix_query_tokens_total, stats.prompt_tokens_total) == (80, 240)


@pytest.mark.parametrize("prompt", [prompt_of(1), prompt_of(40)])
@pytest.mark.parametrize("token_id", [7, EOS])
def test_a_prompt_can_be_scored_alone(prompt: list[int], token_id: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt, prompt_logprobs=0, max_tokens=0))
    _, chunks = step(scheduler, token_id)
    report = report_on(prompt)
    assert chunks == [TokenChunk(request_id="a", prompt_logprobs=report, finish_reason=FinishReason.LENGTH)]
    assert not scheduler.has_work
    assert scheduler.stats().generated_tokens_total == 0


def test_a_report_comes_though_the_answer_is_empty() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_of(5), prompt_logprobs=0))
    (chunk,) = step(scheduler, EOS)[1]
    assert (chunk.finish_reason, chunk.prompt_logprobs) == (FinishReason.STOP, report_on(prompt_of(5)))


@pytest.mark.parametrize(("num_blocks", "limit"), [(64, 100), (2, 64)])
def test_max_tokens_is_cut_to_context_and_memory(num_blocks: int, limit: int) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=100)
    scheduler.add(make_request("a", prompt_of(50), max_tokens=10_000))
    chunks = run_to_end(scheduler)
    assert sum(len(chunk.token_ids) for chunk in chunks) == limit - 50
    assert chunks[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ([], "empty_prompt", "the prompt is empty"),
        (prompt_of(100), "context_length_exceeded", "the prompt has 100 tokens; .* may have 100"),
        ([1, VOCAB], "invalid_token_id", "token id 1000 is not in the vocabulary; allowed: 0 to 999"),
        ([1, -1], "invalid_token_id", "token id -1"),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing(prompt: list[int], code: str, message: str) -> None:
    scheduler = make_scheduler(max_model_len=100)
    with pytest.raises(RequestError, match=message) as refused:
        scheduler.add(make_request("a", prompt))
    assert (refused.value.param, refused.value.code) == ("prompt", code)
    assert not scheduler.has_work
    scheduler.add(make_request("a", prompt_of(99)))
    assert run_to_end(scheduler)[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("token_id", [-5, VOCAB])
def test_a_stop_token_that_can_never_come_is_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token_id} is not in the vocabulary") as refused:
        make_scheduler().add(make_request("a", [1], stop_token_ids=(3, token_id)))
    assert (refused.value.param, refused.value.code) == ("stop_token_ids", "invalid_token_id")


def test_a_prompt_that_the_pool_can_never_hold_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=2)
    with pytest.raises(RequestError, match="the prompt has 64 tokens"):
        scheduler.add(make_request("a", prompt_of(2 * TOKENS_PER_BLOCK)))


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_of(4), max_tokens=1))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(make_request("a", prompt_of(4)))
    run_to_end(scheduler)
    scheduler.add(make_request("a", prompt_of(4)))


def test_a_full_queue_refuses_and_accepted_requests_finish() -> None:
    scheduler = make_scheduler(max_waiting=2)
    scheduler.add(make_request("a", prompt_of(4)))
    scheduler.add(make_request("b", prompt_of(4)))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        scheduler.add(make_request("c", prompt_of(4)))
    step(scheduler)
    scheduler.add(make_request("c", prompt_of(4)))
    assert {chunk.request_id for chunk in run_to_end(scheduler) if chunk.finish_reason} == {"a", "b", "c"}


def test_cancel_frees_blocks_whether_running_or_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", prompt_of(40)))
    scheduler.add(make_request("b", prompt_of(40)))
    step(scheduler)
    assert scheduler.stats().num_free_blocks == 62
    cancelled = TokenChunk(request_id="a", finish_reason=FinishReason.CANCELLED)
    assert scheduler.cancel("a") == cancelled
    assert scheduler.stats().num_free_blocks == 64
    assert scheduler.cancel("a") is None
    assert scheduler.cancel("b") == TokenChunk(request_id="b", finish_reason=FinishReason.CANCELLED)
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_kv_behind_broken_logits_is_not_reused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_of(70)))
    output = scheduler.schedule()
    (chunk,) = scheduler.update(output, [None])
    assert (chunk.finish_reason, chunk.token_ids) == (FinishReason.ERROR, [])
    assert chunk.error == "the logits of token 70 are not finite"
    scheduler.check_integrity()
    scheduler.add(make_request("b", prompt_of(70), max_tokens=1))
    assert step(scheduler)[1][0].num_cached_tokens == 0


def test_broken_logits_within_a_prompt_end_its_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt_of(70), prompt_logprobs=0))
    scheduler.add(make_request("b", prompt_of(10, first=400), prompt_logprobs=0, max_tokens=1))
    output = scheduler.schedule()
    results: list[SampledToken | None] = [score_of(given or 0) for _, given in scheduler.logit_rows(output)]
    results[20] = results[50] = None
    broken, sound = scheduler.update(output, results)
    scheduler.check_integrity()
    assert (broken.finish_reason, broken.prompt_logprobs) == (FinishReason.ERROR, None)
    assert broken.error == "the logits of token 21 are not finite"
    assert sound.prompt_logprobs == report_on(prompt_of(10, first=400))
    scheduler.add(make_request("c", prompt_of(70), max_tokens=1))
    assert step(scheduler)[1][0].num_cached_tokens == 0


def test_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(num_blocks=3)
    scheduler.add(make_request("a", prompt_of(30), max_tokens=40))
    scheduler.add(make_request("b", prompt_of(32), max_tokens=40))
    logged = []
    for _ in range(4):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="harness.decisions"):
            step(scheduler)
        logged.append(caplog.messages)
    assert logged == [
        [
            "KV_CACHE request=a hit_tokens=0 of=30",
            "KV_CACHE request=b hit_tokens=0 of=32",
            "BATCHING tokens=62 sequences=2 waiting=0",
        ],
        ["BATCHING tokens=2 sequences=2 waiting=0"],
        ["BATCHING tokens=2 sequences=2 waiting=0"],
        ["PREEMPT request=b", "BATCHING tokens=1 sequences=1 waiting=1"],
    ]
