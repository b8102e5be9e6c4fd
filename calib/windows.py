"""Cuts prompts to the length calibrated on, after secrets are out.

Owns which part of a long prompt is kept, and says whether that holds any of the system prompt.

- A system prompt of at most half a window stays whole in front, and the middle of what follows is cut out: the model
  reads it there in front of every request.
- A longer one is shown in windows that are spread evenly over it, from its beginning to its end, by every fourth of the
  prompts that share it, and by up to every second where fewer windows would leave gaps. The others keep their tail,
  where the user speaks. All heads would be the same tokens, and all tails would never show it.
- Without a system prompt, every fourth keeps its head and the others their tail, so that text stays in one piece.

Every window begins with the BOS if its prompt does.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harness.calib.redact import redact
from harness.calib.rendering import Prompt
from harness.tokenizer import Tokenizer

FRONT_EVERY, FRONT_EVERY_AT_LEAST = 4, 2
# Enough text for a window: few tokenizers need more characters per token, and a log may hold prompts of megabytes.
CHARS_PER_TOKEN = 16
MARGIN_CHARS = 4096

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Token ids `(num_tokens,)` of a prompt, or of parts of it, and whether any of its system prompt is among them."""

    prompt: Prompt
    token_ids: TokenIds
    truncated: bool
    has_system_prompt: bool


@dataclass(frozen=True, kw_only=True)
class _Prefix:
    """A prompt up to the end of its system prompt, redacted; empty but for a BOS without one.

    `num_chars` are those of the prompt itself; the system prompt begins at token `start`.
    """

    num_chars: int
    text: str
    found: Counter[str]
    token_ids: list[int]
    start: int


@dataclass(frozen=True, kw_only=True)
class _Window:
    token_ids: list[int]
    found: Counter[str]
    has_system_prompt: bool


