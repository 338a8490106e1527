"""Positions as potentials: linear biases, relative-position tables, rotary positions.

Positions are the marks of the tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._types import Features, Scalar, over_scores
from regard.errors import ArgumentError
from regard.parameters import number, parameter, part
from regard.potentials.base import Potential


class PositionPotential(Potential):
    """A potential that looks at marks only: a bias on pairs of positions. Its features are the marks.

    Examples:
        >>> isinstance(regard.Alibi(1.0), regard.potentials.PositionPotential)
        True
        >>> regard.Alibi(1.0).scores(torch.randn(3, 2), torch.randn(3, 2))[2].tolist()
        [-2.0, -1.0, -0.0]
    """

    positional: ClassVar[bool] = True

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        kind = torch.promote_types(x.dtype, torch.float32)
        if 0 not in (
            x_marks.shape[-1],
            y_marks.shape[-1],
        ):  # only differences count: from a near origin float32 holds them exactly
            origin = x_marks.detach().amin(-1, keepdim=True)
            if y_marks is x_marks:
                x_marks = y_marks = (x_marks - _common(origin)).to(kind).unsqueeze(-1)
                return x_marks, y_marks
            origin = _common(torch.minimum(origin, y_marks.detach().amin(-1, keepdim=True)))
            x_marks, y_marks = x_marks - origin, y_marks - origin
        return x_marks.unsqueeze(-1).to(kind), y_marks.unsqueeze(-1).to(kind)


NEAR = 1 << 23
"""Whole positions below this are exact in float32, and are counted from zero wherever tokens begin."""


def _common(origin: Tensor) -> Tensor:
    """An origin that does not depend on which tokens are looked at, where positions are whole numbers."""
    return origin if origin.dtype.is_floating_point else origin // NEAR * NEAR


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(PositionPotential):
    """a = -slope · |s - t| for a query at position s and a key at t (press2022). slope: a number,
    or one for each head (h,).

    Examples:
        >>> near = regard.Dot() + regard.Alibi(0.5)
        >>> near.scores(torch.zeros(3, 2), torch.zeros(3, 2))[2].tolist()  # the third query, to the left
        [-1.0, -0.5, 0.0]
    """

    slope: Scalar = number()

    def __post_init__(self) -> None:
        _check.number("slope", self.slope)

    @staticmethod
    def heads(count: int) -> Alibi:
        """The published slopes, one for each head: 2^(-8 i / count), i = 1..count, for a power of two.

        For other counts they are those of the released code (press2022), which models were trained with: all
        of the next lower power of two, then every other one of the next higher.
        """
        if not isinstance(count, int) or count < 1:
            raise ArgumentError("count", f"is {count!r}", "give the number of heads, one or more")
        lower = 1 << (count.bit_length() - 1)
        own, between = _slopes(lower), _slopes(2 * lower)[::2]
        return Alibi(torch.cat([own, between[: count - lower]]))

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return -over_scores(self.slope) * (queries - keys.mT).abs()


def _slopes(count: int) -> Tensor:
    """2^(-8 i / count), i = 1..count."""
    return 2.0 ** (-8.0 * torch.arange(1, count + 1) / count)


class Buckets(Object):
    """How relative positions t - s share the entries of a table. Abstract.

    Examples:
        >>> offsets = torch.tensor([-3, 0, 3])
        >>> for buckets in (regard.potentials.Clipped(2), regard.potentials.Logarithmic(8, 5)):
        ...     print(buckets.count, buckets.index(offsets).tolist())
        5 [0, 2, 4]
        8 [2, 0, 6]
    """

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of entries the table must have."""

    @abstractmethod
    def index(self, offset: Tensor) -> Tensor:
        """The entry for each offset key - query."""


@dataclass(frozen=True, eq=False, repr=False)
class Clipped(Buckets):
    """Entry clip(t - s, -reach, reach) + reach: one for each offset, the far ones shared (shaw2018).

    Examples:
        >>> regard.potentials.Clipped(2).index(torch.tensor([-5, -1, 0, 5])).tolist()
        [0, 1, 2, 4]
    """

    reach: int

    @property
    def count(self) -> int:
        return 2 * self.reach + 1

    def index(self, offset: Tensor) -> Tensor:
        return offset.clamp(-self.reach, self.reach).long() + self.reach


