"""Steps that make something with a program: checkpoints, engines, reports, test runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from servers import Servers
from steps import FOUND, Findings, Step, StepFailed, run_command
from tools import REPOSITORY, Variant, build, builder_command, program

_NO_GPU_HERE = "no GPU is expected in a dry run"
_OPEN_QUESTION = "this is what the run is to find out: int4 alone and int8 alone follow"


class Building:
    """Makes such steps. Those of a variant are called by its name: `int4-checkpoint`, `int4-engine`.

    Args:
        arch: to build for.
        work: where what belongs to no variant is run.
        servers: stopped before a step that needs the GPU's memory.
        timeout_s: of a program.
        calib_bin: folder with the `harness-build` that can calibrate; None where it is this environment's.
    """

    def __init__(self, arch: str, work: Path, servers: Servers, *, timeout_s: float, calib_bin: Path | None) -> None:
        self._arch = arch
        self._work = work
        self._servers = servers
        self._timeout_s = timeout_s
        self._calib_bin = calib_bin

    def doctor(self, *, dry_run: bool) -> Step:
        """Whether the machine is fit."""
        argv = [program("harness-build"), "doctor", "--arch", self._arch]
        tolerated = _NO_GPU_HERE if dry_run else ""
        return self._command("doctor", "this machine has what engines need", lambda: argv, tolerated=tolerated)

    def checkpoint(self, variant: Variant) -> Step:
        """A TensorRT-LLM checkpoint, made on any machine; the only step that may calibrate."""
        calibrates = variant.quantized_in in (None, variant.name)

        def argv() -> list[str]:
            source = variant.source if calibrates else variant.lowered_from()
            flags = (*source, *variant.checkpoint_flags, "--tp", str(variant.tp), "--stage", "checkpoint")
            return build(self._arch, *flags, "--out", str(variant.checkpoint), calib_bin=self._calib_bin)

        needs = () if calibrates else (f"{variant.quantized_in}-checkpoint",)
        name, what = f"{variant.name}-checkpoint", "weights become a TensorRT-LLM checkpoint"
        return self._command(
            name, what, argv, cwd=variant.folder, made=variant.is_made, needs=needs, after=variant.note
        )

    def cpu_engine(self, variant: Variant) -> Step:
        """The very integers of the checkpoint on the CPU."""

        def argv() -> list[str]:
            return build("cpu", *variant.lowered_from(), "--report", "none", "--out", str(variant.cpu_engine))

        what = "the same integers become an engine for the CPU, to compare with"
        needs = (f"{variant.name}-checkpoint",)
        made = variant.cpu_answers.is_file  # all that it is for
        return self._command(f"{variant.name}-cpu-engine", what, argv, cwd=variant.folder, made=made, needs=needs)

    def pytorch_folder(self, variant: Variant) -> Step:
        """What releases of TensorRT-LLM without engines load."""

        def argv() -> list[str]:
            flags = ("--backend", "trtllm-pytorch", "--out", str(variant.folder / "pytorch"))
            return build(self._arch, *variant.lowered_from(), *flags)

        needs = (f"{variant.name}-checkpoint",)
        what = "the quantized checkpoint becomes a folder for TensorRT-LLM's PyTorch backend"
        return self._command("pytorch-folder", what, argv, cwd=variant.folder, needs=needs)

    def builder_arguments(self, variants: Sequence[Variant]) -> Step:
        """What `trtllm-build` would be called with."""

        def run(log: TextIO) -> Findings:
            found = {v.name: shlex.join(builder_command(v)) for v in variants if v.is_made()}
            if len(found) < len(variants):
                raise StepFailed("a checkpoint is missing", found)
            return found

        what = "the limits of each engine follow from its checkpoint: the trtllm-build of a card of 80 GiB"
        return Step(name="builder-arguments", what=what, command=lambda: "", run=run)

    def engine(self, variant: Variant, needs: str = "") -> Step:
        """An engine, on the GPU. `needs`: the step that made its checkpoint, where that is not the variant's own."""

        def argv() -> list[str]:
            flags = ("--stage", "engine", "--checkpoint", str(variant.checkpoint), *variant.engine_flags)
            return build(self._arch, *flags, "--out", str(variant.engine))

        what = "trtllm-build makes an engine of the checkpoint"
        return self._command(
            f"{variant.name}-engine",
            f"{what}: int4 and int8 layers in one" if variant.name == "mixed" else what,
            argv,
            cwd=variant.folder,
            needs=() if variant.given and not needs else (needs or f"{variant.name}-checkpoint",),
            gpu=True,
            tolerated=_OPEN_QUESTION if variant.name == "mixed" else "",
        )

    def quality(self, variant: Variant, baseline: Variant) -> Step:
        """The quality report of an engine beside another one for GPUs."""
        argv = [program("harness-build"), "quality", "--engine", str(variant.engine)]
        argv += ["--baseline", str(baseline.engine), "--quick"]
        tolerated = "its verdict is about the precision, not about the engine: see what it says"
        needs = (f"{variant.name}-engine", f"{baseline.name}-engine")
        what = "the engine passes the gates of a quick quality report"
        return self._command("quality", what, lambda: argv, needs=needs, gpu=True, tolerated=tolerated)

    def gpu_tests(self) -> Step:
        """The tests that are not run without a GPU."""
        argv = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-m", "gpu", "tests/runtime/tensorrt_llm"]
        return self._command("gpu-tests", "the tests that need a GPU pass", lambda: argv, cwd=REPOSITORY, gpu=True)

    def _command(
        self,
        name: str,
        what: str,
        argv: Callable[[], list[str]],
        *,
        cwd: Path | None = None,
        made: Callable[[], bool] = lambda: False,
        after: Callable[[], None] = lambda: None,
        needs: tuple[str, ...] = (),
        gpu: bool = False,
        tolerated: str = "",
    ) -> Step:
        def run(log: TextIO) -> Findings:
            if made():
                return FOUND
            folder = cwd or self._work
            folder.mkdir(parents=True, exist_ok=True)
            if gpu:
                self._servers.stop()  # they hold the memory of the GPU
            out = run_command(argv(), log, cwd=folder, timeout_s=self._timeout_s)
            after()
            return {"said": out.strip()[-2000:]} if out.strip() else {}

        return Step(
            name=name, what=what, command=lambda: shlex.join(argv()), run=run, needs=needs, gpu=gpu, tolerated=tolerated
        )
