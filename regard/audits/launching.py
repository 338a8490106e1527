"""Workers of one audit on this machine: started, watched, and ended with the process that started them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from regard._files import writing
from regard.audits.fleet import GROUP
from regard.audits.meeting import POLL, Meeting
from regard.audits.owning import Hold, Owner, succession
from regard.errors import ArgumentError

HOST = "127.0.0.1"
END_WITHIN = 10.0
"""Seconds that the other workers have to end once one of them has ended by itself."""
STOP_WITHIN = 60.0
"""Seconds that workers have for a partial report after Ctrl-C."""
STOPPED, TERMINATED = 130, 143


def launch(
    command: Sequence[str], count: int, directory: Path, resume: bool, say: Callable[[str], None]
) -> int:
    """Run a command in so many workers that keep their results in a directory, and give their exit status;
    `say` is told which of them were lost.

    The directory is locked as long as one of them lives.
    """
    group = secrets.token_hex(8)
    with writing(directory):
        hold = Hold(directory, Owner(group=group))
    if hold.before is not None:
        say(succession(hold.before, resume))
    try:
        workers = _Workers(command, count, hold, group)
        with _ending(workers):
            return workers.watch(say)
    finally:
        hold.remove_empty()


class _Workers:
    """Processes that meet at a store of this one."""

    def __init__(self, command: Sequence[str], count: int, hold: Hold, group: str) -> None:
        self._server = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
        self._meeting = Meeting.at(HOST, self._server.port, count, count, hosted=True)
        self._lost: set[int] = set()
        shared = () if hold.file is None else (hold.file,)
        self.processes = [
            subprocess.Popen(
                [*command],
                env=self._environment(rank, count, group),
                pass_fds=shared,
                start_new_session=True,  # Ctrl-C on a terminal comes to this process, which passes it on
            )
            for rank in range(count)
        ]

    def _environment(self, rank: int, count: int, group: str) -> dict[str, str]:
        """What torchrun would tell a worker."""
        threads = str(max(1, _cores() // count))
        return {
            "OMP_NUM_THREADS": threads,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            GROUP: group,
        }

    def watch(self, say: Callable[[str], None]) -> int:
        """Wait until all have ended; the exit status of the first that was not ended by a signal."""
        deadline = float("inf")
        while self._living():
            try:
                self._note_losses(say)
                if any((process.returncode or 0) >= 0 for process in self._ended()):
                    deadline = min(deadline, time.monotonic() + END_WITHIN)
                if time.monotonic() > deadline:
                    self.send(signal.SIGKILL)
                time.sleep(POLL)
            except KeyboardInterrupt:
                if deadline < float("inf"):  # the second time
                    return STOPPED
                deadline = time.monotonic() + STOP_WITHIN
                self.send(signal.SIGINT)
        self._note_losses(say)
        return self._status()

    def send(self, kind: signal.Signals) -> None:
        """A signal for all that live."""
        for process in self._living():
            process.send_signal(kind)

    def _living(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is None]

    def _ended(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is not None]

    def _note_losses(self, say: Callable[[str], None]) -> None:
        """Tell the others who has ended, and the user who was ended."""
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None and rank not in self._lost:
                self._lost.add(rank)
                self._meeting.lose(rank)
                if code < 0 and self._living():
                    kind = signal.Signals(-code).name
                    say(
                        f"worker {rank} (process {process.pid}) was ended by {kind}: "
                        "the others take over its work"
                    )

    def _status(self) -> int:
        codes = [process.wait() for process in self.processes]
        own = [code for code in codes if code >= 0]
        if own:
            return own[0]
        kinds = ", ".join(sorted({signal.Signals(-code).name for code in codes}))
        found = f"all {len(codes)} workers were ended by a signal ({kinds})"
        remedy = "what was measured is kept: go on with --resume; fewer processes take less memory"
        raise ArgumentError("--processes", found, remedy)


def _cores() -> int:
    """How many cores this process may use."""
    own = getattr(os, "sched_getaffinity", None)
    return len(own(0)) if own else os.cpu_count() or 1


@contextmanager
def _ending(workers: _Workers) -> Iterator[None]:
    """Whatever ends this process ends its workers, where it can still do something."""

    def terminated(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        workers.send(signal.SIGKILL)
