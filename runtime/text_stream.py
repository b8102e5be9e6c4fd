"""From token chunks to visible text: characters are kept whole, stop strings cut off, reasoning parted, and an echoed
prompt put before it.

One `TextStream` serves one request, streamed or not, so both give the same text. It knows tokens and text, no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from harness.errors import InvalidLogitsError
from harness.runtime.detokenizer import IncrementalDetokenizer, StopStringMatcher
from harness.runtime.reasoning import ReasoningSplitter
from harness.runtime.request import FinishReason, TokenChunk, TokenLogprob
from harness.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """A token with its log-probability; `text_offset` is where its text begins in all that is shown.

    Only the first token of an echoed prompt has no log-probability.
    """

    token_id: int
    logprob: TokenLogprob | None
    text_offset: int


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What became visible. `num_tokens` counts the tokens it took, visible or not."""

    content: str = ""
    reasoning: str = ""
    reports: tuple[TokenReport, ...] = ()
    num_tokens: int = 0
    finish_reason: FinishReason | None = None

    @classmethod
    def join(cls, deltas: Sequence[Delta]) -> Delta:
        """Successive deltas as one."""
        return cls(
            content="".join(delta.content for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
            reports=tuple(report for delta in deltas for report in delta.reports),
            num_tokens=sum(delta.num_tokens for delta in deltas),
            finish_reason=deltas[-1].finish_reason,
        )


@dataclass(frozen=True, kw_only=True)
class Echo:
    """A prompt as it is shown before the answer: its text, its tokens, and where in the text each of them begins."""

    text: str
    token_ids: list[int]
    offsets: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, token_ids: list[int], text: str | None = None) -> Echo:
        """The echo of a prompt; `text` is what its tokens were made of, None where they came as they are.

        A BOS that was put before a text takes no part of it. Special tokens show only where they were written as text.
        """
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=text is None)
        pieces = [detokenizer.feed((token_id,)) for token_id in token_ids]
        if text is None:
            text = "".join(pieces) + detokenizer.flush()
        elif token_ids[:1] == [tokenizer.bos_token_id] and not text.startswith(pieces[0]):
            pieces[0] = ""
        offsets = list(accumulate(map(len, pieces[:-1]), initial=0))
        return cls(text=text, token_ids=token_ids, offsets=offsets)

    def reports(self, logprobs: Sequence[TokenLogprob | None]) -> tuple[TokenReport, ...]:
        """A report on each token."""
        columns = zip(self.token_ids, logprobs, self.offsets, strict=True)
        return tuple(TokenReport(token_id=i, logprob=p, text_offset=offset) for i, p, offset in columns)


class TextStream:
    """Follows one request. `num_*` are exact at every moment.

    Args:
        stop: stop strings; the answer ends before the first that appears.
        splitter: parts reasoning from content, None where all is content.
        echo: comes with the first delta, as content, and with reports where the request asked for the prompt's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        splitter: ReasoningSplitter | None = None,
        echo: Echo | None = None,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopStringMatcher(stop)
        self._splitter = splitter
        self._echo = echo
        self._num_decoded_chars = self._num_visible_chars = 0 if echo is None else len(echo.text)
        self._reports: list[TokenReport] = []
        self._num_new_tokens = 0
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    async def follow(self, chunks: AsyncIterator[TokenChunk]) -> AsyncGenerator[Delta, None]:
        """Deltas with something to see, the last one with the finish reason. Ends early at a stop string.

        Raises:
            InvalidLogitsError: the request ended with ERROR; text held back until then is lost.
        """
        async for chunk in chunks:
            if chunk.finish_reason is FinishReason.ERROR:
                raise InvalidLogitsError(
                    chunk.error or "the logits are not finite",
                    "send the request again; if it repeats, run or build the model at a higher precision",
                )
            delta = self.push(chunk)
            if delta is not None:
                yield delta
            if self.finish_reason is not None:
                return

    def push(self, chunk: TokenChunk) -> Delta | None:
        """Take a chunk; None if nothing became visible by it."""
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        text = self._decode(chunk)
        if chunk.finish_reason is not None and not self._matcher.stopped:
            text += self._matcher.feed(self._detokenizer.flush())
            text += self._matcher.flush()
        is_stopped = self._matcher.stopped
        self.finish_reason = FinishReason.STOP if is_stopped else chunk.finish_reason
        is_over = self.finish_reason is not None
        self._num_visible_chars += len(text)
        reasoning, content = "", text
        if self._splitter is not None:
            reasoning, content = self._splitter.push(text, is_last=is_over)
        reports = self._take_reports(includes_empty=is_over and not is_stopped)
        if self._echo is not None:
            content = self._echo.text + content
            if chunk.prompt_logprobs is not None:
                reports = (*self._echo.reports(chunk.prompt_logprobs), *reports)
            self._echo = None
        if not (content or reasoning or reports or is_over):
            return None
        num_tokens, self._num_new_tokens = self._num_new_tokens, 0
        return Delta(
            content=content,
            reasoning=reasoning,
            reports=reports,
            num_tokens=num_tokens,
            finish_reason=self.finish_reason,
        )

    def _decode(self, chunk: TokenChunk) -> str:
        visible = ""
        for index, token_id in enumerate(chunk.token_ids):
            if chunk.logprobs is not None:
                report = TokenReport(
                    token_id=token_id, logprob=chunk.logprobs[index], text_offset=self._num_decoded_chars
                )
                self._reports.append(report)
            self.num_completion_tokens += 1
            self._num_new_tokens += 1
            text = self._detokenizer.feed((token_id,))
            self._num_decoded_chars += len(text)
            visible += self._matcher.feed(text)
            if self._matcher.stopped:
                break
        return visible

    def _take_reports(self, *, includes_empty: bool) -> tuple[TokenReport, ...]:
        """Reports of tokens whose text has begun to show; at a natural end also of those without any text."""
        ready = [r for r in self._reports if includes_empty or r.text_offset < self._num_visible_chars]
        self._reports = self._reports[len(ready) :]
        return tuple(ready)
