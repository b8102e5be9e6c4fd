"""Steps of an acceptance run: what each needs, how a command is run, and which verdict comes of it.

Owns the order and the verdicts, one log a step. A step that fails ends nothing but the steps that need it. What the
steps are is `plan`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from harness.errors import HarnessError

Verdict = Literal["pass", "fail", "skipped", "not run"]
Findings = dict[str, Any]
FOUND: Findings = {"found": "made by a former run"}
_PATIENCE_S = 10
_LAST_LINES = 6


class StepFailed(Exception):
    """What a step was to prove does not hold. `findings` are what was seen all the same."""

    def __init__(self, reason: str, findings: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.findings = dict(findings or {})


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing to be proven.

    Attributes:
        what: what a pass says, in a sentence.
        command: what is run, as one would type it.
        run: does it, writes to the log, and returns what was found.
        needs: names of steps that must have passed before.
        gpu: whether it needs a GPU with TensorRT-LLM.
        tolerated: why a failure does not fail the run; empty where it does.
    """

    name: str
    what: str
    command: Callable[[], str]
    run: Callable[[TextIO], Findings]
    needs: tuple[str, ...] = ()
    gpu: bool = False
    tolerated: str = ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a step ended; `log` is relative to the report's folder, None where nothing was run."""

    name: str
    what: str
    verdict: Verdict
    seconds: float = 0.0
    command: str = ""
    reason: str = ""
    tolerated: str = ""
    findings: Findings = field(default_factory=dict)
    log: str | None = None

    @property
    def fails_the_run(self) -> bool:
        """Whether the run cannot be called a success with it."""
        return self.verdict == "fail" and not self.tolerated


def run_steps(
    steps: Sequence[Step], folder: Path, *, has_gpu: bool, on_result: Callable[[list[Result]], None]
) -> list[Result]:
    """Run steps in order, with a log of each in `folder/logs`.

    Args:
        has_gpu: whether steps that need one are run; they are listed with their command otherwise.
        on_result: called with all results so far after each step, so that a run that is killed leaves its report.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    verdicts: dict[str, Verdict] = {}
    for number, step in enumerate(steps, 1):
        missing = [name for name in step.needs if verdicts[name] != "pass"]
        if step.gpu and not has_gpu:
            result = _unrun(step, "not run", "needs a GPU")
        elif missing:
            result = _unrun(step, "skipped", f"needs {missing[0]}, which ended with {verdicts[missing[0]]!r}")
        else:
            print(f"{step.name} ...", file=sys.stderr, flush=True)
            result = _run(step, folder, f"logs/{number:02}-{step.name}.log")
        print(f"{result.verdict:8} {step.name} {result.reason[:160]}".rstrip(), file=sys.stderr, flush=True)
        verdicts[step.name] = result.verdict
        results.append(result)
        on_result(results)
    return results


def run_command(
    argv: Sequence[str], log: TextIO, *, cwd: Path, timeout_s: float, accepted: Sequence[int] = (0,)
) -> str:
    """Run a command and return its stdout; all output goes to the log as it comes.

    Raises:
        StepFailed: it ended with another exit code than those accepted, or took too long; it is stopped then, with
            all that it started.
    """
    log.write(f"$ cd {shlex.quote(str(cwd))}\n$ {shlex.join(argv)}\n")
    log.flush()
    start = log.tell()
    try:
        process = subprocess.Popen(
            argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    except OSError as error:
        raise StepFailed(f"{argv[0]} cannot be run: {error.strerror or error}") from None
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        stop(process)
        if process.stdout is not None:
            process.stdout.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise StepFailed(f"took more than {timeout_s:.0f} s and was stopped") from None
        raise
    log.seek(0, os.SEEK_END)
    text = out.decode(errors="replace")
    log.write(text)
    log.flush()
    if process.returncode not in accepted:
        with open(log.name, encoding="utf-8", errors="replace") as written:
            written.seek(start)
            said = [line.strip() for line in written.read().splitlines() if line.strip()]
        raise StepFailed(f"exit code {process.returncode}: {_telling(said)}", {"exit_code": process.returncode})
    return text


def stop(process: subprocess.Popen[Any], patience_s: float = _PATIENCE_S) -> None:
    """End a process that leads a session of its own, and all in that session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it started may still be there
    process.wait()


def _telling(lines: Sequence[str]) -> str:
    """The lines of an output that say why: from `error:` on, or the last ones."""
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    return " / ".join(lines[starts[-1] :] if starts else lines[-_LAST_LINES:])


def _unrun(step: Step, verdict: Verdict, reason: str) -> Result:
    return Result(name=step.name, what=step.what, verdict=verdict, command=_shown(step), reason=reason)


def _shown(step: Step) -> str:
    try:
        return step.command()
    except StepFailed as error:  # it names what an earlier step did not make
        return f"({error})"


def _run(step: Step, folder: Path, log_name: str) -> Result:
    verdict, reason, findings = "pass", "", {}
    start = time.monotonic()
    with (folder / log_name).open("w", encoding="utf-8", errors="replace") as log:
        try:
            findings = step.run(log)
        except (StepFailed, HarnessError) as error:
            verdict, reason, findings = "fail", str(error), getattr(error, "findings", {})
            log.write(f"\nfailed: {error}\n")
        except Exception as error:  # a fault of one step, whatever it is, must not hide what the others show
            verdict, reason = "fail", f"{type(error).__name__}: {error}"
            log.write(f"\n{traceback.format_exc()}")
        for name, value in findings.items():
            log.write(f"found {name}: {value}\n")
    return Result(
        name=step.name,
        what=step.what,
        verdict="pass" if verdict == "pass" else "fail",
        seconds=round(time.monotonic() - start, 2),
        command=_shown(step),
        reason=reason,
        tolerated=step.tolerated if verdict == "fail" else "",
        findings=findings,
        log=log_name,
    )
