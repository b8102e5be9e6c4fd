"""Cuts prompts to the length calibrated on, after secrets are out.

Owns which part of a long prompt is kept. All heads would be the same tokens wherever requests share a long system
prompt, and all tails would never show that prompt: of the long prompts under one system prompt the first and then every
fourth keeps its head, the others keep their tail, where the user speaks, behind the BOS that every prompt begins with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harness.calib.redact import redact
from harness.calib.rendering import Prompt
from harness.tokenizer import Tokenizer

HEAD_EVERY = 4
# Enough text for a window: few tokenizers need more characters per token, and a log may hold prompts of megabytes.
CHARS_PER_TOKEN = 16
MARGIN_CHARS = 4096

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Token ids `(num_tokens,)` of a prompt, or of its head or tail."""

    prompt: Prompt
    token_ids: TokenIds
    truncated: bool


@dataclass(kw_only=True)
class WindowCutter:
    """Makes samples, none equal to another. Counts what it replaced and what it dropped as a duplicate."""

    tokenizer: Tokenizer
    max_tokens: int
    redactions: Counter[str] = field(default_factory=Counter)
    num_duplicates: int = 0
    _num_long: Counter[str] = field(default_factory=Counter)
    _seen: set[bytes] = field(default_factory=set)

    def cut(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> tuple[Sample, ...]:
        """Samples of prompts whose whole lengths in tokens are given; of two that end up equal, the first."""
        samples = []
        for prompt, length in zip(prompts, lengths, strict=True):
            long = length > self.max_tokens
            heads_turn = self._num_long[prompt.system_prompt] % HEAD_EVERY == 0
            self._num_long[prompt.system_prompt] += long
            # a head that is taken already is that of a system prompt longer than the window
            windows = [True, False] if long and heads_turn else [not long]
            for head in windows:
                ids, redactions = self._window(prompt.text, head=head)
                if ids.tobytes() not in self._seen:
                    self._seen.add(ids.tobytes())
                    self.redactions += redactions
                    samples.append(Sample(prompt=prompt, token_ids=ids, truncated=long))
                    break
            else:
                self.num_duplicates += 1
        return tuple(samples)

    def _window(self, whole: str, *, head: bool) -> tuple[TokenIds, Counter[str]]:
        """Token ids, and how many placeholders of each kind are among them."""
        chars = self.max_tokens * CHARS_PER_TOKEN + MARGIN_CHARS
        part = whole[:chars] if head else whole[-chars:]
        text, found = redact(part)
        if len(part) < len(whole):
            # a secret that the cut went through was not recognised
            text = text[:-MARGIN_CHARS] if head else text[MARGIN_CHARS:]
        ids = self.tokenizer.encode(text)
        if not head and len(ids) > self.max_tokens:
            # a template may write the BOS where the tokenizer adds none
            start = self.tokenizer.encode(whole[: 4 * CHARS_PER_TOKEN])[:1]
            bos = [i for i in start if i == self.tokenizer.bos_token_id]
            ids = bos + ids[len(bos) - self.max_tokens :]
        ids = ids[: self.max_tokens]
        shown = self.tokenizer.decode(ids) if found else ""
        counts = Counter({kind: min(number, shown.count(f"<{kind}>")) for kind, number in found.items()})
        return np.array(ids, dtype=np.int64), counts
