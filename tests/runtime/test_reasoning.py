"""Parting reasoning from content: the same, however the text is cut."""

from __future__ import annotations

import random

import pytest

from harness.runtime.reasoning import ReasoningSplitter

CASES = [
    (True, "why\n</think>\n\nanswer", ("why\n", "answer")),
    (True, "\nwhy</think>answer</think>x", ("why", "answer</think>x")),
    (True, "why </thin", ("why </thin", "")),
    (True, "", ("", "")),
    (False, "<think>why</think>answer", ("why", "answer")),
    (False, "\n <think>\nwhy</think>\nanswer\n", ("why", "answer\n")),
    (False, "\nanswer", ("", "\nanswer")),
    (False, "a <think>b</think>", ("", "a <think>b</think>")),
    (False, "<thi", ("", "<thi")),
    (False, "  ", ("", "  ")),
    (False, "<think></think>", ("", "")),
]


@pytest.mark.parametrize(("starts_inside", "text", "expected"), CASES)
def test_parts_do_not_depend_on_the_cuts(starts_inside: bool, text: str, expected: tuple[str, str]) -> None:
    rng = random.Random(text)
    for _ in range(50):
        splitter = ReasoningSplitter(starts_inside=starts_inside)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        parts = [splitter.push(piece, is_last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
        assert ("".join(p[0] for p in parts), "".join(p[1] for p in parts)) == expected


@pytest.mark.parametrize(("prompt", "parts"), [("Why? <think>\n", ("why", "")), ("<think></think> Why?", ("", "why"))])
def test_a_prompt_may_open_the_tag(prompt: str, parts: tuple[str, str]) -> None:
    assert ReasoningSplitter.for_prompt(prompt).push("why", is_last=True) == parts


def test_text_that_cannot_be_a_tag_is_not_held_back() -> None:
    splitter = ReasoningSplitter(starts_inside=True)
    assert splitter.push("one < two </th") == ("one < two ", "")
    assert splitter.push("ree") == ("</three", "")
