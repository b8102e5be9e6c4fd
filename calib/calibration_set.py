"""From traffic to a calibration set: the token ids that a model is calibrated on, and a held-out part to measure with.

Owns the order of the steps, the sizes, the checks and the fingerprint. Reading is in `traffic`, the
chat template in `rendering`, the choice in `selection`, cutting and redaction in `windows` and `redact`, the figures in
`set_report`. numpy alone: a set can be made and looked at without torch.

Why traffic: GPTQ and its kin fit the weights to the inputs they are shown (arXiv:2210.17323), and the tokens that every
request of a service shares, its system prompt, are in front of all others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.calib.rendering import Prompt, RenderedTraffic, render_traffic
from harness.calib.selection import common_prompts, draw, first_of_each
from harness.calib.set_report import SetReport, measure_lengths, measure_shares, name_of_prompt
from harness.calib.traffic import Traffic, TrafficRequest, read_text, read_traffic
from harness.calib.windows import Sample, TokenIds, WindowCutter
from harness.errors import CalibrationError
from harness.manifest import BUNDLED_SET
from harness.tokenizer import Tokenizer

DEFAULT_SET = Path(__file__).parent / "default_set" / "default.jsonl"
FEWEST_SAMPLES, MOST_SAMPLES = 128, 512
DEFAULT_SAMPLES, DEFAULT_TOKENS = 128, 512
MAX_HELD_OUT = 32
MIN_HELD_OUT = 4
SHORT_TOKENS = 16
STRATUM_BOUNDS = (64, 256, 1024, 4096)


@dataclass(frozen=True, kw_only=True)
class CalibrationSet:
    """Token ids to calibrate on, `(num_tokens of the sample,)` each, and others of the same kinds to measure loss with.

    No held-out sample equals a calibrated one. `label` names the files, `fingerprint` (SHA-256) every id, the tokenizer
    and the options.
    """

    samples: tuple[TokenIds, ...]
    held_out: tuple[TokenIds, ...]
    label: str
    fingerprint: str
    report: SetReport

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, without the held-out ones."""
        return sum(map(len, self.samples))

    @property
    def system_prompt_share(self) -> float:
        """Share of the samples that hold a system prompt or part of one, from 0 to 1."""
        return self.report.system_prompt_share


