"""regard audit of several checkpoints: how each head moves over training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.directories import source_of

if TYPE_CHECKING:
    from regard.audits.checkpoint import Checkpoint
    from regard.audits.run import Audit
    from regard.audits.streaming import StreamedAudit
    from regard.audits.weights import WeightAudit

    AnyAudit = Audit | StreamedAudit | WeightAudit


def audit_series(models: Sequence[str], audit_of: Callable[[Checkpoint], AnyAudit], out: Path) -> None:
    """Audit each checkpoint, and lay the reports side by side."""
    from regard.audits import terminal
    from regard.audits.checkpoint import find
    from regard.audits.series import save, series

    with status("looking at the checkpoints"):
        found = [find(model) for model in models]
    reports = []
    for checkpoint in found:  # one in memory at a time
        with status(f"loading {checkpoint.name}"):
            run = audit_of(checkpoint)
        sizes = [len(run.places), *(len(run.places) + 1 for _ in run.inputs)]
        with terminal.Bars(terminal.messages(), sizes) as bars:
            run.measure(bars)
        reports.append(run.report())
    whole = series(reports, _distinct([checkpoint.name for checkpoint in found], models))
    whole = replace(whole, source=source_of(models))
    terminal.show_series(whole, save(whole, out), terminal.output())


def _distinct(short: Sequence[str], long: Sequence[str]) -> Sequence[str]:
    """Short names, where these tell the models apart."""
    return short if len(set(short)) == len(set(long)) else long


@contextmanager
def status(what: str) -> Iterator[None]:
    """A word of what takes a while, on a terminal."""
    from regard.audits import terminal

    console = terminal.messages()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
