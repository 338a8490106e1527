"""The command line: parse, call, print. One command a file."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import traceback
import warnings

from regard._command import STOPPED
from regard._printable import printable
from regard.cli.letters import without_errors
from regard.cli.streams import lasting
from regard.errors import MissingExtraError, RegardError

UNFORESEEN = 3
"""The exit status of an error that is regard's own."""


def main() -> None:
    """The entry point: every error is one line. Errors of arguments, files, the disk or memory have exit
    status 2; what nobody foresaw has 3, and its line names a log with the traceback.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            without_errors(stream)  # a terminal without these letters gets others, not an error
            setattr(sys, name, lasting(stream))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment] # it needs the message alone
            try:
                _run()
            finally:
                if sys.stdout is not None:  # as after `>&-`
                    sys.stdout.flush()  # a full disk is found here, not while Python ends
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        foreseen = _of_the_system(error) or (str(error) if isinstance(error, RegardError) else "")
        _end(foreseen or _unforeseen(error), 2 if foreseen else UNFORESEEN)


def _warn(message: Warning | str, *where: object) -> None:
    print(printable(f"warning: {' '.join(str(message).split())}"), file=sys.stderr)


def _end(sentence: str, status: int) -> None:
    print(printable(f"regard: {' '.join(sentence.split())}"), file=sys.stderr)
    sys.exit(status)


def _of_the_system(error: Exception) -> str:
    """What the machine did not have, in a sentence; nothing where the error is another."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "there is not enough memory; give a smaller model, shorter texts or smaller sizes"
    if not isinstance(error, OSError):
        return ""
    try:
        sys.stdout.flush()
    except OSError:  # what is left goes nowhere, or Python complains about it when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.filename is None:
        return f"the output cannot be written ({error.strerror})"
    return f"{error.filename} cannot be read or written ({error.strerror})"


def _unforeseen(error: Exception) -> str:
    """Keep the traceback in a file, and say where."""
    text = printable("".join(traceback.format_exception(error)))
    found = f"an error that was not foreseen ({type(error).__name__})"
    try:
        handle, path = tempfile.mkstemp(".log", "regard-")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(f"{sys.argv}\n{text}")
    except OSError:
        return f"{found}, and no log can be written to {tempfile.gettempdir()}"
    return f"{found}; the traceback is in {path}: please report it"


def _run() -> None:
    try:
        from regard.cli.application import application
    except ImportError as error:  # without the extra there is no command line, but there is help
        if error.name not in ("typer", "click", "rich"):
            raise
        from regard.cli.overview import extra_of, plain_help

        if sys.argv[1:] in ([], ["--help"]):
            print(plain_help(), end="")
            return
        raise MissingExtraError(error.name, extra_of(sys.argv[1])) from None
    application()()
