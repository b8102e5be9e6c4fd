"""The core over TensorRT-LLM's executor: what clients get of it, held against a stand-in that checks every name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_trtllm
import pytest

from harness.errors import EngineError, OverloadedError, RequestError
from harness.manifest import EngineManifest
from harness.runtime.request import FinishReason, Request, SamplingParams, TokenChunk
from harness.runtime.tensorrt_llm.core import TrtllmCore

MakeCore = Callable[..., tuple[TrtllmCore, fake_trtllm.ToyEngine]]
Answers = dict[str, list[TokenChunk]]


def request(name: str, prompt: list[int], *, salt: str = "", max_tokens: int = 5, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})
    return Request(request_id=name, prompt_token_ids=prompt, sampling=params, cache_salt=salt)


def run(core: TrtllmCore, *requests: Request) -> Answers:
    """Chunks of each request, all computed together."""
    for one in requests:
        core.add_request(one)
    answers: Answers = {one.request_id: [] for one in requests}
    while core.has_work:
        for chunk in core.step():
            answers[chunk.request_id].append(chunk)
    return answers


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_requests_run_together_and_each_gets_its_own_tokens(make_core: MakeCore) -> None:
    core, toy = make_core()
    answers = run(core, *(request(str(start), [start], max_tokens=6) for start in (10, 50, 90, 130, 170, 210)))
    for start, chunks in answers.items():
        assert tokens(chunks) == list(range(int(start) + 1, int(start) + 7))
        assert len(chunks) == 6  # streamed, a token at a time
        assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + [FinishReason.LENGTH]
    # four of them in each step, as the engine was built
    assert toy.num_iterations < 20


def test_the_end_of_sequence_ends_a_request_and_is_not_delivered(make_core: MakeCore) -> None:
    (chunks,) = run(make_core()[0], request("r", [254], max_tokens=9)).values()
    assert tokens(chunks) == [255, 256]
    assert chunks[-1].finish_reason is FinishReason.STOP


def test_every_other_end_of_sequence_and_stop_token_does_so_too(
    make_core: MakeCore, gpu_manifest: Callable[..., EngineManifest]
) -> None:
    core, _ = make_core(gpu_manifest(eos_token_ids=(257, 100)))
    answers = run(core, request("eos", [97], max_tokens=9), request("stop", [10], max_tokens=9, stop_token_ids=(13,)))
    assert tokens(answers["eos"]) == [98, 99]
    assert tokens(answers["stop"]) == [11, 12]
    assert {chunks[-1].finish_reason for chunks in answers.values()} == {FinishReason.STOP}


def test_ignored_ends_of_sequence_are_delivered(
    make_core: MakeCore, gpu_manifest: Callable[..., EngineManifest]
) -> None:
    core, _ = make_core(gpu_manifest(eos_token_ids=(257, 100)))
    (chunks,) = run(core, request("r", [98], max_tokens=3, ignore_eos=True)).values()
    assert tokens(chunks) == [99, 100, 101]
    assert chunks[-1].finish_reason is FinishReason.LENGTH


def test_answers_are_cut_to_the_context(make_core: MakeCore) -> None:
    core, _ = make_core(max_model_len=64)
    (chunks,) = run(core, request("r", [1] * 60, max_tokens=100)).values()
    assert len(tokens(chunks)) == 4
    with pytest.raises(RequestError, match="may have 64"):
        core.add_request(request("long", [1] * 64))


def test_cached_tokens_are_exact(make_core: MakeCore) -> None:
    core, _ = make_core()
    prompt = list(range(100))
    cached = {}
    for name, asked in {
        "cold": prompt,
        "same": prompt,  # all but the token that is always computed
        "longer": [*prompt, 100, 101, 102, 103, 104, 7, 8],
        "first block differs": [9, *prompt[1:]],
        "third block differs": [*prompt[:70], 3, *prompt[71:]],
    }.items():
        (chunks,) = run(core, request(name, asked)).values()
        assert len({chunk.num_cached_tokens for chunk in chunks}) == 1
        cached[name] = chunks[0].num_cached_tokens
    assert cached == {
        "cold": 0,
        "same": 96,
        "longer": 96,
        "first block differs": 0,
        "third block differs": 64,
    }
    stats = core.stats()
    assert stats.prefix_hit_tokens_total == 96 + 96 + 64
    assert stats.prompt_tokens_total == stats.prefix_query_tokens_total == 4 * 100 + 107


def test_a_stored_last_block_counts_up_to_the_token_that_is_computed(make_core: MakeCore) -> None:
    """Two tokens more than were stored: the executor then finds a block that is not full, and counts it as one."""
    core, _ = make_core()
    (first,) = run(core, request("first", list(range(40)), max_tokens=6)).values()
    whole = list(range(40)) + tokens(first)
    # 45 tokens were kept, in a whole block and one of 13
    (second,) = run(core, request("second", whole)).values()
    assert second[0].num_cached_tokens == 45 == len(whole) - 1


def test_tenants_never_share(make_core: MakeCore) -> None:
    core, _ = make_core()
    prompt = list(range(100))

    def cached(name: str, salt: str) -> int:
        (chunks,) = run(core, request(name, prompt, salt=salt)).values()
        return chunks[0].num_cached_tokens

    assert cached("a1", "a") == cached("b1", "b") == cached("open1", "") == 0
    assert cached("a2", "a") == cached("b2", "b") == cached("open2", "") == 96


def test_without_a_prefix_cache_nothing_is_reused(
    make_core: MakeCore, gpu_manifest: Callable[..., EngineManifest]
) -> None:
    for core, _ in (make_core(prefix_cache=False), make_core(gpu_manifest(prefix_reuse=False))):
        for name in ("first", "again"):
            (chunks,) = run(core, request(name, list(range(100)))).values()
            assert chunks[0].num_cached_tokens == 0
        assert core.stats().prefix_query_tokens_total == 0


def test_cancelling_frees_the_blocks_and_says_nothing_more(make_core: MakeCore) -> None:
    core, toy = make_core()
    for n in range(6):
        core.add_request(request(f"r{n}", [n] * 40, max_tokens=200))
    assert core.step()
    assert (core.stats().num_running, core.stats().num_waiting) == (4, 2)
    assert core.stats().num_free_blocks < core.stats().num_blocks
    for n in range(6):
        last = core.cancel(f"r{n}")
        assert last is not None
        assert last.finish_reason is FinishReason.CANCELLED
        assert core.cancel(f"r{n}") is None
    assert (core.stats().num_running, core.stats().num_waiting) == (0, 0)
    while core.has_work:
        assert core.step() == []
    assert not toy.active
    assert not toy.queue
    assert core.stats().num_free_blocks == core.stats().num_blocks == fake_trtllm.NUM_BLOCKS
    assert core.cancel("unknown") is None


def test_a_full_queue_is_an_overload(make_core: MakeCore) -> None:
    core, _ = make_core(max_waiting=2)
    for name in ("first", "second"):
        core.add_request(request(name, [1]))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        core.add_request(request("third", [1]))
    assert core.step()  # both are taken from the queue
    core.add_request(request("third", [1]))  # its id was not kept


def test_one_request_refused_by_the_executor_ends_alone(make_core: MakeCore) -> None:
    core, _ = make_core()
    answers = run(core, request("bad", [fake_trtllm.REFUSED]), request("good", [1]))
    (refused,) = answers["bad"]
    assert refused.finish_reason is FinishReason.ERROR
    assert "fetching new request" in (refused.error or "")
    assert tokens(answers["good"]) == [2, 3, 4, 5, 6]


def test_a_broken_executor_is_the_end_of_the_engine(make_core: MakeCore) -> None:
    core, _ = make_core()
    core.add_request(request("poison", [fake_trtllm.POISON]))
    with pytest.raises(EngineError, match="CUDA error"):
        core.step()


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([1000], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"stop_token_ids": (1000,)}, "stop_token_ids"),
        ([1], {"prompt_logprobs": 0}, "prompt_logprobs"),
        ([1], {"logprobs": 3}, "logprobs"),
    ],
)
def test_what_it_cannot_do_is_refused_before_it_is_queued(
    make_core: MakeCore, prompt: list[int], fields: dict[str, Any], param: str
) -> None:
    core, toy = make_core()
    with pytest.raises(RequestError) as caught:
        core.add_request(request("r", prompt, **fields))
    assert caught.value.param == param
    assert not core.has_work
    assert toy.requests == []


def test_an_id_in_use_is_refused(make_core: MakeCore) -> None:
    core, _ = make_core()
    core.add_request(request("r", [1]))
    with pytest.raises(RequestError, match="in use"):
        core.add_request(request("r", [2]))


def test_without_chunks_a_prompt_must_fit_a_step(
    make_core: MakeCore, gpu_manifest: Callable[..., EngineManifest]
) -> None:
    core, _ = make_core(gpu_manifest(chunked_context=False))
    core.add_request(request("fits", [1] * 256))
    with pytest.raises(RequestError, match="takes 256"):
        core.add_request(request("long", [1] * 257))
    run(make_core()[0], request("in chunks", [1] * 500))


def test_log_probabilities_belong_to_the_tokens_delivered(make_core: MakeCore) -> None:
    core, _ = make_core()
    (chunks,) = run(core, request("r", [10], max_tokens=9, logprobs=0, stop_token_ids=(14,))).values()
    reports = [report for chunk in chunks for report in chunk.logprobs or []]
    assert tokens(chunks) == [11, 12, 13]
    assert [report.logprob for report in reports] == [fake_trtllm.log_prob(token_id) for token_id in (11, 12, 13)]
    assert all(report.top == [] for report in reports)


def test_figures_of_the_executor_are_reported(make_core: MakeCore) -> None:
    core, toy = make_core()
    run(core, request("r", list(range(40)), max_tokens=6))
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.steps_total == toy.num_iterations > 6
    assert stats.generated_tokens_total == 6
    assert (stats.gpu_memory_used_bytes, stats.gpu_memory_bytes) == (3, 80)
    assert (stats.num_cached_blocks, stats.evictions_total) == (None, None)
