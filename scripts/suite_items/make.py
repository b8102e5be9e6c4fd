"""Writes the items of the default suite that are made by rule: `scripts/make_suite`. It always makes the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import adversarial
import extraction
import functions
import instructions
import knowledge
import questions

TASKS = Path(__file__).resolve().parents[2] / "calib" / "suites" / "tasks"


def made() -> dict[str, list[dict[str, Any]]]:
    """Items by the name of their file. Each file has a seed of its own, so that one may change without the others."""
    return {
        "extraction": extraction.items(Random(1)),
        "question_answering": questions.items(Random(2)),
        "functions": functions.items(),
        "instruction_following": instructions.items(Random(4)),
        "common_knowledge": knowledge.items(Random(5)),
        "long_context": adversarial.long_context(Random(6)),
        "mixed_languages": adversarial.mixed_languages(Random(7)),
        "digits": adversarial.digits(Random(8)),
        "strict_json": adversarial.strict_json(Random(9)),
        "broken_encodings": adversarial.broken_encodings(Random(10)),
        "repeated_characters": adversarial.repeated_characters(Random(11)),
        "empty_input": adversarial.empty_input(),
        "prompt_injections": adversarial.prompt_injections(Random(12)),
    }


def as_lines(items: list[dict[str, Any]]) -> str:
    """JSON lines, readable."""
    # what is no character to see stays escaped; a line separator inside a string would end the line
    return "".join(_readable(json.dumps(item, ensure_ascii=False)) + "\n" for item in items)


def _readable(line: str) -> str:
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def main() -> None:
    """Write all files."""
    for name, items in made().items():
        (TASKS / f"{name}.jsonl").write_text(as_lines(items), encoding="utf-8")


if __name__ == "__main__":
    main()
