"""Moments: how the law of values becomes an output. encode: law -> moments, embed:
moments -> a law of the moment subspace.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.kernel import AnyLaw, Kernel
from regard.measure import GaussianMeasure, Measure, dirac
from regard.parameters import shared


class Moment(Kernel):
    """The projection Π = embed ∘ encode of a law on the moment subspace (vuckovic2020,
    Definitions 6 and 7).

    Examples:
        >>> law = regard.Measure(torch.tensor([[0.0], [2.0]]))
        >>> isinstance(regard.Mean(), regard.moments.Moment), regard.Mean().encode(law).tolist()
        (True, [1.0])
    """

    @abstractmethod
    def encode(self, law: Measure) -> Any:
        """The moments of each law of the batch."""

    @abstractmethod
    def embed(self, moments: Any) -> AnyLaw:
        """The law of the moment subspace with these moments."""

    def __call__(self, points: Tensor, marks: Tensor | None = None) -> AnyLaw:
        """Π at a point is Π of the Dirac law there."""
        return self.after(dirac(points))

    def after(self, law: Measure) -> AnyLaw:
        """Π acts on the whole law, not atom by atom: it is where attention is nonlinear."""
        return self.embed(self.encode(law))


@dataclass(frozen=True, eq=False, repr=False)
class Mean(Moment):
    """Π(ν) = δ_{∫ v ν(dv)}: ordinary attention.

    Examples:
        >>> regard.Attention(regard.Dot(), moment=regard.Mean())(torch.tensor([[0.0], [0.0]])).tolist()
        [[0.0], [0.0]]
    """

    def encode(self, law: Measure) -> Tensor:
        return law.mean()

    def embed(self, moments: Tensor) -> Measure:
        return dirac(moments)


@dataclass(frozen=True, eq=False, repr=False)
class Law(Moment):
    """Π(ν) = ν: the whole law, no projection.

    Examples:
        >>> x = torch.randn(4, 2)
        >>> regard.Attention(regard.Dot(), moment=regard.Law()).kernel(x)(x).size  # atoms, not their mean
        4
    """

    def encode(self, law: Measure) -> Measure:
        return law

    def embed(self, moments: Measure) -> Measure:
        return moments


@dataclass(frozen=True, eq=False, repr=False)
class SecondMoment(Moment):
    """Π(ν) = N(mean, covariance): the Gaussian with the same first two moments.

    Examples:
        >>> x = torch.randn(6, 2)
        >>> regard.Attention(regard.Dot(), moment=regard.SecondMoment()).kernel(x)(x).covariance.shape
        torch.Size([6, 2, 2])
    """

    def encode(self, law: Measure) -> tuple[Tensor, Tensor]:
        return law.mean(), law.covariance()

    def embed(self, moments: tuple[Tensor, Tensor]) -> GaussianMeasure:
        return GaussianMeasure(*moments)


@dataclass(frozen=True, eq=False, repr=False)
class Mode(Moment):
    """Π(ν) = δ at the heaviest atom, the first of equals: hard attention.

    Examples:
        >>> hard = regard.Attention(regard.Dot(), moment=regard.Mode())
        >>> hard(torch.tensor([[1.0], [3.0]])).tolist()
        [[3.0], [3.0]]
    """

    def encode(self, law: Measure) -> Tensor:
        return pick(law.points, law.log_masses().argmax(-1))

    def embed(self, moments: Tensor) -> Measure:
        return dirac(moments)


@dataclass(frozen=True, eq=False, repr=False)
class Sample(Moment):
    """Π(ν) = δ at one atom drawn from ν: stochastic hard attention.

    Examples:
        >>> drawn = regard.Attention(regard.Dot(), moment=regard.Sample(torch.Generator().manual_seed(0)))
        >>> bool((drawn(torch.tensor([[1.0], [1.0]])) == 1).all())
        True
    """

    generator: torch.Generator | None = shared(default=None)

    def encode(self, law: Measure) -> Tensor:
        return law.sample(1, self.generator).squeeze(-2)

    def embed(self, moments: Tensor) -> Measure:
        return dirac(moments)


def pick(points: Tensor, index: Tensor) -> Tensor:
    """The atom (..., d) at an index (...) in each law's points (..., n, d).

    Examples:
        >>> regard.moments.pick(torch.tensor([[1.0], [5.0]]), torch.tensor(1)).tolist()
        [5.0]
    """
    points = points.expand(*index.shape, *points.shape[-2:])
    return points.gather(-2, index[..., None, None].expand(*index.shape, 1, points.shape[-1])).squeeze(-2)
