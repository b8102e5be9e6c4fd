"""What a quantized checkpoint says of itself: `calibration.json` beside its weights.

A quantized checkpoint is a Hugging Face folder in compressed-tensors format that every arch is lowered from. The record
says what it was made from and how, and holds the sha256 of every other file, which is checked before any is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from harness.errors import SourceError
from harness.manifest import CalibrationSetPart, FilePart, ModelPart, RecipePart, read_versioned

RECORD_NAME = "calibration.json"
NGRAMS_NAME, SENSITIVITY_NAME = "calibration-ngrams.npy", "sensitivity.json"
"""What a quality report reads of a calibration; engines carry copies. The second only where the recipe was searched."""
STATISTICS_NAME = "calibration.safetensors"
"""Maxima of layer inputs, keys and values over the calibration set, for lowerings with static scales."""

_MAKE_AGAIN = "remove its folder and make the checkpoint again, or copy it again, whole"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LossPart(_Part):
    """Perplexity of the held-out samples of the set, before and after, and the mean KL divergence in nats per token."""

    perplexity_before: float
    perplexity_after: float
    kl_divergence: float
    num_tokens: int


class CheckpointRecord(_Part):
    """All of `calibration.json`."""

    schema_version: Literal[1] = 1
    checkpoint_id: str
    model: ModelPart
    method: Literal["gptq"]
    calibration_set: CalibrationSetPart
    recipe: RecipePart
    target: Literal["portable", "cpu"]
    optimize: Literal["decode", "prefill"]
    loss: LossPart
    unreached_experts: list[str]
    versions: dict[str, str]
    files: dict[str, FilePart]


def read_record(folder: Path) -> CheckpointRecord:
    """Read and check `calibration.json`; the files it names are not looked at.

    Raises:
        SourceError: no checkpoint there, a record of another schema, or a broken one.
    """
    path = folder / RECORD_NAME
    if not folder.is_dir():
        raise SourceError(f"there is no folder {folder}", f"relative paths are taken from {Path.cwd()}")
    if not path.is_file():
        raise SourceError(
            f"no quantized checkpoint in {folder} (it has no {RECORD_NAME})",
            "give the folder that harness-build made, or the unquantized weights as --model",
        )
    record = read_versioned(path, CheckpointRecord, SourceError, _MAKE_AGAIN)
    for name in record.files:
        # a record is input: it must not point out of its folder
        if name in ("", ".", "..", RECORD_NAME) or not name.isprintable() or set(name) & {"/", "\\"}:
            raise SourceError(f"{path} lists a file that is not one of its own folder: {name!r}", "do not use it")
    return record
