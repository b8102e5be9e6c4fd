"""Text to token ids and back, with the `tokenizers` library, for byte-level BPE vocabularies.

`tokenizer.json` is taken as it is. The class that a `tokenizer_config.json` names is never consulted: DeepSeek labels
byte-level tokenizers as Llama's, and loading them by that label loses every space. Only whether a BOS goes in front is
taken from there, since many releases say it nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from harness.chat_template import ChatTemplate
from harness.errors import RequestError, TokenizerError

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What an engine needs to turn text into ids and back.

    `tokenizer_json` is the serialized form of the `tokenizers` library. `special_tokens` maps `bos_token`,
    `eos_token`, `pad_token` (those the model has) to their text. `add_bos` says whether plain text begins with a BOS;
    None leaves it to the post-processor in `tokenizer_json`.
    """

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    add_bos: bool | None = None


class Tokenizer:
    """A model's tokenizer with its chat template. Safe to use from several threads.

    `bos_token_id` is None for a model without one; `eos_token_ids` are those of the generation config, then the
    tokenizer's own; `adds_bos` says whether `encode` begins text with a BOS; `vocab_size` is the largest id plus one;
    no token stands for more than `max_token_chars` characters.

    Raises:
        TokenizerError: the file is not a byte-level tokenizer, a special token is not in its vocabulary, or what ends
            a text is no token id.
    """

    def __init__(self, files: TokenizerFiles, generation_config: Mapping[str, Any]) -> None:
        self._files = files
        self._generation_config = dict(generation_config)
        self._tokenizer = _load(files.tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.max_token_chars = max(map(len, vocab))  # in byte symbols, of which a character has one or more
        self.bos_token_id = self._special_id(files.special_tokens, "bos_token")
        eos = generation_config.get("eos_token_id")
        named = self._special_id(files.special_tokens, "eos_token")
        ids = [*(eos if isinstance(eos, list) else [eos]), named]
        if not all(i is None or type(i) is int for i in ids):
            raise TokenizerError(
                f"eos_token_id is {eos!r}; it is a token id, or a list of them",
                "take generation_config.json from the model's own release",
            )
        self.eos_token_ids = tuple(dict.fromkeys(i for i in ids if i is not None))
        self.adds_bos = self.bos_token_id is not None and (
            files.add_bos if files.add_bos is not None else self._tokenizer.encode("a").ids[:1] == [self.bos_token_id]
        )
        self._template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None

    @classmethod
    def from_dir(cls, engine_dir: Path) -> Tokenizer:
        """Load what `save` wrote.

        Raises:
            TokenizerError: a file is missing or broken.
        """
        template = engine_dir / CHAT_TEMPLATE_NAME
        try:
            settings = json.loads((engine_dir / TOKENIZER_CONFIG_NAME).read_text(encoding="utf-8"))
            files = TokenizerFiles(
                tokenizer_json=(engine_dir / TOKENIZER_NAME).read_bytes(),
                # bytes, because reading text would turn \r\n into \n
                chat_template=template.read_bytes().decode("utf-8") if template.is_file() else None,
                special_tokens=dict(settings["special_tokens"]),
                add_bos=settings["add_bos"],
            )
            generation_config = dict(json.loads((engine_dir / GENERATION_CONFIG_NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TokenizerError(
                f"the tokenizer of {engine_dir} cannot be read: {error}", "copy the engine again, or rebuild it"
            ) from None
        try:
            return cls(files, generation_config)
        except TokenizerError as error:
            raise TokenizerError(
                f"the tokenizer of {engine_dir}: {error.message}", "copy the engine again, or rebuild it"
            ) from None

    def save(self, engine_dir: Path) -> None:
        """Write tokenizer, chat template, special tokens and generation config into an engine folder."""
        files = self._files
        (engine_dir / TOKENIZER_NAME).write_bytes(files.tokenizer_json)
        if files.chat_template is not None:
            (engine_dir / CHAT_TEMPLATE_NAME).write_bytes(files.chat_template.encode("utf-8"))
        settings = {"special_tokens": files.special_tokens, "add_bos": files.add_bos}
        for name, content in ((TOKENIZER_CONFIG_NAME, settings), (GENERATION_CONFIG_NAME, self._generation_config)):
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (engine_dir / name).write_text(text + "\n", encoding="utf-8")

    @property
    def sha256(self) -> str:
        """Hash of `tokenizer.json`."""
        return hashlib.sha256(self._files.tokenizer_json).hexdigest()

    @property
    def chat_template_sha256(self) -> str | None:
        """Hash of the chat template, None without one."""
        template = self.chat_template
        return None if template is None else hashlib.sha256(template.encode("utf-8")).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template."""
        return self._files.chat_template

    def _special_id(self, special_tokens: Mapping[str, str], role: str) -> int | None:
        text = special_tokens.get(role)
        if text is None:
            return None
        token_id: int | None = self._tokenizer.token_to_id(text)
        if token_id is None:
            raise TokenizerError(
                f"the {role} {text!r} is not in the vocabulary",
                "take the tokenizer files from one and the same release",
            )
        return token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text. With `add_special_tokens`, a model that begins with BOS gets exactly one.

        Text that already begins with the BOS (a rendered chat template may) gets no second one. Nothing is appended:
        a prompt that ended with EOS would be over.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_special_tokens and self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, which need not be whole characters; empty for an id without a token."""
        # An added token is literal text. Decoding it as byte symbols would break letters such as "ø", which
        # DeepSeek-Coder has as added tokens and which are byte symbols too.
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token: str | None = self._tokenizer.id_to_token(token_id)
        try:
            return bytes(map(_SYMBOL_TO_BYTE.__getitem__, token or ""))
        except KeyError:  # literal text in the plain vocabulary, as converters leave it there
            return (token or "").encode()

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt text of a conversation; `extra` are further template variables, such as `tools`.

        Raises:
            RequestError: the model has no chat template, or the template does not accept the messages.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; send the prompt to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **extra)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """Token ids of a conversation, with exactly one BOS where the model has one. Raises as `render_chat`."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, **extra))


def _load(tokenizer_json: bytes) -> tokenizers.Tokenizer:
    try:
        described = json.loads(tokenizer_json)
        decoder = described.get("decoder") or {}
        if not any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", []))):
            raise TokenizerError(
                f"the tokenizer decodes with {decoder.get('type')!r}, not ByteLevel",
                "byte-level BPE tokenizers are supported (DeepSeek, Qwen, Llama 3); SentencePiece ones are not",
            )
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode("utf-8"))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(
            f"tokenizer.json cannot be loaded: {error}", "take tokenizer.json from the model's own release"
        ) from None
    # some releases leave the padding or truncation of their training here
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _byte_symbols() -> dict[str, int]:
    # GPT-2's alphabet: visible Latin-1 characters stand for their own byte, the others are moved past U+0100
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_SYMBOL_TO_BYTE = _byte_symbols()
