"""Parts of a manifest that every lowering fills in the same way, from the source and its tokenizer."""

from __future__ import annotations

from harness.build.checkpoint import QuantizedCheckpoint
from harness.manifest import CalibrationPart, ModelPart, TokenizerPart
from harness.recipe import num_linear_parameters
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
