"""Pages that commands of regard write, as parts of the site: kept in .venv/live until the code changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from website.repository import ROOT

KEPT = ROOT / ".venv" / "live"
COMMANDS = {
    "audit/report.html": "audit --quick",
    "flow/flow.html": "simulate --beta 4 --particles 300",
    "phase/flow.html": "simulate --phase gamma",
}
"""Files of the site below live/, and the command that writes each."""


def files() -> dict[str, bytes]:
    """What the commands wrote, by its path in the site."""
    folder = KEPT / state()
    if not folder.exists():
        shutil.rmtree(KEPT, ignore_errors=True)
        for page, command in COMMANDS.items():
            run(command, folder.with_suffix(".new") / Path(page).parent)
        folder.with_suffix(".new").rename(folder)
    return {f"live/{page}": (folder / page).read_bytes() for page in COMMANDS}


def run(command: str, out: Path) -> None:
    """A command with this regard, into a directory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # small models
    done = subprocess.run(
        [sys.executable, "-m", "regard", *command.split(), "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"regard {command} ended with {done.returncode}: {done.stderr[-2000:]}")


def state() -> str:
    """A sum of the package's files and the commands."""
    total = hashlib.sha256(repr(COMMANDS).encode())
    for path in sorted((ROOT / "regard").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            total.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:16]
