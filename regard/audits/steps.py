"""What an audit does one after another: each step has a name, and a key under which its result is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from regard.audits.store import Store

Progress = Callable[[str, int, int], None]
"""Called with what is done now, how much is done, and how much there is."""
SEED = 20200706


class Step(NamedTuple):
    """What is done at a time: its name, the key of its result, and the work."""

    what: str
    key: str
    work: Callable[[], None]

    def do(self) -> None:
        """Do it with the same random numbers whatever was done before, in this process or in another."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)  # starts of randomized bounds
            self.work()


def in_order(steps: Sequence[Step], store: Store, progress: Progress | None = None) -> None:
    """Do every step whose result is not in the store yet."""
    for done, step in enumerate(steps):
        if progress is not None:
            progress(step.what, done, len(steps))
        if step.key not in store:
            step.do()
    if progress is not None:
        progress("done", len(steps), len(steps))
