"""What a folder for the PyTorch backend of TensorRT-LLM was made from: `trtllm-pytorch.json` beside its weights.

TensorRT-LLM does not read it. It is there to find a folder again, and to see whether one is whole.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from harness.build.tensorrt_llm.pytorch_config import Dtype
from harness.manifest import CalibrationPart, FilePart, ModelPart, RecipePart, TokenizerPart

RECORD_NAME = "trtllm-pytorch.json"


class PytorchFolderRecord(BaseModel):
    """All of `trtllm-pytorch.json`.

    Attributes:
        recipe: the precision of each module as it stands in this folder.
        tokenizer: the model's own; `tokenizer.json` of the folder may say of the BOS what the model says elsewhere.
        dtype: of activations, of scales, and of weights that are not quantized.
        files: sha256 and size of every other file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    folder_id: str
    model: ModelPart
    recipe: RecipePart
    calibration: CalibrationPart
    tokenizer: TokenizerPart
    dtype: Dtype
    versions: dict[str, str]
    files: dict[str, FilePart]
