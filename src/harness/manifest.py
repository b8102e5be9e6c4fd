"""The engine manifest: the only contract between building and running.

`manifest.json` says what an engine is, what it was made from and with, and the sha256 of every file beside it. Its JSON
schema is `EngineManifest.model_json_schema()`, kept in docs/manifest.schema.json.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import EngineError, HarnessError

MANIFEST_NAME = "manifest.json"
BUNDLED_SET = "bundled default set"
"""Label of the calibration set that comes with this project."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_OPTIONAL = ("chat_template.jinja",)
_WEIGHTS_NODE = "weights:"
_COPY_AGAIN = "copy the engine again, or rebuild it"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PositiveInt = Annotated[int, Field(gt=0)]
MOST_RANKS = 64
"""GPUs that share layers, or that layers are shared over."""
RankCount = Annotated[int, Field(gt=0, le=MOST_RANKS)]
Versioned = TypeVar("Versioned", bound=BaseModel)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPart(_Part):
    """Which model, and the hash of its weights, config and tokenizer."""

    name: str
    architecture: str
    content_hash: Sha256
    num_parameters: PositiveInt
    num_layers: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt


class RecipePart(_Part):
    """The recipe by name, and the precision of each module in its written form (`int4-g128`).

    Bits count scales and zero points: `bits_per_weight` over all modules, `decoder_bits_per_weight` over the linear
    modules of the decoder layers.
    """

    name: str
    layers: dict[str, str]
    bits_per_weight: float
    decoder_bits_per_weight: float


class CalibrationSetPart(_Part):
    """The calibration set: where it came from and what is in it. The text itself is not kept."""

    label: str
    fingerprint: Sha256
    num_samples: PositiveInt
    num_tokens: PositiveInt
    system_prompt_share: Annotated[float, Field(ge=0, le=1)]

    @property
    def is_bundled(self) -> bool:
        """Whether it is the set that comes with this project, and not traffic of a user's."""
        return self.label == BUNDLED_SET


class CalibrationPart(_Part):
    """What the integers were chosen by.

    Round to nearest needs no data. Integers of gptq are those of a quantized checkpoint: its id, the hash of its record
    (which holds the hashes of its files), and the set it was calibrated on.
    """

    method: Literal["round-to-nearest", "gptq"]
    fingerprint: Sha256 | None = None
    checkpoint_id: str | None = None
    calibration_set: CalibrationSetPart | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> CalibrationPart:
        given = [value is not None for value in (self.fingerprint, self.checkpoint_id, self.calibration_set)]
        if set(given) != {self.method != "round-to-nearest"}:
            raise ValueError(f"{self.method} with {given.count(True)} of fingerprint, checkpoint_id, calibration_set")
        return self

    def describe(self) -> str:
        """The calibration in a line."""
        chosen = self.calibration_set
        if chosen is None:
            return self.method
        return (
            f"{self.method} on {chosen.label}: {chosen.num_samples} samples, {chosen.num_tokens:,} tokens, "
            f"{chosen.system_prompt_share:.0%} with a system prompt; checkpoint {self.checkpoint_id}"
        )


class KvPart(_Part):
    """Layout of the KV cache. `bytes_per_token` is over all layers, by execution mode, block scales included.

    On GPUs it is that of the rank with most, in the one mode there is.
    """

    kind: Literal["gqa", "mla-latent"]
    num_layers: PositiveInt
    num_kv_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    tokens_per_block: PositiveInt
    bytes_per_token: dict[Literal["fast", "deterministic"], PositiveInt]