@dataclass(kw_only=True)
class WindowCutter:
    """Makes samples, none equal to another. Counts what it replaced and what it dropped as a duplicate."""

    tokenizer: Tokenizer
    max_tokens: int
    redactions: Counter[str] = field(default_factory=Counter)
    num_duplicates: int = 0
    _prefixes: dict[tuple[str, str], _Prefix] = field(default_factory=dict)
    _seen: set[bytes] = field(default_factory=set)

    def cut(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> tuple[Sample, ...]:
        """Samples of prompts whose whole lengths in tokens are given; of two that end up equal, the first."""
        long = [length > self.max_tokens for length in lengths]
        turns = self._turns({place: prompt for place, prompt in enumerate(prompts) if long[place]})
        samples = []
        for place, prompt in enumerate(prompts):
            windows = self._windows(prompt, turns.get(place)) if long[place] else [self._whole(prompt)]
            for window in windows:
                ids = np.array(window.token_ids, dtype=np.int64)
                if ids.tobytes() not in self._seen:
                    self._seen.add(ids.tobytes())
                    self.redactions += self._num_shown(window)
                    has = window.has_system_prompt
                    samples.append(Sample(prompt=prompt, token_ids=ids, truncated=long[place], has_system_prompt=has))
                    break
            else:
                self.num_duplicates += 1
        return tuple(samples)

    def _turns(self, prompts: Mapping[int, Prompt]) -> dict[int, tuple[int, int]]:
        """Places of the prompts to show the front of, each with the number of its window and how many there are."""
        groups: dict[str | None, list[int]] = defaultdict(list)
        common = Counter(prompt.system_prompt for prompt in prompts.values())
        for place, prompt in prompts.items():
            if not self._keeps_prefix(prompt):
                # prompts that hold a date or a name are all different, and take turns together
                alone = prompt.system_prompt and common[prompt.system_prompt] == 1
                groups[None if alone else prompt.system_prompt].append(place)
        turns: dict[int, tuple[int, int]] = {}
        for shared, places in groups.items():
            num_tokens = len(self._prefix(prompts[places[0]]).token_ids) if shared else 1
            num_windows = -(-num_tokens // (self.max_tokens - 1))  # all but the BOS
            every = max(FRONT_EVERY_AT_LEAST, min(FRONT_EVERY, len(places) // num_windows))
            fronts = places[::every]
            turns |= {place: (number, len(fronts)) for number, place in enumerate(fronts)}
        return turns

    def _keeps_prefix(self, prompt: Prompt) -> bool:
        return bool(prompt.system_prompt) and len(self._prefix(prompt).token_ids) <= self.max_tokens // 2

    def _whole(self, prompt: Prompt) -> _Window:
        text, found = redact(prompt.text)
        # placeholders may be longer than what they stand for
        ids = self.tokenizer.encode(text)[: self.max_tokens]
        return _Window(token_ids=ids, found=found, has_system_prompt=bool(prompt.system_prompt))

    def _windows(self, prompt: Prompt, turn: tuple[int, int] | None) -> Iterator[_Window]:
        """What to keep of a long prompt, the first choice first."""
        prefix = self._prefix(prompt)
        if self._keeps_prefix(prompt):
            head, tail = self._head(prompt, prefix), self._tail(prompt, prefix)
            num_front = self.max_tokens // 2
            ids = head.token_ids
            if ids != tail.token_ids:  # else all of it fits, now that the secrets are out
                ids = ids[:num_front] + tail.token_ids[num_front - self.max_tokens :]
            yield _Window(token_ids=ids, found=head.found + tail.found, has_system_prompt=True)
            return
        if turn is not None:
            longer = len(prefix.token_ids) > self.max_tokens
            yield self._part_of_prefix(prompt, prefix, *turn) if longer else self._head(prompt, prefix)
        yield self._tail(prompt, prefix)

    def _part_of_prefix(self, prompt: Prompt, prefix: _Prefix, number: int, num_parts: int) -> _Window:
        """Of windows spread evenly, the first at the beginning and the last at the end, the one of this number."""
        bos = self._bos(prompt)
        width = self.max_tokens - len(bos)
        start = len(bos) + number * (len(prefix.token_ids) - self.max_tokens) // max(num_parts - 1, 1)
        ids = bos + prefix.token_ids[start : start + width]
        return _Window(token_ids=ids, found=prefix.found, has_system_prompt=start + width > prefix.start)

    def _head(self, prompt: Prompt, prefix: _Prefix) -> _Window:
        text, found = self._end_of(prompt.text[prefix.num_chars :], head=True)
        ids = self.tokenizer.encode(prefix.text + text)[: self.max_tokens]
        has = bool(prompt.system_prompt) and len(ids) > prefix.start
        return _Window(token_ids=ids, found=prefix.found + found, has_system_prompt=has)

    def _tail(self, prompt: Prompt, prefix: _Prefix) -> _Window:
        rest = prompt.text[prefix.num_chars :]
        text, found = self._end_of(rest, head=False)
        bos = self._bos(prompt)
        reaches = len(rest) <= self._max_chars
        ids = self.tokenizer.encode(prefix.text + text if reaches else text)
        if len(ids) > self.max_tokens:
            ids = bos + ids[len(bos) - self.max_tokens :]
        num_after = len(self.tokenizer.encode(text, add_special_tokens=False))
        return _Window(
            token_ids=ids,
            found=prefix.found + found,
            has_system_prompt=bool(prompt.system_prompt) and reaches and len(ids) - len(bos) > num_after,
        )

    @property
    def _max_chars(self) -> int:
        return self.max_tokens * CHARS_PER_TOKEN + MARGIN_CHARS

    def _end_of(self, whole: str, *, head: bool) -> tuple[str, Counter[str]]:
        """Head or tail of a text, redacted: enough of it for a window."""
        part = whole[: self._max_chars] if head else whole[-self._max_chars :]
        text, found = redact(part)
        if len(part) < len(whole):
            # a secret that the cut went through was not recognised
            text = text[:-MARGIN_CHARS] if head else text[MARGIN_CHARS:]
        return text, found

    def _prefix(self, prompt: Prompt) -> _Prefix:
        # a prompt has its own line ends, its system prompt is told with "\n"
        pattern = re.escape(prompt.system_prompt).replace("\\\n", "\r?\n")
        place = re.search(pattern, prompt.text)
        start, end = place.span() if place else (0, 0)
        raw = prompt.text[:end]
        key = (prompt.system_prompt, raw)
        if key not in self._prefixes:
            text, found = redact(raw)
            num_before = len(self.tokenizer.encode(raw[:start]))
            ids = self.tokenizer.encode(text)
            self._prefixes[key] = _Prefix(num_chars=end, text=text, found=found, token_ids=ids, start=num_before)
        return self._prefixes[key]

    def _bos(self, prompt: Prompt) -> list[int]:
        # a template may write the BOS where the tokenizer adds none
        first = self.tokenizer.encode(prompt.text[: 4 * CHARS_PER_TOKEN])[:1]
        return [i for i in first if i == self.tokenizer.bos_token_id]

    def _num_shown(self, window: _Window) -> Counter[str]:
        """How many placeholders of each kind are among the tokens of a window."""
        shown = self.tokenizer.decode(window.token_ids) if window.found else ""
        return Counter({kind: min(number, shown.count(f"<{kind}>")) for kind, number in window.found.items()})
