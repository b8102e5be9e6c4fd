"""What a manifest says of calibration: all of it or nothing, and what earlier engines say is still read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from harness.manifest import CalibrationPart

SET = {
    "label": "traffic.jsonl",
    "fingerprint": "a" * 64,
    "num_samples": 128,
    "num_tokens": 65536,
    "system_prompt_share": 1.0,
}
GPTQ: dict[str, Any] = {"method": "gptq", "fingerprint": "b" * 64, "checkpoint_id": "c", "calibration_set": SET}


@pytest.mark.parametrize(
    "written", [GPTQ, {"method": "round-to-nearest"}, {"method": "round-to-nearest", "fingerprint": None}]
)
def test_calibration_is_read(written: dict[str, Any]) -> None:
    assert CalibrationPart.model_validate(written).model_dump(exclude_none=True) == {
        name: value for name, value in written.items() if value is not None
    }


@pytest.mark.parametrize("missing", ["fingerprint", "checkpoint_id", "calibration_set"])
def test_gptq_names_its_checkpoint_and_set(missing: str) -> None:
    with pytest.raises(ValidationError, match="gptq with 2 of fingerprint, checkpoint_id, calibration_set"):
        CalibrationPart.model_validate({k: v for k, v in GPTQ.items() if k != missing})


def test_round_to_nearest_has_no_set() -> None:
    with pytest.raises(ValidationError, match="round-to-nearest with 3 of"):
        CalibrationPart.model_validate(GPTQ | {"method": "round-to-nearest"})
