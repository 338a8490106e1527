"""The command as a user meets it, in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "examples" / "data" / "paradise_lost.txt"
TINY = (
    "--width",
    "16",
    "--layers",
    "2",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch",
    "4",
    "--steps",
    "8",
    "--every",
    "4",
)
SHORT = 6
"""How many tokens samples have in tests."""
KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from regard.training import loop
from regard.training.batches import batch_at

def fatal(tokens, recipe, step):
    if step == {step}:
        os.kill(os.getpid(), signal.{signal})
    return batch_at(tokens, recipe, step)

loop.batch_at, loop.SAMPLED = fatal, {short}
from tests.training.command import train
train(*sys.argv[1:])
"""


def train(*arguments: Any) -> None:
    """`regard train` with these arguments; raises what the command raises."""
    from regard.cli.train import train as command

    application = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    application.command()(command)
    application([str(argument) for argument in arguments], standalone_mode=True)


def interrupted(step: int, signal: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own that gets a signal just before an update."""
    code = KILLED.format(step=step, signal=signal, short=SHORT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def status(*arguments: Any) -> int:
    """The exit status of the command in this process."""
    try:
        train(*arguments)
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def contents(directory: Path) -> dict[str, bytes]:
    """All files of a directory but locks, by their names."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != ".lock")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
