"""The derivative of one map after another, from those of both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from regard.certificate import Hypothesis
from regard.derive.graph import check_index
from regard.derive.jacobian import Jacobian
from regard.errors import ArgumentError


class Chain(Jacobian):
    """x ↦ g(f(x)): J = J_g J_f. Both are of the same batch, and f has the point of g as its value."""

    def __init__(self, outer: Jacobian, inner: Jacobian) -> None:
        if inner.shape_out != outer.shape_in or inner.batch_shape != outer.batch_shape:
            found = f"gives {list(inner.shape_out)} and the outer takes {list(outer.shape_in)}"
            raise ArgumentError("inner", found, "chain maps whose shapes and batches fit")
        self._outer, self._inner = outer, inner
        self.point, self.value = inner.point, outer.value
        self.batch_shape, self.batch_leads = outer.batch_shape, outer.batch_leads

    def trusted(self) -> tuple[Hypothesis, ...]:
        return (*self._inner.trusted(), *self._outer.trusted())

    def mv(self, tangent: Tensor) -> Tensor:
        return self._outer.mv(self._inner.mv(tangent))

    def rmv(self, cotangent: Tensor) -> Tensor:
        return self._inner.rmv(self._outer.rmv(cotangent))

    def second(self, tangent: Tensor) -> Tensor:
        """D²g[f't, f't] + g' D²f[t, t]."""
        bent = self._outer.second(self._inner.mv(tangent))
        return bent + self._outer.mv(self._inner.second(tangent))

    def block(self, i: int, j: int) -> Tensor:
        i, j = check_index("i", i, self.value.shape[-2]), check_index("j", j, self.point.shape[-2])
        return self._token(i)[..., j, :, :]

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        for i in range(self.value.shape[-2]):
            yield slice(i, i + 1), self._token(i).unsqueeze(-4)

    def _token(self, i: int) -> Tensor:
        """The blocks of one output token, (..., n, d_out, d_in): a backward pass for each of its numbers."""
        if self.batch_shape:
            raise ArgumentError("map", "is a batch of chains", "ask for the blocks of one at a time")
        lead = self.value.shape[:-2]
        found = []
        for place in itertools.product(*map(range, lead), [i], range(self.value.shape[-1])):
            unit = torch.zeros_like(self.value)
            unit[place] = 1
            found.append(self.rmv(unit))
        return torch.stack(found, -2).unflatten(-2, (*lead, -1)).movedim(0, len(lead))

    def in_double(self) -> Jacobian:
        return Chain(self._outer.in_double(), self._inner.in_double())

    def nudge(self, relative: float, generator: Generator) -> Jacobian:
        return Chain(self._outer.nudge(relative, generator), self._inner.nudge(relative, generator))
