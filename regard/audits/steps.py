"""What an audit does one after another: each step has a name, and a key under which its result is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

import torch

from regard.audits.store import Store

Progress = Callable[[str, int, int], None]
"""Called with what is done now, how much is done, and how much there is."""
SEED = 20200706
"""What the seed of an audit is added to where a step begins."""

_telling: ContextVar[Callable[[str], None] | None] = ContextVar("telling", default=None)


def tell(what: str) -> None:
    """Show what is done now within the step that runs."""
    show = _telling.get()
    if show is not None:
        show(what)


@contextmanager
def _shown_by(show: Callable[[str], None]) -> Iterator[None]:
    token = _telling.set(show)
    try:
        yield
    finally:
        _telling.reset(token)


class Step(NamedTuple):
    """What is done at a time: its name, the key of its result, the work, and the seed of its random
    numbers.
    """

    what: str
    key: str
    work: Callable[[], None]
    seed: int = 0

    def do(self) -> None:
        """Do it with the same random numbers whatever was done before, in this process or in another."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED + self.seed)  # starts of randomized bounds
            self.work()


def in_order(steps: Sequence[Step], store: Store, progress: Progress | None = None) -> None:
    """Do every step whose result is not in the store yet."""

    def show(done: int, step: str, within: str = "") -> None:
        if progress is not None:
            progress(f"{step}: {within}" if within else step, done, len(steps))

    for done, step in enumerate(steps):
        show(done, step.what)
        if step.key not in store:
            with _shown_by(partial(show, done, step.what)):
                step.do()
    show(len(steps), "done")
