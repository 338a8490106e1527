"""Where results are kept while an audit runs: each place measured is written at once or not at all,
so that long work can go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from regard._files import write_text, writing
from regard._written import parsed, plain
from regard.audits.owning import Hold, Owner
from regard.errors import ArgumentError

SUBJECT = "subject"
"""The file that says what the results beside it are of."""


class Store:
    """Results by key, in memory and, with a directory, in a file each.

    `subject` says what the results are of, part by part. A directory has one owner at a time; processes of
    one `group` share it, and what an earlier try of the group has found of the same subject is kept.
    """

    def __init__(
        self,
        directory: Path | None = None,
        subject: dict[str, str] | None = None,
        *,
        resume: bool = False,
        group: str = "",
    ) -> None:
        self._directory, self._found = directory, {}  # type: Path | None, dict[str, Any]
        self._owner, self._hold = Owner(group=group), None  # type: Owner, Hold | None
        if directory is None:
            return
        with writing(directory):
            self._hold = Hold(directory, self._owner)
            if resume:
                _refuse_other(directory, subject or {})
            if not resume and not (self._tried_before() and _read(directory / SUBJECT) == subject):
                self._hold.clear()
            if _read(directory / SUBJECT) != (subject or {}):
                write_text(directory / SUBJECT, json.dumps(subject or {}))
            self.refresh()

    def _tried_before(self) -> bool:
        """Whether the directory was that of an earlier try of the same group."""
        if self._hold is None or self._hold.before is None or self._hold.file is None:
            return False
        return self._owner.group != "" and self._hold.before.group == self._owner.group

    @property
    def predecessor(self) -> Owner | None:
        """The run that ended and left results here, where it is another than ours."""
        before = None if self._hold is None else self._hold.before
        return None if before is None or before.is_kin(self._owner) else before

    def refresh(self) -> None:
        """Read what other processes of the group have added; a file that is not whole is deleted."""
        for path in () if self._directory is None else sorted(self._directory.glob("*.json")):
            if path.stem not in self._found:
                unit = _read(path)
                if unit is None:
                    path.unlink(missing_ok=True)
                else:
                    self._found[path.stem] = unit

    def keys(self) -> set[str]:
        """What has a result by now, of this process or another of the group."""
        there = () if self._directory is None else self._directory.glob("*.json")
        return {*self._found, *(path.stem for path in there)}

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
        if self._hold is not None:
            with contextlib.suppress(OSError):
                self._hold.clear()
                self._hold.remove_empty()


def fingerprint(*parts: Any) -> str:
    """A short name of something: equal parts, equal name."""
    return hashlib.sha256(json.dumps(plain(parts), sort_keys=True).encode()).hexdigest()


def _refuse_other(directory: Path, subject: dict[str, str]) -> None:
    """Results of another audit are neither mixed in nor thrown away."""
    if not (directory / SUBJECT).exists() and not any(directory.glob("*.json")):
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
        return parsed(path.read_bytes())
    except (OSError, ValueError):
        return None
