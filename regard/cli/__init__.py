"""The command line: parse, call, print. One command a file."""

from __future__ import annotations

import io
import sys

from regard.errors import MissingExtraError, RegardError


def main() -> None:
    """The entry point: errors that regard raises become one line and exit status 2."""
    try:
        from regard.cli.application import application
    except ImportError as error:  # without the extra there is no command line
        if error.name not in ("typer", "click", "rich"):
            raise
        sys.exit(str(MissingExtraError(error.name, "cli")))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without these letters gets others, not an error
    try:
        application()()
    except RegardError as error:
        print(f"regard: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
