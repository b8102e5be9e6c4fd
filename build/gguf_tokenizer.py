"""The tokenizer inside a GGUF file, as the `tokenizer.json` that it was made from.

GGUF keeps vocabulary, merges and kinds of tokens, and a name (`tokenizer.ggml.pre`) for how text is cut before merging.
That name stands for regular expressions of the model's own tokenizer; a name not listed here is refused, because a
wrong cut gives a model that is quietly worse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.errors import SourceError, UnsupportedModelError
from harness.weight_source import TokenizerFiles

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}
# Tokens that end a turn or a document. A chat model must stop at them whichever of them its file calls EOS.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|EOT|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# DeepSeek-LLM's letters: those with an upper and a lower case, by Unicode block
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DIGITS: dict[str, Any] = {"type": "Digits", "individual_digits": True}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool = False) -> dict[str, Any]:
    """Bytes as symbols; with `use_regex`, cut by GPT-2's expression first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "default": [_byte_level(use_regex=True)],
    "smollm": [_DIGITS, _byte_level(use_regex=True)],
    "qwen2": [_split(_QWEN2), _byte_level()],
    "deepseek-r1-qwen": [_split(_QWEN2), _byte_level()],
    "llama-bpe": [_split(_LLAMA3), _byte_level()],
    "deepseek-llm": [
        _split("[\r\n]"),
        _split(rf"\s?[{_CASED}]+"),
        _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        _split(r"\s+$"),
        _split(_CJK),
        _DIGITS,
        _byte_level(),
    ],
    "deepseek-coder": [
        _split("[\r\n]"),
        _split(r"\s?\p{L}+"),
        _split(r"\s?\p{P}+"),
        _split(_CJK),
        _DIGITS,
        _byte_level(),
    ],
}
_NORMALIZES_NFC = ("qwen2", "deepseek-r1-qwen")


def read_tokenizer(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Convert the tokenizer of a GGUF file.

    Raises:
        UnsupportedModelError: not a byte-level BPE tokenizer, or one that cuts text in an unknown way.
        SourceError: vocabulary, kinds and merges do not fit together.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer is {model!r}; only byte-level BPE, 'gpt2', is supported",
            "use the model's Hugging Face folder",
        )
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer cuts text as {pre!r}, which is unknown here",
            f"known: {', '.join(sorted(_PRE_TOKENIZERS))}; or use the model's Hugging Face folder",
        )
    tokens, kinds, merges = (_list(metadata, key) for key in ("tokens", "token_type", "merges"))
    if not tokens or not merges or len(tokens) != len(kinds):
        raise SourceError(
            f"the GGUF file's tokenizer has {len(tokens)} tokens, {len(kinds)} kinds and {len(merges)} merges",
            "download the file again",
        )
    special_ids = {role: metadata[key] for role, key in _ROLES.items() if key in metadata}
    if not all(isinstance(i, int) and 0 <= i < len(tokens) for i in special_ids.values()):
        raise SourceError(f"the GGUF file's special tokens {special_ids} are not ids", "download the file again")
    # unused rows of the embedding have made-up names, which must not be found in text
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    return TokenizerFiles(
        tokenizer_json=_tokenizer_json(pre, vocab, kinds, merges),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={role: tokens[i] for role, i in special_ids.items()},
        # files older than the key are of Llama 3, which has a BOS
        add_bos=bool(add_bos) if add_bos is not None else pre == "llama-bpe",
    )


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, list) else []


def _tokenizer_json(pre: str, vocab: Mapping[str, int], kinds: list[int], merges: list[str]) -> bytes:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, "special": kinds[i] != _USER_DEFINED, **flags}
        for token, i in vocab.items()
        if kinds[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in _NORMALIZES_NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # Llama 3's vocabulary has words that its merges do not reach
            "ignore_merges": pre == "llama-bpe",
            "vocab": vocab,
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    return json.dumps(described, ensure_ascii=False).encode("utf-8")


def read_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids as `generation_config.json` has them: BOS, and everything that ends a turn."""
    tokens, kinds = _list(metadata, "tokens"), _list(metadata, "token_type")
    eos = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    eos += [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    config: dict[str, Any] = {} if bos is None else {"bos_token_id": bos}
    return config | {"eos_token_id": list(dict.fromkeys(i for i in eos if i is not None))}
