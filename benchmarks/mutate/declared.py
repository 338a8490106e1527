"""What is declared: which files are proofs, which tests are about each, and which faults no test can see."""

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
    """proofs: files, with the functions that count where not all do. tests: what to run for each.

    explained: faults that change nothing a test could see, with the reason. witnesses: of a function, the
    tests that know what it returns.
    """

    proofs: dict[str, frozenset[str] | None]
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
    files = [file for room in written["rooms"] for file in _files(root, room)] + written["files"]
    chosen = sorted(set(files) - set(left_out))
    proofs = {file: frozenset(only[file]) if file in only else None for file in chosen}
    own = {file: tuple(written["tests"].get(file) or _same_name(root, file)) for file in proofs}
    also = written["also"]
    tests = {file: (*found, *also.get(file.rpartition("/")[0], ())) for file, found in own.items() if found}
    known = _toml(survivors).get("survivor", []) if survivors.exists() else []
    explained = {(k["file"], k["function"], k["operator"], k["before"], k["after"]): k["why"] for k in known}
    return Declared(proofs, tests, explained, _witnesses(root))


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


def _same_name(root: Path, file: str) -> list[str]:
    """tests/theorems/test_x.py for x.py."""
    path = f"tests/theorems/test_{Path(file).stem.lstrip('_')}.py"
    return [path] if (root / path).exists() else []


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())
