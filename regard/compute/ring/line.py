"""Line: what the ranks of a group tell each other beside the data, so that none waits for one that is gone.

Every two ranks hold a connection of their own. It breaks at once where a process dies, whatever moves the
tensors; a rank that is alive and waits answers when it is asked, and one that hangs does not.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from regard.errors import ArgumentError, RankLostError

ANSWER_WITHIN = 0.5
"""Seconds that a rank has to say that it is there, once somebody has waited for the whole timeout."""
EXPLAIN_WITHIN = 1.0
"""Seconds in which a broken connection of the line may explain an error of the transport."""


class Line:
    """The connections of one rank to all others of its group, and what came through them."""

    def __init__(self, rank: int, world: int, connections: dict[int, socket.socket]) -> None:
        self.rank, self.world = rank, world
        self.meetings, self.trips = 0, 0
        self._connections = connections
        self._read = dict.fromkeys(connections, b"")
        self._came: dict[tuple[int, int], dict[str, Any]] = {}
        self._done = dict.fromkeys(connections, 0)
        self._gone: set[int] = set()
        self._here: set[int] = set()

    def meet(self, message: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """What every rank brings to this meeting, in their order; an ArgumentError where that is an error."""
        self.meetings += 1
        number = self.meetings
        self._tell({**message, "kind": "here", "meeting": number})

        def missing() -> set[int]:
            return {peer for peer in self._connections if (peer, number) not in self._came}

        self._wait(missing, timeout, "did not reach a call of attention on the ring")
        brought = [
            message if peer == self.rank else self._came.pop((peer, number)) for peer in range(self.world)
        ]
        for peer, one in enumerate(brought):
            if "error" in one:
                found = f"could not take part: {one['error']}"
                raise ArgumentError(
                    f"rank {peer}", found, "nothing was computed on any rank; correct it there"
                )
        return brought

    def excuse(self, error: Exception) -> None:
        """Tell the others, who wait at the next meeting, that this rank has an error instead."""
        self.meetings += 1
        self._tell({"error": str(error), "kind": "here", "meeting": self.meetings})

    def begin_trip(self) -> int:
        """The number of a round of tensors that begins."""
        self.trips += 1
        return self.trips

    def end_trip(self) -> None:
        """This rank has sent and got all that the round needs, so that it may leave."""
        self._tell({"kind": "done", "trip": self.trips})

    def wait_for(self, waits: Sequence[tuple[int, Callable[[], Any]]], timeout: float) -> None:
        """Run blocking waits, each for one peer, and listen to everyone else meanwhile."""
        left = [peer for peer, _ in waits]
        failed: list[tuple[int, Exception]] = []
        own, wake = socket.socketpair()

        def run() -> None:
            for peer, wait in waits:
                try:
                    wait()
                except Exception as error:  # whatever the transport raises: it is told in the other thread
                    failed.append((peer, error))
                    break
                left.remove(peer)
            wake.close()

        waiting = threading.Thread(target=run, daemon=True)
        waiting.start()
        with own:
            self._wait(lambda: set() if failed else set(left), timeout, "hangs", own)
        waiting.join()  # it lets go of the transport: a thread that did so while Python ends would abort it
        if failed:
            self._explain(*failed[0])

    def _wait(
        self, missing: Callable[[], set[int]], timeout: float, what: str, wake: socket.socket | None = None
    ) -> None:
        """Listen until nobody is missing."""
        deadline, asked = time.monotonic() + timeout, False
        while missing():
            self._look_for_losses(missing() if wake is None else set())
            left = deadline - time.monotonic()
            if left <= 0 and asked:
                self._blame(missing(), what, timeout)
            if left <= 0:
                self._here, asked, deadline = set(), True, time.monotonic() + ANSWER_WITHIN
                self._tell({"kind": "ask"})
                continue
            self._listen(min(left, 1.0), wake)

    def _blame(self, missing: set[int], what: str, timeout: float) -> NoReturn:
        """Nothing came for too long: those are lost who do not answer, first those who are waited for."""
        silent = missing - self._here or set(self._connections) - self._here
        if silent:
            self._lose(silent, f"{what}: nothing was received from it for {timeout:g} s")
        why = "waits for something else; all ranks must make the same calls in the same order"
        self._lose(missing, f"{why}, each within {timeout:g} s")

    def _look_for_losses(self, waits: set[int]) -> None:
        """Raise where a rank is gone that did not finish its round of tensors, or that this one waits for."""
        for peer in self._gone:
            if peer in waits or self._done[peer] < self.trips:
                self._lose({peer}, "is gone: its process ended or its connection broke")

    def _explain(self, peer: int, error: Exception) -> NoReturn:
        """The transport failed: the line may know who is gone; else it is the peer."""
        deadline = time.monotonic() + EXPLAIN_WITHIN
        while time.monotonic() < deadline:
            self._look_for_losses({peer})
            self._listen(0.05, None)
        self._lose({peer}, f"could not be reached: {str(error).splitlines()[0]}")

    def _lose(self, ranks: Iterable[int], why: str) -> NoReturn:
        """Tell the others who was lost, so that all name the same, and raise."""
        lost = sorted(ranks)
        self._tell({"kind": "lost", "ranks": lost, "why": why})
        raise RankLostError(tuple(lost), why)

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message to everyone; that one is gone is noted where its last messages are read."""
        text = json.dumps(message).encode() + b"\n"
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(text)

    def _listen(self, seconds: float, wake: socket.socket | None) -> None:
        """Read what comes within so many seconds."""
        alive = {connection: peer for peer, connection in self._connections.items() if peer not in self._gone}
        ready = select.select([*alive, *([] if wake is None else [wake])], [], [], seconds)[0]
        for connection in ready:
            if connection is not wake:
                self._read_from(alive[connection], connection)

    def _read_from(self, peer: int, connection: socket.socket) -> None:
        try:
            text = connection.recv(1 << 16)
        except OSError:
            text = b""
        if not text:
            self._gone.add(peer)
            return
        *lines, self._read[peer] = (self._read[peer] + text).split(b"\n")
        for line in lines:
            self._hear(peer, json.loads(line))

    def _hear(self, peer: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "here":
            self._came[peer, message["meeting"]] = message
        elif kind == "done":
            self._done[peer] = message["trip"]
        elif kind == "ask":
            self._tell({"kind": "answer"})
        elif kind == "answer":
            self._here.add(peer)
        elif kind == "lost":
            raise RankLostError(tuple(message["ranks"]), message["why"])
