"""Where a token stands: added to its embedding, or part of the score of a pair."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard import _check
from regard._object import Object
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.potentials import Alibi, Logarithmic, RelativeBias, Rotary, XPos


class Positions(Object):
    """How a model knows the order of its tokens. Abstract.

    Examples:
        >>> from regard.nn import AlibiPositions, Design, Encoder, NoPositions, Positions, Sinusoidal
        >>> all(isinstance(one, Positions) for one in (AlibiPositions(), NoPositions(), Sinusoidal()))
        True
        >>> Encoder(Design(8, 2, positions=AlibiPositions()), 1)(torch.randn(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    @abstractmethod
    def added(self, width: int) -> nn.Module | None:
        """A module that gives points (n, width) for positions (n,), added to embeddings;
        None where nothing is added.
        """

    @abstractmethod
    def placed(self, mechanism: Attention, heads: int) -> Attention:
        """The mechanism of self-attention with these positions in its scores."""


@dataclass(frozen=True, eq=False, repr=False)
class NoPositions(Positions):
    """Order does not count: an encoder is then equivariant under permutations.

    Examples:
        >>> from regard.nn import Design, Encoder, NoPositions
        >>> encoder, x = Encoder(Design(8, 2, positions=NoPositions()), 1), torch.randn(1, 3, 8)
        >>> order = [2, 0, 1]
        >>> torch.allclose(encoder(x[:, order]), encoder(x)[:, order], atol=1e-5)  # equivariant
        True
    """

    def added(self, width: int) -> None:
        return None

    def placed(self, mechanism: Attention, heads: int) -> Attention:
        return mechanism


@dataclass(frozen=True, eq=False, repr=False)
class Sinusoidal(Positions):
    """sin and cos of position · base^(-2i/width) are added to embeddings (vaswani2017, 3.5).

    Examples:
        >>> waves = regard.nn.Sinusoidal().added(4)
        >>> waves(torch.arange(2))[0].tolist()  # position 0: sines are 0 and cosines 1
        [0.0, 1.0, 0.0, 1.0]
    """

    base: float = 10000.0

    def __post_init__(self) -> None:
        _check.positive("base", self.base)

    def added(self, width: int) -> nn.Module:
        return Waves(width, self.base)

    def placed(self, mechanism: Attention, heads: int) -> Attention:
        return mechanism


@dataclass(frozen=True, eq=False, repr=False)
class LearnedPositions(Positions):
    """One learned point for each of `longest` positions is added to embeddings.

    Examples:
        >>> table = regard.nn.LearnedPositions(longest=16).added(8)
        >>> sum(parameter.numel() for parameter in table.parameters())
        128
    """

    longest: int

    def __post_init__(self) -> None:
        if not isinstance(self.longest, int) or isinstance(self.longest, bool) or self.longest < 1:
            raise ArgumentError(
                "longest", f"is {self.longest!r}", "give the number of positions, one or more"
            )

    def added(self, width: int) -> nn.Module:
        return LearnedTable(self.longest, width)

    def placed(self, mechanism: Attention, heads: int) -> Attention:
        return mechanism


@dataclass(frozen=True, eq=False, repr=False)
class RotaryPositions(Positions):
    """Queries and keys turn with their positions, so that scores see differences (su2024).

    Examples:
        >>> placed = regard.nn.RotaryPositions().placed(regard.Attention(regard.Dot()), heads=2)
        >>> type(placed.potential).__name__
        'Rotary'
    """

    base: float = 10000.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        _check.positive("base", self.base)

    def added(self, width: int) -> None:
        return None

    def placed(self, mechanism: Attention, heads: int) -> Attention:
        return mechanism.replace(
            potential=Rotary(mechanism.potential, self.base, interleaved=self.interleaved)
        )


@dataclass(frozen=True, eq=False, repr=False)
class XPosPositions(Positions):
    """Queries and keys turn with their positions, and products fade with the distance (sun2023); for
    decoders, whose tokens see their past.

    Examples:
        >>> from regard.nn import Decoder, Design, XPosPositions
        >>> decoder = Decoder(Design(8, 2, positions=XPosPositions(reach=64.0)), 1, cross=False)
        >>> decoder(torch.randn(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    base: float = 10000.0
    reach: float = 512.0

    def __post_init__(self) -> None:
        _check.positive("base", self.base)
        _check.positive("reach", self.reach)

    def added(self, width: int) -> None:
        return None

    def placed(self, mechanism: Attention, heads: int) -> Attention:
        if mechanism.support.span(0, 0)[1] > 0:
            found = "fade with distance into the past, and would grow for the later tokens that are seen here"
            raise ArgumentError("positions", found, "use them in decoders, or RotaryPositions()")
        return mechanism.replace(potential=XPos(mechanism.potential, self.base, self.reach))


@dataclass(frozen=True, eq=False, repr=False)
class AlibiPositions(Positions):
    """Scores fall with distance, at a slope that is fixed for each head (press2022).

    Examples:
        >>> placed = regard.nn.AlibiPositions().placed(regard.Attention(regard.Dot()), heads=2)
        >>> [type(term).__name__ for term in placed.potential.terms]
        ['Dot', 'Alibi']
    """

    def added(self, width: int) -> None:
        return None

    def placed(self, mechanism: Attention, heads: int) -> Attention:
        return mechanism.replace(potential=mechanism.potential + Alibi.heads(heads))


@dataclass(frozen=True, eq=False, repr=False)
class RelativePositions(Positions):
    """A learned bias for each head and each bucket of differences (raffel2020, 2.1).

    Every layer has a table of its own.

    Examples:
        >>> from regard.nn import Design, Encoder, RelativePositions
        >>> encoder = Encoder(Design(8, 2, positions=RelativePositions(buckets=8)), 2)
        >>> [tuple(p.shape) for p in encoder.parameters() if p.shape == (2, 8)]  # a table for each layer
        [(2, 8), (2, 8)]
    """

    buckets: int = 32
    farthest: int = 128

    def __post_init__(self) -> None:
        for name, value in (("buckets", self.buckets), ("farthest", self.farthest)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 2:
                raise ArgumentError(name, f"is {value!r}", "give a whole number, two or more")

    def added(self, width: int) -> None:
        return None

    def placed(self, mechanism: Attention, heads: int) -> Attention:
        later = mechanism.support.span(0, 0)[1] > 0
        self._check_room(later)
        table = nn.Parameter(torch.zeros(heads, self.buckets))
        bias = RelativeBias(table, Logarithmic(self.buckets, self.farthest, bidirectional=later))
        return mechanism.replace(potential=mechanism.potential + bias)

    def _check_room(self, later: bool) -> None:
        """Half of the buckets of a direction are single differences,
        the others reach from there to the farthest.
        """
        single = self.buckets // 4 if later else self.buckets // 2
        if not single:
            raise ArgumentError(
                "buckets", f"is {self.buckets}, where tokens see both directions", "give four or more"
            )
        if self.farthest <= single:
            found = f"is {self.farthest}, and {single} buckets are single differences already"
            raise ArgumentError("farthest", found, f"give more than {single}, or fewer buckets")


class Waves(nn.Module):
    """sin and cos of positions, side by side in each pair of coordinates, in float64."""

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        if width % 2:
            raise ArgumentError(
                "width", f"is {width}", "sinusoidal positions come in pairs: use an even width"
            )
        self.width, self.base = width, base

    def forward(self, positions: Tensor) -> Tensor:
        pairs = torch.arange(0, self.width, 2, device=positions.device, dtype=torch.float64)
        angle = positions.unsqueeze(-1) * self.base ** (-pairs / self.width)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


class LearnedTable(nn.Module):
    """Points (longest, width) that are looked up."""

    def __init__(self, longest: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(longest, width))
        nn.init.normal_(self.weight, std=1.0)

    def forward(self, positions: Tensor) -> Tensor:
        longest = len(self.weight)
        last = positions.shape[-1] and int(positions[..., -1].max())
        if last >= longest:
            raise ArgumentError(
                "ids",
                f"reach position {last} and {longest} positions are learned",
                f"give at most {longest} tokens, or other positions",
            )
        return self.weight[positions]
