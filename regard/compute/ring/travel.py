"""Trip: tensors that go round a ring of processes, from each rank to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.compute.ring.line import Line

TAGS = 64
"""Tags that belong to one round, so that what was left over of a round that failed meets nobody."""


@dataclass(frozen=True)
class Passed:
    """Tensors that are on their way: `take` waits for those that come."""

    trip: Trip
    works: list[tuple[int, Any]]
    sent: list[Tensor]
    coming: list[Tensor]

    def take(self) -> list[Tensor]:
        """What the rank before this one had."""
        timeout = self.trip.timeout
        limit = timedelta(seconds=2 * timeout + 60)  # the line ends a wait; this one is for threads left over
        waits = [(peer, partial(work.wait, limit)) for peer, work in self.works]
        self.trip.line.wait_for(waits, timeout)
        return self.coming


class Trip:
    """One round of tensors over a group."""

    def __init__(self, group: Any, line: Line, timeout: float) -> None:
        self.group, self.line, self.timeout = group, line, timeout
        self._tag = line.begin_trip() % (1 << 20) * TAGS

    def pass_on(self, tensors: Sequence[Tensor], shapes: Sequence[torch.Size]) -> Passed:
        """Send tensors to the next rank; those that come from the one before have the given shapes."""
        import torch.distributed as dist

        before, after = (self.line.rank - 1) % self.line.world, (self.line.rank + 1) % self.line.world
        sent = [t.contiguous() for t in tensors]
        coming = [
            torch.empty(shape, dtype=t.dtype, device=t.device) for t, shape in zip(sent, shapes, strict=True)
        ]
        peers: list[int] = []
        steps: list[Any] = []
        for place, (out, into) in enumerate(zip(sent, coming, strict=True)):
            for step, tensor, peer in ((dist.isend, out, after), (dist.irecv, into, before)):
                steps.append(
                    dist.P2POp(step, tensor, group=self.group, tag=self._tag + place, group_peer=peer)
                )
                peers.append(peer)
        works: list[Any]
        try:
            works = dist.batch_isend_irecv(steps)
        except RuntimeError as error:  # a connection that broke before
            works = [_Failed(error)]
        named = peers if len(works) == len(peers) else [before] * len(works)
        return Passed(self, list(zip(named, works, strict=True)), sent, coming)


class _Failed:
    """A transfer that did not begin."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def wait(self, limit: timedelta) -> None:
        raise self.error
