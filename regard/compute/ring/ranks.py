"""Ranks: the processes of a group as one, by reductions that notice who is gone."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.compute.fourier.processes import Processes
from regard.compute.ring.line import Line


@dataclass(frozen=True, eq=False, repr=False)
class Ranks(Processes):
    """The ranks of a group; each number is summed or compared by one of them, so that all get the same."""

    group: weakref.ref[Any]
    line: Line
    timeout: float
    device: torch.device

    @property
    def count(self) -> int:
        return self.line.world

    @property
    def rank(self) -> int:
        return self.line.rank

    def total(self, tensor: Tensor) -> Tensor:
        return self._reduce(tensor, "SUM")

    def largest(self, tensor: Tensor) -> Tensor:
        return self._reduce(tensor, "MAX")

    def _reduce(self, tensor: Tensor, name: str) -> Tensor:
        """One reduction, as a trip of the line: an error on every rank where one does not come."""
        import torch.distributed as dist

        found = tensor.detach().to(self.device, copy=True).contiguous()
        if self.count == 1:
            return found
        self.line.begin_trip()
        flat = torch.view_as_real(found) if found.is_complex() else found
        work = dist.all_reduce(flat, getattr(dist.ReduceOp, name), self.group(), async_op=True)
        limit = timedelta(seconds=2 * self.timeout + 60)  # the line ends a wait, as on a trip
        self.line.wait_for([((self.rank + 1) % self.count, partial(work.wait, limit))], self.timeout)
        self.line.end_trip()
        return found
