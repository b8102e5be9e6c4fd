"""Quality reports as a measurement would make them, without measuring: for the tests of what shows them.

`quick_report` is of a small dense model and passes; `full_report` has tasks and speed, a module with doubled scales,
and fails. Figures are drawn from a seed and are about those of real engines.
"""

from __future__ import annotations

import itertools
import math
import random

from harness.calib.quality.report import (
    DomainResult,
    EngineRow,
    EngineSummary,
    GateResult,
    Interval,
    ModuleError,
    PositionKl,
    QualityReport,
    SpeedResult,
    Spread,
    SuiteSummary,
    TaskItem,
    TaskMetric,
    TaskResult,
    TextResult,
    UnitSensitivity,
    Verdict,
)

BROKEN_MODULE = "model.layers.3.mlp.down_proj"
BROKEN_EXPERT = "model.layers.3.mlp.experts.5.down_proj"  # where there are experts
_DENSE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_UNITS = ("self_attn.q+k+v", "self_attn.o", "mlp.gate+up", "mlp.down")
_BITS = {"f16": 16.0, "int8": 8.06, "int4": 4.13, "mix 4.5": 4.5}


def quick_report(num_layers: int = 30) -> QualityReport:
    """Text alone, one engine beside its baseline, all gates passed."""
    text = _text(scale=1.0)
    gates = [g for d in (text.overall, *text.domains) for g in _text_gates(d)]
    return QualityReport(
        kind="quick",
        verdict="pass",
        created="2026-11-30T02:40:00+00:00",
        seconds=48.2,
        machine="Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, 2 cores, 15.60 GiB of memory",
        versions={"harness": "0.1.0", "openvino": "2026.4.1-22222-abcdef"},
        suite=_suite(),
        baseline_is_engine=False,
        gates=gates,
        table=_table(text, ("f16", "int8"), engine="int8", with_speed=False),
        text=text,
        weights=weights(num_layers=num_layers, precision="int8"),
        sensitivity=[],
        tasks=[],
        notes=["Both engines ran in fast mode, as harness-run serves them unless --deterministic is given."],
    )


def full_report(num_layers: int = 30, num_experts: int = 0) -> QualityReport:
    """Tasks, speed and four engines; the mix has a module with doubled scales and fails."""
    text = _text(scale=30.0)
    tasks = _tasks()
    gates = [g for d in (text.overall, *text.domains) for g in _text_gates(d)] + _task_gates(tasks)
    broken = weights(num_layers=num_layers, num_experts=num_experts)
    return QualityReport(
        kind="full",
        verdict="fail",
        created="2026-11-30T02:40:00+00:00",
        seconds=541.0,
        machine="Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, 2 cores, 15.60 GiB of memory",
        versions={"harness": "0.1.0", "openvino": "2026.4.1-22222-abcdef"},
        suite=_suite(),
        baseline_is_engine=False,
        gates=gates,
        table=_table(text, ("f16", "mix 4.5", "int8", "int4"), engine="mix 4.5", with_speed=True),
        text=text,
        weights=[_doubled(m) if m.module in (BROKEN_MODULE, BROKEN_EXPERT) else m for m in broken],
        sensitivity=_sensitivity(num_layers),
        tasks=tasks,
        notes=[
            "Both engines ran in fast mode, as harness-run serves them unless --deterministic is given.",
            "The engine was calibrated on the bundled default set, not on traffic of yours: harness-build --calib.",
            "Not run: code.",
        ],
    )


def weights(*, num_layers: int, num_experts: int = 0, precision: str | None = None) -> list[ModuleError]:
    """Errors of all modules: of one precision, or int4 with int8 in the first, the last and every fifth layer."""
    draw = random.Random(0)
    experts = [f"mlp.experts.{expert}.{kind}" for expert in range(num_experts) for kind in _MLP]
    shared = [f"mlp.shared_experts.{kind}" for kind in _MLP]
    modules = [("model.embed_tokens", None, "int8", 0.0066), ("lm_head", None, "int8", 0.0066)]
    for layer in range(num_layers):
        is_dense = not num_experts or layer == 0
        kinds = [*_DENSE, *((f"mlp.{kind}" for kind in _MLP) if is_dense else [*experts, *shared])]
        chosen = precision or ("int8" if layer in (0, num_layers - 1) or layer % 5 == 0 else "int4-g128")
        usual = 0.0066 if chosen == "int8" else 0.081
        modules += [(f"model.layers.{layer}.{k}", layer, chosen, usual * draw.uniform(0.9, 1.2)) for k in kinds]
    return [ModuleError(module=m, layer=at, precision=p, relative_error=error) for m, at, p, error in modules]


