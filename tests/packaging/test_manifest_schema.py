"""docs/manifest.schema.json is the schema of the manifest that the code writes and reads."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from harness.manifest import EngineManifest

SCHEMA = Path(__file__).parents[2] / "docs" / "manifest.schema.json"
REGENERATE = (
    "python -c 'import json; from harness.manifest import EngineManifest as M; "
    "print(json.dumps(M.model_json_schema(), indent=1))' > docs/manifest.schema.json"
)


def test_schema_in_docs_is_current() -> None:
    written = json.loads(SCHEMA.read_text(encoding="utf-8")) if SCHEMA.is_file() else None
    assert written == EngineManifest.model_json_schema(), f"regenerate it with:\n  {REGENERATE}"


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(EngineManifest.model_json_schema())