def make_calibration_set(
    tokenizer: Tokenizer,
    *,
    traffic: Sequence[Path] = (),
    system_prompts: Sequence[Path] = (),
    allow_no_system_prompts: bool = False,
    num_samples: int = DEFAULT_SAMPLES,
    max_tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
) -> CalibrationSet:
    """Draw a set from files of traffic, or from the bundled one, with the model's own tokenizer and chat template.

    Raises:
        CalibrationError: a file cannot be read, nothing usable is in it, or no sample holds any of a system prompt.
    """
    if num_samples < 1 or max_tokens < SHORT_TOKENS:
        raise ValueError(f"{num_samples} samples of {max_tokens} tokens: allowed are >= 1 of >= {SHORT_TOKENS}")
    given = _read_prompts(system_prompts)
    read = read_traffic(traffic or [DEFAULT_SET], seed=seed)
    # the bundled system prompts stand in for those of production, which are known where they are given
    stand_in = not traffic and (given or allow_no_system_prompts)
    requests = tuple(map(_without_system, read.requests)) if stand_in else read.requests
    rendered = render_traffic(requests, tokenizer, system_prompts=given)
    if not rendered.prompts:
        raise CalibrationError(
            f"the model's chat template accepts none of the {rendered.num_refused} requests",
            "look at the roles in the --calib file; this model may have no system or tool turns",
        )
    pool = _pool(rendered.prompts, tokenizer)
    chosen, reserved = _choose(pool, num_samples)
    cutter = WindowCutter(tokenizer=tokenizer, max_tokens=max_tokens)
    samples, held_out = (cutter.cut(part.prompts, part.lengths) for part in (chosen, reserved))
    if not allow_no_system_prompts:
        _check_system_prompts(samples)
    label = ", ".join(sorted({path.name for path in traffic})) or BUNDLED_SET
    options = {
        "max_tokens": max_tokens,
        "no_system_prompts": allow_no_system_prompts,
        "num_samples": num_samples,
        "seed": seed,
        "system_prompts": sorted(given),
    }
    return CalibrationSet(
        samples=tuple(sample.token_ids for sample in samples),
        held_out=tuple(sample.token_ids for sample in held_out),
        label=label,
        fingerprint=_fingerprint(tokenizer, options, samples, held_out),
        report=_report(
            label, tokenizer, read=read, rendered=rendered, pool=pool, cutter=cutter, samples=samples, held_out=held_out
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """Prompts to draw from, with their whole lengths in tokens."""

    prompts: tuple[Prompt, ...]
    lengths: tuple[int, ...]

    def at(self, places: Sequence[int]) -> _Pool:
        return _Pool(
            prompts=tuple(self.prompts[i] for i in places),
            lengths=tuple(self.lengths[i] for i in places),
        )

    def kinds(self) -> list[tuple[str, int, str]]:
        """Language, bucket of the length, and system prompt of each."""
        names = common_prompts([prompt.system_prompt for prompt in self.prompts])
        buckets = np.searchsorted(STRATUM_BOUNDS, self.lengths).tolist()
        return [(p.language, bucket, name) for p, bucket, name in zip(self.prompts, buckets, names, strict=True)]


def _pool(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> _Pool:
    distinct = [prompts[i] for i in first_of_each([(p.system_prompt, p.body) for p in prompts])]
    return _Pool(prompts=tuple(distinct), lengths=tuple(len(tokenizer.encode(p.text)) for p in distinct))


def _choose(pool: _Pool, num_samples: int) -> tuple[_Pool, _Pool]:
    """What to calibrate on, what to hold out: up to 32 beyond the samples, or a tenth (at least 4) of a small pool."""
    num = len(pool.prompts)
    least = max(num // 10, MIN_HELD_OUT) if num >= 2 * MIN_HELD_OUT else 0
    num_held_out = min(MAX_HELD_OUT, max(num - num_samples, least))
    kinds = pool.kinds()
    chosen = draw(kinds, min(num_samples, num - num_held_out))
    rest = sorted(set(range(num)) - set(chosen))
    reserved = [rest[i] for i in draw([kinds[i] for i in rest], num_held_out)]
    return pool.at(chosen), pool.at(reserved)


def _read_prompts(paths: Sequence[Path]) -> tuple[str, ...]:
    prompts = []
    for path in paths:
        try:
            text = read_text(path).strip()
        except OSError as error:
            raise CalibrationError(
                f"the system prompt {path} cannot be read: {error.strerror}", "give --system-prompt a text file"
            ) from None
        if not text:
            raise CalibrationError(
                f"the system prompt {path} is blank",
                "give --system-prompt what production sends, or say --no-system-prompts if it sends none",
            )
        prompts.append(text)
    # in the order of their text, so that the order of the flags does not matter
    return tuple(sorted(set(prompts)))


def _without_system(request: TrafficRequest) -> TrafficRequest:
    return replace(request, turns=tuple(turn for turn in request.turns if turn[0] != "system"))


def _check_system_prompts(samples: Sequence[Sample]) -> None:
    if any(sample.has_system_prompt for sample in samples):
        return
    raise CalibrationError(
        f"none of the {len(samples)} samples has a system prompt. A service puts the same one in front of "
        "every request; a model calibrated without those tokens is worst on what it reads most",
        "give --system-prompt FILE (repeatable) with the prompts of production, or --calib with traffic that has them; "
        "if production has none, say --no-system-prompts",
    )


def _report(
    label: str,
    tokenizer: Tokenizer,
    *,
    read: Traffic,
    rendered: RenderedTraffic,
    pool: _Pool,
    cutter: WindowCutter,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
) -> SetReport:
    in_traffic = [name_of_prompt(prompt.system_prompt) for prompt in pool.prompts]
    # what the windows hold: a tail may have nothing of the prompt that its request came with
    in_set = [name_of_prompt(s.prompt.system_prompt if s.has_system_prompt else "") for s in samples]
    return SetReport(
        label=label,
        num_samples=len(samples),
        num_held_out=len(held_out),
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        max_tokens=cutter.max_tokens,
        lengths=measure_lengths(pool.lengths, [prompt.count for prompt in pool.prompts]),
        languages=measure_shares([p.language for p in pool.prompts], [s.prompt.language for s in samples]),
        system_prompts=measure_shares(in_traffic, in_set),
        system_prompt_share=sum(sample.has_system_prompt for sample in samples) / len(samples),
        num_requests=read.num_requests,
        num_distinct=len(pool.prompts),
        num_duplicates=read.num_duplicates + cutter.num_duplicates,
        num_near_duplicates=len(rendered.prompts) - len(pool.prompts),
        num_prompts_added=rendered.num_prompts_added,
        num_refused=rendered.num_refused,
        num_truncated=sum(sample.truncated for sample in (*samples, *held_out)),
        num_short=sum(len(sample.token_ids) < SHORT_TOKENS for sample in (*samples, *held_out)),
        redactions=dict(sorted(cutter.redactions.items())),
        num_bad_lines=read.num_bad_lines,
        bad_lines=read.bad_lines,
        num_broken_encodings=read.num_broken_encodings,
        has_chat_template=tokenizer.chat_template is not None,
        warnings=_warnings(len(samples), len(held_out), len(pool.prompts)),
    )


def _warnings(num_samples: int, num_held_out: int, num_distinct: int) -> tuple[str, ...]:
    warnings = []
    if num_samples < FEWEST_SAMPLES:
        warnings.append(
            f"{num_samples} samples ({num_distinct} distinct requests); below {FEWEST_SAMPLES} the scales follow the "
            "accidents of the samples. Give --calib more traffic"
        )
    if num_samples > MOST_SAMPLES:
        warnings.append(f"{num_samples} samples; above {MOST_SAMPLES} calibration takes longer and gains little")
    if not num_held_out:
        warnings.append("nothing is held out: the loss would be measured on what was calibrated on")
    return tuple(warnings)


def _fingerprint(
    tokenizer: Tokenizer, options: Mapping[str, Any], samples: Sequence[Sample], held_out: Sequence[Sample]
) -> str:
    described = {
        "tokenizer": tokenizer.sha256,
        "chat_template": tokenizer.chat_template_sha256,
        "options": options,
        "samples": [sample.token_ids.tolist() for sample in samples],
        "held_out": [sample.token_ids.tolist() for sample in held_out],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
