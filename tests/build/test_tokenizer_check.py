"""A build must fail on a tokenizer that loses text, doubles the BOS, or does not fit its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.build.gguf_source import GgufSource
from harness.build.tokenizer_check import check_tokenizer
from harness.errors import TokenizerError
from harness.spec import ModelSpec
from harness.tokenizer import Tokenizer, TokenizerFiles

Make = Callable[..., TokenizerFiles]
CHAT = "{{ bos_token }}{% for m in messages %}<user>{{ m.content }}{% endfor %}"


def spec(vocab_size: int = 300) -> ModelSpec:
    return ModelSpec.from_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": 8,
        }
    )


def check(files: TokenizerFiles, vocab_size: int = 300, eos: int | None = None) -> None:
    check_tokenizer(Tokenizer(files, generation_config={"eos_token_id": eos}), spec(vocab_size))


def test_sound_tokenizers_pass(make_tokenizer: Make) -> None:
    check(make_tokenizer())
    check(make_tokenizer(bos=None, chat_template=CHAT))
    check(make_tokenizer(chat_template=CHAT, add_bos=True))
    check(make_tokenizer(without="øõ÷Áýÿ", plain=tuple("øõ÷Áýÿ")))  # DeepSeek-Coder


def test_a_bos_that_marks_turns_is_no_bos(make_tokenizer: Make) -> None:
    # SmolLM2 and Qwen name as BOS a token that their templates write as text
    check(make_tokenizer(bos="<user>", chat_template="{% for m in messages %}<user>{{ m.content }}{% endfor %}"))


def test_smollm2_and_deepseek_pass(smollm2_path: Path, deepseek_tokenizer_path: Path) -> None:
    source = GgufSource(smollm2_path)
    tokenizer = Tokenizer(source.tokenizer, generation_config=source.generation_config)
    check_tokenizer(tokenizer, source.spec)
    files = TokenizerFiles(
        tokenizer_json=deepseek_tokenizer_path.read_bytes(),
        chat_template=CHAT,
        special_tokens={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        add_bos=True,
    )
    check(files, vocab_size=129_280)


def test_lost_spaces_are_shown(make_tokenizer: Make) -> None:
    files = make_tokenizer()
    described = json.loads(files.tokenizer_json)
    described["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": ""}
    with pytest.raises(TokenizerError, match="'hello world' becomes 'helloworld'"):
        check(replace(files, tokenizer_json=json.dumps(described).encode()))


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}",
        "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}",
        "{{ messages[0].content }}{{ bos_token }}",
    ],
)
def test_a_bos_twice_or_elsewhere_fails(make_tokenizer: Make, template: str) -> None:
    with pytest.raises(TokenizerError, match="BOS"):
        check(make_tokenizer(chat_template=template))


def test_a_template_may_refuse_the_system_role_but_not_a_conversation(make_tokenizer: Make) -> None:
    refuses_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
    check(make_tokenizer(chat_template=refuses_system))
    with pytest.raises(TokenizerError, match="never"):
        check(make_tokenizer(chat_template="{{ raise_exception('never') }}"))


def test_ids_outside_the_vocabulary_fail(make_tokenizer: Make) -> None:
    with pytest.raises(TokenizerError, match="258"):
        check(make_tokenizer(), vocab_size=258)
    with pytest.raises(TokenizerError, match="999"):
        check(make_tokenizer(), eos=999)
