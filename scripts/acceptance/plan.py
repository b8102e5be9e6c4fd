"""All steps of an acceptance run, in order: what needs no GPU, small models, the model itself, what serving it is like.

The first GPU step answers the open question: whether TensorRT-LLM 1.2.1 builds int4 (W4A16_AWQ) and int8 (W8A8) layers
into one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asking import Asking
from building import Building
from servers import Servers
from steps import Step
from tools import LOOKAHEAD, RECIPES, SMALL_MODEL, Variant

from harness.build.tensorrt_llm.record import RECORD_NAME

_MEASURABLE = ("--context-logits",)  # which a quality report needs, and an engine that serves does without


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The flags of a run.

    Attributes:
        work: where checkpoints and engines go, and are found again.
        model, checkpoint: what to build and serve; the small model alone with neither.
        calib_flags: passed to every build that calibrates.
        calib_bin: folder with the `harness-build` that can calibrate; None where it is this environment's.
        rounds: of the comparison with `trtllm-serve`.
        timeout_s: of a build.
    """

    arch: str
    work: Path
    dry_run: bool
    model: str | None
    checkpoint: Path | None
    recipe: Path | None
    bits: str
    tp: int
    calib_flags: tuple[str, ...]
    calib_bin: Path | None
    rounds: int
    timeout_s: float


def plan(wishes: Wishes, servers: Servers) -> list[Step]:
    """The steps of a run."""
    work = wishes.work
    build = Building(wishes.arch, work, servers, timeout_s=wishes.timeout_s, calib_bin=wishes.calib_bin)
    ask = Asking(servers, rounds=wishes.rounds)
    mixed, int4, int8 = (_small(name, wishes) for name in ("mixed", "int4", "int8"))
    int8_kv = ("--kv-cache-dtype", "int8")
    kv = Variant(name="int8-kv", work=work, quantized_in="int8", checkpoint_flags=int8_kv, engine_flags=int8_kv)
    ahead = Variant(name="lookahead", work=work, given=int4.checkpoint, engine_flags=("--lookahead", LOOKAHEAD))
    model = _model(wishes)
    made = [mixed, int4, int8, *([model] if model else [])]
    served = model or int4

    steps = [build.doctor(dry_run=wishes.dry_run)]
    for variant in made:
        if variant.given is None:  # a TensorRT-LLM checkpoint has no way back to the CPU
            steps += [build.checkpoint(variant), build.cpu_engine(variant), ask.cpu_answers(variant)]
    steps += [build.checkpoint(kv), build.pytorch_folder(mixed)]
    baseline = _baseline(wishes, served)
    if baseline is not None:
        steps.append(build.checkpoint(baseline))
    if wishes.dry_run:
        steps += [build.builder_arguments([*made, kv, ahead]), ask.rehearsal(int4)]
    for variant in made:
        steps += [build.engine(variant), ask.answers(variant)]
    steps += [build.engine(kv), ask.answers(kv, of=int8), ask.no_reuse(kv)]
    steps += [build.engine(ahead, needs="int4-checkpoint"), ask.lookahead_is_greedy(ahead, int4)]
    steps += [ask.pytorch_answers(mixed), *ask.serving(served), ask.speed(served)]
    if baseline is not None:
        measured = Variant(name="measured", work=work, given=served.checkpoint, engine_flags=_MEASURABLE)
        made_by = "" if served.given else f"{served.name}-checkpoint"
        steps += [build.engine(baseline), build.engine(measured, needs=made_by), build.quality(measured, baseline)]
    return [*steps, build.gpu_tests()]


def _small(name: str, wishes: Wishes) -> Variant:
    """The small model. Its int4 is rounded to nearest, so that one of the three needs no calibration."""
    source = ("--model", str(SMALL_MODEL), "--recipe", str(RECIPES / f"{name}.yaml"))
    if name == "int4":
        return Variant(name=name, work=wishes.work, source=(*source, "--no-calib"))
    return Variant(name=name, work=wishes.work, source=(*source, *wishes.calib_flags), quantized_in=name)


def _baseline(wishes: Wishes, served: Variant) -> Variant | None:
    """What the served engine is measured against: the same model in 16 bits; None where that cannot be."""
    model = wishes.model if served.name == "model" else str(SMALL_MODEL)
    if model is None or served.tp > 1:  # a report measures engines of one GPU
        return None
    source = ("--model", model, "--precision", "f16")
    return Variant(name="baseline", work=wishes.work, source=source, tp=served.tp, engine_flags=_MEASURABLE)


def _model(wishes: Wishes) -> Variant | None:
    """The model of the user, to be calibrated, or as a checkpoint that was made elsewhere."""
    if wishes.checkpoint is not None:
        source = ("--checkpoint", str(wishes.checkpoint))
        given = wishes.checkpoint if (wishes.checkpoint / RECORD_NAME).is_file() else None
        return Variant(name="model", work=wishes.work, source=source, given=given, tp=wishes.tp)
    if wishes.model is None:
        return None
    precision = ("--recipe", str(wishes.recipe)) if wishes.recipe else ("--bits", wishes.bits)
    source = ("--model", wishes.model, *precision, *wishes.calib_flags)
    return Variant(name="model", work=wishes.work, source=source, quantized_in="model", tp=wishes.tp)
