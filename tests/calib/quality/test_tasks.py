"""From items to requests and answers: what the model is shown, and what is taken of what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from harness.calib.measure import log_softmax
from harness.calib.quality.items import Answer
from harness.calib.quality.suite import DEFAULT_SUITE, Decoding, Suite, load_suite
from harness.calib.quality.tasks import Task, TaskSettings, read_tasks, run_task
from harness.errors import EngineDeadError, HarnessError, SuiteError
from harness.ledger import TOKENS_PER_BLOCK
from harness.manifest import read_manifest
from harness.runtime.backend import BackendStats
from harness.runtime.config import EngineConfig
from harness.runtime.executor import ScheduledSequence, SchedulerOutput
from harness.runtime.openvino_executor import OpenVinoExecutor
from harness.runtime.process_backend import ProcessBackend
from harness.runtime.request import FinishReason, Request, TokenChunk, TokenLogprob
from harness.tokenizer import Tokenizer, TokenizerFiles

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
REASONING_TEMPLATE = TEMPLATE + "<think>"

MakeSuite = Callable[..., Suite]


@pytest.fixture
def make_suite(tmp_path: Path) -> MakeSuite:
    """A suite of one task with these items."""

    def make(scorer: str, items: list[dict[str, Any]], **entry: Any) -> Suite:
        content = yaml.safe_load(DEFAULT_SUITE.read_text("utf-8"))
        (tmp_path / "text.txt").write_text("Once upon a time there was a fox. " * 400, encoding="utf-8")
        content["text"]["domains"] = {"english": "text.txt"}
        lines = "".join(json.dumps({"id": str(number), **item}) + "\n" for number, item in enumerate(items, 1))
        (tmp_path / "items.jsonl").write_text(lines, encoding="utf-8")
        described = {"name": "t", "layer": "tasks", "description": "d", "source": "s", "file": "items.jsonl"}
        content["tasks"] = [{**described, "scorer": scorer, **entry}]
        path = tmp_path / "suite.yaml"
        path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
        return load_suite(path)

    return make


class ScriptedBackend:
    """A `Backend` that answers each prompt with a text, byte by byte, and notes the requests."""

    is_ready = True
    num_restarts = 0

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[str], str | Exception]) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self.prompts: list[str] = []
        self.requests: list[Request] = []
        self.num_running = self.most_running = 0

    async def start(self) -> None: ...

    async def submit(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        try:
            answer = self._answer(prompt)
            if isinstance(answer, Exception):
                raise answer
            if answer == "NaN":
                yield TokenChunk(request_id=request.request_id, finish_reason=FinishReason.ERROR, error="NaN")
                return
            ids = self._tokenizer.encode(answer, add_special_tokens=False)
            if request.sampling.prompt_logprobs is not None:
                # a token is the likelier the smaller its id
                report = [None, *(TokenLogprob(logprob=-float(i), top=[]) for i in request.prompt_token_ids[1:])]
                yield TokenChunk(
                    request_id=request.request_id, prompt_logprobs=report, finish_reason=FinishReason.LENGTH
                )
                return
            is_cut = len(ids) > request.sampling.max_tokens
            for token_id in ids[: request.sampling.max_tokens]:
                yield TokenChunk(request_id=request.request_id, token_ids=[token_id])
                await asyncio.sleep(0)
            reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
            yield TokenChunk(request_id=request.request_id, finish_reason=reason)
        finally:
            self.num_running -= 1

    async def stats(self) -> BackendStats:
        return BackendStats()

    async def stop(self) -> None: ...


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., TokenizerFiles]) -> Tokenizer:
    return Tokenizer(make_tokenizer(chat_template=TEMPLATE, bos=None), {})


def ask(
    suite: Suite, tokenizer: Tokenizer, answer: Callable[[str], str | Exception], **settings: Any
) -> tuple[list[Answer], ScriptedBackend]:
    backend = ScriptedBackend(tokenizer, answer)
    (task,) = read_tasks(suite)
    wished = {"decoding": Decoding(), "max_model_len": 4096, **settings}
    return asyncio.run(run_task(backend, tokenizer, task, TaskSettings(**wished))), backend


def test_a_prompt_is_a_conversation_with_all_that_belongs_to_it(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    suite = make_suite(
        "contains",
        [{"prompt": "Who?", "system": "Be brief.", "answer_prefix": "It is", "expected": ["Ann"]}] * 3,
        examples=[{"prompt": "Where?", "answer": "It is here"}],
        stop=["\n"],
        max_tokens=9,
    )
    answers, backend = ask(suite, tokenizer, lambda _: " Ann\nand more", system_prompts=("You are A.", "You are B."))
    shown = "\n\nBe brief.\n<user>Where?\n<assistant>It is here\n<user>Who?\n<assistant>It is"
    assert backend.prompts == [f"<system>You are {name}.{shown}" for name in "ABA"]
    assert answers == [Answer(prompt="Who?", text=" Ann", finish="stop")] * 3
    assert {request.sampling.max_tokens for request in backend.requests} == {9}


def test_no_system_turn_without_a_system_prompt(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    _, backend = ask(make_suite("contains", [{"prompt": " \n", "expected": ["Ann"]}]), tokenizer, lambda _: "x")
    assert backend.prompts == ["<user> \n\n<assistant>"]


def test_answers_come_in_the_order_of_items_whoever_ends_first(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    items = [{"prompt": f"{number:02}", "expected": ["x"]} for number in range(20)]
    seen: list[int] = []
    answers, backend = ask(
        make_suite("contains", items),
        tokenizer,
        lambda prompt: prompt[6:8] * (1 + int(prompt[6:8]) * 5 % 7),
        max_concurrent=5,
        on_item=lambda: seen.append(1),
    )
    assert [answer.text[:2] for answer in answers] == [item["prompt"] for item in items]
    assert backend.most_running == 5
    assert len(seen) == 20
    assert len({request.request_id for request in backend.requests}) == 20


def test_decoding_is_the_suites(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    decoding = Decoding(temperature=0.7, top_p=0.9, seed=5)
    suite = make_suite("contains", [{"prompt": "a", "expected": ["x"]}, {"prompt": "b", "expected": ["x"]}])
    _, backend = ask(suite, tokenizer, lambda _: "x", decoding=decoding)
    assert [(s.temperature, s.top_p, s.seed) for s in (request.sampling for request in backend.requests)] == [
        (0.7, 0.9, 5),
        (0.7, 0.9, 6),
    ]


def test_what_does_not_fit_is_not_asked(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    items = [{"prompt": "x" * length, "expected": ["x"]} for length in (10, 73, 74, 5000)]
    room = 100 - 8 - len(tokenizer.encode("<user>\n<assistant>"))
    items[1]["prompt"], items[2]["prompt"] = "x" * room, "x" * (room + 1)
    answers, backend = ask(make_suite("contains", items, max_tokens=8), tokenizer, lambda _: "x", max_model_len=100)
    assert [answer.finish for answer in answers] == ["stop", "stop", "too_long", "too_long"]
    assert len(backend.requests) == 2


def test_a_cut_answer_and_one_that_is_not_finite_are_told(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    items = [{"prompt": prompt, "expected": ["x"]} for prompt in ("long", "NaN", "fine")]
    said = {"long": "x" * 50, "NaN": "NaN", "fine": "x"}
    answers, _ = ask(
        make_suite("contains", items, max_tokens=8),
        tokenizer,
        lambda prompt: said[prompt[6:].partition("\n")[0]],
    )
    assert [answer.finish for answer in answers] == ["length", "error", "stop"]


def test_a_dead_engine_ends_it_all(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    suite = make_suite("contains", [{"prompt": "a", "expected": ["x"]}] * 40)
    with pytest.raises(EngineDeadError):
        ask(suite, tokenizer, lambda _: EngineDeadError("it died"))


def test_reasoning_is_not_scored(make_suite: MakeSuite, make_tokenizer: Callable[..., TokenizerFiles]) -> None:
    tokenizer = Tokenizer(make_tokenizer(chat_template=REASONING_TEMPLATE, bos=None), {})
    items = [{"prompt": "Who?", "answer_prefix": "It is", "expected": ["Ann"]}]
    suite = make_suite("contains", items, max_tokens=10, stop=["\n"])
    # without tokens to reason with, the tag is closed and the answer begun
    (answer,), backend = ask(suite, tokenizer, lambda _: " Ann")
    assert backend.prompts[0].endswith("<assistant><think>\n\n</think>\n\nIt is")
    assert answer.text == " Ann"
    # with some, the model reasons, and stop strings are for its answer
    decoding = Decoding(max_reasoning_tokens=40)
    (answer,), backend = ask(suite, tokenizer, lambda _: "Bob?\nNo.</think>\n\nAnn\nmore", decoding=decoding)
    assert backend.prompts[0].endswith("<assistant><think>")
    assert backend.requests[0].sampling.max_tokens == 50
    assert (answer.text, answer.finish) == ("Ann", "stop")


def test_a_tag_that_the_model_opens_is_reasoning_too(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    suite = make_suite("contains", [{"prompt": "Who?", "expected": ["Ann"]}])
    (answer,), _ = ask(suite, tokenizer, lambda _: "<think>Bob?</think>\n\nAnn")
    assert answer.text == "Ann"


def test_choices_are_scored_by_all_their_tokens(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    suite = make_suite("multiple_choice", [{"prompt": "?", "choices": ["ab", "b", "abc"], "correct": 0}])
    (answer,), backend = ask(suite, tokenizer, lambda _: "")
    sums = [-float(sum(tokenizer.encode(choice))) for choice in ("ab", "b", "abc")]
    assert answer.choice_logprobs == tuple(sums)
    assert {request.sampling.max_tokens for request in backend.requests} == {0}
    (answer,), _ = ask(suite, tokenizer, lambda _: "NaN")
    assert answer.finish == "error"
    (answer,), _ = ask(suite, tokenizer, lambda _: "", max_model_len=12)
    assert answer.finish == "too_long"


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_lies_at_its_depth_and_fills_the_context(
    make_suite: MakeSuite, tokenizer: Tokenizer, depth: float
) -> None:
    item = {"prompt": "Read: {text} Code?", "needle": "The code is 7.", "expected": ["7"], "depth": depth, "fill": 0.5}
    suite = make_suite("needle", [{**item, "cap": 1000}, {**item, "cap": 500}, {**item, "cap": 90_000}], max_tokens=8)
    answers, backend = ask(suite, tokenizer, lambda _: "7", max_model_len=40_000)
    # the suite's text has 13,600 characters, so the longest context takes it twice
    for request, budget in zip(backend.requests, (1000, 500, 20_000), strict=True):
        assert budget - 32 <= len(request.prompt_token_ids) + 8 <= budget
    before, after = answers[0].prompt.split("The code is 7.")
    assert len(before) / len(before + after) == pytest.approx(depth, abs=0.03)


def test_a_context_too_short_for_any_hay_shows_the_needle_alone(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    item = {"prompt": "Read: {text} Code?", "needle": "The code is 7.", "expected": ["7"]}
    answers, _ = ask(make_suite("needle", [item], max_tokens=8), tokenizer, lambda _: "7", max_model_len=64)
    assert answers[0].prompt.split() == ["Read:", "The", "code", "is", "7.", "Code?"]


def test_code_is_asked_for_only_where_it_may_be_run(make_suite: MakeSuite, tokenizer: Tokenizer) -> None:
    item = {"prompt": "Go on.", "header": "def f():\n", "entry_point": "f", "tests": "assert f() == 1"}
    suite = make_suite("python_tests", [item])
    assert ask(suite, tokenizer, lambda _: "\n    return 1")[0] == []
    (answer,), backend = ask(suite, tokenizer, lambda _: "\n    return 1", allow_code_execution=True)
    assert backend.prompts[0].endswith("<assistant>```python\ndef f():")
    assert answer.text == "\n    return 1"


def test_a_template_that_refuses_is_told(make_suite: MakeSuite, make_tokenizer: Callable[..., TokenizerFiles]) -> None:
    tokenizer = Tokenizer(make_tokenizer(chat_template="{{ raise_exception('no') }}", bos=None), {})
    with pytest.raises(HarnessError, match="refuses item '1' of task 't'"):
        ask(make_suite("contains", [{"prompt": "a", "expected": ["x"]}]), tokenizer, lambda _: "x")


@pytest.mark.parametrize(
    ("scorer", "item", "says"),
    [
        ("contains", {"prompt": "a", "expected": "x"}, r"items.jsonl, item '1'.*`array`.*\$.expected"),
        ("contains", {"prompt": "a"}, r"missing required field `expected`(.|\n)*have: id, prompt, expected"),
        ("contains", {"prompt": "a", "expected": ["x"], "expect": 1}, "unknown field `expect`"),
        ("sings", {"prompt": "a"}, r"scorer 'sings'(.|\n)*allowed: json_fields"),
        (
            "needle",
            {"prompt": "{text}", "needle": "n", "expected": ["n"], "domain": "x"},
            r"no domain 'x'(.|\n)*english",
        ),
        ("multiple_choice", {"prompt": "a", "choices": ["a", "b"], "correct": 7}, "correct is 7"),
        ("contains", {"prompt": "\ud800", "expected": ["x"]}, "half a surrogate pair"),
    ],
)
def test_a_wrong_item_is_named_before_anything_runs(
    make_suite: MakeSuite, scorer: str, item: dict[str, Any], says: str
) -> None:
    with pytest.raises(SuiteError, match=says):
        read_tasks(make_suite(scorer, [item]))


def test_a_line_separator_in_a_text_ends_no_line(make_suite: MakeSuite, tmp_path: Path) -> None:
    suite = make_suite("contains", [{"prompt": "a", "expected": ["x"]}])
    (tmp_path / "items.jsonl").write_text(
        '{"id": "1", "prompt": "a\u2028b", "expected": ["x"]}\r\n\n', encoding="utf-8"
    )
    (task,) = read_tasks(suite)
    assert [item.prompt for item in task.items] == ["a\u2028b"]


def test_choices_of_a_real_engine_are_as_likely_as_its_logits_say(make_suite: MakeSuite, llama_f16: Path) -> None:
    """Through scheduler, batches and process, against one run of the whole text alone."""
    items = [
        {"prompt": "Go on.", "answer_prefix": "The sun", "choices": [" is", " was warm", " xyz"], "correct": 0},
        {"prompt": "Say it.", "choices": ["one two three", "no"], "correct": 1},
    ]
    (task,) = read_tasks(make_suite("multiple_choice", items))
    tokenizer, manifest = Tokenizer.from_dir(llama_f16), read_manifest(llama_f16)
    config = EngineConfig(engine_dir=llama_f16, max_model_len=256, deterministic=True).resolve(
        manifest, available_bytes=4 << 30, num_cores=1
    )
    answers = asyncio.run(_run(config, tokenizer, task))
    executor = OpenVinoExecutor(llama_f16, manifest, deterministic=True, kv_cache_bytes=64 << 20, num_threads=1)
    for item, answer in zip(items, answers, strict=True):
        turns = [{"role": "user", "content": item["prompt"]}]
        prompt = tokenizer.encode(tokenizer.render_chat(turns) + str(item.get("answer_prefix", "")))
        for choice, logprob in zip(item["choices"], answer.choice_logprobs, strict=True):
            ids = tokenizer.encode(choice, add_special_tokens=False)
            expected = _logprob(executor, prompt, ids)
            assert logprob == pytest.approx(expected, abs=1e-3)


async def _run(config: Any, tokenizer: Tokenizer, task: Task) -> list[Answer]:
    backend = ProcessBackend(config)
    await backend.start()
    try:
        settings = TaskSettings(decoding=Decoding(), max_model_len=config.max_model_len)
        return await run_task(backend, tokenizer, task, settings)
    finally:
        await backend.stop()


def _logprob(executor: OpenVinoExecutor, prompt: list[int], choice: list[int]) -> float:
    whole = [*prompt, *choice]
    sequence = ScheduledSequence(
        request_id="one",
        token_ids=whole,
        num_computed_tokens=0,
        block_table=list(range(-(-len(whole) // TOKENS_PER_BLOCK))),
        logit_positions=list(range(len(prompt) - 1, len(whole) - 1)),
    )
    logits = executor.execute(SchedulerOutput(sequences=[sequence])).logits
    return float(log_softmax(logits)[np.arange(len(choice)), choice].sum())
