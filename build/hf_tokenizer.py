"""The tokenizer files of a Hugging Face folder: what is taken from each of them, and in which order.

`tokenizer.json` decides how text is split. `tokenizer_config.json` gives the special tokens, the chat template and
whether text begins with a BOS; its class name decides nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.errors import SourceError, TokenizerError
from harness.weight_source import TokenizerFiles

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """A JSON object from a file; empty where the file may be missing and is.

    Raises:
        SourceError: the file is missing or not a JSON object.
    """
    if not path.is_file():
        if not required:
            return {}
        raise SourceError(f"{path} is missing", "give a folder as Hugging Face publishes it, or a GGUF file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON: {error}", "download it again") from None
    if not isinstance(content, dict):
        raise SourceError(f"{path} is not a JSON object", "download it again")
    return content


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read tokenizer, chat template and special tokens.

    Raises:
        TokenizerError: there is no tokenizer.json.
        SourceError: a file beside it is not JSON.
    """
    config = read_json(folder / "tokenizer_config.json", required=False)
    path = folder / "tokenizer.json"
    if not path.is_file():
        named = config.get("tokenizer_class")
        seen = f"; tokenizer_config.json names the class {named}" if named else ""
        raise TokenizerError(
            f"{folder} has no tokenizer.json{seen}",
            "take tokenizer.json from the model's release, or save a fast tokenizer with transformers",
        )
    add_bos = config.get("add_bos_token")
    return TokenizerFiles(
        tokenizer_json=path.read_bytes(),
        chat_template=_chat_template(folder, config),
        special_tokens=_special_tokens(folder, config),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(f"{path} is not UTF-8: {error}", "download it again") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in (read_json(folder / "special_tokens_map.json", required=False), config):
        for role in _ROLES:
            value = source.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[role] = text
    return tokens
