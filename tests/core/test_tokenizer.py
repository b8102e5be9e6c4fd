"""Encoding, decoding and the BOS, on a tiny tokenizer, DeepSeek's own, and SmolLM2's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from harness.errors import RequestError, TokenizerError
from harness.tokenizer import Tokenizer, TokenizerFiles

Make = Callable[..., TokenizerFiles]
CHAT_WITH_BOS = "{{ bos_token }}{% for m in messages %}<user>{{ m.content }}{% endfor %}"
CHAT_WITHOUT_BOS = "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "user", "content": "there"}]


@pytest.fixture(scope="module")
def deepseek(deepseek_tokenizer_path: Path) -> Tokenizer:
    special_tokens = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    files = TokenizerFiles(
        tokenizer_json=deepseek_tokenizer_path.read_bytes(),
        chat_template="{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}<｜Assistant｜>",
        special_tokens=special_tokens,
        add_bos=True,
    )
    return Tokenizer(files, generation_config={"eos_token_id": 1})


@pytest.mark.parametrize("template", [CHAT_WITH_BOS, CHAT_WITHOUT_BOS])
@pytest.mark.parametrize(
    "settings",
    [{"add_bos": True}, {"post_processor_adds_bos": True}, {"add_bos": True, "post_processor_adds_bos": True}],
)
def test_chat_and_text_get_exactly_one_bos(make_tokenizer: Make, template: str, settings: dict[str, bool]) -> None:
    tokenizer = Tokenizer(make_tokenizer(chat_template=template, **settings), generation_config={})
    for ids in (tokenizer.encode_chat(MESSAGES), tokenizer.encode("hi"), tokenizer.encode("<bos>hi")):
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(ids[0]) == 1
    assert tokenizer.bos_token_id not in tokenizer.encode("hi", add_special_tokens=False)


def test_bos_comes_from_the_template_alone_where_the_tokenizer_adds_none(make_tokenizer: Make) -> None:
    # DeepSeek-V3: add_bos_token is false, the template writes it
    files = make_tokenizer(chat_template=CHAT_WITH_BOS, add_bos=False, post_processor_adds_bos=True)
    tokenizer = Tokenizer(files, generation_config={})
    assert tokenizer.encode_chat(MESSAGES).count(256) == 1
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=False)


def test_no_token_is_longer_than_the_longest(deepseek: Tokenizer) -> None:
    longest = max(len(deepseek.decode([i], skip_special_tokens=False)) for i in range(deepseek.vocab_size))
    assert longest <= deepseek.max_token_chars == 128
    for text in ("-" * 10_000, "\n" * 10_000, "  " * 5_000, "<｜begin▁of▁sentence｜>" * 100):
        assert len(deepseek.encode(text)) >= len(text) / deepseek.max_token_chars


def test_a_model_without_bos_gets_none(make_tokenizer: Make) -> None:
    tokenizer = Tokenizer(make_tokenizer(bos=None, chat_template=CHAT_WITH_BOS), generation_config={})
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode_chat(MESSAGES)[0] == tokenizer.encode("<user>")[0]


def test_eos_ids_are_those_of_the_generation_config_then_the_tokenizers(make_tokenizer: Make) -> None:
    assert Tokenizer(make_tokenizer(), generation_config={}).eos_token_ids == (257,)
    assert Tokenizer(make_tokenizer(), generation_config={"eos_token_id": 258}).eos_token_ids == (258, 257)
    both = Tokenizer(make_tokenizer(), generation_config={"eos_token_id": [257, 258]})
    assert both.eos_token_ids == (257, 258)


def test_saved_tokenizer_comes_back_whole(make_tokenizer: Make, tmp_path: Path) -> None:
    files = make_tokenizer(chat_template="a\r\n{{ bos_token }}ß{{ messages[0].content }}", add_bos=True)
    before = Tokenizer(files, generation_config={"eos_token_id": [257, 258]})
    before.save(tmp_path)
    after = Tokenizer.from_dir(tmp_path)
    assert (after.sha256, after.chat_template_sha256) == (before.sha256, before.chat_template_sha256)
    assert (after.eos_token_ids, after.adds_bos) == ((257, 258), True)
    assert after.encode_chat(MESSAGES) == before.encode_chat(MESSAGES)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_missing_or_broken_file_is_named(make_tokenizer: Make, tmp_path: Path, name: str) -> None:
    Tokenizer(make_tokenizer(), generation_config={}).save(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(TokenizerError):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_dir(tmp_path)


def test_truncation_and_padding_left_in_the_file_are_ignored(make_tokenizer: Make) -> None:
    files = make_tokenizer()
    described = tokenizers.Tokenizer.from_str(files.tokenizer_json.decode())
    described.enable_truncation(4)
    described.enable_padding(length=8)
    changed = TokenizerFiles(
        tokenizer_json=described.to_str().encode(), chat_template=None, special_tokens=files.special_tokens
    )
    tokenizer = Tokenizer(changed, generation_config={})
    assert [len(tokenizer.encode(text)) for text in ("a", "a longer text")] == [1, 13]


def test_a_sentencepiece_tokenizer_is_refused(make_tokenizer: Make) -> None:
    files = make_tokenizer()
    described = json.loads(files.tokenizer_json)
    described["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    broken = TokenizerFiles(tokenizer_json=json.dumps(described).encode(), chat_template=None, special_tokens={})
    with pytest.raises(TokenizerError, match="Metaspace"):
        Tokenizer(broken, generation_config={})


def test_a_special_token_outside_the_vocabulary_is_refused(make_tokenizer: Make) -> None:
    with pytest.raises(TokenizerError, match="<nowhere>"):
        Tokenizer(make_tokenizer(bos="<nowhere>"), generation_config={})


def test_an_added_letter_that_is_also_a_byte_symbol_survives(make_tokenizer: Make) -> None:
    # DeepSeek-Coder lacks the bytes that UTF-8 never has, and has their symbols, such as "ø", as added tokens
    tokenizer = Tokenizer(make_tokenizer(without="øõ", plain=("ø", "õ")), generation_config={})
    ids = tokenizer.encode("smørrebrød õ")
    assert max(ids) == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "smørrebrød õ"


def test_token_bytes_may_be_parts_of_characters(make_tokenizer: Make) -> None:
    tokenizer = Tokenizer(make_tokenizer(), generation_config={})
    ids = tokenizer.encode("é🙂")
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([b]) for b in "é🙂".encode()]
    assert tokenizer.token_bytes(257) == b"<eos>"
    assert tokenizer.token_bytes(100_000) == b""


def test_deepseek_tokenizer_keeps_spaces_and_splits_as_the_library_does(deepseek: Tokenizer) -> None:
    text = "hello world, 12345 你好世界\n\n\tdef f(x):\n        return x  # 🙂"
    ids = deepseek.encode(text, add_special_tokens=False)
    assert deepseek.decode(ids) == text
    assert b" world" in [deepseek.token_bytes(i) for i in ids]
    assert deepseek.vocab_size == 129_280


def test_deepseek_chat_has_one_bos_and_single_role_tokens(deepseek: Tokenizer) -> None:
    ids = deepseek.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert [deepseek.token_bytes(i).decode() for i in ids[1:]] == ["<｜User｜>", "hi", "<｜Assistant｜>"]


def test_decode_agrees_with_the_library_on_any_ids(deepseek: Tokenizer, deepseek_tokenizer_path: Path) -> None:
    oracle = tokenizers.Tokenizer.from_file(str(deepseek_tokenizer_path))
    choose = random.Random(7)
    for _ in range(50):
        ids = [choose.randrange(deepseek.vocab_size) for _ in range(60)]
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip)
            assert deepseek.decode(ids, skip_special_tokens=skip) == expected


def test_no_chat_template_is_the_requests_fault(make_tokenizer: Make) -> None:
    tokenizer = Tokenizer(make_tokenizer(), generation_config={})
    with pytest.raises(RequestError, match="/v1/completions"):
        tokenizer.encode_chat(MESSAGES)
