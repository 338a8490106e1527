"""The book itself: tests, functions, and two numbers for each."""

from __future__ import annotations

import json
from pathlib import Path

PATH = Path(__file__).with_name("ledger.json")
TOLERANCE = 1e-7
"""What other processors and libraries may change, relative to a number or to one."""

Entry = dict[str, list[float]]


def read(path: Path = PATH) -> dict[str, Entry]:
    """Of each test, the numbers of each function, which stand under its file."""
    if not path.exists():
        return {}
    written = json.loads(path.read_text())
    return {
        test: {f"{file}:{name}": numbers for file, names in files.items() for name, numbers in names.items()}
        for test, files in written.items()
    }


def write(entries: dict[str, Entry], path: Path = PATH) -> None:
    """A line for each test and file, so that a change is a change of few lines."""
    tests = []
    for test in sorted(entries):
        files: dict[str, Entry] = {}
        for name in sorted(entries[test]):
            file, _, function = name.rpartition(":")
            files.setdefault(file, {})[function] = [_shortened(x) for x in entries[test][name]]
        lines = [f"  {json.dumps(file)}: {json.dumps(names)}" for file, names in files.items()]
        tests.append(f"{json.dumps(test)}: {{\n" + ",\n".join(lines) + "\n}")
    kept = path.with_suffix(".new")
    kept.write_text("{\n" + ",\n".join(tests) + "\n}\n")
    kept.replace(path)


def _shortened(x: float) -> float:
    return float(f"{x:.10g}")


def close(first: list[float], second: list[float], tolerance: float = TOLERANCE) -> bool:
    """Whether both numbers are the same up to a tolerance."""
    return all(abs(a - b) <= tolerance * (1 + abs(a)) for a, b in zip(first, second, strict=True))


def differences(entry: Entry | None, found: Entry) -> list[str]:
    """A line for each function that returned something else."""
    return [
        f"  {name}: {_pair(numbers)} in the ledger, {_pair(found.get(name, [0.0, 0.0]))} now"
        for name, numbers in (entry or {}).items()
        if not close(numbers, found.get(name, [0.0, 0.0]))
    ]


def _pair(numbers: list[float]) -> str:
    return "{:.9g} / {:.9g}".format(*numbers)


ENTRIES = read()
"""What is written now."""
