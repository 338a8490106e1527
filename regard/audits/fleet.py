"""One audit by several processes: each does the steps that nobody else does, all write to one store, and the
first of them that is there makes the report.

A step gives the same result in every process, so the report is that of one process with as many threads.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from regard.audits.meeting import POLL, Meeting
from regard.audits.steps import Progress, Step
from regard.audits.store import Store
from regard.errors import ArgumentError, RegardError

GROUP = "REGARD_GROUP"
"""The variable of the environment by which `--processes` tells its workers that they belong together."""
STARTED = "start the ranks with torchrun, or leave RANK and WORLD_SIZE unset for one process"


class Shareable(Protocol):
    """An audit whose steps can be done in any order, by anybody."""

    store: Store

    def steps(self) -> list[Step]:
        """All that is to be done."""

    def measure(self, progress: Progress | None = None) -> None:
        """Do all of it here."""


class Team(ABC):
    """Who does an audit, as one of its processes sees it: `rank` of `world`."""

    rank: int
    world: int

    @abstractmethod
    def agree(self, subject: dict[str, str]) -> None:
        """Raise where the processes do not audit the same."""

    @abstractmethod
    def open_store(self, directory: Path, subject: dict[str, str], resume: bool) -> Store:
        """Where results are kept."""

    @abstractmethod
    def measure(self, run: Shareable, progress: Progress | None = None) -> None:
        """Come back when all steps are done."""

    @abstractmethod
    def parts(self, sizes: list[int]) -> list[int]:
        """How many steps are done one after another, of these parts of the whole."""

    @abstractmethod
    def await_report(self, status: int | None) -> int | None:
        """The exit status once another process has made the report; None where this one is to make it.

        status: that of this process, where it was stopped and waits for nobody.
        """

    @abstractmethod
    def reported(self, status: int) -> None:
        """Tell the others that the report is written."""


class Alone(Team):
    """One process, which does everything."""

    rank, world = 0, 1

    def agree(self, subject: dict[str, str]) -> None:
        """There is nobody to disagree with."""

    def open_store(self, directory: Path, subject: dict[str, str], resume: bool) -> Store:
        """A store of this process."""
        return Store(directory, subject, resume=resume)

    def measure(self, run: Shareable, progress: Progress | None = None) -> None:
        """All steps in their order."""
        run.measure(progress)

    def parts(self, sizes: list[int]) -> list[int]:
        """The parts as they are."""
        return sizes

    def await_report(self, status: int | None) -> int | None:
        """This process makes it."""
        return None

    def reported(self, status: int) -> None:
        """There is nobody to tell."""


class Fleet(Team):
    """One process of several."""

    def __init__(self, meeting: Meeting, group: str) -> None:
        self._meeting, self._group = meeting, group
        self.rank, self.world = meeting.rank, meeting.world
        self._progress, self._store = None, None  # type: tuple[Progress, list[Step]] | None, Store | None
        self._quiet = contextlib.ExitStack()

    def agree(self, subject: dict[str, str]) -> None:
        """Raise on every rank where they do not audit the same with the same arithmetic."""
        mine = {**subject, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        said = self._meeting.gather("subject", mine)
        first = min(said)
        for rank, other in said.items():
            changed = sorted(key for key in mine if other.get(key) != said[first].get(key))
            if changed:
                found = f"of rank {rank} differs from that of rank {first}"
                remedy = "give all ranks the same arguments, files (copies with their times) and settings"
                raise ArgumentError(", ".join(changed), found, remedy)

    def open_store(self, directory: Path, subject: dict[str, str], resume: bool) -> Store:
        """One store for all: the first rank opens it, and the others follow."""
        while self._store is None:
            self._meeting.raise_trouble()
            opened = (self._meeting.heard("store", rank) for rank in range(self.world))
            group = next((group for group in opened if group is not None), None)
            if group is not None:
                self._store = Store(directory, subject, resume=True, group=group)
            elif self._meeting.leader() == self.rank and self._meeting.claim("store"):
                self._store = Store(directory, subject, resume=resume, group=self._group)
                self._meeting.say("store", self._group)
            else:
                time.sleep(POLL)
        return self._store

    def measure(self, run: Shareable, progress: Progress | None = None) -> None:
        """Do the steps that nobody else does, and those of ranks that are gone, until all are done."""
        steps = run.steps()
        begin = self.rank * len(steps) // self.world  # where no other is: few prepare the same input
        mine = steps[begin:] + steps[:begin]
        self._progress = None if progress is None else (progress, steps)
        try:
            while left := self._left(mine, run.store):
                step = next((step for step in left if self._meeting.claim(step.key)), None)
                if step is None:
                    time.sleep(POLL)
                else:
                    self._do(step)
        finally:
            self._progress = None
            run.store.refresh()
        if progress is not None:
            progress("done", len(steps), len(steps))

    def _do(self, step: Step) -> None:
        """Do a step; one that others have done meanwhile, since they took this rank for gone, may fail."""
        try:
            step.do()
        except RegardError:
            if self._meeting.posted() is None:
                raise

    def _left(self, steps: list[Step], store: Store) -> list[Step]:
        """The steps without a result; raises where a rank has an error."""
        self._meeting.raise_trouble()
        if self._meeting.leader() == self.rank:
            self._quiet.close()
        done = store.keys()
        over = self._meeting.posted() is not None
        return [step for step in steps if step.key not in done and not over]

    def parts(self, sizes: list[int]) -> list[int]:
        """Parts are done at once."""
        return [sum(sizes)]

    def await_report(self, status: int | None) -> int | None:
        """Wait for the report, and make it if those before this rank are gone."""
        while self._meeting.leader() != self.rank:
            self._meeting.raise_trouble()
            status = self._meeting.posted() if status is None else status
            if status is not None:
                return status
            time.sleep(POLL)
        return self._meeting.posted()

    def reported(self, status: int) -> None:
        """Tell the others that the report is written."""
        self._meeting.post(status)

    def _look(self) -> None:
        """Show what all have done: called now and then while this process works."""
        showing, store = self._progress, self._store
        if showing is not None and store is not None:
            progress, steps = showing
            done = len({step.key for step in steps} & store.keys())
            living = self.world - len(self._meeting.gone())
            progress(f"{living} of {self.world} processes", done, len(steps))

    @contextlib.contextmanager
    def present(self) -> Iterator[Fleet]:
        """While inside, the others know that this rank is there; an error here is an error of all."""
        with self._meeting.alive(self._look), self._quiet:
            if self.rank:
                self._quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            try:
                yield self
            except Exception as error:
                self._meeting.trouble((str(error).splitlines() or [type(error).__name__])[0])
                raise
            finally:
                self._meeting.leave()


@contextlib.contextmanager
def joined(environment: Mapping[str, str] = os.environ) -> Iterator[Team]:
    """The processes of an audit: those that torchrun or `--processes` has started, or this one alone."""
    if _number(environment, "WORLD_SIZE", "1") < 2:
        yield Alone()
        return
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    host, port = _variable(environment, "MASTER_ADDR"), _number(environment, "MASTER_PORT")
    if rank >= world:
        raise ArgumentError("RANK", f"is {rank} in a world of {world}", STARTED)
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")  # what was said in an earlier one is over
    meeting = Meeting.at(host, port, rank, world, hosted=hosted, attempt=attempt)
    try:
        with Fleet(meeting, group_of(environment)).present() as fleet:
            yield fleet
    except dist.DistError:
        found = f"the meeting at {host}:{port} is over, since the process that hosts it has ended"
        remedy = "what was measured is kept: the same command with --resume continues"
        raise ArgumentError(f"rank {rank}", found, remedy) from None
    except RegardError:
        if rank and GROUP in environment:  # the first rank says it for all
            raise SystemExit(2) from None
        raise


def group_of(environment: Mapping[str, str]) -> str:
    """A name of the processes that belong together, the same when torchrun starts them again."""
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    by_agent = f"{socket.gethostname()} {os.getppid()}" if run == "none" else run
    return environment.get(GROUP, by_agent)


def _variable(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ArgumentError(name, "is not set, and WORLD_SIZE says that there are several processes", STARTED)
    return environment[name]


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name) or default if default else _variable(environment, name)
    if not text.isascii() or not text.isdigit():
        raise ArgumentError(name, f"is {text!r}, which is not a number", STARTED)
    return int(text)
