import pytest

from harness.calib.quality.gates import judge_tasks, judge_text, judge_weights, worst
from harness.calib.quality.report import DomainResult, Interval, ModuleError, TaskResult
from harness.calib.quality.suite import load_suite

GATES = load_suite().content.gates
BIG, SMALL = 7_000_000_000, 135_000_000


def around(value: float, half: float) -> Interval:
    return Interval(value=value, low=value - half, high=value + half)


def domain(change: Interval, *, noise: float = 0.0, kl: float = 0.01, non_finite: int = 0) -> DomainResult:
    return DomainResult(
        domain="english",
        num_windows=6,
        num_tokens=3000,
        num_overlapping=0,
        perplexity_baseline=10,
        perplexity=10 * (1 + change.value),
        perplexity_change=change,
        kl_mean=around(kl, kl / 10),
        kl_median=kl / 2,
        kl_p90=kl * 2,
        kl_p99=kl * 5,
        top1_agreement=around(0.9, 0.01),
        num_non_finite=non_finite,
        noise_kl=0.0001,
        noise_perplexity_change=noise,
    )


def task(difference: Interval, *, skipped: str | None = None, layer: str = "tasks", name: str = "t") -> TaskResult:
    return TaskResult(
        name=name,
        layer=layer,  # type: ignore[arg-type]
        description="",
        source="",
        scorer="exact_match",
        num_items=100,
        score=0.5,
        score_baseline=0.5,
        difference=difference,
        detectable_difference=0.08,
        metrics=[],
        differing=[],
        num_differing=0,
        skipped=skipped,
    )


@pytest.mark.parametrize(
    ("change", "half", "parameters", "verdict"),
    [
        (0.019, 0.001, BIG, "pass"),
        (0.021, 0.001, BIG, "warn"),
        (0.049, 0.001, BIG, "warn"),
        (0.051, 0.001, BIG, "fail"),
        (0.009, 0.001, SMALL, "pass"),
        (0.011, 0.001, SMALL, "warn"),
        (0.031, 0.001, SMALL, "fail"),
        (-0.10, 0.001, SMALL, "pass"),  # better is no fault
        (0.015, 0.02, SMALL, "pass"),  # chance explains it
        (0.08, 0.09, SMALL, "warn"),  # far beyond, but too little was measured to say so
    ],
)
def test_perplexity(change: float, half: float, parameters: int, verdict: str) -> None:
    assert worst(judge_text([domain(around(change, half))], GATES, parameters)) == verdict


def test_small_models_need_no_limits_of_their_own() -> None:
    same = GATES.model_copy(update={"small_models": None})
    assert worst(judge_text([domain(around(0.019, 0.001))], same, SMALL)) == "pass"


@pytest.mark.parametrize(
    ("errors", "verdict", "words"),
    [
        ({"a": 0.1, "b": 0.51}, "pass", "not above 60"),
        ({"a": 0.1, "b": 0.61}, "warn", "above 60"),
        ({"a": 0.1, "b": 1.0}, "fail", "above the limit of 85"),
        ({"a": 0.7, "b": 1.0, "c": 0.9}, "fail", "as 2 other modules are"),
    ],
)
def test_the_module_that_is_farthest_off_decides(errors: dict[str, float], verdict: str, words: str) -> None:
    modules = [ModuleError(module=m, layer=0, precision="int4-g64", relative_error=e) for m, e in errors.items()]
    (gate,) = judge_weights(modules, GATES)
    assert (gate.where, gate.verdict, gate.value) == ("b", verdict, errors["b"])
    assert words in gate.reason


def test_that_a_task_of_few_items_passes_is_qualified() -> None:
    few = task(around(0.0, 0.01)).model_copy(update={"detectable_difference": 0.93})
    (gate,) = judge_tasks([few], GATES)
    assert gate.verdict == "pass"
    assert "would not show a loss below 93" in gate.reason


def test_a_task_on_which_the_baseline_fails_is_no_evidence() -> None:
    hopeless = task(around(0.0, 0.0)).model_copy(update={"score_baseline": 0.01, "score": 0.01})
    (gate,) = judge_tasks([hopeless], GATES)
    assert gate.verdict == "pass"
    assert "nothing to lose" in gate.reason


def test_a_change_that_batching_alone_makes_does_not_fire() -> None:
    assert worst(judge_text([domain(around(0.02, 0.005), noise=0.018)], GATES, SMALL)) == "pass"


def test_divergence_fires_where_perplexity_does_not() -> None:
    assert worst(judge_text([domain(around(0.0, 0.001), kl=0.3)], GATES, SMALL)) == "fail"


def test_logits_that_are_not_finite_fail() -> None:
    gates = judge_text([domain(around(0.0, 0.001), non_finite=3)], GATES, SMALL)
    assert [g.gate for g in gates if g.verdict == "fail"] == ["non-finite logits"]


def test_tasks_lose_or_not() -> None:
    assert worst(judge_tasks([task(around(-0.01, 0.005))], GATES)) == "pass"
    assert worst(judge_tasks([task(around(-0.03, 0.005))], GATES)) == "warn"
    assert worst(judge_tasks([task(around(-0.06, 0.005))], GATES)) == "fail"
    assert worst(judge_tasks([task(around(+0.06, 0.005))], GATES)) == "pass"
    assert worst(judge_tasks([task(around(-0.06, 0.005), layer="adversarial")], GATES)) == "warn"
    assert judge_tasks([task(around(-1, 0), skipped="not allowed")], GATES) == []


def test_many_tasks_need_more_evidence_each_and_give_more_together() -> None:
    slight = around(-0.07, 0.06)
    alone = judge_tasks([task(slight)], GATES)
    assert [g.verdict for g in alone] == ["fail"]
    one_of_ten = judge_tasks([task(slight), *(task(around(0, 0.06), name=f"t{i}") for i in range(9))], GATES)
    assert one_of_ten[0].verdict == "warn"
    assert one_of_ten[-1].where == "all tasks"
    assert one_of_ten[-1].verdict == "pass"
    all_of_ten = judge_tasks([task(slight, name=f"t{i}") for i in range(10)], GATES)
    assert all_of_ten[-1].verdict == "fail"
