"""How the two console scripts end: errors as text and an exit code, never a traceback for a user's mistake.

Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import sys

import typer

from harness.errors import HarnessError, UsageError


def run_cli(app: typer.Typer) -> None:
    """Run a typer app as a process: prints a `HarnessError` with its hint, or a failure of the system, and exits."""
    try:
        app(standalone_mode=True)
    except UsageError as error:
        _fail(error, 2)
    except HarnessError as error:
        _fail(error, 1)
    except OSError as error:  # the machine's or the command line's doing, never ours
        where = f": {error.filename}" if error.filename else ""
        _fail(
            HarnessError(f"{error.strerror or error}{where}"[:400], "check that path, its permissions and its disk"), 1
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _fail(error: HarnessError, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)
