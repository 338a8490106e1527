"""Checkpoints: all that a training needs to go on bit for bit, written whole or not at all, in safetensors and JSON."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from regard._files import writing
from regard.errors import ArgumentError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # a system without these locks
    fcntl = None

STATE, LOCK = "state.json", ".lock"
PREFIX, UNFINISHED = "step-", ".unfinished-"
KEPT = 2
"""How many checkpoints stay: one may be damaged by what no program sees."""
AGAIN = "start again with another --out"


@dataclass(frozen=True)
class Checkpoint:
    """A directory that was written whole: model/, optimizer.safetensors, state.json."""

    path: Path

    @property
    def step(self) -> int:
        """After how many updates it was written."""
        return int(self.path.name.removeprefix(PREFIX))

    def state(self) -> dict[str, Any]:
        """What state.json says, once all files are found to be those it was written with."""
        try:
            found: dict[str, Any] = json.loads((self.path / STATE).read_text(encoding="utf-8"))
            sums, own = found["sums"], found.pop("sum")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damaged(f"{STATE} cannot be read") from error
        if own != _sum_of(found):
            raise self.damaged(f"{STATE} was changed")
        for name, expected in sums.items():
            if not (self.path / name).is_file() or _digest(self.path / name) != expected:
                raise self.damaged(f"{name} is missing or was changed")
        return found

    def damaged(self, what: str) -> ArgumentError:
        """What to do about a checkpoint that is not whole."""
        others = [other for other in checkpoints(self.path.parent) if other.step < self.step]
        remedy = f"remove {self.path}, and --resume goes on from {others[-1].path.name}" if others else AGAIN
        return ArgumentError("--resume", f"{self.path} is damaged ({what})", remedy)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """All checkpoints of a training, the newest last."""
    found = [Checkpoint(path) for path in directory.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def write(directory: Path, step: int, fill: Callable[[Path], None], state: dict[str, Any]) -> Checkpoint:
    """Fill a directory, add the state, make sure that the disk has it, and only then give it its name; then drop old ones."""
    target = directory / f"{PREFIX}{step:06d}"
    made = directory / f"{UNFINISHED}{step}"
    try:
        made.mkdir()
        fill(made)
        _write_state(made, state)
        _to_disk(made)
        os.replace(made, target)
        _synchronize(directory)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    for old in checkpoints(directory)[:-KEPT]:
        shutil.rmtree(old.path, ignore_errors=True)
    return Checkpoint(target)


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Two trainings at once would take each other's files; the system forgets the lock of a process that is gone."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        held = (directory / LOCK).open("w")
    with held as stream:
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ArgumentError("--out", f"{directory} is in use by another training", "wait for it, or give another") from None
        yield


def sweep(directory: Path) -> None:
    """Remove what a process that was killed left half written."""
    for left in directory.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _write_state(made: Path, state: dict[str, Any]) -> None:
    files = sorted(path for path in made.rglob("*") if path.is_file())
    whole = {**state, "sums": {path.relative_to(made).as_posix(): _digest(path) for path in files}}
    (made / STATE).write_text(json.dumps({**whole, "sum": _sum_of(whole)}, ensure_ascii=False), encoding="utf-8")


def _sum_of(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _to_disk(made: Path) -> None:
    """Wait until all files and directories are on the disk: a name must not outlive what it names."""
    for path in [*made.rglob("*"), made]:
        _synchronize(path)


def _synchronize(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
