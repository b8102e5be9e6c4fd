"""Runs programs that a model wrote, each in a process of its own that is shut in (see `sandbox`).

Owns the limits and what the outcome of a program is. What they contain and what they do not stands in docs/suites.md.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import tempfile
from functools import cache

from harness.calib.quality import sandbox
from harness.errors import QualityError

CPU_SECONDS = 4
WALL_SECONDS = 30  # generous, for machines that are busy: what a program may use is the time of a core
GRACE_SECONDS = 5  # then it is killed from outside
MEMORY_BYTES = 512 << 20
_MOST_CHARS = 300

# Sets must have the same order in every run, or programs pass by chance; python -I would ignore the seed. With nothing
# else in the environment and -s it is as isolated.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "LC_ALL": "C.UTF-8"}


def run_program(program: str) -> str:
    """Run Python source; empty if it came to its end, else what went wrong.

    Raises:
        QualityError: it cannot be contained on this machine, so it was not run.
    """
    secret = secrets.token_hex(16)
    limits = {"cpu_seconds": CPU_SECONDS, "wall_seconds": WALL_SECONDS, "memory_bytes": MEMORY_BYTES}
    job = json.dumps({"program": program, "secret": secret, "limits": limits})
    command = [sys.executable, "-s", "-B", sandbox.__file__]
    with tempfile.TemporaryDirectory(prefix="program-") as folder, tempfile.TemporaryFile() as verdict:
        try:
            done = subprocess.run(
                command,
                input=job.encode(),
                stdout=verdict,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=_ENVIRONMENT,
                timeout=WALL_SECONDS + GRACE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "did not end"
        verdict.seek(0)
        said = verdict.read(4096).decode("utf-8", "replace")
    if said == secret:
        return ""
    if said.startswith(secret):
        raise QualityError(f"code cannot be contained on this machine: {said.removeprefix(secret)}", _HINT)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM):
        return f"did not end within {CPU_SECONDS} s"
    return said[:_MOST_CHARS] or f"ended the process with status {done.returncode}"


@cache
def why_not() -> str | None:
    """Why programs cannot be run here, None where they can."""
    if not sys.platform.startswith("linux"):
        return "programs of a model are run on Linux alone, where the kernel can contain them"
    try:
        failure = run_program("pass")
    except QualityError as error:
        return f"{error.message} ({error.hint})"
    return f"an empty program failed: {failure}" if failure else None


_HINT = "install libseccomp 2 (apt install libseccomp2), and allow seccomp where this runs in a container"
