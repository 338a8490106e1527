"""What is declared: which files are proofs, the tests about a file, and faults that no test can see."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutate.planting import Mutant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Declared:
    """files: all of the package, with the functions that count where not all do. proofs: those that make
    bounds. tests: what to run for each file.

    explained: faults that change nothing a test could see, with the reason. witnesses: of a function, the
    tests that know what it returns.
    """

    files: dict[str, frozenset[str] | None]
    proofs: frozenset[str]
    tests: dict[str, tuple[str, ...]]
    explained: dict[tuple[str, str, str, str, str], str]
    witnesses: dict[str, tuple[str, ...]]

    def tests_of(self, mutant: Mutant) -> tuple[str, ...]:
        """Tests whose ledger has the function come first."""
        function = mutant.function.rpartition(".")[2]
        return (*self.witnesses.get(f"{mutant.file}:{function}", ()), *self.tests[mutant.file])


def read(root: Path, survivors: Path = HERE / "survivors.toml") -> Declared:
    """The declarations of `tests.toml`, for the files that are there, and those of a list of survivors."""
    written = _toml(HERE / "tests.toml")
    left_out, only = written["not-proofs"], written["only"]
    made = [file for room in written["proofs"] for file in _files(root, room)] + written["files"]
    proofs = frozenset(made) - frozenset(left_out)
    files = {file: frozenset(only[file]) if file in only else None for file in _files(root, "regard")}
    tests = {file: _tests_of(root, file, written, file in proofs) for file in files}
    known = _toml(survivors).get("survivor", []) if survivors.exists() else []
    explained = {(k["file"], k["function"], k["operator"], k["before"], k["after"]): k["why"] for k in known}
    return Declared(files, proofs, tests, explained, _witnesses(root))


def _witnesses(root: Path) -> dict[str, tuple[str, ...]]:
    """Those of the ledger."""
    path = root / "tests" / "ledger" / "ledger.json"
    found: dict[str, tuple[str, ...]] = {}
    for test, files in json.loads(path.read_text()).items() if path.exists() else ():
        for file, functions in files.items():
            for function in functions:
                found[f"{file}:{function}"] = (*found.get(f"{file}:{function}", ()), test)
    return found


def named(root: Path) -> list[Mutant]:
    """The faults of `named.toml`, which once passed every test."""
    return [_named(root, **fault) for fault in _toml(HERE / "named.toml")["fault"]]


def _named(root: Path, what: str, file: str, before: str, after: str) -> Mutant:
    source, old = (root / file).read_bytes(), before.encode()
    if source.count(old) != 1:
        raise ValueError(f"named.toml: {before!r} is {source.count(old)} times in {file}, not once")
    start = source.index(old)
    line = source.count(b"\n", 0, start) + 1
    return Mutant(file, what, "named", line, before, after, start, start + len(old), after)


def _files(root: Path, room: str) -> list[str]:
    found = sorted((root / room).rglob("*.py"))
    return [str(path.relative_to(root)) for path in found if path.name != "__init__.py"]


def _tests_of(root: Path, file: str, written: dict[str, Any], proof: bool) -> tuple[str, ...]:
    """Those that are named for a file, or have its name, and those of its room."""
    if proof:
        own = written["tests"].get(file) or _same_name(root, file, "theorems")
        return (*own, *written["also"].get(file.rpartition("/")[0], ())) if own else ()
    named = written["tests"].get(file)
    if named is not None:
        return tuple(named)
    room = next(str(room) for room in Path(file).parents if str(room) in written["rooms"])
    return tuple(dict.fromkeys((*_same_name(root, file, room_of(file)), *written["rooms"][room])))


def room_of(file: str) -> str:
    """The package of a file, or none for those beside them."""
    parts = file.split("/")
    return parts[1] if len(parts) > 2 else ""


def _same_name(root: Path, file: str, folder: str) -> list[str]:
    """tests/<folder>/test_x.py for x.py."""
    path = Path("tests", folder, f"test_{Path(file).stem.lstrip('_')}.py")
    return [str(path)] if (root / path).exists() else []


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())
