"""Near-duplicates and the stratified draw."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from harness.calib.selection import common_prompts, draw, first_of_each


def words(rng: random.Random, num: int) -> str:
    return " ".join("".join(rng.choices("aeiounrstlkmd", k=rng.randint(2, 8))) for _ in range(num))


def test_small_edits_are_near_duplicates_and_other_texts_are_not() -> None:
    rng = random.Random(0)
    texts = [words(rng, 300) for _ in range(50)]
    edited = [text[:900] + "changed" + text[907:] for text in texts]
    noisy = [text.upper().replace(" ", "  ") + "." for text in texts]
    kept = first_of_each([("", text) for text in texts + edited + noisy])
    assert kept[:50] == list(range(50))
    assert len(kept) <= 55  # SimHash is a coin with odds, not a proof
    assert all(place < 100 for place in kept)


def test_texts_without_letters_are_compared_as_they_are() -> None:
    assert first_of_each([("", text) for text in ("???", "!!!", "", "???", "1.5", "2.5")]) == [0, 1, 2, 4]


def test_a_body_counts_once_per_system_prompt() -> None:
    assert first_of_each([("a", "hello"), ("b", "hello"), ("a", "Hello!")]) == [0, 1]


@pytest.mark.parametrize("num", [1, 7, 64, 128, 500])
def test_a_draw_has_its_size_and_no_item_twice(num: int) -> None:
    rng = random.Random(num)
    kinds = [(rng.choice("aaaaab"), rng.randint(0, 5), rng.choice(["", "x", "y"])) for _ in range(500)]
    places = draw(kinds, num)
    assert len(places) == len(set(places)) == num
    assert places == sorted(places) == draw(kinds, num)


def test_every_kind_of_every_axis_is_drawn_where_there_is_room() -> None:
    rng = random.Random(1)
    kinds: list[tuple[str, int]] = [
        (f"language {min(int(rng.expovariate(1)), 9)}", rng.randint(0, 3)) for _ in range(2000)
    ]
    kinds += [("rare", 9)]
    drawn = [kinds[i] for i in draw(kinds, 64)]
    for axis in (0, 1):
        assert {kind[axis] for kind in drawn} == {kind[axis] for kind in kinds}
    # and what is common stays common
    share = Counter(language for language, _ in kinds)["language 0"] / len(kinds)
    assert Counter(language for language, _ in drawn)["language 0"] / 64 == pytest.approx(share, abs=0.1)


def test_more_kinds_than_room_takes_the_rarest() -> None:
    kinds = [("common", i) for i in range(90)] + [("rare", 100)]
    assert 90 in draw(kinds, 3)


def test_prompts_that_are_all_different_are_one_kind() -> None:
    names = common_prompts(["fixed"] * 5 + [f"Today is day {i}." for i in range(100)] + [""], max_prompts=2)
    assert len(set(names)) == 4
    assert names[-1] == ""
    assert Counter(names)["other"] == 99
