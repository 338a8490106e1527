"""A bar on standard error for what takes longer than two seconds: a simulated time, or a count."""

from __future__ import annotations

import sys
import time
from typing import Any

PATIENCE = 2.0
"""Seconds before anything is shown."""


class Bar:
    """Says how far a number is, of which `what` says what it is. Shows nothing before PATIENCE, where
    standard error is no terminal, or without rich.
    """

    def __init__(self, start: float, until: float, what: str = "t =") -> None:
        self._start, self._until, self._what, self._began = start, until, what, time.monotonic()
        self._shown: Any = None
        self._quiet = not sys.stderr.isatty()

    def reached(self, t: float) -> None:
        """The number is t."""
        if self._quiet:
            return
        if self._shown is None and time.monotonic() - self._began >= PATIENCE:
            self._show()
        if self._shown is not None:
            self._shown.update(
                self._task,
                completed=t - self._start,
                description=f"{self._what} {_written(t)} of {_written(self._until)}",
            )

    def _show(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        except ImportError:
            self._quiet = True
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._shown = Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True), transient=True
        )
        self._task = self._shown.add_task(self._what, total=self._until - self._start)
        self._shown.start()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown is not None:
            self._shown.stop()


def _written(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.4g}"
