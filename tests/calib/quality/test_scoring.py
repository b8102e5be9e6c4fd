"""How answers are read and compared."""

from __future__ import annotations

from typing import Any

import pytest

from harness.calib.quality import scoring


@pytest.mark.parametrize(
    ("text", "value", "is_bare"),
    [
        (' {"a": 1}\n', {"a": 1}, True),
        ("[1, 2]", [1, 2], True),
        ('```json\n{"a": [1]}\n```', {"a": [1]}, False),
        ('```\n{"a": 1}', {"a": 1}, False),
        ('Here it is: {"a": {"b": "}"}} and more', {"a": {"b": "}"}}, False),
        ('{"a": b", "c": {"d": 1}}', None, False),
        ("42", None, False),
        ('"text"', None, False),
        ('{"a": NaN}', None, False),
        ('{"a": 1', None, False),
        ("", None, False),
        ("[" * 100_000, None, False),
        ('{"a": ' + "9" * 10_000 + "}", None, False),
    ],
)
def test_json_is_found(text: str, value: Any, is_bare: bool) -> None:
    assert scoring.find_json(text) == (value, is_bare)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        ("3", 3),
        (3, "3"),
        (" Ann  Lee", "ann lee"),
        ("３月", "3月"),
        ([1, "A"], [1, "a"]),
        ({"a": "B"}, {"a": "b"}),
        (None, None),
        (True, True),
    ],
)
def test_values_that_say_the_same(value: Any, expected: Any) -> None:
    assert scoring.same_value(value, expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        (True, 1),
        ("true", True),
        (None, ""),
        ("", None),
        ([1], 1),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1, 2], [2, 1]),
        ({}, "x"),
    ],
)
def test_values_that_do_not(value: Any, expected: Any) -> None:
    assert not scoring.same_value(value, expected)


def test_f1_is_squads() -> None:
    assert scoring.exact_match("The Eiffel Tower!", ["eiffel tower"]) == 1
    assert scoring.f1("in the city of Paris", ["Paris"]) == pytest.approx(2 / 5)
    assert scoring.f1("Paris, France", ["Lyon", "Paris"]) == pytest.approx(2 / 3)
    assert scoring.f1("", ["Paris"]) == scoring.f1("London", ["Paris"]) == 0


def test_chinese_is_compared_by_character() -> None:
    assert scoring.units("“他在北京，有 3 本 book。”") == ["他", "在", "北", "京", "有", "3", "本", "book"]
    assert scoring.f1("在北京市", ["北京"]) == pytest.approx(2 * 2 / 6)
    assert scoring.exact_match("北京。", ["北京"]) == 1


@pytest.mark.parametrize("text", ["42", "It is 42.", "(42)", "x=42,", "答案是42。", "40 + 2 = 42"])
def test_a_number_stands_for_itself(text: str) -> None:
    assert scoring.contains(text, "42")


@pytest.mark.parametrize("text", ["142", "421", "4.42", "42.5", "42,000", "1,42", "a42", "42nd"])
def test_a_number_within_another_does_not_count(text: str) -> None:
    assert not scoring.contains(text, "42")


def test_case_counts_unless_told() -> None:
    assert not scoring.contains("qk-55", "QK-55")
    assert scoring.contains("on friday", "Friday", ignore_case=True)
    assert scoring.contains("a.b*c", "a.b*c")


@pytest.mark.parametrize("piece", ["a", "ab ", "I am sorry. ", "哈哈\n", "0123456789" * 8])
def test_loops_are_seen(piece: str) -> None:
    assert scoring.is_looping("It begins well: " + piece * 60)
    assert scoring.is_looping("It begins well: " + piece * 60 + piece[: len(piece) // 2])


@pytest.mark.parametrize(
    "text", ["", "no", "ha ha ha", "-" * 20, "word " * 60 + "and then an end", "a fine answer " * 2]
)
def test_what_is_no_loop(text: str) -> None:
    assert not scoring.is_looping(text)
