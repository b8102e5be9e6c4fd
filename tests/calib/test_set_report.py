"""The figures of a report against figures computed by hand, and its two forms against each other."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest

from harness.calib.set_report import (
    Lengths,
    SetReport,
    Share,
    as_json,
    measure_lengths,
    measure_shares,
    name_of_prompt,
    render_text,
)

REPORT = SetReport(
    label="traffic.jsonl",
    num_samples=100,
    num_held_out=10,
    num_tokens=40_000,
    max_tokens=512,
    lengths=measure_lengths([10, 700, 90, 5000], [1, 1, 2, 1]),
    languages=(Share(name="Latin", of_traffic=0.9, of_set=0.8), Share(name="Chinese", of_traffic=0.1, of_set=0.2)),
    system_prompts=(Share(name="a | b [00000000]", of_traffic=1.0, of_set=1.0),),
    system_prompt_share=0.75,
    num_requests=150,
    num_distinct=120,
    num_duplicates=20,
    num_near_duplicates=5,
    num_prompts_added=7,
    num_refused=3,
    num_truncated=11,
    num_short=2,
    redactions={"EMAIL": 4, "IP": 1},
    num_bad_lines=2,
    bad_lines=("traffic.jsonl:3: not JSON", "traffic.jsonl:9: not JSON"),
    num_broken_encodings=6,
    has_chat_template=False,
    warnings=("100 samples are few",),
)


def test_percentiles_are_those_of_all_requests() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 3000) for _ in range(500)]
    counts = [rng.randint(1, 5) for _ in lengths]
    measured = measure_lengths(lengths, counts)
    every = sorted(n for n, count in zip(lengths, counts, strict=True) for _ in range(count))
    for share, value in ((50, measured.p50), (90, measured.p90), (99, measured.p99)):
        assert value in every
        assert sum(n <= value for n in every) >= share / 100 * len(every)
        assert sum(n < value for n in every) <= share / 100 * len(every)
    assert sum(number for _, number in measured.histogram) == len(every)
    below = 0
    for bound, number in measured.histogram:
        below += number
        assert below == sum(n <= (bound or np.inf) for n in every)
    assert (measured.longest, measured.histogram[-1][0]) == (every[-1], None)


@pytest.mark.parametrize(
    ("p99", "suggested"), [(1, 2048), (1024, 2048), (1025, 3072), (30_000, 31_744), (130_000, 131_072)]
)
def test_the_suggested_length_holds_the_prompt_and_an_answer(p99: int, suggested: int) -> None:
    assert measure_lengths([p99], [1]).suggested_max_model_len == suggested


def test_one_length_makes_one_bar() -> None:
    assert measure_lengths([16], [3]).histogram == ((None, 3),)


def test_shares_add_up_however_many_names() -> None:
    names = [f"prompt {i}" for i in range(100)] + ["common"] * 50
    shares = measure_shares(names, names[80:110])
    assert shares[0] == Share(name="common", of_traffic=50 / 150, of_set=10 / 30)
    assert len(shares) == 33
    assert shares[-1].name == "(others)"
    assert sum(s.of_traffic for s in shares) == pytest.approx(1)
    assert sum(s.of_set for s in shares) == pytest.approx(1)


def test_prompts_that_begin_alike_have_different_names() -> None:
    first, second = name_of_prompt("x" * 100 + "1"), name_of_prompt("x" * 100 + "2")
    assert first != second
    assert first.startswith("x" * 60 + " [")
    assert name_of_prompt("") == "(none)"
    assert "\n" not in name_of_prompt("two\n\nlines")


@pytest.mark.parametrize("secret", ["bob@corp.example.com", "b\x00ob@corp\u200b.example.com", "sk-" + "a1B2" * 100])
def test_names_of_prompts_hold_no_secret(secret: str) -> None:
    name = name_of_prompt(f"You help {secret} with mail.")
    assert "corp" not in name
    assert "a1B2" not in name
    assert name.startswith(("You help <EMAIL> with mail. [", "You help <API_KEY> with mail. ["))
    late = name_of_prompt("You are the agent of a shop for tea and answer " + secret)
    assert "@" not in late
    assert "a1B2" not in late


def test_names_of_prompts_command_no_terminal() -> None:
    name = name_of_prompt("A\x1b]0;owned\x07B\x9b2J\u202eC\x7f\tD")
    assert name.startswith("A]0;ownedB2JC D [")
    assert name.isprintable()


def test_a_name_that_only_the_set_has_is_listed() -> None:
    shares = measure_shares(["a"] * 4, ["a", "(none)"])
    assert shares == (Share(name="a", of_traffic=1.0, of_set=0.5), Share(name="(none)", of_traffic=0.0, of_set=0.5))


def test_json_holds_every_field_and_goes_through_json() -> None:
    described = json.loads(json.dumps(as_json(REPORT)))
    assert set(described) == {field.name for field in dataclasses.fields(SetReport)}
    assert set(described["lengths"]) == {field.name for field in dataclasses.fields(Lengths)}
    assert described["label"] == "traffic.jsonl"
    assert described["languages"][1] == {"name": "Chinese", "of_traffic": 0.1, "of_set": 0.2}


def test_text_says_all_that_a_reader_must_know() -> None:
    text = render_text(REPORT)
    for said in (
        "## Calibration set: traffic.jsonl",
        "100 samples of at most 512 tokens (40000 in all), 10 held out",
        "75% of the samples hold a system prompt or part of one",
        "20 duplicates and 5 near-duplicates",
        "7 requests came without a system prompt",
        "P50 90, P90 5000, P99 5000, longest 5000",
        "--max-model-len 6144",
        "Truncated to 512 tokens: 11 of 110",
        "| Chinese | 10.0% | 20.0% |",
        "a \\| b [00000000]",
        "4 EMAIL, 1 IP",
        "no chat template",
        "3 requests left out",
        "6 lines hold",
        "- traffic.jsonl:9: not JSON",
        "warning: 100 samples are few",
    ):
        assert said in text
    bars = {line.split()[1]: line.split()[2:] for line in text.splitlines() if line.startswith("    ")}
    assert bars["128"] == ["2", "#" * 40]
    assert bars["16"] == ["1", "#" * 20]
    assert bars["64"] == ["0"]


def test_a_quiet_report_is_short() -> None:
    quiet = dataclasses.replace(
        REPORT, redactions={}, num_bad_lines=0, bad_lines=(), num_broken_encodings=0, has_chat_template=True,
        num_refused=0, warnings=(), num_prompts_added=0,
    )  # fmt: skip
    text = render_text(quiet)
    assert text.endswith("Secrets and personal data replaced: nothing found.")
    assert "warning" not in text
