"""Where the processes of one audit meet: what each says, who does what, and who is gone.

They meet at a key-value store of torch.distributed, over TCP. Results do not pass through it; they are files.
No call here waits for a process that does not come.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from regard.errors import ArgumentError

BEAT = 1.0
"""Seconds between signs of life."""
SILENT = 30.0
"""Seconds after which a process without a sign of life is taken for gone."""
COME_WITHIN = 120.0
"""Seconds in which every process comes to the meeting."""
LEAVE_WITHIN = 5.0
"""Seconds for which the process that hosts a meeting stays for the others."""
POLL = 0.05
"""Seconds between two looks."""


class Meeting:
    """One process of several at their meeting: `rank` of `world`."""

    def __init__(self, store: dist.Store, rank: int, world: int, *, hosts: bool = False) -> None:
        self.rank, self.world, self._hosts = rank, world, hosts
        self._store = store
        self._claims: dict[str, int] = {}
        self._beats = dict.fromkeys(range(world), (0, time.monotonic()))
        self._gone: set[int] = set()

    @classmethod
    def at(cls, host: str, port: int, rank: int, world: int, *, hosted: bool, attempt: str = "0") -> Meeting:
        """The meeting at an address; the first rank opens it where nobody else does (hosted)."""
        hosts = rank == 0 and not hosted
        try:
            store = dist.TCPStore(
                host,
                port,
                None,
                hosts,
                timeout=timedelta(seconds=COME_WITHIN),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            found = f"no meeting was found at {host}:{port} ({(str(error).splitlines() or [''])[0]})"
            remedy = "start all ranks with torchrun, or with --processes on one machine"
            raise ArgumentError("MASTER_ADDR, MASTER_PORT", found, remedy) from None
        return cls(dist.PrefixStore(f"regard {attempt}", store), rank, world, hosts=hosts)

    def say(self, topic: str, message: Any) -> None:
        """Put down a message of this rank."""
        self._store.set(f"{topic} {self.rank}", json.dumps(message))

    def heard(self, topic: str, rank: int) -> Any:
        """What a rank has said; None where it has not."""
        key = f"{topic} {rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def gather(self, topic: str, message: Any) -> dict[int, Any]:
        """What every rank says, by rank; those that are gone say nothing."""
        self.say(topic, message)
        found: dict[int, Any] = {}
        while missing := [rank for rank in range(self.world) if rank not in found]:
            gone, trouble = self.gone(), self._trouble()
            found |= {rank: said for rank in missing if (said := self.heard(topic, rank)) is not None}
            if all(rank in found or rank in gone for rank in missing):
                break
            if trouble is not None:  # of a rank that has not come: what they bring is judged by the caller
                raise trouble
            time.sleep(POLL)
        return found

    def claim(self, key: str) -> bool:
        """Whether this rank is to do something: nobody else said so before, or who did is gone."""
        holder = self._claims.get(key)
        if holder is not None and holder not in self._gone:
            return holder == self.rank
        expected = "" if holder is None else str(holder)
        now = int(self._store.compare_set(f"claim {key}", expected, str(self.rank)))
        self._claims[key] = now
        return now == self.rank

    def lose(self, rank: int) -> None:
        """Note for everybody that a rank is gone."""
        self._store.set(f"gone {rank}", "1")

    def gone(self) -> set[int]:
        """The ranks that are known to be gone, or that have been silent for too long."""
        for rank in set(range(self.world)) - {self.rank}:
            count, since = self._beats[rank]
            beats = self._store.add(f"beat {rank}", 0)
            if beats != count:
                self._beats[rank] = beats, time.monotonic()
                self._gone.discard(rank)
            elif time.monotonic() - since > (SILENT if beats else COME_WITHIN):
                self._gone.add(rank)
            if self._store.check([f"gone {rank}"]):
                self._gone.add(rank)
        return self._gone

    def leader(self) -> int:
        """The lowest rank that is there."""
        return min(set(range(self.world)) - self.gone())

    def post(self, status: int) -> None:
        """Tell everybody that the report is written, and the exit status that belongs to it."""
        self._store.set("reported", str(status))

    def posted(self) -> int | None:
        """The exit status, once a report is written."""
        return int(self._store.get("reported")) if self._store.check(["reported"]) else None

    def trouble(self, text: str) -> None:
        """Tell everybody of an error of this rank; the first one counts."""
        self._store.compare_set("trouble", "", json.dumps([self.rank, text]))

    def raise_trouble(self) -> None:
        """Raise where another rank has an error."""
        trouble = self._trouble()
        if trouble is not None:
            raise trouble

    def _trouble(self) -> ArgumentError | None:
        if not self._store.check(["trouble"]):
            return None
        rank, text = json.loads(self._store.get("trouble"))
        error = ArgumentError(f"rank {rank}", f"stopped ({text})", "correct it there: all ranks stop")
        return None if rank == self.rank else error

    def leave(self) -> None:
        """Go; the process that hosts the meeting waits a little for the others to hear what was said last."""
        with suppress(dist.DistError):
            self.say("left", True)
            deadline = time.monotonic() + LEAVE_WITHIN
            others = set(range(self.world)) - {self.rank} if self._hosts else set()
            while time.monotonic() < deadline and any(
                self.heard("left", rank) is None for rank in others - self.gone()
            ):
                time.sleep(POLL)

    @contextmanager
    def alive(self, also: Callable[[], None] = lambda: None) -> Iterator[None]:
        """While inside, signs of life are given, and `also` is called as often."""
        over = threading.Event()

        def beat() -> None:
            while True:
                try:
                    self._store.add(f"beat {self.rank}", 1)
                except RuntimeError:  # whoever hosts the meeting is gone: the next call says so
                    return
                also()
                if over.wait(BEAT):
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
