"""Every kind of instruction, followed and not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness.calib.quality.instructions import Instruction

FOLLOWED: list[tuple[dict[str, Any], str, str]] = [
    ({"kind": "includes", "texts": ["sea", "sun"]}, "The SUN and the sea", "The sun"),
    ({"kind": "excludes", "texts": [","]}, "no comma here", "one, two"),
    ({"kind": "words", "at_most": 3}, "one, two three!", "one two three four"),
    ({"kind": "words", "at_least": 4}, "我爱北京", "我爱"),
    ({"kind": "sentences", "at_least": 2, "at_most": 2}, "One. Two!", "One. Two. Three"),
    ({"kind": "sentences", "at_most": 1}, "It costs 3.50 euros.", "It is so. It is."),
    ({"kind": "sentences", "at_least": 2, "at_most": 2}, "你好。再见。", "你好，再见。"),
    ({"kind": "bullets", "at_least": 2, "at_most": 2}, "- a\n* b", "- a\nb"),
    ({"kind": "bullets", "at_most": 0}, "a - b", "\u2022 a"),
    ({"kind": "starts_with", "text": "Well"}, " well, yes", "Oh well"),
    ({"kind": "ends_with", "text": "That is all."}, "Yes. That is all.\n", "That is all. Yes"),
    ({"kind": "case", "case": "upper"}, "ALL OF 2", "Not all"),
    ({"kind": "case", "case": "lower"}, "all of 2", "Not all"),
    ({"kind": "json", "keys": ["a", "b"]}, '```json\n{"b": 1, "a": 2}\n```', '{"a": 1}'),
    ({"kind": "script", "script": "Chinese"}, "今天天气很好", "fine weather"),
    ({"kind": "script", "script": "Latin"}, "fine weather", "今天天气很好"),
    ({"kind": "no_loop"}, "a fine answer", "no " * 50),
]


@pytest.mark.parametrize(("fields", "good", "bad"), FOLLOWED)
def test_followed_and_not(fields: dict[str, Any], good: str, bad: str) -> None:
    instruction = msgspec.convert(fields, Instruction)
    assert instruction.follows(good)
    assert not instruction.follows(bad)


def test_every_kind_is_tested() -> None:
    kinds = {kind.__struct_config__.tag for kind in Instruction.__args__}
    assert kinds == {fields["kind"] for fields, _, _ in FOLLOWED}
