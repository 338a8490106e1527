"""coalesce: a flow that unites particles as they meet, so that it gets cheaper on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard import _check
from regard._round import outward
from regard._upper import Upper
from regard.certificate import Certificate, Hypothesis
from regard.compute import Engine
from regard.dynamics.drifts import drift
from regard.dynamics.fields import read_source
from regard.dynamics.flowing import flow
from regard.dynamics.merging import merge_within
from regard.dynamics.schemes import Euler, Scheme
from regard.dynamics.spaces import Euclidean, Space
from regard.dynamics.splitting import HYPOTHESES, apart_after, refusal
from regard.dynamics.trajectory import Trajectory
from regard.errors import ArgumentError, RefusalError
from regard.maps import Mapping
from regard.measure import Measure
from regard.norms import TokenMax


@dataclass(frozen=True)
class Merge:
    """When particles are united: those within `within` of each other, at the multiples of `every` in time, as
    soon as at most `most` atoms are left of all of them.

    Examples:
        >>> regard.dynamics.Merge(within=0.01, every=1.0, most=100).within
        0.01
    """

    within: float
    every: float
    most: int = 1000

    def __post_init__(self) -> None:
        _check.positive("within", self.within)
        _check.positive("every", self.every)
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise ArgumentError("most", f"is {self.most!r}", "give a number of atoms of at least one")


@dataclass(frozen=True)
class _Piece:
    """The flow between two times at which particles may be united."""

    begin: float
    trajectory: Trajectory
    labels: Tensor
    moved: Upper

    @property
    def size(self) -> int:
        """How many atoms there are."""
        return self.trajectory.at(0.0).shape[-2]


class Coalescence:
    """t ↦ the atoms that particles have become, made by `coalesce`. Computed when asked.

    Examples:
        >>> from regard.dynamics import Euler, Merge, coalesce
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.001], [0.0, 1.0]], dtype=torch.float64)
        >>> merge = Merge(within=0.01, every=0.5)
        >>> few = coalesce(regard.Attention(regard.Dot()), x, Euler(0.5), 1.0, merge)  # a Coalescence
        >>> few.measure(1.0).size
        2
    """

    def __init__(
        self, map: Mapping, source: Measure, scheme: Scheme, until: float, merge: Merge, how: _How
    ) -> None:
        self._map, self._scheme, self._how, self._merge = map, scheme, how, merge
        self.until = until
        everyone = torch.arange(source.size, device=source.points.device)
        self._pieces = [_Piece(0.0, self._flow(source, 0.0), everyone, Upper(0.0))]
        self._apart: dict[float, float] = {0.0: 0.0}  # at most how far, before particles are united at a time

    def at(self, t: float) -> Tensor:
        """The atoms (k, d) at time t."""
        piece = self._piece(t)
        return piece.trajectory.at(max(0.0, t - piece.begin))

    def measure(self, t: float) -> Measure:
        """The atoms with their masses."""
        piece = self._piece(t)
        return piece.trajectory.measure(max(0.0, t - piece.begin))

    def particles(self, t: float) -> Tensor:
        """Where each of the particles of the start is (n, d): at its atom."""
        return self.at(t)[self._piece(t).labels]

    def atoms(self) -> list[tuple[float, int]]:
        """The times at which particles were united, and how many atoms were left; all of it is computed."""
        self._piece(self.until)
        counts = [(piece.begin, piece.size) for piece in self._pieces]
        return [after for before, after in pairwise(counts) if after[1] < before[1]]

    def error(self, t: float) -> Certificate:
        """At most how far any particle of the flow without merging is from its atom at time t: proved for
        softmax attention and Euler steps (see regard.dynamics.splitting).
        """
        why = refusal(self._map, self._how.space)
        if why is None and not isinstance(self._scheme, Euler):
            why = f"{self._scheme!r} has stages; take Euler(step)."
        if why is not None:
            raise RefusalError("error", [why])
        value = self._error(t)
        rounded = "neither flow is rounded, and no engine errs"
        held = (*(Hypothesis(sentence, True) for sentence in HYPOTHESES), Hypothesis(rounded, False))
        where = f"the flow without merging, at time {t:g}"
        return Certificate(value, where, TokenMax(), "split atoms", held, quantity="distance to the atoms")

    def __repr__(self) -> str:
        last = self._pieces[-1]
        count = f"{len(self._pieces[0].labels)} particles in {last.size} atoms"
        return f"Coalescence({count} at {last.begin:g}, until {self.until:g}, {self._merge!r})"

    def _error(self, t: float) -> float:
        last = self._piece(t)
        for piece in self._pieces:
            if piece is last:
                break
            end = self._end(piece)
            if end not in self._apart:
                self._apart[end] = self._across(piece, end)
        return self._across(last, t)

    def _across(self, piece: _Piece, t: float) -> float:
        """At most how far particles are from their atoms at a time of one piece."""
        apart = outward(self._apart[piece.begin] + float(piece.moved))
        inside = [s for s in piece.trajectory.steps() if piece.begin + s < t]
        for begin, end in pairwise([*inside, t - piece.begin]):
            if apart == 0 or math.isinf(apart):
                break
            atoms = piece.trajectory.measure(begin)
            value = drift(self._map, atoms, self._how.engine)
            apart = apart_after(self._map, atoms, value, apart, end - begin, self._how.space)
        return apart

    def _end(self, piece: _Piece) -> float:
        return piece.begin + piece.trajectory.until

    def _piece(self, t: float) -> _Piece:
        """The last piece that begins before t, or at it."""
        if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t <= self.until * (1 + 1e-12):
            raise ArgumentError("t", f"is {t!r}", f"give a time between 0 and {self.until:g}")
        while self._end(self._pieces[-1]) < min(t, self.until * (1 - 1e-12)):
            self._pieces.append(self._next(self._pieces[-1]))
        return next(piece for piece in reversed(self._pieces) if piece.begin <= t)

    def _next(self, piece: _Piece) -> _Piece:
        begin = self._end(piece)
        measure = piece.trajectory.measure(piece.trajectory.until)
        merged = merge_within(measure, self._merge.within, 0.5 * (len(self._pieces) % 2))
        if merged.measure.size > self._merge.most or merged.measure.size == measure.size:
            return _Piece(begin, self._flow(measure, begin), piece.labels, Upper(0.0))
        return _Piece(begin, self._flow(merged.measure, begin), merged.labels[piece.labels], merged.upper())

    def _flow(self, measure: Measure, begin: float) -> Trajectory:
        length = min(self._merge.every, self.until - begin)
        return flow(self._map, measure, self._scheme, length, space=self._how.space, engine=self._how.engine)


@dataclass(frozen=True)
class _How:
    """Where particles live, and what computes the field."""

    space: Space
    engine: Engine | None


def coalesce(
    map: Mapping,
    x: Measure | Tensor,
    scheme: Scheme,
    until: float,
    merge: Merge,
    *,
    space: Space = Euclidean(),
    engine: Engine | None = None,
) -> Coalescence:
    """The flow x' = map(x), in which particles that meet become one with the sum of their masses.

    For softmax, Sinkhorn and exponential weights particles in one place may be united without changing
    anything; those that are merely close change the flow, by no more than `error(t)`.

    Examples:
        >>> from regard.dynamics import Euler, Merge, coalesce
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> few = coalesce(regard.Attention(regard.Dot()), x, Euler(0.5), 0.5, Merge(within=0.01, every=0.5))
        >>> few.particles(0.5).shape  # where each particle would be
        torch.Size([3, 2])
    """
    if not isinstance(merge, Merge):
        raise ArgumentError("merge", f"is {merge!r}", "give Merge(within, every)")
    source = read_source(x)
    if source.batch_shape or source.marks is not None:
        found = f"has batch shape {list(source.batch_shape)}" if source.batch_shape else "has marks"
        raise ArgumentError("x", found, "give one measure without marks: particles that are alike")
    return Coalescence(map, source, scheme, float(until), merge, _How(space, engine))
