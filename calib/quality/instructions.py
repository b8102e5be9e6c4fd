"""Instructions that can be verified by looking at an answer, such as "no commas" or "at most 30 words".

Owns the kinds and their checks. The idea is IFEval's (arXiv 2311.07911); kinds, wording and code are our own.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from harness.calib.language import kind_of_text
from harness.calib.quality.scoring import find_json, is_looping, units

_BULLET = re.compile(r"^\s*[-*•]\s+\S", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?。！？]+(?=\s|$|[\u4e00-\u9fff])")


class _Kind(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"
):
    """One instruction; `follows` looks at an answer that is not blank."""


class _Count(_Kind, frozen=True, kw_only=True):
    at_least: int = 0
    at_most: int = 1_000_000

    def _holds(self, number: int) -> bool:
        return self.at_least <= number <= self.at_most


class Includes(_Kind, frozen=True, kw_only=True, tag="includes"):
    """Every one of these texts is in the answer, in any case."""

    texts: list[str]

    def follows(self, text: str) -> bool:
        return all(part.casefold() in text.casefold() for part in self.texts)


class Excludes(_Kind, frozen=True, kw_only=True, tag="excludes"):
    """None of these texts is in the answer, in any case."""

    texts: list[str]

    def follows(self, text: str) -> bool:
        return not any(part.casefold() in text.casefold() for part in self.texts)


class Words(_Count, frozen=True, kw_only=True, tag="words"):
    """So many words; each Chinese character counts as one."""

    def follows(self, text: str) -> bool:
        return self._holds(len(units(text)))


class Sentences(_Count, frozen=True, kw_only=True, tag="sentences"):
    """So many sentences, told by their ends."""

    def follows(self, text: str) -> bool:
        ends = len(_SENTENCE_END.findall(text))
        return self._holds(ends + (text.rstrip()[-1] not in ".!?。！？\"'”’)"))


class Bullets(_Count, frozen=True, kw_only=True, tag="bullets"):
    """So many lines that begin with -, * or •."""

    def follows(self, text: str) -> bool:
        return self._holds(len(_BULLET.findall(text)))


class StartsWith(_Kind, frozen=True, kw_only=True, tag="starts_with"):
    """The answer's first words."""

    text: str

    def follows(self, text: str) -> bool:
        return text.lstrip().casefold().startswith(self.text.casefold())


class EndsWith(_Kind, frozen=True, kw_only=True, tag="ends_with"):
    """The answer's last words."""

    text: str

    def follows(self, text: str) -> bool:
        return text.rstrip().casefold().endswith(self.text.casefold())


class Case(_Kind, frozen=True, kw_only=True, tag="case"):
    """All letters are capitals, or none is."""

    case: Literal["upper", "lower"]

    def follows(self, text: str) -> bool:
        return text.isupper() if self.case == "upper" else text.islower()


class Json(_Kind, frozen=True, kw_only=True, tag="json"):
    """The answer is a JSON object with these keys and no others, perhaps in a Markdown fence."""

    keys: list[str]

    def follows(self, text: str) -> bool:
        value, _ = find_json(text)
        return isinstance(value, dict) and value.keys() == set(self.keys)


class Script(_Kind, frozen=True, kw_only=True, tag="script"):
    """The letters are mostly of this script."""

    script: Literal["Latin", "Chinese"]

    def follows(self, text: str) -> bool:
        return kind_of_text(text) == self.script


class NoLoop(_Kind, frozen=True, kw_only=True, tag="no_loop"):
    """The answer does not end in a loop."""

    def follows(self, text: str) -> bool:
        return not is_looping(text)


Instruction = Includes | Excludes | Words | Sentences | Bullets | StartsWith | EndsWith | Case | Json | Script | NoLoop
