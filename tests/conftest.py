"""One thread: on small shapes two are slower, and sums in another order would make exact comparisons
flicker. `--device cuda` runs the same tests on another device.
"""

from pathlib import Path

import pytest
import torch

from tests.devices import OnDevice
from tests.ledger.plugin import (  # noqa: F401
    add_options,
    pytest_pyfunc_call,
    pytest_sessionfinish,
    start_over,
)

torch.set_num_threads(1)
SLOW = set(Path(__file__).with_name("slow.txt").read_text().splitlines())
"""Tests that take seconds, by name without parameters, and files whose tests all do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    parser.addoption("--device", help="make every tensor of the tests on this device: cuda, xpu, mps")


def pytest_configure(config: pytest.Config) -> None:
    """Before test files are imported, whose tables hold tensors too."""
    device = config.getoption("--device")
    if device is not None:
        mode = OnDevice(torch.device(device))
        mode.__enter__()
        config.add_cleanup(lambda: mode.__exit__(None, None, None))


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
