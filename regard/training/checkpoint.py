"""Checkpoints: all that a training needs to go on bit for bit, written whole or not at all,
in safetensors and JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from regard._files import writing
from regard._written import parsed
from regard.errors import ArgumentError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # a system without these locks
    fcntl = None

STATE, LOCK = "state.json", ".lock"
PREFIX, UNFINISHED = "step-", ".unfinished-"
NEEDED = ("format", "step", "sums", "sum")
NAME = re.compile(f"{PREFIX}[0-9]+")
FORMAT = 2
"""Of state.json; 1 had a checksum of its values, not of its bytes."""
KEPT = 2
"""How many checkpoints are kept: two, because a disk may damage one unnoticed."""
AGAIN = "start again with another --out"


@dataclass(frozen=True)
class Checkpoint:
    """A directory that was written whole: model/, optimizer.safetensors, state.json.

    Examples:
        >>> import pathlib
        >>> regard.training.Checkpoint(pathlib.Path("run", "step-00000500")).path.name
        'step-00000500'
    """

    path: Path

    @property
    def step(self) -> int:
        """After how many updates it was written."""
        return int(self.path.name.removeprefix(PREFIX))

    def state(self) -> dict[str, Any]:
        """What state.json says, once all files are found to be those it was written with."""
        content, found = self._read()
        if found["format"] != FORMAT:
            raise ArgumentError(
                "--resume",
                f"{self.path} has format {found['format']!r}, and this version reads {FORMAT}",
                AGAIN,
            )
        if content != _with_checksum(content[: -len(_seal(b""))]):
            raise self.damage_error(f"{STATE} was changed")
        if found["step"] != self.step:
            raise self.damage_error(f"its name says step {self.step}, its {STATE} step {found['step']}")
        for name, expected in found["sums"].items():
            if not (self.path / name).is_file() or _digest(self.path / name) != expected:
                raise self.damage_error(f"{name} is missing or was changed")
        return found

    def _read(self) -> tuple[bytes, dict[str, Any]]:
        """The bytes of state.json, and their values."""
        try:
            content = (self.path / STATE).read_bytes()
            found: dict[str, Any] = parsed(content)
            return content, {name: found[name] for name in (*NEEDED, *found)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self.damage_error(f"{STATE} cannot be read") from error

    def damage_error(self, what: str) -> ArgumentError:
        """What to do about a checkpoint that is not whole."""
        others = [other for other in checkpoints(self.path.parent) if other.step < self.step]
        remedy = (
            f"remove {self.path}, and --resume continues from {others[-1].path.name}" if others else AGAIN
        )
        return ArgumentError("--resume", f"{self.path} is damaged ({what})", remedy)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """All checkpoints of a training, the newest last."""
    found = [Checkpoint(path) for path in directory.glob(f"{PREFIX}*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def write(directory: Path, step: int, fill: Callable[[Path], None], state: dict[str, Any]) -> Checkpoint:
    """Fill a directory, add the state, make sure that the disk has it, and only then give it its name;
    then drop old ones.
    """
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
    """Hold the lock of a training's directory, so that no second process writes there; the system releases
    the lock of a process that ended.

    Where no checkpoint was written, what this made is removed again.
    """
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        held = (directory / LOCK).open("w")
    with held as stream:
        if not _own_lock(stream, directory / LOCK):
            raise ArgumentError(
                "--out", f"{directory} is in use by another training", "wait for it, or give another"
            )
        try:
            yield
        finally:
            _leave(directory, new)


def sweep(directory: Path) -> None:
    """Remove what a process that was killed left half written."""
    for left in directory.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _own_lock(stream: IO[str], path: Path) -> bool:
    """Whether the lock is ours, and the file is still the one that others will find."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except OSError:
        return False


def _leave(directory: Path, new: list[Path]) -> None:
    """Nothing is left of a training that never began; directories that hold something else stay."""
    if not checkpoints(directory):
        with contextlib.suppress(OSError):
            (directory / LOCK).unlink()
            for path in new:
                path.rmdir()


def _write_state(made: Path, state: dict[str, Any]) -> None:
    files = sorted(path for path in made.rglob("*") if path.is_file())
    whole = {
        "format": FORMAT,
        **state,
        "sums": {path.relative_to(made).as_posix(): _digest(path) for path in files},
    }
    (made / STATE).write_bytes(
        _with_checksum(json.dumps(whole, ensure_ascii=False).encode().removesuffix(b"}"))
    )


def _with_checksum(body: bytes) -> bytes:
    """A JSON object without its last brace, closed by the checksum of these very bytes:
    values may survive a change that bytes do not.
    """
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return f', "sum": "{hashlib.sha256(body).hexdigest()}"}}'.encode()


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
