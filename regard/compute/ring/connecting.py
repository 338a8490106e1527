"""line_of: the line of a process group, laid when it is first used."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from regard.compute.ring.line import Line
from regard.errors import RankLostError

_lines: WeakKeyDictionary[Any, Line] = WeakKeyDictionary()


def line_of(group: Any, timeout: float) -> Line:
    """The line between the ranks of a group; every rank of it must ask."""
    line = _lines.get(group)
    if line is None:
        line = _lines[group] = _lay(group, timeout)
    return line


def _lay(group: Any, timeout: float) -> Line:
    """Connect to all lower ranks and let all higher ones connect; addresses stand in the group's store."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == 1:
        return Line(rank, world, {})
    store = dist.PrefixStore(f"regard/{group.group_name}", _get_default_store())
    deadline = time.monotonic() + timeout
    with socket.create_server((_own_address(), 0), backlog=world) as listener:
        if rank == 0:
            store.set("word", secrets.token_hex(16))
        store.set(f"address {rank}", json.dumps(listener.getsockname()[:2]))
        word = _look_up(store, "word", 0, deadline)
        connections = {peer: _call(store, peer, rank, word, deadline) for peer in range(rank)}
        while len(connections) < world - 1:
            missing = set(range(rank + 1, world)) - set(connections)
            peer, connection = _accept(listener, word, missing, deadline)
            connections[peer] = connection
    return Line(rank, world, connections)


def _own_address() -> str:
    """The address under which the others can reach this machine: the one that reaches the first of them."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _look_up(store: Any, key: str, peer: int, deadline: float) -> str:
    """An entry of the store that a peer writes."""
    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        return str(store.get(key).decode())
    except RuntimeError as error:
        raise RankLostError((peer,), "did not reach its first call of attention on the ring") from error


def _call(store: Any, peer: int, rank: int, word: str, deadline: float) -> socket.socket:
    """A connection to a lower rank."""
    host, port = json.loads(_look_up(store, f"address {peer}", peer, deadline))
    try:
        connection = socket.create_connection((host, port), max(0.001, deadline - time.monotonic()))
    except OSError as error:
        raise RankLostError((peer,), f"could not be reached at {host}:{port}") from error
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(f"{word} {rank:08d}\n".encode())
    return connection


def _accept(
    listener: socket.socket, word: str, missing: set[int], deadline: float
) -> tuple[int, socket.socket]:
    """The next connection of a higher rank that knows the word; others are closed."""
    while True:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise RankLostError(
                tuple(sorted(missing)), "did not reach its first call of attention on the ring"
            ) from error
        peer = _greeting(connection, word, deadline)
        if peer in missing:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return peer, connection
        connection.close()


def _greeting(connection: socket.socket, word: str, deadline: float) -> int | None:
    """The rank that a caller says it is, None where it does not know the word."""
    connection.settimeout(max(0.001, min(1.0, deadline - time.monotonic())))
    text = b""
    try:
        while len(text) < len(word) + 10:
            some = connection.recv(len(word) + 10 - len(text))
            if not some:
                return None
            text += some
    except OSError:
        return None
    connection.settimeout(None)
    found, _, rank = text.decode(errors="replace").strip().partition(" ")
    return int(rank) if secrets.compare_digest(found, word) and rank.isdigit() else None
