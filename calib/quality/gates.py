"""From figures to a verdict: which gates an engine passes, and why.

A gate fires on a difference and not on noise. A loss counts where its interval lies above what batching alone moves;
then its size decides. A loss beyond `fail` that chance could explain warns, since too little was measured to let it
pass. Tasks are many chances to err: their intervals are widened (Bonferroni), so that the tasks of a layer together cry
wolf in 5 % of cases. Owns no limit: they stand in the suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import NormalDist

from harness.calib.quality.paired import mean_interval
from harness.calib.quality.report import DomainResult, Gate, GateResult, Interval, ModuleError, TaskResult, Verdict
from harness.calib.quality.suite import Gates, Limits
from harness.calib.quality.wording import gate_format, limit, number_of, percent, points
from harness.manifest import EngineManifest

_ORDER: tuple[Verdict, ...] = ("pass", "warn", "fail")


def worst(gates: Iterable[GateResult]) -> Verdict:
    """The verdict of all gates together."""
    return max((gate.verdict for gate in gates), key=_ORDER.index, default="pass")


def judge_inputs(engine: EngineManifest, baseline: EngineManifest) -> list[GateResult]:
    """Whether both engines turn the same conversation into the same tokens.

    With the same weights another chat template is a fault; a release of other weights may bring its own.
    """
    if engine.tokenizer.chat_template_sha256 == baseline.tokenizer.chat_template_sha256:
        return []
    same_weights = engine.model.content_hash == baseline.model.content_hash
    verdict: Verdict = "fail" if same_weights else "warn"
    return [
        GateResult(
            gate="chat template",
            where="tokenizer",
            value=1,
            interval=None,
            warn=None,
            fail=None,
            verdict=verdict,
            reason="the engine's chat template is not the baseline's, so every conversation reaches the model as "
            "other tokens" + (", though the weights are the same" if same_weights else ""),
        )
    ]


def judge_text(domains: Sequence[DomainResult], gates: Gates, num_parameters: int) -> list[GateResult]:
    """Gates of layer 1, for each domain and overall."""
    small, limits = gates.small_models, gates.perplexity_change
    if small is not None and num_parameters < small.below_parameters:
        limits = small.perplexity_change
    results = []
    for domain in domains:
        if domain.num_non_finite:
            results.append(_non_finite(domain))
        results.append(
            _judge("perplexity change", domain.domain, domain.perplexity_change, limits, domain.noise_perplexity_change)
        )
        results.append(_judge("KL divergence", domain.domain, domain.kl_mean, gates.kl_divergence, domain.noise_kl))
    return results


def judge_weights(weights: Sequence[ModuleError], gates: Gates) -> list[GateResult]:
    """Whether each module's weights are still those of the baseline: the gate for what the text may hardly use.

    The module that is farthest off is judged for all. Only for engines of the same weights.
    """
    if not weights:
        return []
    worst_module = max(weights, key=lambda module: module.relative_error)
    error, limits = worst_module.relative_error, gates.weight_error
    others = sum(module.relative_error > limits.warn for module in weights) - 1
    verdict: Verdict = "fail" if error > limits.fail else "warn" if error > limits.warn else "pass"
    reason = f"not above {percent(limits.warn)}, and no module is farther off"
    if verdict != "pass":
        crossed = f"the limit of {percent(limits.fail)}" if verdict == "fail" else percent(limits.warn)
        also = f", as {number_of(others, 'other module')} {'is' if others == 1 else 'are'}" if others else ""
        reason = f"above {crossed}{also}{f': {limits.why}' if limits.why else ''}"
    return [
        GateResult(
            gate="weight error",
            where=worst_module.module,
            value=error,
            interval=None,
            warn=limits.warn,
            fail=limits.fail,
            verdict=verdict,
            reason=reason,
        )
    ]


def judge_tasks(tasks: Sequence[TaskResult], gates: Gates) -> list[GateResult]:
    """Gates of layers 2 and 3: how much of its score each task loses, and all tasks of a layer together."""
    results = []
    for layer, limits in (("tasks", gates.task_drop), ("adversarial", gates.adversarial_drop)):
        run = [task for task in tasks if task.layer == layer and task.skipped is None]
        drops = {task.name: _negated(task.difference) for task in run}
        for task in run:
            judged = _judge("score drop", task.name, _widened(drops[task.name], len(drops)), limits, 0.0)
            if has_nothing_to_lose(task, gates):
                nothing = f"; the baseline scores {percent(task.score_baseline)}, so that there is nothing to lose"
                judged = judged.model_copy(update={"reason": judged.reason + nothing})
            elif judged.verdict == "pass" and is_too_small(task, gates):
                few = f"; so few items would not show a loss below {points(task.detectable_difference)}"
                judged = judged.model_copy(update={"reason": judged.reason + few})
            results.append(judged)
        if len(drops) > 1:
            results.append(_judge("score drop", f"all {layer}", mean_interval(list(drops.values())), limits, 0.0))
    return results


def is_too_small(task: TaskResult, gates: Gates) -> bool:
    """Whether a task has too few items for a loss at its limit to show: that it passes means little."""
    return task.skipped is None and task.detectable_difference > _drop_limits(task, gates).fail


def has_nothing_to_lose(task: TaskResult, gates: Gates) -> bool:
    """Whether the baseline's own score is not above the loss that a gate allows: that the task passes means nothing."""
    return task.skipped is None and task.score_baseline <= _drop_limits(task, gates).fail


def _drop_limits(task: TaskResult, gates: Gates) -> Limits:
    return gates.task_drop if task.layer == "tasks" else gates.adversarial_drop


def _widened(interval: Interval, num_gates: int) -> Interval:
    """The interval that holds with 95 % for all of `num_gates` together; it was made for one."""
    factor = NormalDist().inv_cdf(1 - 0.025 / num_gates) / NormalDist().inv_cdf(0.975)
    value = interval.value
    return Interval(
        value=value, low=value - factor * (value - interval.low), high=value + factor * (interval.high - value)
    )


def _negated(interval: Interval) -> Interval:
    return Interval(value=-interval.value, low=-interval.high, high=-interval.low)


def _non_finite(domain: DomainResult) -> GateResult:
    return GateResult(
        gate="non-finite logits",
        where=domain.domain,
        value=domain.num_non_finite,
        interval=None,
        warn=None,
        fail=0,
        verdict="fail",
        reason=f"the engine computes NaN or infinity at {domain.num_non_finite} of {domain.num_tokens} positions",
    )


def _judge(gate: Gate, where: str, loss: Interval, limits: Limits, noise: float) -> GateResult:
    verdict: Verdict = "pass"
    is_real = loss.low > noise
    if loss.value > limits.fail:
        verdict = "fail" if is_real else "warn"
    elif loss.value > limits.warn and is_real:
        verdict = "warn"
    written = gate_format(gate)
    warn, fail, moved = limit(limits.warn, written), limit(limits.fail, written), written(noise)
    why = f": {limits.why}" if limits.why else ""
    if verdict == "fail":
        reason = f"above the limit of {fail}, and more than chance explains{why}"
    elif verdict == "warn" and not is_real:
        reason = f"above the limit of {fail}, but chance could explain it; measure on more"
    elif verdict == "warn":
        reason = f"above {warn}, below {fail}{why}"
    elif loss.value > limits.warn:
        reason = f"above {warn}, but chance or the noise of batching ({moved}) could explain it"
    else:
        reason = f"not above {warn}"
    return GateResult(
        gate=gate,
        where=where,
        value=loss.value,
        interval=loss,
        warn=limits.warn,
        fail=limits.fail,
        verdict=verdict,
        reason=reason,
    )