class GpuPart(_Part):
    """What binds an engine to a GPU: how it was divided, built and limited.

    Attributes:
        tp_size: ranks that share each layer; `pp_size`: ranks that share the layers. One `rank{N}.engine` for each.
        dtype: of activations and of weights that are not quantized.
        kv_dtype: of the KV cache.
        prefix_reuse: whether KV blocks can be reused; needs paged context attention, which an int8 KV cache excludes.
        max_batch_size: most sequences in one step.
        max_num_tokens: most tokens in one step.
        max_input_len: longest prompt.
        lookahead: window, n-gram and verification set of lookahead decoding (arXiv 2402.02057); None without it.
        context_logits: whether logits of prompts can be had, which a quality report needs.
        build_flags: the arguments of `trtllm-build`.
        checkpoint_id: of the TensorRT-LLM checkpoint that was built.
    """

    tp_size: RankCount
    pp_size: RankCount
    dtype: Literal["float16", "bfloat16"]
    kv_dtype: Literal["float16", "bfloat16", "int8"]
    prefix_reuse: bool
    chunked_context: bool
    max_batch_size: PositiveInt
    max_num_tokens: PositiveInt
    max_input_len: PositiveInt
    lookahead: tuple[PositiveInt, PositiveInt, Annotated[int, Field(ge=0)]] | None
    context_logits: bool
    build_flags: list[str]
    checkpoint_id: str

    @property
    def num_ranks(self) -> int:
        """How many GPUs the engine runs on."""
        return self.tp_size * self.pp_size


class TokenizerPart(_Part):
    """Hashes of the tokenizer and chat template, and the ids that matter to serving."""

    sha256: Sha256
    chat_template_sha256: Sha256 | None
    bos_token_id: int | None
    eos_token_ids: list[int]


class QualityPart(_Part):
    """The verdict of the quality report, and what it was reached with; all but the verdict None where it was not run.

    `suite_sha256` covers the gates, too. `report` is the report's file in the engine's folder, which is no part of the
    engine: it is not in `files`.
    """

    verdict: Literal["pass", "warn", "fail", "not_run"]
    kind: Literal["quick", "full"] | None = None
    suite_sha256: Sha256 | None = None
    baseline_engine_id: str | None = None
    metrics_version: int | None = None
    report: str | None = None


class FilePart(_Part):
    """One file of an engine or a quantized checkpoint."""

    sha256: Sha256
    num_bytes: Annotated[int, Field(ge=0)]


class EngineManifest(_Part):
    """Everything a runtime must know before it loads an engine."""

    schema_version: Literal[2] = 2
    engine_id: str
    model: ModelPart
    arch: str
    backend: str
    versions: dict[str, str]
    recipe: RecipePart
    calibration: CalibrationPart
    kv: KvPart
    max_model_len: PositiveInt
    tokenizer: TokenizerPart
    compile_settings: dict[Literal["fast", "deterministic"], dict[str, str]]
    gpu: GpuPart | None = None  # of engines for a GPU alone
    quality: QualityPart
    files: dict[str, FilePart]

    def weight_bytes(self) -> int:
        """Bytes of all model files."""
        return sum(part.num_bytes for name, part in self.files.items() if name.endswith((".bin", ".xml", ".engine")))

    def required_files(self) -> tuple[str, ...]:
        """Files without which it cannot run."""
        if self.gpu is None:
            return ("model.xml", "model.bin", *_TOKENIZER_FILES)
        return (*engine_files(self.gpu.num_ranks), *_TOKENIZER_FILES)


def engine_files(num_ranks: int) -> tuple[str, ...]:
    """What `trtllm-build` leaves of an engine of so many ranks."""
    return ("config.json", *(f"rank{rank}.engine" for rank in range(num_ranks)))


def weights_node_name(num_rows: Mapping[str, int]) -> str:
    """Name of the node of `model.xml` that gives a weight matrix in f32: the modules joined in it, with their rows."""
    return _WEIGHTS_NODE + ",".join(f"{module}={rows}" for module, rows in num_rows.items())


def parse_weights_node_name(name: str) -> dict[str, int] | None:
    """What `weights_node_name` was made of; None where a name is another."""
    if not name.startswith(_WEIGHTS_NODE):
        return None
    parts = (part.rpartition("=") for part in name[len(_WEIGHTS_NODE) :].split(","))
    return {module: int(rows) for module, _, rows in parts}


