"""Writes the ledger anew: see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tests.ledger
from benchmarks.mutate.declared import read as declared
from tests.ledger.book import ENTRIES, Entry, close, write
from tests.ledger.choosing import add, choose, stable_parts

ROOT = Path(__file__).resolve().parents[2]
ANOTHER = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""Torch and its library of matrices with the instructions of an older processor."""
MOST = 100
"""Tests for one run: a command has a limited length."""


def main() -> int:
    """Run, compare, write."""
    options = _options()
    if options.choose:
        new = _chosen()
    elif options.add:
        new = add(ENTRIES, stable_parts(*_twice(options.add)))
    else:
        new = _again(options.files)
    print(_changes(ENTRIES, new))
    write(new)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ledger",
        description=tests.ledger.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", help="tests, or files of tests; without any, all of the ledger")
    parser.add_argument("--add", nargs="+", default=[], metavar="FILE", help="files of tests to take in")
    parser.add_argument("--choose", action="store_true", help="choose the tests anew")
    return parser.parse_args()


def _chosen() -> dict[str, Entry]:
    known = declared(ROOT)
    files = {test.split("::")[0] for file in known.proofs for test in known.tests[file]}
    return choose(*_twice(sorted({*files, "tests/ledger/test_instances.py"})))


def _twice(files: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """On this processor, and backwards as on an older one: tests that depend on those before them are not
    fit for a ledger.
    """
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_run, [*files, "-m", "not slow", "--ledger-lines"], {})
        second = pool.submit(_run, [*files, "-m", "not slow", "--ledger-backwards"], ANOTHER)
    return first.result(), second.result()


def _again(files: Sequence[str]) -> dict[str, Entry]:
    """The numbers of the functions that are in the ledger; what is gone is left out."""
    asked = [test for test in ENTRIES if not files or test.startswith(tuple(files))]
    # with all their parameters: a name that is another now would end the run of all tests beside it
    whole = sorted({test.partition("[")[0] for test in asked})
    parts = [whole[start : start + MOST] for start in range(0, len(whole), MOST)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = pool.map(lambda part: _run(part, {}), parts)
        found = {test: one["found"] for run in runs for test, one in run.items() if test in ENTRIES}
    new = {test: entry for test, entry in ENTRIES.items() if test not in asked}
    for test in found:
        new[test] = {name: found[test][name] for name in ENTRIES[test] if name in found[test]}
    return new


def _run(arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as held:
        target = Path(held) / "recorded.json"
        command = [sys.executable, "-m", "pytest", *arguments, "-p", "no:xdist", "--ledger-to", str(target)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment})
        if done.returncode == pytest.ExitCode.USAGE_ERROR:
            raise SystemExit("a test of the ledger is not found (above); nothing was written")
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def _changes(old: dict[str, Entry], new: dict[str, Entry]) -> str:
    """Which functions return something else, in how many tests, and by how much at most."""
    moved: dict[str, list[float]] = defaultdict(list)
    for test in old.keys() & new.keys():
        for name in old[test].keys() & new[test].keys():
            before, after = old[test][name], new[test][name]
            if not close(before, after):
                moved[name] += [(b - a) / (1 + abs(a)) for a, b in zip(before, after, strict=True)]
    lines = [
        f"{name}: in {len(by) // 2} tests, by {min(by):+.2g} to {max(by):+.2g} of its size"
        for name, by in sorted(moved.items())
    ]
    gone, fresh = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    lines += [f"gone: {test}" for test in gone] + ([f"new: {len(fresh)} tests"] if fresh else [])
    count = sum(map(len, new.values()))
    return "\n".join([*(lines or ["nothing moved"]), f"{len(new)} tests, {count} functions"])


if __name__ == "__main__":
    sys.exit(main())
