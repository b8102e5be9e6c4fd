"""The quality report as data: what `report.json` holds, and its JSON schema.

Owns the shape of the report, nothing of how its figures are found. The page and the summary are made from this alone.
Changes and shares are fractions (0.01 is 1 %), divergences are nats a token, times are seconds, sizes bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from harness.errors import EngineError

SCHEMA_VERSION = 1
METRICS_VERSION = 1
"""Raised when the same engine and suite would give other figures: reports of different versions do not compare."""

Verdict = Literal["pass", "warn", "fail"]
Gate = Literal["perplexity change", "KL divergence", "score drop", "non-finite logits", "chat template", "weight error"]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(_Part):
    """An estimate and its 95 % confidence interval, from a paired bootstrap."""

    value: float
    low: float
    high: float


class EngineSummary(_Part):
    """An engine as its manifest describes it. Bits count scales and zero points."""

    name: str
    engine_id: str
    path: str
    arch: str
    backend: str
    recipe: str
    precisions: dict[str, int]  # how many modules have each
    calibration: str
    decoder_bits_per_weight: float
    bits_per_weight: float
    weight_bytes: int
    num_parameters: int


class DomainResult(_Part):
    """One domain of the held-out text, the engine beside the baseline.

    `noise_*` is the engine against itself computed in other batch shapes: differences below it mean nothing.
    """

    domain: str
    num_windows: int
    num_tokens: int
    num_overlapping: int  # windows left out, since the calibration set holds text of theirs
    perplexity_baseline: float
    perplexity: float
    perplexity_change: Interval
    kl_mean: Interval
    kl_median: float
    kl_p90: float
    kl_p99: float
    top1_agreement: Interval
    num_non_finite: int  # positions of the engine whose logits hold NaN or infinity; in none of the other figures
    noise_kl: float
    noise_perplexity_change: float


class PositionKl(_Part):
    """KL divergence of the positions `start` (inclusive) to `end` of a window, over all domains."""

    start: int
    end: int
    mean: float
    p90: float


class TextResult(_Part):
    """Layer 1: held-out text. `overall` weighs each domain alike; its percentiles are over all tokens."""

    window_tokens: int
    overall: DomainResult
    domains: list[DomainResult]
    by_position: list[PositionKl]


class ModuleError(_Part):
    """How far a module's weights are from the baseline's, as the two engines store them.

    `relative_error` is `|W - W_baseline| / |W_baseline|` in the Frobenius norm, of all rows together.
    """

    module: str
    layer: int | None  # None for embeddings and lm_head
    precision: str
    relative_error: float


class UnitSensitivity(_Part):
    """What calibration measured a unit of a layer to suffer: KL divergence in nats by candidate precision."""

    unit: str
    layer: int
    chosen: str
    harm: dict[str, float]


class TaskItem(_Part):
    """One item whose answers differ. Scores are from 0 to 1."""

    id: str
    prompt: str
    expected: str
    answer: str
    answer_baseline: str
    score: Fraction
    score_baseline: Fraction
    remark: str = ""


class TaskMetric(_Part):
    """A figure of a task beside its score, such as format validity."""

    name: str
    value: float
    baseline: float


class TaskResult(_Part):
    """A task of layer 2 or 3. `skipped` says why it was not run; all scores are 0 then.

    `detectable_difference` is the smallest drop that so many items show four times in five (two-sided 5 % test).
    """

    name: str
    layer: Literal["tasks", "adversarial"]
    description: str
    source: str
    scorer: str
    num_items: int
    score: Fraction
    score_baseline: Fraction
    difference: Interval
    detectable_difference: float
    metrics: list[TaskMetric]
    differing: list[TaskItem]  # at most a few dozen, those that changed score first
    num_differing: int
    skipped: str | None = None


class Spread(_Part):
    """Mean, least and greatest of several rounds."""

    mean: float
    low: float
    high: float


class SpeedResult(_Part):
    """One stream alone, the same prompt lengths for every engine, rounds of all engines interleaved."""

    prompt_tokens: int
    generated_tokens: int
    num_rounds: int
    ttft_s: Spread
    tpot_s: Spread
    tokens_per_s: Spread
    peak_memory_bytes: int | None  # of the engine's process, mapped files included; None where the system does not tell


class EngineRow(_Part):
    """A line of the table that a decision needs. Quality is beside the baseline, None for the baseline itself."""

    role: Literal["baseline", "engine", "compared"]
    engine: EngineSummary
    perplexity: float | None
    perplexity_change: Interval | None
    kl_mean: Interval | None
    top1_agreement: Interval | None
    speed: SpeedResult | None


class GateResult(_Part):
    """One gate at one place: the value seen, its limits, and what follows."""

    gate: Gate
    where: str
    value: float
    interval: Interval | None
    warn: float | None
    fail: float | None
    verdict: Verdict
    reason: str


class SuiteSummary(_Part):
    """The suite: its name, the hash of its text and of all files it names, and what was decoded with."""

    name: str
    path: str
    sha256: str
    decoding: dict[str, float | int]
    num_system_prompts: int
    license_notes: list[str]


class QualityReport(_Part):
    """All of `report.json`."""

    schema_version: Literal[1] = 1
    metrics_version: int = METRICS_VERSION
    kind: Literal["quick", "full"]
    verdict: Verdict
    created: str  # ISO 8601, UTC
    seconds: float
    machine: str
    versions: dict[str, str]
    suite: SuiteSummary
    baseline_is_engine: bool = Field(description="Whether the baseline is this very engine: it is unquantized.")
    gates: list[GateResult]
    table: list[EngineRow]
    text: TextResult
    weights: list[ModuleError]
    sensitivity: list[UnitSensitivity]
    tasks: list[TaskResult]
    notes: list[str]


def read_sensitivity(path: Path) -> list[UnitSensitivity]:
    """What calibration wrote beside a checkpoint; nothing where its recipe was not searched.

    Raises:
        EngineError: the file is not what calibration writes.
    """
    if not path.is_file():
        return []
    try:
        return TypeAdapter(list[UnitSensitivity]).validate_json(path.read_bytes())
    except ValidationError as error:
        raise EngineError(f"{path} is not what calibration writes: {error}"[:400], "build the engine again") from None
