"""Where results are kept while an audit runs: each place measured is written at once or not at all,
so that long work can go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from regard._files import write_text, writing
from regard._written import plain
from regard.errors import ArgumentError

SUBJECT = "subject"
"""The file that says what the results beside it are of."""
OWNER = "owner"
"""The file with the process that writes them."""


class Store:
    """Results by key, in memory and, with a directory, in a file each.

    `subject` says what the results are of, part by part.
    """

    def __init__(
        self, directory: Path | None = None, subject: dict[str, str] | None = None, *, resume: bool = False
    ) -> None:
        self._directory, self._found = directory, {}  # type: Path | None, dict[str, Any]
        if directory is None:
            return
        if resume:
            _refuse_other(directory, subject or {})
        _refuse_shared(directory)
        with writing(directory):
            if not resume:
                shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True, exist_ok=True)
            write_text(directory / SUBJECT, json.dumps(subject or {}))
            write_text(directory / OWNER, str(os.getpid()))
        self._found = {
            path.stem: unit for path in directory.glob("*.json") if (unit := _read(path)) is not None
        }

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Any:
        """What was kept, or None."""
        return self._found.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep plain values. They pass through JSON, so that what is resumed is the same as what is not."""
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
        if self._directory is not None:
            with writing(self._directory):
                write_text(self._directory / f"{key}.json", text)
        self._found[key] = json.loads(text)

    def remove(self) -> None:
        """Delete the files, once the report has all of it."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def fingerprint(*parts: Any) -> str:
    """A short name of something: equal parts, equal name."""
    return hashlib.sha256(json.dumps(plain(parts), sort_keys=True).encode()).hexdigest()


def _refuse_shared(directory: Path) -> None:
    """Two audits at once would take each other's results for their own;
    a process that is gone does not count.
    """
    owner = _read(directory / OWNER)
    if isinstance(owner, int) and owner != os.getpid() and _alive(owner):
        found = f"{directory.parent} is in use by another run (process {owner})"
        stale = f"if none is running, the number is that of another program by now: delete {directory}"
        raise ArgumentError("--out", found, f"wait for it, or give another directory; {stale}")


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


def _refuse_other(directory: Path, subject: dict[str, str]) -> None:
    """Results of another audit are neither mixed in nor thrown away."""
    if not directory.is_dir():
        return
    kept = _read(directory / SUBJECT)
    changed = sorted(key for key in {*subject, *(kept or {})} if (kept or {}).get(key) != subject.get(key))
    if changed:
        found = f"the results kept in {directory} are of another run (changed: {', '.join(changed)})"
        raise ArgumentError(
            "--resume", found, "give the arguments of that run, or leave --resume out to start again"
        )


def _read(path: Path) -> Any:
    """A unit, or None where the file is not whole: then it is measured again."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
