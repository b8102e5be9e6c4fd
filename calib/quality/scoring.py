"""How an answer's text is read and compared: JSON in it, words, characters, repetition.

Owns no items and no models. Exact match and F1 are SQuAD's (arXiv 1606.05250); Chinese is compared by character, as
CMRC 2018 does (arXiv 1810.07366).
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

_FENCE = re.compile(r"```[\w+-]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# a Chinese character, or a run of anything else that is no space
_UNIT = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]|[^\s\u3400-\u4dbf\u4e00-\u9fff]+")
_LOOP_CHARS = 40  # this much of an answer's end is a loop, if the same piece four times over
_LONGEST_PERIOD = 80


def find_json(text: str) -> tuple[Any, bool]:
    """The first JSON object or array in an answer, and whether the answer is that and nothing else.

    A Markdown fence around it is passed over, but counts as something else. `(None, False)` if there is none.
    """
    text = text.strip()
    value = _parse(text)
    if isinstance(value, dict | list):
        return value, True
    fenced = unfenced(text)
    # from its first bracket alone: what stands inside of a broken object is not what was asked for
    start = re.search(r"[\[{]", fenced)
    value = _parse_first(fenced[start.start() :]) if start else None
    return value, False


def unfenced(text: str) -> str:
    """What stands in the first Markdown fence, or all of a text without one."""
    found = _FENCE.search(text)
    return found.group(1) if found else text


def same_value(value: Any, expected: Any) -> bool:
    """Whether two JSON values say the same: numbers by value, also those written as text; text but for case, width and
    spaces; lists in order."""
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[name], expected[name]) for name in expected)
        )
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(same_value(a, b) for a, b in zip(value, expected, strict=True))
        )
    if expected is None or value is None or isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(value, dict | list):
        return False
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected
    return _plain(str(value)) == _plain(str(expected))


def exact_match(text: str, answers: Sequence[str]) -> float:
    """1 if the answer is one of those expected, normalised as SQuAD does."""
    return float(any(units(text) == units(answer) for answer in answers))


def f1(text: str, answers: Sequence[str]) -> float:
    """The best F1 over words, or Chinese characters, shared with one of the answers expected."""
    return max(_f1(units(text), units(answer)) for answer in answers)


def units(text: str) -> list[str]:
    """Words of a text and Chinese characters, without case, punctuation and English articles."""
    text = "".join(map(_unpunctuated, _plain(text)))
    return _UNIT.findall(_ARTICLES.sub(" ", text))


def contains(text: str, expected: str, *, ignore_case: bool = False) -> bool:
    """Whether a text holds another, not as a part of a longer word or number."""
    flags = re.IGNORECASE if ignore_case else 0
    before = r"(?<![0-9A-Za-z])(?<!\d[.,])" if re.match(r"[0-9A-Za-z]", expected) else ""
    after = r"(?![0-9A-Za-z])(?![.,]\d)" if re.search(r"[0-9A-Za-z]$", expected) else ""
    return re.search(before + re.escape(expected) + after, text, flags) is not None


def is_looping(text: str) -> bool:
    """Whether a text ends with the same piece of up to 80 characters over and over (arXiv 1904.09751)."""
    text = text.rstrip()
    for period in range(1, min(_LONGEST_PERIOD, len(text) // 4) + 1):
        num_chars = max(_LOOP_CHARS, 4 * period)
        tail = text[-num_chars:]
        if len(tail) == num_chars and tail[period:] == tail[:-period]:
            return True
    return False


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _parse_first(text: str) -> Any:
    try:
        return json.JSONDecoder(parse_constant=_refuse).raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unpunctuated(char: str) -> str:
    if char in string.punctuation:  # SQuAD's: "it's" is one word
        return ""
    return " " if unicodedata.category(char).startswith("P") else char


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _f1(found: list[str], expected: list[str]) -> float:
    shared = (Counter(found) & Counter(expected)).total() if found and expected else 0
    return 2 * shared / (len(found) + len(expected)) if shared else float(found == expected)