@dataclass(frozen=True, eq=False, repr=False)
class Logarithmic(Buckets):
    """The buckets of T5: exact for near offsets, logarithmic up to `farthest`,
    one for all beyond (raffel2020, 2.1).

    Examples:
        >>> buckets = regard.potentials.Logarithmic(8, 16)
        >>> buckets.index(torch.tensor([0, 1, 2, 8, 500])).tolist()  # exact when near, shared when far
        [0, 5, 6, 7, 7]
    """

    buckets: int = 32
    farthest: int = 128
    bidirectional: bool = True

    @property
    def count(self) -> int:
        return self.buckets

    def index(self, offset: Tensor) -> Tensor:
        offset = offset.long()
        half = self.buckets // 2 if self.bidirectional else self.buckets
        base = (offset > 0).long() * half if self.bidirectional else torch.zeros_like(offset)
        distance = offset.abs() if self.bidirectional else (-offset).clamp_min(0)
        exact = half // 2
        ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(self.farthest / exact)
        far = (exact + (ratio * (half - exact)).long()).clamp_max(half - 1)
        return base + torch.where(distance < exact, distance, far)


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(PositionPotential):
    """a = table[bucket(t - s)]; table (..., count), one row for each head where there are heads (h,
    count).

    Examples:
        >>> from regard.potentials import Clipped
        >>> shift = regard.RelativeBias(torch.tensor([0.0, 1.0, 2.0]), Clipped(1))
        >>> shift.scores(torch.zeros(2, 1), torch.zeros(2, 1)).tolist()
        [[1.0, 2.0], [0.0, 1.0]]
    """

    table: Tensor = parameter(rank=1)
    buckets: Buckets = part()

    def __post_init__(self) -> None:
        _check.parameter("table", self.table, 1, "(..., count)")
        if self.table.shape[-1] != self.buckets.count:
            raise ArgumentError(
                "table", f"has {self.table.shape[-1]} entries", f"{self.buckets!r} needs {self.buckets.count}"
            )

    def pair(self, queries: Features, keys: Features) -> Tensor:
        index = self.buckets.index(keys.mT - queries)
        if index.ndim == 2:  # one list of positions for the whole batch
            return self.table[..., index]
        lead = _check.broadcast("table and marks", self.table.shape[:-1], index.shape[:-2])
        table = self.table.expand(*lead, -1)
        flat = index.expand(*lead, *index.shape[-2:]).flatten(-2)
        return table.gather(-1, flat).reshape(*lead, *index.shape[-2:])


@dataclass(frozen=True, eq=False, repr=False)
class Rotary(Potential):
    """The inner potential on projected points rotated by their positions: coordinate pairs turn by position ·
    frequency (su2024).

    frequencies (f,) turn the first 2f coordinates; None means base^(-2i/c) on all of them. interleaved=False
    pairs coordinate i with i + f (as in Llama and GPT-NeoX), True pairs 2i with 2i + 1.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
        >>> regard.attend(q, k, v, potential=regard.Rotary(regard.Dot())).shape
        torch.Size([1, 2, 8, 4])
    """

    potential: Potential = part()
    base: float = 10000.0
    frequencies: Tensor | None = parameter(rank=1, default=None)
    interleaved: bool = False
    positional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check.positive("base", self.base)
        _check.parameter("frequencies", self.frequencies, 1, "(f,)")
        if not isinstance(self.potential, Potential):
            raise ArgumentError(
                "potential",
                f"is a {type(self.potential).__name__}",
                "give the potential whose queries and keys are rotated",
            )

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        queries, keys = self.potential.projections(x, y, x_marks, y_marks)
        if not (isinstance(queries, Tensor) and queries.dtype.is_floating_point):
            name = type(self.potential).__name__
            raise ArgumentError(
                "potential",
                f"{name} has no single projected query to rotate",
                "wrap each term: Rotary(Dot(...)) + Alibi(...)",
            )
        own = self.turns(queries, x_marks)
        other = own if y_marks is x_marks else self.turns(keys, y_marks)
        return self.turn(queries, *own), self.turn(keys, *other)

    def rotate(self, z: Tensor, marks: Tensor) -> Tensor:
        """Each coordinate pair of z (..., n, c) turned by its angle."""
        return self.turn(z, *self.turns(z, marks))

    def turns(self, z: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, (..., n, f)."""
        angle = (
            marks.unsqueeze(-1).double() * self._frequencies(z).double()
        )  # a large angle in float32 has no digits left after the full turns
        kind = torch.promote_types(z.dtype, torch.float32)
        return angle.cos().to(kind), angle.sin().to(kind)

    def turn(self, z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Each coordinate pair of z (..., n, c) turned by angles with these cosines and sines."""
        turning = 2 * cos.shape[-1]
        if self.interleaved:
            a, b = z[..., 0:turning:2], z[..., 1:turning:2]
            turned = torch.stack(_turn_pairs(a, b, cos, sin), -1).flatten(-2)
        else:
            a, b = z[..., : turning // 2], z[..., turning // 2 : turning]
            turned = torch.cat(_turn_pairs(a, b, cos, sin), -1)
        if turning == z.shape[-1]:
            return turned.to(z.dtype)
        rest = z[..., turning:].expand(*turned.shape[:-1], -1)
        return torch.cat([turned, rest.to(turned.dtype)], -1).to(z.dtype)

    def _frequencies(self, z: Tensor) -> Tensor:
        if self.frequencies is None:
            if z.shape[-1] % 2:
                raise ArgumentError(
                    "potential",
                    f"projects to an odd width {z.shape[-1]}",
                    "rotary positions turn pairs: use an even width, or give frequencies",
                )
            pairs = torch.arange(0, z.shape[-1], 2, device=z.device, dtype=torch.float64)
            return self.base ** (-pairs / z.shape[-1])
        if 2 * self.frequencies.shape[-1] > z.shape[-1]:
            raise ArgumentError(
                "frequencies",
                f"turn {2 * self.frequencies.shape[-1]} coordinates of {z.shape[-1]}",
                "give at most half as many as the projected width",
            )
        return self.frequencies

    def pair(self, queries: Features, keys: Features) -> Tensor:
        return self.potential.pair(queries, keys)

    def width(self, queries: Features, keys: Features) -> int:
        return self.potential.width(queries, keys)


def _turn_pairs(a: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) turned by their angles."""
    return torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