def _doubled(module: ModuleError) -> ModuleError:
    return module.model_copy(update={"relative_error": 1.008})


def _suite() -> SuiteSummary:
    return SuiteSummary(
        name="default",
        path="harness/calib/suites/default.yaml",
        sha256="9f3c" * 16,
        decoding={"temperature": 0.0, "top_p": 1.0, "seed": 0},
        num_system_prompts=1,
        license_notes=["english-questions: written for this project, Apache-2.0", "code: CPython's tests, PSF-2.0"],
    )


def _around(value: float, share: float = 0.2) -> Interval:
    return Interval(value=value, low=value - abs(value) * share, high=value + abs(value) * share)


def _domain(name: str, perplexity: float, kl: float) -> DomainResult:
    change = 0.5 * kl
    return DomainResult(
        domain=name,
        num_windows=24,
        num_tokens=12_264,
        num_overlapping=2 if name == "code" else 0,
        perplexity_baseline=perplexity,
        perplexity=perplexity * (1 + change),
        perplexity_change=_around(change, 0.4),
        kl_mean=_around(kl),
        kl_median=kl * 0.45,
        kl_p90=kl * 2.4,
        kl_p99=kl * 9,
        top1_agreement=_around(1 - 0.6 * math.sqrt(kl), 0.01),
        num_non_finite=0,
        noise_kl=0.00004,
        noise_perplexity_change=0.0006,
    )


def _text(*, scale: float) -> TextResult:
    domains = [
        _domain("english", 23.41, 0.0021 * scale),
        _domain("chinese", 41.07, 0.0052 * scale),
        _domain("code", 6.88, 0.0013 * scale),
    ]
    bounds = (1, 8, 16, 32, 64, 128, 256, 512)
    positions = [
        PositionKl(start=start, end=end, mean=0.003 * scale * (1 + 1 / start), p90=0.007 * scale * (1 + 2 / start))
        for start, end in itertools.pairwise(bounds)
    ]
    overall = _domain("overall", 18.2, 0.0029 * scale)
    return TextResult(window_tokens=512, overall=overall, domains=domains, by_position=positions)


def _text_gates(domain: DomainResult) -> list[GateResult]:
    return [
        _gate("perplexity change", domain.domain, domain.perplexity_change, 0.01, 0.03),
        _gate("KL divergence", domain.domain, domain.kl_mean, 0.05, 0.2),
    ]


def _task_gates(tasks: list[TaskResult]) -> list[GateResult]:
    return [
        _gate("score drop", t.name, Interval(value=-d.value, low=-d.high, high=-d.low), warn, fail)
        for t in tasks
        for d in [t.difference]
        for warn, fail in [(0.02, 0.05) if t.layer == "tasks" else (0.03, 0.1)]
        if t.skipped is None
    ]


def _gate(gate: str, where: str, loss: Interval, warn: float, fail: float) -> GateResult:
    verdict: Verdict = "fail" if loss.value > fail and loss.low > 0 else "warn" if loss.value > warn else "pass"
    reason = {
        "fail": "above the limit, and more than chance explains (a small model has little redundancy)",
        "warn": "above the limit of a warning, but chance could explain it: measure on more",
        "pass": "below both limits",
    }[verdict]
    return GateResult(
        gate=gate,
        where=where,
        value=loss.value,
        interval=loss,
        warn=warn,
        fail=fail,
        verdict=verdict,
        reason=reason,
    )


def _table(text: TextResult, recipes: tuple[str, ...], *, engine: str, with_speed: bool) -> list[EngineRow]:
    rows = []
    for recipe in recipes:
        is_baseline, bits = recipe == "f16", _BITS[recipe]
        share = 1.0 if recipe == engine else {"int8": 0.05, "int4": 1.6}.get(recipe, 1.0)
        summary = EngineSummary(
            name="SmolLM2-135M-Instruct",
            engine_id=f"smollm2-135m-{recipe.replace(' ', '-')}-1a2b3c4d",
            path=f"engines/SmolLM2-135M-Instruct/{recipe.replace(' ', '-')}",
            arch="cpu",
            backend="openvino",
            recipe=recipe,
            precisions={"f16": 212} if is_baseline else {"int8": 72, "int4-g128": 140},
            calibration="round-to-nearest"
            if recipe != "mix 4.5"
            else "gptq on bundled default set: 128 samples, 61,432 tokens, 33% with a system prompt; checkpoint 7d1f",
            decoder_bits_per_weight=bits,
            bits_per_weight=bits if is_baseline else bits * 0.8 + 1.6,
            weight_bytes=int(134_515_008 * (bits * 0.8 + 1.6 if not is_baseline else 16) / 8),
            num_parameters=134_515_008,
        )
        overall = text.overall
        rows.append(
            EngineRow(
                role="baseline" if is_baseline else "engine" if recipe == engine else "compared",
                engine=summary,
                perplexity=overall.perplexity_baseline if is_baseline else overall.perplexity,
                perplexity_change=None if is_baseline else _around(overall.perplexity_change.value * share),
                kl_mean=None if is_baseline else _around(overall.kl_mean.value * share),
                top1_agreement=None if is_baseline else overall.top1_agreement,
                speed=_speed(bits) if with_speed else None,
            )
        )
    return rows


