"""Files that are written whole or not at all, and errors of the file system that name the option."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError


class writing:
    """Errors of the file system as errors that name the option."""

    def __init__(self, directory: Path, argument: str = "--out") -> None:
        self._directory, self._argument = directory, argument

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            found = f"{self._directory} cannot be written ({error.strerror})"
            raise ArgumentError(self._argument, found, "give a directory you may write to") from error


def check_writable(directory: Path) -> None:
    """Find out now, and not after the work, whether a directory can be written; makes nothing, so that others
    may do the same at once.
    """
    there = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    with writing(directory):
        with contextlib.suppress(FileNotFoundError):  # other errors tell that it cannot be made
            os.lstat(directory)
        tempfile.TemporaryFile(dir=there).close()


def write_text(path: Path, text: str) -> None:
    """A text in UTF-8, whole or not at all."""
    write_whole(path, text.encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write beside, flush to the disk, then rename: a reader sees the old file or the new one,
    also after a crash or on a full disk.
    """
    write_together({path: content})


def write_together(contents: dict[Path, bytes]) -> None:
    """Files that belong together: all are on the disk before the first is renamed, and what was there
    comes back where a rename fails.
    """
    staged: dict[Path, Path] = {}
    kept: dict[Path, Path | None] = {}
    try:
        for path, content in contents.items():
            staged[path] = _write_beside(path, content)
            kept[path] = _second_name(path)
        _rename_all(staged, kept)
    finally:
        for name in (*staged.values(), *kept.values()):
            if name is not None:
                name.unlink(missing_ok=True)


def _write_beside(path: Path, content: bytes) -> Path:
    """A file beside the one that is to be written, whole and on the disk."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with name.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    return name


def _second_name(path: Path) -> Path | None:
    """A second name for what is there; None where nothing is,
    or where the file system has no second names.
    """
    name = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        os.link(path, name)
    except OSError:
        return None
    return name


def _rename_all(staged: dict[Path, Path], kept: dict[Path, Path | None]) -> None:
    done: list[Path] = []
    new = {path for path in staged if not path.exists()}
    try:
        for path, name in staged.items():
            os.replace(name, path)
            done.append(path)
    except BaseException:
        for path in done:
            _restore(path, kept[path], path in new)
        raise


def _restore(path: Path, kept: Path | None, new: bool) -> None:
    """What was there before: nothing, where the file is new."""
    with contextlib.suppress(OSError):
        if kept is not None:
            os.rename(kept, path)
        elif new:
            path.unlink()
