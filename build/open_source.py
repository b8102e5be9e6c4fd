"""From what `--model` says to a weight source."""

from __future__ import annotations

import re
from pathlib import Path

from harness.build.gguf_source import GgufSource
from harness.build.hf_source import HfFolderSource
from harness.build.hub import fetch_from_hub
from harness.errors import SourceError
from harness.weight_source import WeightSource

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_FORMS = "give a Hugging Face folder, a .gguf file, or a hub id such as deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"


def open_source(model: str) -> WeightSource:
    """Open a folder, a GGUF file or a hub id; what exists on disk goes first.

    Raises:
        SourceError: it is none of these, or it is broken or cannot be fetched.
        UnsupportedModelError: it is readable, but not a model this project lowers.
    """
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: `~somebody` who does not exist
        raise SourceError(f"nothing can be at {model[:80]!r}: {error}"[:400], _FORMS) from None
    if is_dir:
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not ggufs:
            return HfFolderSource(path)
        if len(ggufs) > 1:
            raise SourceError(f"{path} holds {len(ggufs)} GGUF files", f"name one of them, such as {ggufs[0]}")
        return GgufSource(ggufs[0])
    if is_file:
        if path.suffix.lower() == ".gguf":
            return GgufSource(path)
        raise SourceError(f"{path} is not a folder, and not a .gguf file", _FORMS)
    if _HUB_ID.fullmatch(model):
        return HfFolderSource(fetch_from_hub(model), name=model.partition("/")[2])
    raise SourceError(f"nothing at {model!r}", _FORMS)
