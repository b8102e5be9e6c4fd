"""docs/quality-report.schema.json is the schema of the report that the code writes, and its reports follow it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from quality_report_sample import full_report, quick_report

from harness.calib.quality.report import QualityReport

SCHEMA = Path(__file__).parents[2] / "docs" / "quality-report.schema.json"
REGENERATE = (
    "python -c 'import json; from harness.calib.quality.report import QualityReport as R; "
    "print(json.dumps(R.model_json_schema(), indent=1))' > docs/quality-report.schema.json"
)


def test_schema_in_docs_is_current() -> None:
    written = json.loads(SCHEMA.read_text(encoding="utf-8")) if SCHEMA.is_file() else None
    assert written == QualityReport.model_json_schema(), f"regenerate it with:\n  {REGENERATE}"


def test_reports_follow_the_schema_and_come_back_whole() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for report in (quick_report(), full_report(5)):
        text = report.model_dump_json()
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert QualityReport.model_validate_json(text) == report
