"""What a task asks and how an answer is scored: one kind of item for each scorer that a suite may name.

Owns the fields of items and their checks, and what becomes of an answer. It asks no model. docs/suites.md has an
example of each kind. Code items have the form of HumanEval's (arXiv 2107.03374).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jsonschema
import msgspec
import referencing

from harness.calib.quality import scoring
from harness.calib.quality.code_execution import run_program
from harness.calib.quality.instructions import Instruction
from harness.errors import HarnessError

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Texts = Annotated[list[Text], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model answered. `text` is without reasoning, `choice_logprobs` sums over the tokens of each choice.

    `error` ended it for logits that are not finite; `too_long` was never asked.
    """

    prompt: str
    text: str = ""
    choice_logprobs: tuple[float, ...] = ()
    finish: Literal["stop", "length", "error", "too_long"] = "stop"


@dataclass(frozen=True, kw_only=True)
class Score:
    """From 0 to 1, with further figures of the scorer, and what there is to say about it."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)
    remark: str = ""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question. `system` is joined with the suite's system prompt; the answer is made to begin with
    `answer_prefix`, which is no part of it."""

    id: str
    prompt: str
    system: str = ""
    answer_prefix: str = ""

    def question(self) -> str:
        """The user's turn."""
        return self.prompt

    def prefix(self) -> str:
        """What the answer begins with."""
        return self.answer_prefix

    def expected_text(self) -> str:
        """What is expected, to be read."""
        raise NotImplementedError

    def score(self, answer: Answer) -> Score:
        """Score an answer that came to its end."""
        raise NotImplementedError


class JsonFieldsItem(Item, frozen=True, kw_only=True):
    """Extraction. The score is the share of fields that are right; format is right where the answer is a JSON object of
    exactly these fields and nothing else."""

    expected: Annotated[dict[str, Any], msgspec.Meta(min_length=1)]

    def expected_text(self) -> str:
        return json.dumps(self.expected, ensure_ascii=False)

    def score(self, answer: Answer) -> Score:
        value, is_bare = scoring.find_json(answer.text)
        found = value if isinstance(value, dict) else {}
        right = [n for n, e in self.expected.items() if n in found and scoring.same_value(found[n], e)]
        is_valid = is_bare and found.keys() == self.expected.keys()
        remark = "" if found else "no JSON object in the answer"
        return Score(value=len(right) / len(self.expected), metrics={"format_validity": is_valid}, remark=remark)


class ShortAnswerItem(Item, frozen=True, kw_only=True):
    """Question answering. The score is F1 with the best of the answers."""

    answers: Texts

    def expected_text(self) -> str:
        return " | ".join(self.answers)

    def score(self, answer: Answer) -> Score:
        exact = scoring.exact_match(answer.text, self.answers)
        return Score(value=scoring.f1(answer.text, self.answers), metrics={"exact_match": exact})


class PythonItem(Item, frozen=True, kw_only=True):
    """Code. `header` begins a function, the model goes on; it passes if `tests` run to their end after it.

    `solution` is a body that passes, for those who check the suite.
    """

    header: Text
    entry_point: Text
    tests: Text
    solution: str = ""

    def question(self) -> str:
        return f"{self.prompt}\n\n```python\n{self.header.rstrip()}\n```"

    def prefix(self) -> str:
        return f"```python\n{self.header.rstrip()}"

    def expected_text(self) -> str:
        return self.tests

    def program(self, text: str) -> str:
        """The answer between header and tests. An answer that holds the whole function takes its place."""
        definition = f"def {self.entry_point}("
        whole = scoring.unfenced(text)
        if f"\n{definition}" in f"\n{whole}":
            start, code = self.header.partition(definition)[0], whole
        else:
            start, code = self.header.rstrip() + "\n", text.partition("```")[0].lstrip("\n")
        return f"{start}{code}\n\n{self.tests}\n"

    def score(self, answer: Answer) -> Score:
        failure = run_program(self.program(answer.text))
        return Score(value=float(not failure), remark=failure)


class InstructionsItem(Item, frozen=True, kw_only=True):
    """Instruction following. The score is the share of instructions followed, none by a blank answer."""

    instructions: Annotated[list[Instruction], msgspec.Meta(min_length=1)]

    def expected_text(self) -> str:
        return msgspec.json.encode(self.instructions).decode()

    def score(self, answer: Answer) -> Score:
        text = answer.text
        followed = [bool(text.strip()) and instruction.follows(text) for instruction in self.instructions]
        missed = [i.__struct_config__.tag for i, is_met in zip(self.instructions, followed, strict=True) if not is_met]
        return Score(
            value=sum(followed) / len(followed),
            metrics={"all_followed": all(followed)},
            remark=f"not followed: {', '.join(map(str, missed))}" if missed else "",
        )


