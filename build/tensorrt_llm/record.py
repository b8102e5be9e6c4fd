"""What a TensorRT-LLM checkpoint says of itself: `trtllm-checkpoint.json` beside its weights.

A TensorRT-LLM checkpoint is `config.json`, `rank{N}.safetensors` and, where layers differ, `quant_cfg.json`: what
`trtllm-build` reads. It belongs to no GPU arch, but to a number of ranks. Beside them lie the model's own config
(`hf_config.json`) and its tokenizer, so that a machine with the GPU needs this folder alone. The record holds the
sha256 of every other file, which is checked before any is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from harness.checkpoint_record import check_file_names, find_record
from harness.errors import SourceError
from harness.manifest import (
    CalibrationPart,
    FilePart,
    ModelPart,
    RankCount,
    RecipePart,
    TokenizerPart,
    read_versioned,
)

RECORD_NAME = "trtllm-checkpoint.json"
HF_CONFIG_NAME = "hf_config.json"

_MAKE_AGAIN = "make the checkpoint again with --stage checkpoint, or copy it again, whole"


class TrtllmCheckpointRecord(BaseModel):
    """All of `trtllm-checkpoint.json`.

    Attributes:
        recipe: the precision of each module as it stands in this checkpoint, which may be higher than was asked for.
        dtype: of activations and of weights that are not quantized.
        kv_dtype: of the KV cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    checkpoint_id: str
    model: ModelPart
    recipe: RecipePart
    calibration: CalibrationPart
    tokenizer: TokenizerPart
    tp_size: RankCount
    pp_size: RankCount
    dtype: Literal["float16", "bfloat16"]
    kv_dtype: Literal["float16", "bfloat16", "int8"]
    versions: dict[str, str]
    files: dict[str, FilePart]


def read_trtllm_record(folder: Path) -> TrtllmCheckpointRecord:
    """Read and check `trtllm-checkpoint.json`; the files it names are not looked at.

    Raises:
        SourceError: no checkpoint there, a record of another schema, or a broken one.
    """
    path = find_record(folder, RECORD_NAME, "TensorRT-LLM checkpoint", _MAKE_AGAIN)
    record = read_versioned(path, TrtllmCheckpointRecord, SourceError, _MAKE_AGAIN)
    check_file_names(path, record.files)
    return record
