"""Running: tests on a copy of the package that has one fault, each in a process of its own.

A process that has imported torch and pytest, and nothing of regard, forks one child for each fault; so the
imports are paid once. Children have a limit of processor time, which a busy machine does not shorten; whoever
reaches it counts as killed.
"""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COPIED = ("regard", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md", "DESIGN.md")
LIMIT = 150
"""Seconds of processor time for the tests of one fault."""
WAIT = 1200
"""Seconds on the clock after which a child that does not compute is ended."""
MEMORY = 12 * 2**30
USAGE = 4
"""What pytest ends with where a test that was named is not there."""
_FORKING = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """Whether tests failed, and which one; `broken` where they could not be asked at all."""

    killed: bool
    by: str
    seconds: float
    broken: bool = False


class Workshop:
    """A copy of the project in which one file at a time is changed."""

    def __init__(self, root: Path) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="regard-mutate-")
        self.root = Path(self._held.name)
        for name in COPIED:
            source = root / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(source, self.root / name, ignore=ignored)
            elif source.exists():
                shutil.copy2(source, self.root / name)
        # Bytecode that is checked against its source by contents: times of files are too coarse here.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.root / "regard", quiet=2, invalidation_mode=mode)

    def close(self) -> None:
        """Remove the copy."""
        self._held.cleanup()

    def run(self, tests: Sequence[str], file: str | None, source: bytes) -> Outcome:
        """The tests, with a file changed."""
        path = None if file is None else self.root / file
        kept = None if path is None else path.read_bytes()
        if path is not None:
            path.write_bytes(source)
        try:
            return _forked(self.root, tests)
        finally:
            if path is not None and kept is not None:
                path.write_bytes(kept)


def warm_up() -> None:
    """Import once what every child needs, and nothing of regard."""
    sys.dont_write_bytecode = True
    import mpmath  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.func
    import torch.nn.attention
    import torch.utils._pytree

    torch.set_num_threads(1)
    torch.linalg.eigvalsh(torch.eye(2, dtype=torch.float64))
    if any(name.split(".")[0] == "regard" for name in sys.modules):
        raise RuntimeError("regard is imported before the fork: children would run it without the fault")


def _forked(root: Path, tests: Sequence[str]) -> Outcome:
    started = time.monotonic()
    with _FORKING:  # a sister that is born in between would keep this pipe open
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _child(root, tests, writing)
        os.close(writing)
    told = _heard(reading, child)
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - started
    if os.WIFSIGNALED(status):
        return Outcome(True, f"the end of its time ({signal.Signals(os.WTERMSIG(status)).name})", seconds)
    if not told:
        return Outcome(True, f"exit status {os.WEXITSTATUS(status)}", seconds)
    code, by = json.loads(told)
    if code == USAGE and by:  # a file that the fault keeps from loading has none of the tests that were named
        code = 2
    return Outcome(code in (1, 2, 3), by or "collection", seconds, code not in (0, 1, 2, 3))


def _heard(reading: int, child: int) -> str:
    """What the child says before it ends; one that sleeps for too long is ended."""
    said = b""
    until = time.monotonic() + WAIT
    with os.fdopen(reading, "rb") as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], 5.0)
            if ready:
                part = os.read(pipe.fileno(), 65536)
                if not part:
                    return said.decode()
                said += part
            elif time.monotonic() > until:
                os.kill(child, signal.SIGKILL)


def _child(root: Path, tests: Sequence[str], writing: int) -> None:
    code, by = 99, ""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setsid()
        os.chdir(root)
        sys.path[:] = [str(root), *(part for part in sys.path if part and not _holds_regard(part))]
        output = os.open(str(root / "output.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code, by = _pytest(root, tests)
    except BaseException as error:
        by = repr(error)
    finally:
        os.write(writing, json.dumps([code, by]).encode())
        os._exit(0)


def _holds_regard(part: str) -> bool:
    return (Path(part) / "regard" / "_round.py").exists()


def _place(test: str, named: Sequence[str]) -> int:
    """Where a test is in a list of tests and files of tests."""
    name = test.split("[")[0]
    found = [place for place, one in enumerate(named) if one in (test, name) or name.startswith(f"{one}::")]
    return min(found, default=len(named))


def _pytest(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    import pytest

    class Listener:
        by = ""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            """Slow tests last, and otherwise in the order in which tests are named; none of them twice."""
            items[:] = {item.nodeid: item for item in items}.values()
            items.sort(
                key=lambda item: (item.get_closest_marker("slow") is not None, _place(item.nodeid, tests))
            )

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.by:
                self.by = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.by:
                self.by = f"collection of {report.nodeid}"

    listener = Listener()
    quiet = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = int(pytest.main([*quiet, "--rootdir", str(root), *tests], plugins=[listener]))
    used = getattr(sys.modules.get("regard"), "__file__", None)
    if used is not None and not str(used).startswith(str(root)):
        return 98, f"regard was imported from {used}"
    return code, listener.by