class MultipleChoiceItem(Item, frozen=True, kw_only=True):
    """Multiple choice by likelihood: the choice that the model finds most likely is its answer.

    The score takes the sum of log-probabilities; `accuracy_per_byte` divides it by the choice's length, and
    `probability` is that of the right one among the choices.
    """

    choices: Annotated[list[Text], msgspec.Meta(min_length=2)]
    correct: Annotated[int, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.correct >= len(self.choices):
            raise ValueError(f"correct is {self.correct}; the first choice is 0, the last {len(self.choices) - 1}")

    def expected_text(self) -> str:
        return self.choices[self.correct].strip()

    def score(self, answer: Answer) -> Score:
        sums = answer.choice_logprobs
        per_byte = [s / len(c.encode()) for s, c in zip(sums, self.choices, strict=True)]
        probability = 1 / sum(math.exp(min(s - sums[self.correct], 700.0)) for s in sums)
        return Score(
            value=float(max(sums) == sums[self.correct]),
            metrics={
                "accuracy_per_byte": float(max(per_byte) == per_byte[self.correct]),
                "probability": probability,
            },
        )


class ContainsItem(Item, frozen=True, kw_only=True):
    """All of `expected` stand in the answer, as words or numbers of their own."""

    expected: Texts
    ignore_case: bool = False

    def expected_text(self) -> str:
        return " & ".join(self.expected)

    def score(self, answer: Answer) -> Score:
        found = (scoring.contains(answer.text, e, ignore_case=self.ignore_case) for e in self.expected)
        return Score(value=float(all(found)))


class NeedleItem(ContainsItem, frozen=True, kw_only=True):
    """A sentence to find in a long text. `{text}` in the prompt becomes held-out text of `domain` with the needle at
    `depth` of it, so much that prompt and answer take `fill` of the model's context, but at most `cap` tokens."""

    needle: Text
    fill: Share = 0.9
    depth: Share = 0.5
    cap: Annotated[int, msgspec.Meta(ge=64)] = 2048
    domain: str = "english"

    def __post_init__(self) -> None:
        if "{text}" not in self.prompt:
            raise ValueError("the prompt has no {text}, where the long text goes")


class JsonSchemaItem(Item, frozen=True, kw_only=True):
    """Strict JSON. The score is 1 for JSON that the schema allows; `bare` counts answers with nothing around it."""

    schema: dict[str, Any]

    def __post_init__(self) -> None:
        try:
            jsonschema.Draft202012Validator.check_schema(self.schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"schema is not a JSON schema: {error.message}") from None

    def expected_text(self) -> str:
        return json.dumps(self.schema, ensure_ascii=False)

    def score(self, answer: Answer) -> Score:
        value, is_bare = scoring.find_json(answer.text)
        if value is None:
            return Score(value=0.0, metrics={"parses": 0, "bare": 0}, remark="no JSON in the answer")
        # a schema that points to the network gets nothing from there
        validator = jsonschema.Draft202012Validator(self.schema, registry=referencing.Registry())
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except referencing.exceptions.Unresolvable as failure:
            raise HarnessError(f"the schema of item {self.id!r} cannot be used: {failure}", "write it whole") from None
        except RecursionError:
            return Score(value=0.0, metrics={"parses": 1, "bare": is_bare}, remark="nested too deeply")
        remark = f"{error.json_path}: {error.message}"[:300] if error else ""
        return Score(value=float(error is None), metrics={"parses": 1, "bare": is_bare}, remark=remark)


class NonDegenerateItem(Item, frozen=True, kw_only=True):
    """Input that has no answer. One has to come all the same, that ends or at least does not run in a loop."""

    def expected_text(self) -> str:
        return "an answer that is not blank and does not end in a loop"

    def score(self, answer: Answer) -> Score:
        has_ended = answer.finish == "stop"
        is_blank, is_looping = not answer.text.strip(), not has_ended and scoring.is_looping(answer.text)
        remark = "blank" if is_blank else "loops" if is_looping else ""
        return Score(value=float(not remark), metrics={"ended": has_ended}, remark=remark)


SCORERS: dict[str, type[Item]] = {
    "json_fields": JsonFieldsItem,
    "short_answer": ShortAnswerItem,
    "python_tests": PythonItem,
    "instructions": InstructionsItem,
    "multiple_choice": MultipleChoiceItem,
    "contains": ContainsItem,
    "needle": NeedleItem,
    "json_schema": JsonSchemaItem,
    "non_degenerate": NonDegenerateItem,
}
