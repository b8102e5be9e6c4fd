"""What a quantized checkpoint says of itself: `calibration.json` beside its weights.

A quantized checkpoint is a Hugging Face folder in compressed-tensors format that every arch is lowered from. The record
says what it was made from and how, and holds the sha256 of every other file, which is checked before any is read.
"""

from __future__ import annotations

from collections.abc import Iterable
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

_GIVE_ANOTHER = "give the folder that harness-build made, or the unquantized weights as --model"
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
    path = find_record(folder, RECORD_NAME, "quantized checkpoint", _GIVE_ANOTHER)
    record = read_versioned(path, CheckpointRecord, SourceError, _MAKE_AGAIN)
    check_file_names(path, record.files)
    return record


def find_record(folder: Path, name: str, what: str, hint: str) -> Path:
    """The record of a folder that is `what`.

    Raises:
        SourceError: no such folder, or it has no record; then with `hint`.
    """
    if not folder.is_dir():
        raise SourceError(f"there is no folder {folder}", f"relative paths are taken from {Path.cwd()}")
    if not (folder / name).is_file():
        raise SourceError(f"no {what} in {folder} (it has no {name})", hint)
    return folder / name


def check_file_names(record: Path, names: Iterable[str]) -> None:
    """Check that a record, which is input, does not point out of its folder.

    Raises:
        SourceError: names what is no file of the folder, or the record itself.
    """
    for name in names:
        if name in ("", ".", "..", record.name) or not name.isprintable() or set(name) & {"/", "\\"}:
            raise SourceError(f"{record} lists a file that is not one of its own folder: {name!r}", "do not use it")