def write_manifest(engine_dir: Path, manifest: EngineManifest) -> None:
    """Write `manifest.json`, whole or not at all."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False)
    temporary = engine_dir / f".{MANIFEST_NAME}"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(engine_dir / MANIFEST_NAME)


def read_manifest(engine_dir: Path) -> EngineManifest:
    """Read and check `manifest.json`; hashes are checked by `verify_files`.

    Raises:
        EngineError: no engine there, a manifest of another schema, or a broken one.
    """
    path = engine_dir / MANIFEST_NAME
    if not engine_dir.is_dir():
        raise EngineError(f"there is no folder {engine_dir}", f"relative paths are taken from {Path.cwd()}")
    if not path.is_file():
        raise EngineError(
            f"no engine in {engine_dir} (it has no {MANIFEST_NAME})",
            "build one with: harness-build --model MODEL --arch cpu",
        )
    manifest = read_versioned(path, EngineManifest, EngineError, "rebuild the engine")
    for name in manifest.files:
        # a manifest is input: it must not point out of its folder
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise EngineError(f"{path} lists a file outside the engine: {name!r}", "do not use this engine")
    return manifest


def read_versioned(path: Path, kind: type[Versioned], refusal: type[HarnessError], make_again: str) -> Versioned:
    """Read and check a JSON file that says the version of its schema.

    Raises:
        HarnessError: a `refusal` with the hint `make_again`: another version wrote it, or it is broken; names fields.
    """
    known = kind.model_fields["schema_version"].default
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        seen = raw.get("schema_version")
        if seen != known:
            age = "an older" if isinstance(seen, int) and seen < known else "another"
            raise refusal(
                f"{path} is of {age} version: its schema_version is {seen!r}, this one reads {known}", make_again
            )
        return kind.model_validate(raw)
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = str(error)
    raise refusal(f"{path} is not valid: {reason}", make_again)


def sha256_file(path: Path) -> str:
    """sha256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        if hasattr(hashlib, "file_digest"):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()  # Python 3.10
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def describe_files(engine_dir: Path) -> dict[str, FilePart]:
    """Hash and size of every file of a folder but the manifest, by relative path."""
    paths = sorted(p for p in engine_dir.rglob("*") if p.is_file() and p.name != MANIFEST_NAME)
    return {
        p.relative_to(engine_dir).as_posix(): FilePart(sha256=sha256_file(p), num_bytes=os.path.getsize(p))
        for p in paths
    }


def verify_files(engine_dir: Path, manifest: EngineManifest) -> None:
    """Check that every file is there, whole and unchanged, and that none a runtime would read is unknown.

    Raises:
        EngineError: names the first file that is missing, truncated, altered, unreadable, or not in the manifest.
    """
    for name, part in manifest.files.items():
        verify_file(engine_dir / name, part)
    required = manifest.required_files()
    for name in (*required, *_OPTIONAL):
        if name not in manifest.files and (name in required or (engine_dir / name).exists()):
            raise EngineError(f"{engine_dir / name} is not in the manifest of the engine", _COPY_AGAIN)


def verify_file(path: Path, part: FilePart) -> None:
    """Check one file's size and hash.

    Raises:
        EngineError: it is missing, truncated, altered or unreadable.
    """
    try:
        if not path.is_file():
            raise EngineError(f"{path} is missing", _COPY_AGAIN)
        size = path.stat().st_size
        if size != part.num_bytes:
            raise EngineError(f"{path} has {size} bytes, expected {part.num_bytes}", _COPY_AGAIN)
        seen = sha256_file(path)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}", "check the permissions of the engine") from None
    if seen != part.sha256:
        raise EngineError(f"{path} is corrupt: sha256 {seen[:12]}..., expected {part.sha256[:12]}...", _COPY_AGAIN)
