"""What a quantized checkpoint says of itself: `calibration.json` beside its weights.

A quantized checkpoint is a Hugging Face folder in compressed-tensors format that every arch is lowered from. The record
says what it was made from and how, and holds the sha256 of every other file, which is checked before any is read.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.manifest import FilePart, ModelPart, RecipePart, Sha256

RECORD_NAME = "calibration.json"
STATISTICS_NAME = "calibration.safetensors"
"""Maxima of layer inputs, keys and values over the calibration set, for lowerings with static scales."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CalibrationSetPart(_Part):
    """The calibration set: where it came from and what is in it. The text itself is not kept."""

    label: str
    fingerprint: Sha256
    num_samples: Annotated[int, Field(gt=0)]
    num_tokens: Annotated[int, Field(gt=0)]
    system_prompt_share: Annotated[float, Field(ge=0, le=1)]


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
    linear_bits_per_weight: float
    target: Literal["portable", "cpu"]
    optimize: Literal["decode", "prefill"]
    loss: LossPart
    unreached_experts: list[str]
    versions: dict[str, str]
    files: dict[str, FilePart]
