"""What the two console scripts share: `--version`, and how they end, never in a traceback for a user's mistake.

Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import harness
from harness.errors import HarnessError, UsageError

_INTERRUPTED = 130


def _print_version(asked: bool) -> None:
    if asked:
        print(harness.__version__)
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
]


def printable(text: str) -> str:
    """Text that cannot speak to the terminal: what comes from files may hold escape sequences. Lines stay lines."""
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


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
        _interrupted()
    except SystemExit as end:  # typer's own end of an interrupted command says nothing
        if end.code == _INTERRUPTED:
            _interrupted()
        raise


def _interrupted() -> None:
    print("interrupted", file=sys.stderr)
    sys.exit(_INTERRUPTED)


def _fail(error: HarnessError, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)