def _speed(bits: float) -> SpeedResult:
    def spread(value: float) -> Spread:
        return Spread(mean=value, low=value * 0.97, high=value * 1.06)

    return SpeedResult(
        prompt_tokens=512,
        generated_tokens=256,
        num_rounds=3,
        ttft_s=spread(0.21 + bits / 400),
        tpot_s=spread(0.004 + bits / 1500),
        tokens_per_s=spread(1 / (0.004 + bits / 1500)),
        peak_memory_bytes=int((400 + bits * 30) * 2**20),
    )


def _sensitivity(num_layers: int) -> list[UnitSensitivity]:
    draw = random.Random(1)
    units = []
    for layer in range(num_layers):
        for unit in _UNITS:
            harm = 0.0004 * draw.lognormvariate(0, 1) * (8 if layer == 0 else 1)
            units.append(
                UnitSensitivity(
                    unit=f"model.layers.{layer}.{unit}",
                    layer=layer,
                    chosen="int8" if harm > 0.0008 else "int4-g128",
                    harm={"int4-g128": harm, "int8": harm / 180},
                )
            )
    return units


def _task(name: str, layer: str, scores: tuple[float, float], differing: list[TaskItem]) -> TaskResult:
    change = scores[0] - scores[1]
    return TaskResult(
        name=name,
        layer=layer,  # type: ignore[arg-type]
        description={
            "extraction": "Fields of an order confirmation as JSON.",
            "questions": "Questions about a paragraph, answered in a few words.",
        }.get(name, "Checked answers to unusual inputs."),
        source="written for this project, Apache-2.0",
        scorer="exact match and F1 over tokens" if name == "questions" else "accuracy over fields",
        num_items=120,
        score=scores[0],
        score_baseline=scores[1],
        difference=Interval(value=change, low=change - 0.03, high=change + 0.03),
        detectable_difference=0.043,
        metrics=[TaskMetric(name="format validity", value=0.958, baseline=0.992)] if name == "extraction" else [],
        differing=differing,
        num_differing=3 * len(differing),
    )


def _tasks() -> list[TaskResult]:
    skipped = _task("code", "tasks", (0.0, 0.0), [])
    return [
        _task("extraction", "tasks", (0.741, 0.823), _order_items()),
        _task("questions", "tasks", (0.605, 0.612), _order_items()[:1]),
        skipped.model_copy(update={"skipped": "it runs code of the model's: give --allow-code-execution"}),
        _task("needle", "adversarial", (0.64, 0.66), []),
        _task("strict-json", "adversarial", (0.88, 0.88), []),
    ]


def _order_items() -> list[TaskItem]:
    prompt = "Extract number, date and total.\n\nOrder 48213 of 3 March 2026, total 1,204.50 EUR, shipped to Lyon."
    expected = '{"number": "48213", "date": "2026-03-03", "total": 1204.5}'
    wrong = expected.replace("1204.5", "120450")
    return [
        TaskItem(
            id="order-017",
            prompt=prompt,
            expected=expected,
            answer=expected.replace(", ", ","),
            answer_baseline=expected,
            score=1.0,
            score_baseline=1.0,
        ),
        TaskItem(
            id="order-042",
            prompt=prompt,
            expected=expected,
            answer=expected,
            answer_baseline=wrong,
            score=1.0,
            score_baseline=0.667,
        ),
        TaskItem(
            id="order-003",
            prompt=prompt,
            expected=expected,
            answer=wrong,
            answer_baseline=expected,
            score=0.667,
            score_baseline=1.0,
            remark="total: 120450 instead of 1204.5",
        ),
        TaskItem(
            id="order-088",
            prompt=prompt,
            expected=expected,
            answer="",
            answer_baseline=expected,
            score=0.0,
            score_baseline=1.0,
            remark="not JSON",
        ),
    ]
