"""Requests and sampling parameters in the executor's words, and what is refused instead."""

from __future__ import annotations

from typing import Any

import fake_trtllm
import pytest

from harness.errors import RequestError
from harness.runtime.request import Request, SamplingParams
from harness.runtime.tensorrt_llm.request_mapping import MAX_TOP_K, RequestMapper, salt_id

VOCAB_SIZE = 32000
NAMES = ("top_k", "top_p", "min_p", "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")


def mapper(**fields: Any) -> RequestMapper:
    defaults = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [2], "has_lookahead": False}
    return RequestMapper(api=fake_trtllm.make_module(), **(defaults | fields))


def mapped(*, salt: str = "", eos: list[int] | None = None, **sampling: Any) -> Any:
    request = Request(
        request_id="r",
        prompt_token_ids=[5, 6, 7],
        sampling=SamplingParams(**{"max_tokens": 9, **sampling}),
        cache_salt=salt,
    )
    return mapper(eos_token_ids=[2] if eos is None else eos).request(request, 9)


def sampling_of(**sampling: Any) -> dict[str, Any]:
    config = mapped(**sampling).sampling_config
    return {name: getattr(config, name) for name in NAMES if getattr(config, name) is not None}


def test_greedy_takes_the_likeliest_whatever_else_is_given() -> None:
    assert sampling_of(temperature=0.0, top_p=0.5, top_k=40, min_p=0.1) == {"top_k": 1}


def test_sampling_parameters_keep_their_values() -> None:
    assert sampling_of() == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    given = {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}
    assert sampling_of(**given) == given
    assert sampling_of(top_k=VOCAB_SIZE)["top_k"] == 0  # all of them, which is no filter


def test_presence_and_frequency_count_generated_tokens_alone() -> None:
    config = mapped(presence_penalty=0.5, frequency_penalty=-0.5).sampling_config
    assert (config.presence_penalty, config.frequency_penalty, config.prompt_ignore_length) == (0.5, -0.5, 3)
    # repetition counts the prompt, too
    assert mapped(repetition_penalty=1.1).sampling_config.prompt_ignore_length is None


def test_seeds_are_kept_and_without_one_every_request_draws_anew() -> None:
    assert mapped(seed=7).sampling_config.seed == 7
    assert mapped(seed=-1).sampling_config.seed == 2**64 - 1
    assert len({mapped().sampling_config.seed for _ in range(8)}) == 8


@pytest.mark.parametrize(
    ("eos", "sampling", "end_id", "stop_words"),
    [
        ([2], {}, 2, None),
        ([2, 3, 4], {"stop_token_ids": (9,)}, 2, [[3], [4], [9]]),
        ([2, 3], {"ignore_eos": True}, -1, None),
        ([2, 3], {"ignore_eos": True, "stop_token_ids": (2,)}, -1, [[2]]),
        ([], {}, -1, None),
    ],
)
def test_what_ends_a_request(eos: list[int], sampling: dict[str, Any], end_id: int, stop_words: Any) -> None:
    request = mapped(eos=eos, **sampling)
    assert (request.end_id, request.stop_words) == (end_id, stop_words)


def test_requests_are_streamed_with_the_figures_that_usage_needs() -> None:
    request = mapped()
    assert request.streaming
    assert request.output_config.return_perf_metrics
    assert request.output_config.exclude_input_from_output
    assert not request.output_config.return_log_probs
    assert mapped(logprobs=0, temperature=0.0).output_config.return_log_probs
    assert (request.input_token_ids, request.max_tokens) == ([5, 6, 7], 9)


def test_a_priority_is_the_executors() -> None:
    request = Request(request_id="r", prompt_token_ids=[5], sampling=SamplingParams(max_tokens=1), priority=0.75)
    made = mapper().request(request, 1)
    assert made.arguments["priority"] == 0.75


def test_a_salt_is_always_the_same_number_and_none_is_none() -> None:
    assert mapped().cache_salt_id is None
    # fixed, since blocks of several processes may one day be told apart by it
    assert mapped(salt="a").cache_salt_id == salt_id("a") == 7642108306138534471
    assert len({salt_id(str(n)) for n in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("sampling", "param", "words"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs", "prompt"),
        ({"logprobs": 1, "temperature": 0.0}, "logprobs", "alternatives"),
        ({"logprobs": 0, "temperature": 0.7}, "logprobs", "after temperature"),
        ({"logprobs": 0, "min_p": 0.1, "frequency_penalty": 1.0}, "logprobs", "min_p, frequency_penalty"),
        ({"top_k": MAX_TOP_K + 1}, "top_k", "0 to 1024"),
    ],
)
def test_what_the_executor_cannot_do_is_refused_by_name(sampling: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        mapper().check(SamplingParams(max_tokens=1, **sampling))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"logprobs": 0},
        {"logprobs": 0, "temperature": 0.0, "top_p": 0.5},
        {"top_k": MAX_TOP_K},
        {"top_k": VOCAB_SIZE},
        {"presence_penalty": 2.0, "seed": 3, "ignore_eos": True},
    ],
)
def test_what_it_can_do_is_not(sampling: dict[str, Any]) -> None:
    mapper().check(SamplingParams(max_tokens=1, **sampling))


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({}, "temperature"),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"temperature": 0.0, "logprobs": 0}, "logprobs"),
    ],
)
def test_lookahead_is_greedy_and_says_so(sampling: dict[str, Any], param: str) -> None:
    with_lookahead = mapper(has_lookahead=True)
    with_lookahead.check(SamplingParams(max_tokens=1, temperature=0.0))
    with pytest.raises(RequestError, match="lookahead") as caught:
        with_lookahead.check(SamplingParams(max_tokens=1, **sampling))
    assert caught.value.param == param
