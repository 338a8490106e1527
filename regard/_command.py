"""Ctrl-C while the command line is still being loaded is one line, not a traceback."""

from __future__ import annotations

import sys
from pathlib import PurePath
from types import TracebackType

STOPPED = "regard: stopped"


def quiet_interrupts() -> None:
    """Show an interrupt as one line, where this process is the command and not a program that uses regard."""
    if _is_command():
        sys.excepthook = _show


def _is_command() -> bool:
    asked = [*sys.orig_argv[1:], ""]
    module = next((asked[place + 1] for place, word in enumerate(asked[:-1]) if word == "-m"), "")
    started = sys.argv[0] if sys.argv else ""
    return (module == "regard" and started == "-m") or PurePath(started).stem == "regard"


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(STOPPED, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
