"""What is kept of long prompts, at the edges of the text that is looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.calib.rendering import Prompt
from harness.calib.windows import CHARS_PER_TOKEN, MARGIN_CHARS, Sample, WindowCutter
from harness.tokenizer import Tokenizer, TokenizerFiles

LONG = "x" * 64  # one token of 64 characters: windows reach as far as the text that was looked at
MAIL = "u123456789.abcdefghij@corp.example.com"


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., TokenizerFiles]) -> Tokenizer:
    return Tokenizer(make_tokenizer(plain=(LONG,), add_bos=True), {})


def cut(tokenizer: Tokenizer, *texts: str, max_tokens: int = 20) -> tuple[tuple[Sample, ...], WindowCutter]:
    cutter = WindowCutter(tokenizer=tokenizer, max_tokens=max_tokens)
    prompts = [Prompt(text=t, body=t, system_prompt="", language="Latin", key=i, count=1) for i, t in enumerate(texts)]
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
