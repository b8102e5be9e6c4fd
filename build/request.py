"""What a user asks of `harness-build`: checked before anything is opened, then opened.

Owns the rules of which flags go together, and the way from a model to what is lowered: a quantized checkpoint given,
one made by calibration, or the model's own weights that lowering rounds to nearest. Torch and the quantizers are in the
extra `calib`; what needs them is imported when a build calibrates.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as RemainingColumn

from harness.build.checkpoint import open_checkpoint
from harness.build.open_source import open_source
from harness.build.tokenizer_check import check_tokenizer
from harness.build.weight_check import check_weights
from harness.console import printable
from harness.errors import CalibrationError, UsageError
from harness.recipe import INT8, PRESETS, Precision, Recipe, default_preset, in_decoder, load_recipe, preset
from harness.spec import ModelSpec
from harness.tokenizer import Tokenizer
from harness.weight_source import WeightSource

_NEEDED = (
    "torch",
    "transformers",
    "llmcompressor",
    "compressed_tensors",
    "safetensors",
    "detect_secrets",
    "phonenumbers",
)
_PERCENT = re.compile(r"^(\d+(?:\.\d+)?)\s*%$")
_DEFAULT_BITS = 4.5


Check = Callable[[ModelSpec, Mapping[str, Precision] | None], None]


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """The flags of a build, as given; None where one is not.

    Raises:
        UsageError: flags that contradict each other, or a value that is none of those allowed.
    """

    model: str | None
    checkpoint: Path | None
    precision: str | None
    bits: float | None
    max_loss: str | None
    recipe: Path | None
    target: str
    optimize: str
    traffic: tuple[Path, ...]
    system_prompts: tuple[Path, ...]
    no_system_prompts: bool
    num_samples: int | None
    max_tokens: int | None
    device: str | None
    no_calib: bool

    def __post_init__(self) -> None:
        if not self.model and self.checkpoint is None:
            raise UsageError("no model given", "harness-build --model MODEL, see harness-build --help")
        self._check_exclusions()
        _one_of("--precision", self.precision, (None, *PRESETS))
        _one_of("--for", self.target, ("portable", "cpu"))
        _one_of("--optimize", self.optimize, ("decode", "prefill"))
        _one_of("--calib-device", self.device, (None, "auto", "cpu", "cuda"))
        if self.bits is not None and not 4 <= self.bits <= 16:
            raise UsageError(f"--bits {self.bits:g} is not between 4 and 16", "4.5 is a good start")
        if self.optimize == "prefill" and (self.recipe or self.precision in ("f16", "int4")):
            raise UsageError(
                "--optimize goes with --bits, --max-loss or --precision int8", "a recipe says int8-a8 where it wants it"
            )
        self._loss_limit()

    def _check_exclusions(self) -> None:
        given = {
            "--precision": self.precision,
            "--bits": self.bits,
            "--max-loss": self.max_loss,
            "--recipe": self.recipe,
        }
        _exclude(given, "each says the precision of every layer")
        if self.checkpoint is not None:
            others = {
                "--model": self.model or None,
                **{flag: value for flag, value in given.items() if flag != "--recipe"},
                **self._calibration_flags(),
                "--no-calib": self.no_calib or None,
            }
            for flag, value in others.items():
                _exclude({"--checkpoint": self.checkpoint, flag: value}, "a checkpoint is quantized already")
        if self.no_calib:
            measured = {"--bits": self.bits, "--max-loss": self.max_loss, **self._calibration_flags()}
            for flag, value in measured.items():
                _exclude({"--no-calib": True, flag: value}, "rounding to nearest measures nothing")
        if self.precision == "f16":
            for flag, value in self._calibration_flags().items():
                _exclude({"--precision f16": True, flag: value}, "half precision has nothing to calibrate")
        _exclude(
            {"--system-prompt": self.system_prompts or None, "--no-system-prompts": self.no_system_prompts or None},
            "production has system prompts or it has none",
        )

    def open(
        self, engines_dir: Path, console: Console, check: Check = lambda spec, resolved: None
    ) -> tuple[WeightSource, Recipe]:
        """What is to be lowered, and its recipe; calibrates where that is asked for.

        Args:
            check: called with the model and the precision of each module, None where that is to be searched; what an
                arch cannot run is refused there, before any hour is spent.

        Raises:
            HarnessError: the model, the traffic, the recipe or the calibration is refused.
        """
        written = load_recipe(self.recipe) if self.recipe else None
        if self.checkpoint is not None:
            checkpoint = open_checkpoint(self.checkpoint)
            _note_unused(written, checkpoint, console)
            check(checkpoint.spec, (written or checkpoint.recipe).resolve(checkpoint.spec))
            return checkpoint, written or checkpoint.recipe
        if not self._plain(written):
            _check_installed()
        assert self.model is not None, "checked at the start"
        source = open_source(self.model)
        _note_unused(written, source, console)
        chosen = written or self._preset(source)
        if self._plain(chosen):
            chosen = chosen or preset("int4", source.spec)
        check(source.spec, None if chosen is None else chosen.resolve(source.spec))
        if chosen is not None and self._plain(chosen):
            return source, chosen
        check_weights(source)
        if chosen is not None:
            resolved = chosen.resolve(source.spec)  # refused here rather than when the traffic is read
            if all(p.dtype == "f16" for module, p in resolved.items() if in_decoder(module)):
                return source, chosen  # embeddings are rounded to nearest either way
        checkpoint = open_checkpoint(self._calibrate(source, chosen, engines_dir, console))
        # a checkpoint that is found may be of a recipe with other embeddings; those of a search are int8
        ends = chosen or Recipe(name=checkpoint.recipe.name, rules=(("*", INT8),))
        return checkpoint, checkpoint.with_ends_of(ends)

    def _plain(self, recipe: Recipe | None) -> bool:
        """Whether there is nothing to calibrate."""
        only_f16 = recipe is not None and all(p.dtype == "f16" for _, p in recipe.rules)
        return self.no_calib or self.precision == "f16" or only_f16

    def _preset(self, source: WeightSource) -> Recipe | None:
        """The recipe that does not come from a file; None where it is to be searched."""
        if self.bits is not None or self.max_loss is not None:
            return None
        name = self.precision or default_preset(source.spec)
        if self.precision is None and name == "int4" and not self.no_calib:
            return None
        if name == "int8" and self.optimize == "prefill":
            both = Precision(dtype="int8", int8_activations=True)
            return Recipe(name="int8-a8", rules=(("*.mlp.experts.*", INT8), ("model.layers.*", both), ("*", INT8)))
        chosen = preset(name, source.spec)
        if name == "int4" and source.spec.moe is not None and self.target == "portable" and not self.no_calib:
            # the last layer's experts are no exception: other servers read those of all layers by one scheme
            experts = ("*.mlp.experts.*", Precision.parse("int4"))
            return Recipe(name=chosen.name, rules=(experts, *chosen.rules))
        return chosen

    def _calibrate(self, source: WeightSource, recipe: Recipe | None, engines_dir: Path, console: Console) -> Path:
        # it would write its warnings to stdout, which is the engine's path alone; it looks when it is imported
        os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")

        from harness.calib.calibrate import Goal, calibrate, int8_reasoning, torch_device
        from harness.calib.calibration_set import DEFAULT_SAMPLES, DEFAULT_TOKENS, make_calibration_set
        from harness.calib.checkpoint_maker import Calibration, Optimize, Target
        from harness.calib.set_report import render_text

        tokenizer = Tokenizer(source.tokenizer, source.generation_config)
        check_tokenizer(tokenizer, source.spec)
        device = torch_device(self.device or "auto")
        chosen = make_calibration_set(
            tokenizer,
            traffic=self.traffic,
            system_prompts=self.system_prompts,
            allow_no_system_prompts=self.no_system_prompts,
            num_samples=self.num_samples or DEFAULT_SAMPLES,
            max_tokens=self.max_tokens or DEFAULT_TOKENS,
        )
        console.print(printable(render_text(chosen.report)), soft_wrap=True)
        limit = self._loss_limit()
        if self.recipe is None:
            console.print(int8_reasoning(cast(Optimize, self.optimize)), soft_wrap=True)
        bits = None if recipe is not None or limit is not None else self.bits or _DEFAULT_BITS
        with _progress(console) as progress:
            tasks: dict[str, TaskID] = {}

            def show(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = progress.add_task(stage, total=total, completed=done)  # what a killed run did
                elif done == 0:  # a further checkpoint
                    progress.reset(tasks[stage])
                progress.update(tasks[stage], completed=done)
                if not console.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                    console.print(f"{stage}: {done} of {total} layers")  # a log shows no bar

            calibration = Calibration(
                source=source,
                calibration_set=chosen,
                target=cast(Target, self.target),
                optimize=cast(Optimize, self.optimize),
                device=device,
                engines_dir=engines_dir,
                on_progress=show,
                say=lambda line: console.print(line, soft_wrap=True),
            )
            return calibrate(calibration, Goal(recipe=recipe, bits=bits, max_loss=limit))

    def _loss_limit(self) -> float | None:
        if self.max_loss is None:
            return None
        found = _PERCENT.match(self.max_loss.strip())
        if not found or not 0 < float(found[1]) <= 100:
            raise UsageError(f"--max-loss {self.max_loss!r} is not a percentage", "write it as 1% or 0.5%")
        return float(found[1]) / 100

    def _calibration_flags(self) -> dict[str, object]:
        """Flags that only calibration looks at, None where not given."""
        return {
            "--calib": self.traffic or None,
            "--system-prompt": self.system_prompts or None,
            "--no-system-prompts": self.no_system_prompts or None,
            "--for": None if self.target == "portable" else self.target,
            "--optimize": None if self.optimize == "decode" else self.optimize,
            "--calib-samples": self.num_samples,
            "--calib-tokens": self.max_tokens,
            "--calib-device": self.device,
        }


def _note_unused(written: Recipe | None, source: WeightSource, console: Console) -> None:
    """Say which rules of a user's recipe decide nothing, before hours of calibration: they may be misspelt."""
    for pattern in written.unused_rules(source.spec) if written else ():
        note = f"note: the recipe's rule {pattern!r} decides no layer of this model"
        console.print(printable(note), soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("layers,"))
    # the estimate is over all layers done: a layer may take minutes
    times = (TimeElapsedColumn(), TextColumn("left:"), RemainingColumn())
    return Progress(*columns, *times, console=console, transient=True, speed_estimate_period=1e9)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CalibrationError(
            f"calibration needs {', '.join(missing)}: not installed",
            "pip install 'deepseek-harness-engine[calib]', or round to nearest with --no-calib",
        )


def _exclude(flags: Mapping[str, object], reason: str) -> None:
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", f"give one of them: {reason}")


def _one_of(flag: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"unknown {flag} {value!r}", f"allowed: {', '.join(str(v) for v in allowed if v is not None)}")
