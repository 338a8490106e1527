"""The command line: parse, call, print. One command a file."""

from __future__ import annotations

import io
import sys

from regard._command import STOPPED
from regard.cli.letters import without_errors
from regard.cli.streams import lasting
from regard.errors import MissingExtraError, RegardError


def main() -> None:
    """The entry point: errors that regard raises become one line and exit status 2."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            without_errors(stream)  # a terminal without these letters gets others, not an error
            setattr(sys, name, lasting(stream))
    try:
        _run()
    except RegardError as error:
        print(f"regard: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        sys.exit(130)


def _run() -> None:
    try:
        from regard.cli.application import application
    except ImportError as error:  # without the extra there is no command line, but there is help
        if error.name not in ("typer", "click", "rich"):
            raise
        if sys.argv[1:] in ([], ["--help"]):
            from regard.cli.overview import plain_help

            print(plain_help(), end="")
            return
        raise MissingExtraError(error.name, "cli") from None
    application()()
