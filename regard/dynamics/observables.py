"""Observables: numbers of a measure, asked along a trajectory."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard.attention import Attention
from regard.compute import Fourier
from regard.compute.application import problem_of
from regard.compute.selection import select_within
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.norms import Wasserstein
from regard.potentials import Dot
from regard.transport import wasserstein

PAIRS = 1 << 22
"""How many pairs of particles are compared at once."""


class Observable(Object):
    """A number of a measure, and of the one that the flow began with. Abstract.

    Examples:
        >>> from regard.dynamics import MeanCosine, Observable, Radius
        >>> here = regard.Measure(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        >>> isinstance(Radius(), Observable), [one.number(here, here) for one in (Radius(), MeanCosine())]
        (True, [1.0, 0.0])
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The head of its column."""

    @abstractmethod
    def number(self, now: Measure, begin: Measure) -> float:
        """The number."""


@dataclass(frozen=True, eq=False, repr=False)
class Energy(Observable):
    """E_β(μ) = (1/2β) ∬ e^{β⟨x,y⟩} μ(dx) μ(dy), which never falls along SA and USA on the sphere
    (geshkovski2023).

    Examples:
        >>> here = regard.Measure(torch.zeros(2, 2))
        >>> regard.dynamics.Energy(beta=1.0).number(here, here)  # e⁰/2
        0.5
    """

    beta: float

    def __post_init__(self) -> None:
        _check.number("beta", self.beta)
        if self.beta == 0:
            raise ArgumentError("beta", "is 0", "give another number: the energy is divided by it")

    @property
    def name(self) -> str:
        return f"energy({self.beta:g})"

    def number(self, now: Measure, begin: Measure) -> float:
        masses = now.masses()
        if now.size**2 > PAIRS:
            return float(masses @ self._means(now)) / (2 * self.beta)
        kernel = (self.beta * now.points @ now.points.mT).exp()
        return float(masses @ kernel @ masses) / (2 * self.beta)

    def _means(self, now: Measure) -> Tensor:
        """∫ e^{β⟨x,y⟩} μ(dy) at every particle, (n,): log-sum-exps of attention, by a series where that pays
        (relative error at most 1e-9), else from all pairs.
        """
        problem = problem_of(Attention(Dot(scale=self.beta)), now.replace(points=now.points.double()), None)
        with torch.no_grad():
            energy = select_within(problem, Fourier(1e-9)).free_energy()
        return (energy - math.log(now.size)).exp().to(now.points)


@dataclass(frozen=True, eq=False, repr=False)
class Clusters(Observable):
    """How many groups there are, where two particles belong together if a chain of particles leads from one
    to the other whose neighbors have a cosine of at least `cosine`.

    Examples:
        >>> here = regard.Measure(torch.tensor([[1.0, 0.0], [1.0, 0.01], [0.0, 1.0]]))
        >>> regard.dynamics.Clusters(cosine=0.99).number(here, here)
        2.0
    """

    cosine: float = 0.99

    def __post_init__(self) -> None:
        _check.between("cosine", self.cosine, -1.0, 1.0)

    @property
    def name(self) -> str:
        return "clusters"

    def number(self, now: Measure, begin: Measure) -> float:
        return float(len(self.labels(now).unique()))

    def labels(self, measure: Measure) -> Tensor:
        """For each particle the first one of its group, (n,)."""
        unit = torch.nn.functional.normalize(measure.points.detach(), dim=-1)
        if measure.dimension == 2 and bool(unit.any(-1).all()):
            return _arcs(unit, math.acos(self.cosine))
        labels = torch.arange(measure.size, device=unit.device)
        while True:
            least = torch.cat(
                [
                    torch.where(unit[rows] @ unit.mT >= self.cosine, labels, labels[rows, None]).amin(-1)
                    for rows in _blocks(measure.size)
                ]
            )
            least = least[least]  # chains halve
            if torch.equal(least, labels):
                return labels
            labels = least


@dataclass(frozen=True, eq=False, repr=False)
class Entropy(Observable):
    """-Σ_c m_c log m_c over the masses m_c of clusters: its exponential is how many there are, counted by
    their mass.

    Examples:
        >>> here = regard.Measure(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> import math
        >>> math.isclose(regard.dynamics.Entropy().number(here, here), math.log(2), rel_tol=1e-6)
        True
    """

    cosine: float = 0.99

    def __post_init__(self) -> None:
        _check.between("cosine", self.cosine, -1.0, 1.0)

    @property
    def name(self) -> str:
        return "entropy"

    def number(self, now: Measure, begin: Measure) -> float:
        masses = now.masses()
        shares = torch.zeros_like(masses).index_add(0, Clusters(self.cosine).labels(now), masses)
        return float(torch.special.entr(shares).sum())


@dataclass(frozen=True, eq=False, repr=False)
class Radius(Observable):
    """max_i |x_i - mean|.

    Examples:
        >>> here = regard.Measure(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
        >>> regard.dynamics.Radius().number(here, here)
        1.0
    """

    @property
    def name(self) -> str:
        return "radius"

    def number(self, now: Measure, begin: Measure) -> float:
        return float(torch.linalg.vector_norm(now.points - now.mean(), dim=-1).max())


@dataclass(frozen=True, eq=False, repr=False)
class EffectiveRank(Observable):
    """exp of the entropy of the squares of the singular values, normalized (roy2007): one where all
    particles are parallel. Weighted particles count by their mass.

    Examples:
        >>> parallel, square = regard.Measure(torch.ones(3, 2)), regard.Measure(torch.eye(2))
        >>> [round(regard.dynamics.EffectiveRank().number(one, one), 3) for one in (parallel, square)]
        [1.0, 2.0]
    """

    @property
    def name(self) -> str:
        return "effective rank"

    def number(self, now: Measure, begin: Measure) -> float:
        squares = torch.linalg.svdvals(now.masses().sqrt().unsqueeze(-1) * now.points).square()
        total = float(squares.sum())
        return float(torch.special.entr(squares / total).sum().exp()) if total > 0 else math.nan


@dataclass(frozen=True, eq=False, repr=False)
class MeanCosine(Observable):
    """∬ cos(x, y) μ(dx) μ(dy) = |∫ x/|x| dμ|²: the mean cosine of two particles, each drawn by itself; one
    where all point the same way.

    Examples:
        >>> opposite = regard.Measure(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        >>> regard.dynamics.MeanCosine().number(opposite, opposite)
        0.0
    """

    @property
    def name(self) -> str:
        return "mean cosine"

    def number(self, now: Measure, begin: Measure) -> float:
        unit = torch.nn.functional.normalize(now.points, dim=-1)
        return float((now.masses() @ unit).square().sum())


@dataclass(frozen=True, eq=False, repr=False)
class Hull(Observable):
    """The mean over directions u of the support function max_i ⟨u, x_i⟩ of the convex hull;
    directions (k, d).

    Examples:
        >>> here = regard.Measure(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        >>> regard.dynamics.Hull(torch.eye(2)).support(here).tolist()
        [1.0, 3.0]
    """

    directions: Tensor

    def __post_init__(self) -> None:
        _check.parameter("directions", self.directions, 2, "(k, d)")

    @property
    def name(self) -> str:
        return "hull"

    def support(self, measure: Measure) -> Tensor:
        """max_i ⟨u, x_i⟩ for each direction, (k,)."""
        return (self.directions.to(measure.points) @ measure.points.mT).amax(-1)

    def number(self, now: Measure, begin: Measure) -> float:
        return float(self.support(now).mean())


@dataclass(frozen=True, eq=False, repr=False)
class Moved(Observable):
    """How far the measure is from where it began, e.g. in Wasserstein(2).

    Examples:
        >>> start, end = regard.Measure(torch.zeros(2, 1)), regard.Measure(torch.ones(2, 1))
        >>> regard.dynamics.Moved(regard.Wasserstein(2)).number(end, start)
        1.0
    """

    norm: Wasserstein = Wasserstein()

    def __post_init__(self) -> None:
        if not isinstance(self.norm, Wasserstein):
            raise ArgumentError("norm", f"is a {type(self.norm).__name__}", "give Wasserstein(p)")

    @property
    def name(self) -> str:
        return f"W{self.norm.p:g} moved"

    def number(self, now: Measure, begin: Measure) -> float:
        return float(wasserstein(now, begin, self.norm.p))


def _arcs(unit: Tensor, angle: float) -> Tensor:
    """Groups of points of the circle: neighbors whose angle is at most this belong together."""
    turn, order = torch.atan2(unit[:, 1], unit[:, 0]).sort()
    gaps = torch.cat([turn[:1] + 2 * math.pi - turn[-1:], turn.diff()])
    groups = (gaps > angle + 4 * torch.finfo(unit.dtype).eps).cumsum(0)
    groups = groups % groups[-1].clamp_min(1)  # what precedes the first gap belongs to the last group
    labels = torch.empty_like(order).scatter_(0, order, groups)
    places = torch.arange(len(order), device=order.device)
    return torch.full_like(order, len(order)).scatter_reduce(0, labels, places, "amin")[labels]


def _blocks(count: int) -> list[slice]:
    rows = max(PAIRS // max(count, 1), 1)
    return [slice(begin, begin + rows) for begin in range(0, count, rows)]
