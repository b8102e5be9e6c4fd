"""What is kept of long prompts, at the edges of the text that is looked at."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from harness.calib.rendering import Prompt
from harness.calib.windows import CHARS_PER_TOKEN, MARGIN_CHARS, Sample, WindowCutter
from harness.tokenizer import Tokenizer, TokenizerFiles

LONG = "x" * 64  # one token of 64 characters: windows reach as far as the text that was looked at
MAIL = "u123456789.abcdefghij@corp.example.com"


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., TokenizerFiles]) -> Tokenizer:
    return Tokenizer(make_tokenizer(plain=(LONG,), add_bos=True), {})


def cut(
    tokenizer: Tokenizer, *texts: str, max_tokens: int = 20, systems: Sequence[str] = ()
) -> tuple[tuple[Sample, ...], WindowCutter]:
    """Cuts texts behind their system prompts, if any."""
    cutter = WindowCutter(tokenizer=tokenizer, max_tokens=max_tokens)
    systems = systems or [""] * len(texts)
    texts = tuple(f"S:{s};U:{text}" if s else text for s, text in zip(systems, texts, strict=True))
    prompts = [
        Prompt(text=t, body=t, system_prompt=s.replace("\r\n", "\n"), language="Latin", key=i, count=1)
        for i, (t, s) in enumerate(zip(texts, systems, strict=True))
    ]
    return cutter.cut(prompts, [len(tokenizer.encode(text)) for text in texts]), cutter


@pytest.mark.parametrize("edge", [20 * CHARS_PER_TOKEN, 20 * CHARS_PER_TOKEN + MARGIN_CHARS])
def test_no_half_of_a_secret_is_left_where_text_is_cut(tokenizer: Tokenizer, edge: int) -> None:
    filler = f"{LONG} " * 200
    texts = []
    for before in range(edge - len(MAIL) - 2, edge + 2, 3):
        text = f"{filler[:before]} {MAIL} {filler}"
        texts += [text, text[::-1].replace(MAIL[::-1], MAIL)]  # the same place from the other end
    samples, _ = cut(tokenizer, *texts)
    assert samples
    for sample in samples:
        assert "u123" not in tokenizer.decode(sample.token_ids.tolist())
        assert "corp" not in tokenizer.decode(sample.token_ids.tolist())


def test_heads_and_tails_are_those_of_the_whole_prompt(tokenizer: Tokenizer) -> None:
    texts = ["".join(chr(97 + (i * k) % 23) for i in range(50_000)) + str(k) for k in range(1, 9)]
    samples, cutter = cut(tokenizer, *texts, max_tokens=100)
    assert [s.truncated for s in samples] == [True] * 8
    for i, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        whole = tokenizer.encode(text)
        expected = whole[:100] if i % 4 == 0 else [whole[0], *whole[-99:]]
        assert sample.token_ids.tolist() == expected
    assert cutter.num_duplicates == 0


def test_a_prompt_that_fits_is_whole_and_an_equal_one_is_dropped(tokenizer: Tokenizer) -> None:
    samples, cutter = cut(tokenizer, "a" * 19, "mail a@corp.org", "mail b@corp.org")
    assert [tokenizer.decode(s.token_ids.tolist()) for s in samples] == ["a" * 19, "mail <EMAIL>"]
    assert not any(s.truncated for s in samples)
    assert (cutter.num_duplicates, cutter.redactions) == (1, {"EMAIL": 1})


def letters(rng: random.Random, num: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=num))


def without_bos(tokenizer: Tokenizer, samples: Sequence[Sample]) -> list[str]:
    assert all(sample.token_ids[0] == tokenizer.bos_token_id for sample in samples)
    return [tokenizer.decode(sample.token_ids[1:].tolist()) for sample in samples]


@pytest.mark.parametrize(("num", "num_chars"), [(128, 1809), (40, 1809), (16, 601), (9, 130), (40, 110)])
def test_windows_cover_a_long_shared_prompt(tokenizer: Tokenizer, num: int, num_chars: int) -> None:
    rng = random.Random(num_chars)
    system = letters(rng, num_chars)
    bodies = [letters(rng, 300).upper() for _ in range(num)]
    samples, cutter = cut(tokenizer, *bodies, max_tokens=101, systems=[system] * num)
    assert (len(samples), cutter.num_duplicates) == (num, 0)
    assert len({s.token_ids.tobytes() for s in samples}) == num
    shown = without_bos(tokenizer, samples)
    assert shown[0] == f"S:{system}"[:100]
    covered: set[int] = set()
    fronts = [(s, text) for s, text in zip(samples, shown, strict=True) if text in f"S:{system}"]
    for sample, text in fronts:
        assert sample.has_system_prompt
        covered.update(range(start := f"S:{system}".index(text), start + len(text)))
    assert covered == set(range(num_chars + 2))
    tails = [(s, text) for s, text in zip(samples, shown, strict=True) if text not in f"S:{system}"]
    for sample, text in tails:
        assert text in [body[-100:] for body in bodies]
        assert not sample.has_system_prompt
    # about a quarter where that covers it, never more than half
    assert num / 4 <= len(fronts) <= max(num / 4, -(-num // 2) if num < 4 * num_chars / 100 else 0) + 1


def test_a_prompt_too_long_to_cover_is_seen_from_beginning_to_end_by_half_of_the_samples(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    system = letters(rng, 5000)
    samples, _ = cut(tokenizer, *(letters(rng, 300) for _ in range(10)), max_tokens=101, systems=[system] * 10)
    fronts = [text for text in without_bos(tokenizer, samples) if text in f"S:{system}"]
    assert (len(fronts), fronts[0], fronts[-1]) == (5, f"S:{system}"[:100], system[-100:])


def test_long_system_prompts_that_all_differ_take_turns(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    systems = [f"{i:03} " + letters(rng, 400) for i in range(20)]
    samples, _ = cut(tokenizer, *(letters(rng, 300) for _ in systems), max_tokens=101, systems=systems)
    assert sum(sample.has_system_prompt for sample in samples) == 5


def test_a_short_system_prompt_stays_and_the_middle_goes(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    system = letters(rng, 47)
    bodies = [letters(rng, length) for length in (60, 200, 30_000)]
    samples, _ = cut(tokenizer, *bodies, max_tokens=101, systems=[system] * 3)
    whole = [f"S:{system};U:{body}" for body in bodies]
    # 50 tokens of the front with the BOS, 51 of the end
    assert without_bos(tokenizer, samples) == [text[:49] + text[-51:] if len(text) > 100 else text for text in whole]
    assert all(sample.has_system_prompt for sample in samples)


def test_a_prompt_that_fits_once_its_secrets_are_out_is_whole(tokenizer: Tokenizer) -> None:
    samples, _ = cut(tokenizer, f"write to {'x' * 60}@corp.example.com", max_tokens=60, systems=["Be kind."])
    assert without_bos(tokenizer, samples) == ["S:Be kind.;U:write to <EMAIL>"]


def test_a_tail_says_whether_it_reaches_the_system_prompt(tokenizer: Tokenizer) -> None:
    rng = random.Random(6)
    system = letters(rng, 70)
    lengths = [200, 98, 97, 96, 60]  # the first shows the head; behind the prompt stand ";U:" and the body
    samples, _ = cut(tokenizer, *(letters(rng, n) for n in lengths), max_tokens=101, systems=[system] * 5)
    assert [s.has_system_prompt for s in samples] == [True, False, False, True, True]
    assert system[-1] + ";U:" in without_bos(tokenizer, samples)[3]


def test_secrets_of_a_shared_prompt_are_out_and_its_line_ends_do_not_hide_it(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    system = f"{letters(rng, 150)} ask {MAIL}\r\n{letters(rng, 150)}"
    samples, cutter = cut(tokenizer, *(letters(rng, 300) for _ in range(12)), max_tokens=101, systems=[system] * 12)
    fronts = [s for s in samples if s.has_system_prompt]
    together = "".join(without_bos(tokenizer, fronts))
    assert len(fronts) == 4
    assert "corp" not in together
    assert "\r\n" in together
    assert cutter.redactions["EMAIL"] == together.count("<EMAIL>") > 0
