"""Runs of `harness-build` as its users meet them: exit code, stdout, stderr.

Imported by several tests (pyproject.toml puts this folder on their path).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN = "from harness.build.cli import main; main()"


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def says(self, *words: str, code: int = 1) -> None:
        """Checks a refusal: its code, its words, a hint, no traceback."""
        assert self.code == code, self.err
        assert self.out == ""
        assert "Traceback" not in self.err
        assert "\n  -> " in self.err
        for word in words:
            assert word in self.err, self.err


def without_report(arguments: Sequence[str | Path]) -> list[str]:
    """The arguments of a build, which makes no quality report unless the test asks for one: that takes a while."""
    given = list(map(str, arguments))
    is_build = "--model" in given or "--checkpoint" in given
    return [*given, "--report", "none"] if is_build and "--report" not in given else given


def process(*arguments: str | Path, cwd: Path, code: str = RUN, **options: Any) -> Done:
    """Runs `harness-build` as a process of its own."""
    command = [sys.executable, "-c", code, *without_report(arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, timeout=600, check=False, **options)
    return Done(code=done.returncode, out=os.fsdecode(done.stdout), err=done.stderr.decode())
