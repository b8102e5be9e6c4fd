"""Chat in the terminal, on an engine process of its own and without HTTP."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import uuid
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any

from rich.console import Console

from harness.errors import HarnessError, RequestError
from harness.runtime.backend import Backend
from harness.runtime.reasoning import ReasoningSplitter
from harness.runtime.request import Request, SamplingParams
from harness.runtime.text_stream import TextStream
from harness.tokenizer import Tokenizer

_CONTROL_CHARACTERS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))
_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."


class Chat:
    """A conversation with one engine. Answers go to stdout, figures to stderr.

    Args:
        backend: started and stopped by the caller.
        max_model_len: longest conversation, in tokens.
        sampling: how answers are chosen, and their length.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        system: str | None,
        sampling: SamplingParams,
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._system = [{"role": "system", "content": system}] if system else []
        self._sampling = sampling
        self._history: list[dict[str, str]] = []
        self._out = Console(soft_wrap=True, highlight=False)
        self._figures = Console(stderr=True, soft_wrap=True, highlight=False)

    async def ask(self, question: str) -> None:
        """Stream one answer and remember both; a cancelled one is remembered as far as it came.

        Raises:
            HarnessError: the engine refused or failed; the question is forgotten.
        """
        turn = {"role": "user", "content": question}
        prompt = self._tokenizer.render_chat([*self._system, *self._history, turn])
        token_ids = self._tokenizer.encode(prompt)
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"the conversation has {len(token_ids)} tokens, the context {self._max_model_len}: /reset starts anew"
            )
        request = Request(request_id=uuid.uuid4().hex, prompt_token_ids=token_ids, sampling=self._sampling)
        stream = TextStream(self._tokenizer, stop=(), splitter=ReasoningSplitter.for_prompt(prompt))
        answer, started, first = "", time.monotonic(), None
        try:
            async with aclosing(self._backend.submit(request)) as chunks, aclosing(stream.follow(chunks)) as deltas:
                async for delta in deltas:
                    first = first or time.monotonic()
                    self._out.out(_printable(delta.reasoning), end="", style="dim", highlight=False)
                    self._out.out(_printable(delta.content), end="", highlight=False)
                    answer += delta.content
        except asyncio.CancelledError:
            self._out.out(" [stopped]", end="", highlight=False)
        self._out.out("")
        self._history += [turn, {"role": "assistant", "content": answer}]
        self._print_figures(len(token_ids), stream, started, first)

    def reset(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self._history = []

    def _print_figures(self, num_prompt_tokens: int, stream: TextStream, started: float, first: float | None) -> None:
        if first is None:
            return
        seconds, later_tokens = time.monotonic() - first, stream.num_completion_tokens - 1
        speed = f"{later_tokens / seconds:.1f} tokens/s" if later_tokens > 0 and seconds > 0 else "one token"
        self._figures.print(
            f"TTFT {first - started:.2f} s, {speed}, {stream.num_completion_tokens} tokens; prompt {num_prompt_tokens} "
            f"tokens, {stream.num_cached_tokens} cached",
            style="dim",
        )


def converse(chat: Chat, loop: asyncio.AbstractEventLoop) -> None:
    """Read questions from the terminal until /exit or the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and history)
    print(_HELP, file=sys.stderr)
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question == "/exit":
            return
        if question == "/reset":
            chat.reset()
        elif question.startswith("/"):
            print(_HELP, file=sys.stderr)
        elif question:
            try:
                run_interruptible(chat.ask(question), loop)
            except HarnessError as error:
                print(f"error: {error}", file=sys.stderr)


def run_interruptible(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Run `work`, which Ctrl-C cancels.

    Raises:
        KeyboardInterrupt: it was cancelled, and did not catch that.
    """
    task = loop.create_task(work)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        loop.run_until_complete(task)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _printable(text: str) -> str:
    # a model's text must not steer the terminal
    return text.translate(_CONTROL_CHARACTERS)
