"""The checks that a tokenizer must pass before an engine is built: text survives, ids fit, one BOS.

A tokenizer that loses spaces or doubles the BOS gives an engine that answers, badly; so a build fails instead.
"""

from __future__ import annotations

from typing import Any

from harness.errors import RequestError, TokenizerError
from harness.spec import ModelSpec
from harness.tokenizer import Tokenizer

# composed characters only: Qwen's tokenizers normalize to NFC, by design
ROUND_TRIP_TEXTS = (
    "hello world",
    " leading, trailing and   several    spaces  ",
    "lines\nand\n\nblank lines\r\nand\ttabs\t\t\n",
    "def fib(n: int) -> int:\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "0 1 12 123 1234 3.14159 1,000,000 0xDEADBEEF",
    "你好，世界！深度求索的模型。",
    "日本語のテキスト、한국어 텍스트",
    "🙂🚀 👩‍💻 🇨🇳",
    "naïve façade, Ærø, smørrebrød, Straße, õ÷Áý Àÿ ø úþ ü ùö û, Łódź, ħ, ß",
    "Привет, мир. ℕ ⊂ ℝ, ∀x ∈ ℝ: x² ≥ 0. \u00a0\u200b",
    "'s 'LL don't I'M <tag attr=\"1\">&amp;</tag> {\"a\": [1, 2]} \\n $x^2$ `code` ~~~",
)
_TURNS = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "How are you?"},
)


def check_tokenizer(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Check a tokenizer against itself, its chat template and its model.

    Raises:
        TokenizerError: a text does not survive the round trip, a token id is outside the model's vocabulary, or the
            chat template fails or does not begin with exactly one BOS.
    """
    _check_ids(tokenizer, spec)
    for text in ROUND_TRIP_TEXTS:
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)
        if decoded != text:
            raise TokenizerError(
                f"the tokenizer does not give back what it is given: {text!r} becomes {decoded!r}",
                "take tokenizer.json from the model's own release",
            )
    if tokenizer.chat_template is not None:
        _check_chat(tokenizer, tokenizer.chat_template)


def _check_ids(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    ids: list[Any] = [tokenizer.vocab_size - 1, *tokenizer.eos_token_ids]
    wrong = [i for i in ids if not (isinstance(i, int) and 0 <= i < spec.vocab_size)]
    if wrong:
        raise TokenizerError(
            f"the tokenizer has the token ids {wrong}, the model only 0 to {spec.vocab_size - 1}",
            "take weights, config and tokenizer from one and the same release",
        )


def _check_chat(tokenizer: Tokenizer, template: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    try:
        ids = tokenizer.encode_chat([system, *_TURNS])
    except RequestError:  # some templates know no system role
        try:
            ids = tokenizer.encode_chat(_TURNS)
        except RequestError as error:
            raise TokenizerError(
                f"the chat template fails on a plain conversation: {error.message}",
                "take the chat template from the model's own release",
            ) from None
    bos = tokenizer.bos_token_id
    # Where neither tokenizer nor template speaks of a BOS, the token named so marks turns (Qwen, SmolLM2)
    if bos is None or not (tokenizer.adds_bos or "bos_token" in template):
        return
    if ids.count(bos) != 1 or ids[0] != bos:
        raise TokenizerError(
            f"a conversation has {ids.count(bos)} BOS tokens and begins with {ids[:2]}; exactly one, {bos}, "
            "must stand in front",
            "take the chat template and tokenizer_config.json from the model's own release",
        )
