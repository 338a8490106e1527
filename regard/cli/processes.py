"""--processes: how many processes work on a command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.audits.fleet import Team


def refuse_processes(count: int, team: Team) -> None:
    """Raise where so many processes cannot work on a model."""
    from regard.audits.fleet import GROUP

    if count < 1:
        raise ArgumentError("--processes", f"is {count}", "give 1 or more")
    if count > 1 and os.name == "nt":
        raise ArgumentError("--processes", "is not for Windows", "start the ranks with torchrun")
    if count > 1 and team.world > 1 and GROUP not in os.environ:
        found = f"is given to ranks of torchrun, which are {team.world} already"
        raise ArgumentError("--processes", found, "leave it out, or start the command without torchrun")


def start_workers(count: int, directory: Path, resume: bool) -> int:
    """Run this command in so many workers that keep their results in a directory; their exit status."""
    from regard.audits import terminal
    from regard.audits.launching import launch

    console = terminal.messages()
    command = [sys.executable, "-m", "regard", *sys.argv[1:]]
    return launch(command, count, directory, resume, lambda line: terminal.say(console, line))
