"""Tells the kind of a text from its characters: the script of its letters, or code.

Owns the detector that strata and reports use. It tells scripts apart, not languages of one script: English and German
are both Latin. That needs no model and is what matters here: tokens of another script are other tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

CODE = "code"
OTHER = "other"
MAX_CHARS = 4096
MIXED_SHARE = 0.25
CODE_SHARE = 0.4

# Unicode names begin with the script
_SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean", "LATIN": "Latin"}
_CODE_LINE = re.compile(
    r"""^\s*(?:def|class|import|from|return|if|for|while|elif|else|try|except|with|async|await|const|let|var|func|fn|pub
    |public|private|package|struct|impl|use|SELECT|INSERT|UPDATE|CREATE|FROM|WHERE|\#include|\#define|@\w+|//|/\*|</?\w)\b.*
    [\[\](){};:=<>,]|[{};]\s*$|^\s*[\]})]+[,;]?\s*$|^\s*["'][\w -]+["']\s*:|\w\s*(?:=|==|\+=|->|=>|:=)\s*[\w"'\[({-]""",
    re.VERBOSE,
)


def kind_of_text(text: str) -> str:
    """`code` (programs, JSON, markup), the script of the letters (`Chinese`, `Latin`, `Cyrillic`, ...), two of them
    joined by `+` where a quarter of the letters is of a second one, or `other` for a text without letters."""
    sample = text if len(text) <= MAX_CHARS else text[: MAX_CHARS // 2] + text[-MAX_CHARS // 2 :]
    lines = [line for line in sample.splitlines() if line.strip()]
    if len(lines) >= 3 and sum(bool(_CODE_LINE.search(line[:400])) for line in lines) >= CODE_SHARE * len(lines):
        return CODE
    scripts = Counter(filter(None, map(_script, sample)))
    if scripts["Japanese"] >= scripts["Chinese"] / 4 and scripts["Japanese"]:
        scripts["Japanese"] += scripts.pop("Chinese", 0)  # Japanese is written with Chinese characters too
    # a Chinese character says about as much as a word of three letters
    weights = {name: n * (3 if name in ("Chinese", "Japanese", "Korean") else 1) for name, n in scripts.items()}
    shares = sorted(weights.items(), key=lambda item: (-item[1], item[0]))[:2]
    if not shares:
        return OTHER
    if len(shares) == 2 and shares[1][1] >= MIXED_SHARE * sum(weights.values()):
        return "+".join(sorted(name for name, _ in shares))
    return shares[0][0]


@lru_cache(maxsize=8192)
def _script(char: str) -> str | None:
    if not char.isalpha():
        return None
    name = unicodedata.name(char, "").split(" ")[0]
    return _SCRIPTS.get(name, name.capitalize()) or None
