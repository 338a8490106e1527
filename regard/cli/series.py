"""regard audit of several checkpoints: how each head moves over training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.audits.checks import Check


def audit_series(models: Sequence[str], asked: list[Check], device: str, out: Path) -> None:
    """Audit the weights of each checkpoint, and lay the reports side by side."""
    from regard.audits import terminal
    from regard.audits.checkpoint import find
    from regard.audits.series import save, series
    from regard.audits.weights import WeightAudit

    with status("looking at the checkpoints"):
        runs = [WeightAudit(find(model), checks=asked, device=device) for model in models]
    sizes = [len(run.places) for run in runs]
    with terminal.Bars(terminal.messages(), sizes) as bars:
        for number, run in enumerate(runs):
            run.measure(
                lambda what, done, total, before=sum(sizes[:number]): bars(what, before + done, sum(sizes))  # type: ignore[misc]
            )
    found = series([run.report() for run in runs], _distinct([run.name for run in runs], models))
    terminal.show_series(found, save(found, out), terminal.output())


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
