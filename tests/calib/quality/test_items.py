"""What each scorer makes of an answer."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from harness.calib.quality.items import SCORERS, Answer, Item, JsonSchemaItem, PythonItem, Score
from harness.errors import HarnessError


def item(scorer: str, **fields: Any) -> Item:
    return msgspec.convert({"id": "one", "prompt": "?", **fields}, SCORERS[scorer])


def scored(kind: Item, text: str = "", **answer: Any) -> Score:
    return kind.score(Answer(prompt="?", text=text, **answer))


def test_fields_count_one_by_one_and_format_as_a_whole() -> None:
    order = item("json_fields", expected={"name": "Ann", "quantity": 3})
    assert scored(order, '{"name": "ann", "quantity": "3"}') == Score(value=1, metrics={"format_validity": 1})
    assert scored(order, '{"name": "Bob", "quantity": 3}') == Score(value=0.5, metrics={"format_validity": 1})
    assert scored(order, 'Sure: {"name": "Ann", "quantity": 3}') == Score(value=1, metrics={"format_validity": 0})
    assert scored(order, '{"name": "Ann", "quantity": 3, "x": 1}').metrics == {"format_validity": 0}
    nothing = scored(order, "Ann, 3")
    assert (nothing.value, nothing.metrics["format_validity"]) == (0, 0)
    assert nothing.remark


def test_short_answers() -> None:
    capital = item("short_answer", answers=["Paris", "City of Paris"])
    assert scored(capital, "paris.") == Score(value=1, metrics={"exact_match": 1})
    assert 0 < scored(capital, "It is Paris").value < 1


HEADER = 'import math\n\n\ndef root(n):\n    """Square root."""\n'


@pytest.mark.parametrize(
    "text",
    [
        "\n    return math.sqrt(n)\n",
        "    return math.sqrt(n)",
        "\n    return math.sqrt(n)\n```\nThis is how it works.",
        "def root(n):\n    return math.sqrt(n)",
        "Here it is:\n```python\ndef root(n):\n    return math.sqrt(n)\n```\nDone.",
        "```python\nimport math\n\ndef root(n):\n    return math.sqrt(n)",
    ],
)
def test_code_is_a_body_or_the_whole_function(text: str) -> None:
    root = item("python_tests", header=HEADER, entry_point="root", tests="assert root(9) == 3")
    assert scored(root, text) == Score(value=1)


def test_code_that_fails_says_how() -> None:
    root = item("python_tests", header=HEADER, entry_point="root", tests="assert root(9) == 3")
    assert isinstance(root, PythonItem)
    assert "AssertionError" in scored(root, "\n    return n").remark
    assert "NameError" in scored(root, "\n    return m").remark
    assert scored(root, "").value == 0
    assert root.header.rstrip() in root.question()
    assert root.prefix().endswith('"""')


def test_instructions_count_one_by_one() -> None:
    rules = [{"kind": "words", "at_most": 3}, {"kind": "excludes", "texts": [","]}]
    two = item("instructions", instructions=rules)
    assert scored(two, "one two") == Score(value=1, metrics={"all_followed": 1})
    assert scored(two, "one, two") == Score(value=0.5, metrics={"all_followed": 0}, remark="not followed: excludes")
    assert scored(two, "  ").value == 0


def test_the_likeliest_choice_is_the_answer() -> None:
    choice = item("multiple_choice", choices=[" a", " a long one"], correct=1)
    right = scored(choice, choice_logprobs=(math.log(0.2), math.log(0.6)))
    assert right.value == 1
    assert right.metrics == {"accuracy_per_byte": 1, "probability": pytest.approx(0.75)}
    long = scored(choice, choice_logprobs=(-2.0, -5.0))
    assert (long.value, long.metrics["accuracy_per_byte"]) == (0, 1)
    assert scored(choice, choice_logprobs=(-1.0, -2000.0)).metrics["probability"] == pytest.approx(0)


def test_all_that_is_expected_has_to_be_there() -> None:
    both = item("contains", expected=["7", "Ann"])
    assert scored(both, "Ann is 7.").value == 1
    assert scored(both, "Ann is 17.").value == 0


def test_json_is_held_to_its_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    strict = item("json_schema", schema=schema)
    assert scored(strict, '{"a": [1]}') == Score(value=1, metrics={"parses": 1, "bare": 1})
    assert scored(strict, '```json\n{"a": [1]}\n```').metrics == {"parses": 1, "bare": 0}
    wrong = scored(strict, '{"a": [1, "x"]}')
    assert wrong.value == 0
    assert "$.a[1]" in wrong.remark
    assert scored(strict, "no").metrics == {"parses": 0, "bare": 0}


def test_json_nested_without_end_is_no_accident() -> None:
    endless = item("json_schema", schema={"type": "array", "items": {"$ref": "#"}})
    depth = 900
    assert scored(endless, "[" * depth + "]" * depth).remark in ("nested too deeply", "no JSON in the answer")
    assert scored(endless, "[[[]]]").value == 1


def test_a_schema_gets_nothing_from_the_network() -> None:
    far = item("json_schema", schema={"$ref": "http://127.0.0.1:9/schema.json"})
    assert isinstance(far, JsonSchemaItem)
    with pytest.raises(HarnessError, match="schema of item 'one'"):
        scored(far, "{}")


@pytest.mark.parametrize(
    ("text", "finish", "value", "ended"),
    [
        ("Hello! How can I help?", "stop", 1, 1),
        ("A long answer that was cut", "length", 1, 0),
        ("no " * 40, "length", 0, 0),
        ("ha " * 40, "stop", 1, 1),  # it did end
        (" \n", "stop", 0, 1),
    ],
)
def test_an_answer_has_to_come_and_not_to_loop(text: str, finish: Any, value: float, ended: float) -> None:
    score = scored(item("non_degenerate"), text, finish=finish)
    assert (score.value, score.metrics) == (value, {"ended": ended})


@pytest.mark.parametrize(
    ("scorer", "fields"),
    [
        ("json_fields", {"expected": {}}),
        ("short_answer", {"answers": []}),
        ("short_answer", {"answers": [""]}),
        ("short_answer", {"answer": "Paris"}),
        ("python_tests", {"header": "def f():", "entry_point": "f"}),
        ("instructions", {"instructions": [{"kind": "sing"}]}),
        ("instructions", {"instructions": [{"kind": "words", "most": 3}]}),
        ("multiple_choice", {"choices": ["a", "b"], "correct": 2}),
        ("multiple_choice", {"choices": ["a"], "correct": 0}),
        ("contains", {"expected": "7"}),
        ("needle", {"expected": ["7"], "needle": "It is 7."}),
        ("needle", {"prompt": "{text}?", "expected": ["7"], "needle": "It is 7.", "fill": 1.5}),
        ("json_schema", {"schema": {"type": "thing"}}),
        ("non_degenerate", {"prompt": None}),
    ],
)
def test_wrong_fields_are_refused(scorer: str, fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        item(scorer, **fields)
