"""Streams of text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.runtime.detokenizer import IncrementalDetokenizer, StopStringMatcher
from harness.tokenizer import Tokenizer, TokenizerFiles

TEXT = "Hello, 你好世界！🙂👩‍💻🇨🇳 naïve\n\tend "


@pytest.fixture(scope="module")
def bytewise(make_tokenizer: Callable[..., TokenizerFiles]) -> Tokenizer:
    return Tokenizer(make_tokenizer(), generation_config={})


@pytest.fixture(scope="module")
def deepseek(deepseek_tokenizer_path: Path) -> Tokenizer:
    files = TokenizerFiles(tokenizer_json=deepseek_tokenizer_path.read_bytes(), chat_template=None, special_tokens={})
    return Tokenizer(files, generation_config={})


def deltas(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.feed([i]) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", ["bytewise", "deepseek"])
def test_characters_are_never_split(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    parts = deltas(tokenizer, tokenizer.encode(TEXT, add_special_tokens=False))
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)


def test_text_comes_as_soon_as_it_is_whole(bytewise: Tokenizer) -> None:
    assert deltas(bytewise, bytewise.encode("a🙂b")) == ["a", "", "", "", "🙂", "b", ""]


def test_the_tail_of_a_broken_character_is_flushed(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("a🙂")[:-1]
    assert deltas(bytewise, ids) == ["a", "", "", "", "\ufffd"]
    assert "".join(deltas(bytewise, ids)) == bytewise.decode(ids)


def test_special_tokens_are_skipped_on_wish(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("é")
    ids = [ids[0], 257, ids[1], 257]
    assert "".join(deltas(bytewise, ids)) == "é" == bytewise.decode(ids)
    assert "".join(deltas(bytewise, ids, skip_special_tokens=False)) == "\ufffd<eos>\ufffd<eos>"


def test_any_ids_join_to_the_full_decode(bytewise: Tokenizer, deepseek: Tokenizer) -> None:
    choose = random.Random(3)
    for tokenizer in (bytewise, deepseek):
        for _ in range(50):
            ids = [choose.randrange(tokenizer.vocab_size) for _ in range(40)]
            assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


def cut(text: str, stops: list[str], sizes: list[int]) -> tuple[str, bool]:
    """Feed text in pieces of the given sizes; the visible text and whether it was stopped."""
    matcher = StopStringMatcher(stops)
    shown, position = "", 0
    for size in sizes:
        shown += matcher.feed(text[position : position + size])
        position += size
    return shown + matcher.flush(), matcher.stopped


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("alphabet: ABCDEFGHIJKL", ["DEFGHIJ"], "alphabet: ABC", True),
        ("alphabet: ABCDEFG", ["DEFGHIJ"], "alphabet: ABCDEFG", False),
        ("one\n\ntwo", ["\n\n", "two"], "one", True),
        ("xaab", ["aab"], "x", True),
        ("ababac!", ["abac"], "ab", True),
        ("abcdef", ["abcdefg", "cd"], "ab", True),
        ("abc", ["bc", "abc"], "", True),
        ("你好。再见", ["。"], "你好", True),
        ("nothing", [], "nothing", False),
        ("", ["x"], "", False),
    ],
)
def test_stop_strings_however_text_is_cut(text: str, stops: list[str], shown: str, stopped: bool) -> None:
    assert cut(text, stops, [len(text)]) == (shown, stopped)
    assert cut(text, stops, [1] * len(text)) == (shown, stopped)
    assert cut(text, stops, [2, 3] * len(text)) == (shown, stopped)


def test_the_first_match_to_be_complete_wins_as_a_search_would_find_it() -> None:
    choose = random.Random(5)
    for _ in range(500):
        text = "".join(choose.choice("ab") for _ in range(20))
        stops = ["".join(choose.choice("ab") for _ in range(choose.randint(2, 6))) for _ in range(3)]
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        expected = (text[: min(ends)[0] + min(ends)[1]], True) if ends else (text, False)
        assert cut(text, stops, [choose.randint(1, 4) for _ in text]) == expected


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    matcher = StopStringMatcher(["</tool>"])
    assert [matcher.feed(part) for part in ("a <", "b", " </to", "p", "</tool>x", "more")] == [
        "a ",
        "<b",
        " ",
        "</top",
        "",
        "",
    ]
    assert matcher.stopped
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])
