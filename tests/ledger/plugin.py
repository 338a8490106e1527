"""The part of the ledger that pytest loads: tests of the ledger are recorded while they run, and compared."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ledger.book import ENTRIES, differences

RECORDED: dict[str, Any] = {}
"""What `--ledger-to` writes."""


def add_options(parser: pytest.Parser) -> None:
    """What recording asks for on the command line."""
    parser.addoption("--ledger-to", help="record what proofs return in every test, and write it to this file")
    parser.addoption("--ledger-backwards", action="store_true", help="run the last test first")
    parser.addoption("--ledger-lines", action="store_true", help="record which lines of proofs run, too")


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, None]:
    """Once as it is, once with a large unit of rounding."""
    target = pyfuncitem.config.getoption("--ledger-to")
    entry = ENTRIES.get(pyfuncitem.nodeid)
    if target is None and entry is None:
        yield
        return
    from tests.ledger.recording import Recorder

    recorder = Recorder(pyfuncitem.config.getoption("--ledger-lines"))
    with recorder:
        outcome = yield
    if outcome.excinfo is not None:
        return
    enlarged = _enlarged(pyfuncitem)
    found = {name: [value, enlarged.get(name, 0.0)] for name, value in recorder.sums.items()}
    if target is None:
        changed = differences(entry, found)
        if changed:
            outcome.force_exception(AssertionError(_told(changed)))
    else:
        lines = sorted(recorder.lines or ())
        RECORDED[pyfuncitem.nodeid] = {"found": found, "calls": recorder.calls, "lines": lines}


def start_over(module: Any) -> None:
    """All generators of a module of tests, and torch's own, at their beginning."""
    torch.manual_seed(0)
    for value in vars(module).values():
        if isinstance(value, torch.Generator):
            value.manual_seed(value.initial_seed())


def _enlarged(item: pytest.Function) -> dict[str, float]:
    """The sums where roundings are large. What the test itself asks may then be wrong."""
    from tests.coarse import large_unit
    from tests.ledger.recording import Recorder

    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    start_over(item.module)
    with large_unit():
        recorder = Recorder()
        try:
            with recorder:
                item.obj(**arguments)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception):
            pass
    return recorder.sums


def _told(changed: list[str]) -> str:
    return "\n".join(
        [
            "Proofs return other numbers than those of tests/ledger/ledger.json:",
            *changed,
            "If they are meant to, `python -m tests.ledger` writes them anew and says what moved.",
        ]
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--ledger-to")
    if target is not None:
        Path(target).write_text(json.dumps(RECORDED))
