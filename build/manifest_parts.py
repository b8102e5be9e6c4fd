"""Parts of a manifest that every lowering fills in the same way, from the source and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from harness.build.checkpoint import QuantizedCheckpoint
from harness.ledger import TOKENS_PER_BLOCK, KvLayout
from harness.manifest import CalibrationPart, KvPart, ModelPart, RecipePart, TokenizerPart
from harness.recipe import Precision, decoder_bits_per_weight, model_bits_per_weight, num_linear_parameters
from harness.spec import MlaSpec, ModelSpec
from harness.tokenizer import Tokenizer
from harness.weight_source import WeightSource


def model_part(source: WeightSource, fingerprint: str) -> ModelPart:
    """The model; `fingerprint` is the source's."""
    spec = source.spec
    # the weights that a checkpoint was made from are the model; the checkpoint is named under calibration
    content_hash = source.record.model.content_hash if isinstance(source, QuantizedCheckpoint) else fingerprint
    return ModelPart(
        name=source.name,
        architecture=spec.architecture,
        content_hash=content_hash,
        num_parameters=num_linear_parameters(spec),
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
    )


def calibration_part(source: WeightSource) -> CalibrationPart:
    """What the integers were chosen by."""
    if not isinstance(source, QuantizedCheckpoint):
        return CalibrationPart(method="round-to-nearest")
    return CalibrationPart(
        method=source.record.method,
        fingerprint=source.fingerprint(),
        checkpoint_id=source.record.checkpoint_id,
        calibration_set=source.record.calibration_set,
    )


def tokenizer_part(tokenizer: Tokenizer) -> TokenizerPart:
    """The tokenizer and its chat template."""
    return TokenizerPart(
        sha256=tokenizer.sha256,
        chat_template_sha256=tokenizer.chat_template_sha256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=sorted(tokenizer.eos_token_ids),
    )


def recipe_part(name: str, spec: ModelSpec, precisions: Mapping[str, Precision]) -> RecipePart:
    """A recipe as it was followed."""
    return RecipePart(
        name=name,
        layers={module: str(precision) for module, precision in precisions.items()},
        bits_per_weight=model_bits_per_weight(spec, precisions),
        decoder_bits_per_weight=decoder_bits_per_weight(spec, precisions),
    )


def kv_part(spec: ModelSpec, layout: KvLayout, bytes_per_token: dict[Literal["fast", "deterministic"], int]) -> KvPart:
    """The KV cache; a value that is read out of the key is as wide as that."""
    return KvPart(
        kind="mla-latent" if isinstance(spec.attention, MlaSpec) else "gqa",
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim or layout.key_dim,
        tokens_per_block=TOKENS_PER_BLOCK,
        bytes_per_token=bytes_per_token,
    )
