"""Token ids to text as they come, and stop strings: what a stream may show, and when.

Owns neither tokens nor requests: one detokenizer and one matcher belong to one choice of one response. Text leaves only
in whole characters, and only when no stop string can still begin in it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from harness.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes a growing sequence. The texts it returns, joined, equal `Tokenizer.decode` of all ids.

    A token may end within a character: its bytes wait for the rest, or for `flush`. Work per token is constant.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        chunk = b"".join(self._tokenizer.token_bytes(i) for i in token_ids if i not in self._skipped)
        return self._decoder.decode(chunk)

    def flush(self) -> str:
        """What is still held back, at the end of the sequence: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


class StopStringMatcher:
    """Finds the first stop string in text that comes in pieces, wherever the pieces end.

    The match that is complete first wins; of several complete at the same character, the longest. Each stop string is
    followed by a Knuth-Morris-Pratt automaton (1977), so work per character does not grow with its length.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty; allowed: strings of at least one character")
        self._stops = list(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop the text ends with
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that is safe to show. Sets `stopped` once a stop string is complete; after that nothing is returned."""
        if self.stopped:
            return ""
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            longest = self._advance(character)
            if longest:
                self.stopped, self._held = True, ""
                return pending[: position - longest]
        num_safe = len(pending) - max(self._matched, default=0)
        self._held = pending[num_safe:]
        return pending[:num_safe]

    def flush(self) -> str:
        """Text held back at the end of the sequence: it began like a stop string and was none."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Take one character; the length of the longest stop string that it completes, or 0."""
        longest = 0
        for index, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            matched += stop[matched] == character
            self._matched[index] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


def _failure_table(stop: str) -> list[int]:
    """For each prefix of a stop string, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    matched = 0
    for position in range(1, len(stop)):
        while matched and stop[position] != stop[matched]:
            matched = table[matched - 1]
        matched += stop[position] == stop[matched]
        table[position] = matched
    return table
