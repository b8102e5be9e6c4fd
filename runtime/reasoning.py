"""Parting a reasoning model's answer: what stands before `</think>` is `reasoning_content`, the rest is `content`.

DeepSeek-R1's templates end the prompt with `<think>`, so the answer starts inside; other templates leave it to the
model to open the tag, as the first thing it writes. Concatenated parts are the same however the text was cut.
"""

from __future__ import annotations

from enum import Enum

OPEN, CLOSE = "<think>", "</think>"


class _Place(Enum):
    BEFORE = "before"  # nothing written yet, but perhaps the start of OPEN
    INSIDE = "inside"
    AFTER = "after"


class ReasoningSplitter:
    """Splits one answer as it comes.

    Args:
        starts_inside: the prompt has opened the tag already.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        self._place = _Place.INSIDE if starts_inside else _Place.BEFORE
        self._held = ""
        self._at_start = True  # of a part: its leading line breaks belong to the tag, not to the text

    @classmethod
    def for_prompt(cls, prompt: str) -> ReasoningSplitter:
        """For the answer to `prompt`, the rendered text of a conversation."""
        return cls(starts_inside=prompt.rstrip().endswith(OPEN))

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Take text; return `(reasoning, content)` that is certain by now. The last call holds nothing back."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._place is _Place.BEFORE:
            begun = text.lstrip()
            if begun.startswith(OPEN):
                self._place, text = _Place.INSIDE, begun[len(OPEN) :]
            elif OPEN.startswith(begun) and not is_last:
                self._held = text
                return "", ""
            else:
                self._place, self._at_start = _Place.AFTER, False
        if self._place is _Place.INSIDE:
            reasoning, close, text = text.partition(CLOSE)
            if not close and not is_last:
                kept = len(reasoning) - _length_of_partial(reasoning, CLOSE)
                reasoning, self._held = reasoning[:kept], reasoning[kept:]
            reasoning = self._trim(reasoning)
            if close:
                self._place, self._at_start = _Place.AFTER, True
        return reasoning, self._trim(text)

    def _trim(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip("\r\n")
            self._at_start = not text
        return text


def _length_of_partial(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
