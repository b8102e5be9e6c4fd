"""Tasks of a suite: asked of an engine through the seam that serves.

Owns how an item becomes a request and a request an answer; what items hold and how answers are scored is `items`'.
Prompts, text and reasoning are the server's: same chat template, same detokenizer. Two things are not:

- A reasoning model that is given no tokens to reason with (`max_reasoning_tokens` 0) gets its `<think>` closed, so that
  it answers at once (arXiv 2504.09858).
- An answer may be made to begin with a text (`answer_prefix`), which stands behind the prompt.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from harness.calib.quality.code_execution import why_not
from harness.calib.quality.items import SCORERS, Answer, Item, MultipleChoiceItem, NeedleItem, PythonItem
from harness.calib.quality.suite import Decoding, Suite, TaskEntry
from harness.calib.rendering import render_traffic
from harness.calib.traffic import TrafficRequest
from harness.errors import HarnessError, InvalidLogitsError, SuiteError
from harness.runtime.backend import Backend
from harness.runtime.reasoning import CLOSE, OPEN, ReasoningSplitter
from harness.runtime.request import FinishReason, Request, SamplingParams, TokenChunk
from harness.runtime.text_stream import Delta, TextStream
from harness.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task with its items, checked. `haystacks` is held-out text by domain, for items that need some."""

    entry: TaskEntry
    items: tuple[Item, ...]
    haystacks: dict[str, str]

    @property
    def runs_code(self) -> bool:
        """Whether scoring runs programs that the model wrote."""
        return SCORERS[self.entry.scorer] is PythonItem


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How tasks are run, on both sides alike.

    Args:
        system_prompts: of production; items take them in turn.
        max_model_len: longest prompt and answer together, in tokens.
        max_concurrent: items asked at once.
        allow_code_execution: whether programs of the model may be run.
        on_item: called after each item.
    """

    decoding: Decoding
    max_model_len: int
    system_prompts: tuple[str, ...] = ()
    max_concurrent: int = 16
    allow_code_execution: bool = False
    on_item: Callable[[], None] = lambda: None


def read_tasks(suite: Suite) -> list[Task]:
    """All tasks of a suite, every item checked.

    Raises:
        SuiteError: names the file and the item, and what to write.
    """
    return [_read_task(suite, entry) for entry in suite.content.tasks]


def _read_task(suite: Suite, entry: TaskEntry) -> Task:
    kind = SCORERS.get(entry.scorer)
    if kind is None:
        raise SuiteError(
            f"{suite.path}: task {entry.name!r} has the scorer {entry.scorer!r}", f"allowed: {', '.join(SCORERS)}"
        )
    items = tuple(_read_item(entry, kind, fields) for fields in suite.items(entry))
    domains = {item.domain: item.id for item in items if isinstance(item, NeedleItem)}
    for domain, item_id in domains.items():
        if domain not in suite.content.text.domains:
            raise SuiteError(
                f"{entry.file}, item {item_id!r}: the suite has no domain {domain!r}",
                f"allowed: {', '.join(suite.content.text.domains)}",
            )
    return Task(entry=entry, items=items, haystacks={d: "\n\n".join(suite.documents(d)) for d in domains})


def _read_item(entry: TaskEntry, kind: type[Item], fields: dict[str, Any]) -> Item:
    where = f"{entry.file}, item {fields['id']!r} of task {entry.name!r}"
    try:
        json.dumps(fields, ensure_ascii=False).encode()
        return msgspec.convert(fields, kind)
    except UnicodeEncodeError:
        raise SuiteError(f"{where} holds half a surrogate pair", "write the whole character, or U+FFFD") from None
    except msgspec.ValidationError as error:
        written = [
            field.name if field.required else f"[{field.name}]"
            for field in sorted(msgspec.structs.fields(kind), key=lambda field: not field.required)
        ]
        raise SuiteError(
            f"{where}: {error}",
            f"items of {entry.scorer} have: {', '.join(written)}; docs/suites.md has an example",
        ) from None


async def run_task(backend: Backend, tokenizer: Tokenizer, task: Task, settings: TaskSettings) -> list[Answer]:
    """Answers in the order of the items; none where the task may not or cannot be run here.

    Raises:
        HarnessError: the engine died, or its chat template refuses an item.
    """
    if task.runs_code and not (settings.allow_code_execution and why_not() is None):
        return []
    runner = _Runner(backend, tokenizer, task, settings)
    answers: dict[int, Answer] = {}
    waiting = iter(range(len(task.items)))

    async def work() -> None:
        for index in waiting:
            answers[index] = await runner.answer(index)
            settings.on_item()

    workers = [asyncio.create_task(work()) for _ in range(settings.max_concurrent)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [answers[index] for index in range(len(task.items))]


@dataclass(frozen=True)
class _Runner:
    backend: Backend
    tokenizer: Tokenizer
    task: Task
    settings: TaskSettings

    async def answer(self, index: int) -> Answer:
        """Ask one item."""
        item = self.task.items[index]
        question = self._needle_question(item, index) if isinstance(item, NeedleItem) else item.question()
        prompt = self._prompt(item, question, index)
        token_ids = self.tokenizer.encode(prompt)
        try:
            if isinstance(item, MultipleChoiceItem):
                return await self._choose(item, token_ids)
            if len(token_ids) + self._max_tokens > self.settings.max_model_len:
                return Answer(prompt=question, finish="too_long")
            return await self._write(question, prompt, token_ids, index)
        except InvalidLogitsError:
            return Answer(prompt=question, finish="error")

    async def _write(self, question: str, prompt: str, token_ids: list[int], index: int) -> Answer:
        decoding, stop = self.settings.decoding, self.task.entry.stop
        sampling = SamplingParams(
            max_tokens=self._max_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            seed=decoding.seed + index,
        )
        reasons = decoding.max_reasoning_tokens > 0
        stream = TextStream(self.tokenizer, stop=() if reasons else stop, splitter=ReasoningSplitter.for_prompt(prompt))
        request = Request(request_id=uuid.uuid4().hex, prompt_token_ids=token_ids, sampling=sampling)
        async with aclosing(self.backend.submit(request)) as chunks, aclosing(stream.follow(chunks)) as deltas:
            whole = Delta.join([delta async for delta in deltas])
        text, has_stopped = whole.content, whole.finish_reason is FinishReason.STOP
        if reasons:  # its stop strings are for the answer alone
            text = min((whole.content.partition(string)[0] for string in stop), key=len, default=text)
            has_stopped = has_stopped or len(text) < len(whole.content)
        return Answer(prompt=question, text=text, finish="stop" if has_stopped else "length")

    async def _choose(self, item: MultipleChoiceItem, token_ids: list[int]) -> Answer:
        choices = [self.tokenizer.encode(choice, add_special_tokens=False) for choice in item.choices]
        if len(token_ids) + max(map(len, choices)) >= self.settings.max_model_len:
            return Answer(prompt=item.question(), finish="too_long")
        logprobs = []
        for choice in choices:
            request = Request(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=token_ids + choice,
                sampling=SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0),
            )
            async with aclosing(self.backend.submit(request)) as chunks:
                report = _prompt_logprobs([chunk async for chunk in chunks])
            logprobs.append(sum(report[-len(choice) :]))
        return Answer(prompt=item.question(), choice_logprobs=tuple(logprobs))

    @property
    def _max_tokens(self) -> int:
        return self.task.entry.max_tokens + self.settings.decoding.max_reasoning_tokens

    def _prompt(self, item: Item, question: str, index: int) -> str:
        """The rendered conversation, and what the answer begins with."""
        prompts = self.settings.system_prompts
        system = "\n\n".join(filter(str.strip, (*prompts[index % max(len(prompts), 1) :][:1], item.system)))
        turns = [("system", system)] if system else []
        for example in self.task.entry.examples:
            turns += [("user", example.prompt), ("assistant", example.answer)]
        rendered = render_traffic([TrafficRequest(turns=(*turns, ("user", question)))], self.tokenizer)
        if not rendered.prompts:
            raise HarnessError(
                f"the model's chat template refuses item {item.id!r} of task {self.task.entry.name!r}",
                "take the item out of the suite, or write it differently",
            )
        text = rendered.prompts[0].text
        if not text.rstrip().endswith(OPEN):
            return text + item.prefix()
        if self.settings.decoding.max_reasoning_tokens:
            return text  # a prefix has no place before the reasoning
        return f"{text.rstrip()}\n\n{CLOSE}\n\n{item.prefix()}"

    def _needle_question(self, item: NeedleItem, index: int) -> str:
        """The question with as much of the haystack as fills the context, the needle at its depth."""
        bare = len(self.tokenizer.encode(self._prompt(item, item.prompt.replace("{text}", item.needle), index)))
        budget = min(int(self.settings.max_model_len * item.fill), item.cap)
        num_tokens = max(budget - bare - self._max_tokens - 16, 0)  # 16: a cut makes some tokens more
        hay = self.task.haystacks[item.domain]
        ids = self.tokenizer.encode(hay[: num_tokens * self.tokenizer.max_token_chars], add_special_tokens=False)
        ids = (ids * -(-num_tokens // max(len(ids), 1)))[:num_tokens]  # over again, where there is too little
        cut = int(len(ids) * item.depth)
        before, after = (self.tokenizer.decode(part).strip("\ufffd") for part in (ids[:cut], ids[cut:]))
        return item.prompt.replace("{text}", f"{before}\n\n{item.needle}\n\n{after}")


def _prompt_logprobs(chunks: Sequence[TokenChunk]) -> list[float]:
    failed = next((chunk for chunk in chunks if chunk.finish_reason is FinishReason.ERROR), None)
    if failed is not None:
        raise InvalidLogitsError(failed.error or "the logits are not finite")
    report = next(chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None)
    return [0.0 if token is None else token.logprob for token in report]
