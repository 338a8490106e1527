"""Whose a directory of results is: one run at a time, and a run that has ended owns nothing.

The owner holds a lock on a file in the directory, which the system frees when the process ends, however it
ends; the text in the file says who it is. On a file system without locks the number of the process decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import weakref
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from regard._written import parsed
from regard.errors import ArgumentError

try:
    import fcntl
except ImportError:  # Windows has no locks of this kind
    fcntl = None  # type: ignore[assignment]

OWNER = "owner"
"""The file with the process that writes the results beside it."""
NAMED_WITHIN = 1.0
"""Seconds in which a process that has the lock writes down who it is."""


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


@dataclass(frozen=True)
class Owner:
    """A process, or the first of a group of processes, that writes to a directory."""

    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    since: str = field(default_factory=_now)
    group: str = ""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    def is_kin(self, other: Owner) -> bool:
        """Whether both are one process, or of one group."""
        same = (self.process, self.host) == (other.process, other.host)
        return same or (self.group != "" and self.group == other.group)

    def may_live(self) -> bool:
        """Whether it may be running: of a process on another machine nothing is known."""
        return self.host != socket.gethostname() or _alive(self.process)


class Hold:
    """A directory that belongs to this process, or to the group that it is of.

    before: who had it last and has ended, where that is written there; file: what is locked, None where
    another process of the group has the lock.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._directory = directory
        self.file: int | None = None
        file, locked = _open(directory)
        self.before = _named(file, patiently=locked is False)
        others = self.before is None or not owner.is_kin(self.before)
        living = locked is None and self.before is not None and self.before.may_live()
        if locked is False or (others and living):
            os.close(file)
            if others:
                raise _in_use(directory, self.before)
            return
        self.file, self._close = file, weakref.finalize(self, os.close, file)
        os.lseek(file, 0, os.SEEK_SET)
        os.ftruncate(file, 0)
        os.write(file, json.dumps(asdict(owner)).encode())

    def release(self) -> None:
        """Let others have it."""
        if self.file is not None:
            self._close()
            self.file = None

    def clear(self) -> None:
        """Delete all results."""
        for path in self._results():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def remove_empty(self) -> None:
        """Delete the directory where nothing but the lock is in it; whoever comes meanwhile begins anew."""
        if self._results() or not self._is_mine():
            self.release()
            return
        (self._directory / OWNER).unlink(missing_ok=True)
        self.release()
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    def _is_mine(self) -> bool:
        """Whether what is there is what was locked, and not a new one of somebody else."""
        return self.file is None or _is_at(self.file, self._directory / OWNER)

    def _results(self) -> list[Path]:
        return [path for path in self._directory.glob("*") if path.name != OWNER]


def succession(before: Owner, resume: bool) -> str:
    """What becomes of the results that a run has left, in words."""
    what = "taken up" if resume else "deleted, since --resume is not given"
    return f"results of a run that has ended ({before}) are {what}"


def _open(directory: Path) -> tuple[int, bool | None]:
    """The file of the owner, and whether it is locked now: False where somebody else has the lock,
    None where there are no locks.
    """
    tries = 0
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = os.open(directory / OWNER, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileNotFoundError, FileExistsError):  # whoever had the directory has just removed it
            tries += 1
            if tries > 1000 or directory.is_file():
                raise
            continue
        locked = _lock(file)
        if not locked or _is_at(file, directory / OWNER):
            return file, locked
        os.close(file)  # the lock is on a file that has been removed


def _is_at(file: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _lock(file: int) -> bool | None:
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _named(file: int, patiently: bool) -> Owner | None:
    """Who wrote down there who they are; None where nobody did."""
    deadline = time.monotonic() + (NAMED_WITHIN if patiently else 0.0)
    while True:
        try:
            os.lseek(file, 0, os.SEEK_SET)
            found = parsed(os.read(file, os.fstat(file).st_size))
            return Owner(int(found["process"]), str(found["host"]), str(found["since"]), str(found["group"]))
        except (OSError, ValueError, TypeError, KeyError):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)


def _in_use(directory: Path, other: Owner | None) -> ArgumentError:
    """Two runs at once would take each other's results for their own."""
    who = "a process that has not said who it is" if other is None else str(other)
    found = f"{directory.parent} is in use by another run ({who})"
    stale = f"if it is no longer running, delete {directory}"
    return ArgumentError("--out", found, f"wait for it, or give another directory; {stale}")


def _alive(process: int) -> bool:
    """Whether there is such a process: numbers below one are groups of processes,
    and far too large ones are nobody's.
    """
    if process < 1:
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True
