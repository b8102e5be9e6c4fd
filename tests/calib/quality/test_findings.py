from __future__ import annotations

import pytest
from quality_report_sample import BROKEN_MODULE, full_report, quick_report, weights

from harness.calib.quality.findings import anchor_of, answer, findings, kind_of, outliers
from harness.calib.quality.report import GateResult


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("model.layers.31.self_attn.q_proj", "self_attn.q_proj"),
        ("model.layers.3.mlp.experts.255.up_proj", "mlp.experts.*.up_proj"),
        ("model.layers.3.mlp.shared_experts.up_proj", "mlp.shared_experts.up_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_kind_of_a_module(module: str, kind: str) -> None:
    assert kind_of(module) == kind


@pytest.mark.parametrize(("num_layers", "num_experts"), [(2, 0), (30, 0), (6, 64)])
def test_one_broken_module_is_found_among_all(num_layers: int, num_experts: int) -> None:
    every = weights(num_layers=num_layers, num_experts=num_experts)
    assert outliers(every) == []
    for at in (2, len(every) // 2, len(every) - 1):
        broken = every[at].model_copy(update={"relative_error": 1.0})
        found = outliers([*every[:at], broken, *every[at + 1 :]])
        assert [outlier.module for outlier in found] == [broken]


def test_modules_stored_as_in_the_baseline_do_not_stand_out() -> None:
    exact = [m.model_copy(update={"relative_error": 1e-5 * n}) for n, m in enumerate(weights(num_layers=8))]
    assert outliers(exact) == []


def test_findings_name_module_domain_and_task() -> None:
    found = {finding.subject: finding.anchor for finding in findings(full_report())}
    assert found == {BROKEN_MODULE: "weights", "chinese": "domain-1", "extraction": "task-0"}
    assert findings(quick_report()) == []


def test_positions_that_are_not_finite_are_named() -> None:
    report = quick_report()
    domains = [report.text.domains[0].model_copy(update={"num_non_finite": 3}), *report.text.domains[1:]]
    (found,) = findings(report.model_copy(update={"text": report.text.model_copy(update={"domains": domains})}))
    assert (found.subject, found.anchor) == ("english", "domain-0")
    assert "3 positions" in found.text


@pytest.mark.parametrize(
    ("gate", "where", "anchor"),
    [
        ("perplexity change", "chinese", "domain-1"),
        ("KL divergence", "overall", "text"),
        ("score drop", "questions", "task-1"),
        ("chat template", "tokenizer", "compared"),
        ("score drop", "code", "task-2"),
        ("perplexity change", "code", "domain-2"),
    ],
)
def test_each_gate_has_its_place(gate: str, where: str, anchor: str) -> None:
    result = GateResult(gate=gate, where=where, value=0, interval=None, warn=None, fail=None, verdict="fail", reason="")
    assert anchor_of(full_report(5), result) == anchor


def test_answer_counts_the_gates() -> None:
    assert answer(quick_report()) == ("Yes", "All 8 gates passed.")
    assert answer(full_report()) == ("No", "4 of 12 gates failed, 4 warn.")
