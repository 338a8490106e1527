"""One thread: on small shapes two are slower, and sums in another order would make exact comparisons
flicker.
"""

from pathlib import Path

import pytest
import torch

from tests.ledger.plugin import (  # noqa: F401
    pytest_addoption,
    pytest_pyfunc_call,
    pytest_sessionfinish,
    start_over,
)

torch.set_num_threads(1)
SLOW = set(Path(__file__).with_name("slow.txt").read_text().splitlines())
"""Tests that take seconds, by name without parameters, and files whose tests all do."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--ledger-backwards"):
        items.reverse()
    for item in items:
        name = item.nodeid.split("[")[0]
        if name in SLOW or name.split("::")[0] in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers whichever ran before it."""
    start_over(request.module)
