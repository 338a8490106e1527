"""Measure: probability measures with finitely many atoms, batched, with weights in the log domain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._verb import Verb
from regard.errors import ArgumentError

follow = Verb("follow")
"""`measure @ kernel`: the left action; the kernel floor registers its rule."""


@dataclass(frozen=True, eq=False, repr=False)
class Measure(Object):
    """The probability measure Σ_j w_j δ_{x_j}, batched over the leading dimensions.

    points (..., n, d); log_weights (..., n), normalized here, None means uniform, -inf means no mass;
    marks (..., n): positions that travel with their points, None means 0, 1, ..., n-1 where somebody asks.

    Examples:
        >>> mu = regard.Measure(torch.tensor([[0.0], [4.0]]), log_weights=torch.tensor([3.0, 1.0]).log())
        >>> mu.mean().tolist()
        [1.0]
    """

    points: Tensor
    log_weights: Tensor | None = None
    marks: Tensor | None = None

    def __post_init__(self) -> None:
        points = _check.floating("points", self.points)
        if points.ndim < 2:
            raise ArgumentError(
                "points", f"has shape {list(points.shape)}", "give (..., n, d): one row for each atom"
            )
        _check.finite("points", points)
        for name in ("log_weights", "marks"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.ndim < 1 or value.shape[-1] != points.shape[-2]:
                raise ArgumentError(
                    name,
                    f"is {_check.describe(value)}",
                    f"give a tensor (..., {points.shape[-2]}): one entry for each atom",
                )
            _check.same_device(name, value, "points", points)
            _check.broadcast(f"points and {name}", points.shape[:-2], value.shape[:-1])
        if self.log_weights is not None:
            object.__setattr__(
                self, "log_weights", _normalize(_check.floating("log_weights", self.log_weights))
            )
        if self.marks is not None and self.marks.dtype.is_floating_point:
            _check.finite("marks", self.marks)

    @property
    def size(self) -> int:
        """The number of atoms."""
        return self.points.shape[-2]

    @property
    def dimension(self) -> int:
        """The dimension of the space the atoms live in."""
        return self.points.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the batch of measures."""
        shapes = [self.points.shape[:-2]]
        if self.log_weights is not None:
            shapes.append(self.log_weights.shape[:-1])
        return torch.broadcast_shapes(*shapes)

    def log_masses(self) -> Tensor:
        """log w_j (..., n), also where the weights are uniform."""
        if self.log_weights is not None:
            return self.log_weights
        return self.points.new_full(self.points.shape[:-1], -math.log(max(self.size, 1)))

    def masses(self) -> Tensor:
        """w_j (..., n)."""
        return self.log_masses().exp()

    def positions(self) -> Tensor:
        """The marks, or 0, 1, ..., n-1."""
        return self.marks if self.marks is not None else torch.arange(self.size, device=self.points.device)

    def integrate(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """∫ f dμ = Σ_j w_j f(x_j), for f: points (..., n, d) -> (..., n) or (..., n, e).

        Atoms without mass do not count.
        """
        values = function(self.points)
        masses = self.masses()
        if values.ndim >= self.points.ndim:
            masses = masses.unsqueeze(-1)
            return torch.where(masses > 0, masses * values, torch.zeros_like(values)).sum(-2)
        return torch.where(masses > 0, masses * values, torch.zeros_like(values)).sum(-1)

    def push(self, function: Callable[[Tensor], Tensor]) -> Measure:
        """The push-forward f_# μ = Σ_j w_j δ_{f(x_j)}; marks travel along."""
        return Measure(function(self.points), self.log_weights, self.marks)

    def reweight(self, log_potential: Tensor | Callable[[Tensor], Tensor]) -> Measure:
        """The Boltzmann–Gibbs transformation Ψ_G(μ)(dy) = G(y) μ(dy) / μ(G), given log G (vuckovic2020,
        Definition 3).
        """
        shift = log_potential if isinstance(log_potential, Tensor) else log_potential(self.points)
        if shift.ndim < 1 or shift.shape[-1] != self.size:
            raise ArgumentError(
                "log_potential",
                f"has shape {list(shift.shape)}",
                f"give log G at each atom: (..., {self.size})",
            )
        return Measure(self.points, self.log_masses() + shift, self.marks)

    def mix(self, other: Measure, weight: float) -> Measure:
        """The mixture (1 - weight) μ + weight ν; marks must be on both or on neither."""
        if not 0 <= weight <= 1:
            raise ArgumentError(
                "weight", f"is {weight}", "give a number between 0 and 1: the share of the other measure"
            )
        if self.dimension != other.dimension:
            raise ArgumentError(
                "other",
                f"lives in dimension {other.dimension}, this measure in {self.dimension}",
                "mix measures on one space",
            )
        if (self.marks is None) != (other.marks is None):
            raise ArgumentError(
                "other",
                "has marks where this measure has none, or the reverse",
                "give marks to both or to neither",
            )
        batch = _check.broadcast("the mixed measures", self.batch_shape, other.batch_shape)
        shares = (
            math.log1p(-weight) if weight < 1 else -math.inf,
            math.log(weight) if weight > 0 else -math.inf,
        )
        points = torch.cat([p.points.expand(*batch, -1, -1) for p in (self, other)], -2)
        log_weights = torch.cat(
            [(p.log_masses() + s).expand(*batch, -1) for p, s in zip((self, other), shares, strict=True)], -1
        )
        marks = (
            None
            if self.marks is None
            else torch.cat([p.positions().expand(*batch, -1) for p in (self, other)], -1)
        )
        return Measure(points, log_weights, marks)

    def mean(self) -> Tensor:
        """∫ x μ(dx), (..., d)."""
        return self.integrate(lambda x: x)

    def covariance(self) -> Tensor:
        """∫ (x - m)(x - m)ᵀ μ(dx), (..., d, d), from centered atoms, so that nothing cancels."""
        centered = self.points - self.mean().unsqueeze(-2)
        return centered.mT @ (self.masses().unsqueeze(-1) * centered)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` independent points, (..., count, d)."""
        masses = self.masses().expand(*self.batch_shape, -1)
        drawn = torch.multinomial(
            masses.reshape(-1, self.size), count, replacement=True, generator=generator
        ).reshape(*self.batch_shape, count)
        points = self.points.expand(*self.batch_shape, -1, -1)
        return points.gather(-2, drawn.unsqueeze(-1).expand(*drawn.shape, self.dimension))

    def merge(self) -> Measure:
        """The same measure with equal atoms (equal points and equal marks) united. Every integral stays, and
        so does attention with softmax or Sinkhorn; entmax and sigmoid count keys, so for them copies are not
        the same as weight.

        In a batch the counts differ, so the shape stays and the emptied atoms get no mass; without a batch
        they are dropped.
        """
        first = _first_equal(_rows(self))
        slots = first.new_zeros(first.shape).scatter(-1, first, 1).bool()
        log_weights = _log_sum_at(self.log_masses().expand(first.shape), first)
        if len(self.batch_shape) > 0:
            return Measure(self.points, log_weights, self.marks)
        return Measure(
            self.points[slots], log_weights[slots], None if self.marks is None else self.marks[slots]
        )

    def entropy(self) -> Tensor:
        """-Σ_j w_j log w_j over the atoms as they are listed;
        merge() first if equal atoms are to count as one.
        """
        masses = self.masses()
        return -torch.where(masses > 0, masses * self.log_masses(), torch.zeros_like(masses)).sum(-1)

    def kl(self, other: Measure) -> Tensor:
        """KL(μ | ν) on common atoms: ∞ where μ has an atom that ν lacks. Atoms are matched in any order, by
        point, and by mark where both measures have marks.
        """
        if self.dimension != other.dimension:
            raise ArgumentError(
                "other",
                f"lives in dimension {other.dimension}, this measure in {self.dimension}",
                "compare measures on one space",
            )
        if self.marks is None or other.marks is None:
            self, other = (Measure(m.points, m.log_weights) for m in (self, other))
        batch = _check.broadcast("the compared measures", self.batch_shape, other.batch_shape)
        both = torch.cat([_rows(p).expand(*batch, -1, -1) for p in (self, other)], -2)
        first = _first_equal(both)
        mine, theirs = self.log_masses().expand(*batch, -1), other.log_masses().expand(*batch, -1)
        empty = torch.full_like
        mine = _log_sum_at(torch.cat([mine, empty(theirs, -math.inf)], -1), first)
        theirs = _log_sum_at(
            torch.cat([empty(self.log_masses().expand(*batch, -1), -math.inf), theirs], -1), first
        )
        return torch.where(mine > -math.inf, mine.exp() * (mine - theirs), torch.zeros_like(mine)).sum(-1)

    def __matmul__(self, kernel: object) -> Measure | GaussianMeasure:
        """μK, the left action of a kernel."""
        return follow.one(kernel, self)


@dataclass(frozen=True, eq=False, repr=False)
class GaussianMeasure(Object):
    """The Gaussian law N(mean, covariance), batched;
    the covariance may be singular (a Dirac is a Gaussian).

    Examples:
        >>> law = regard.measure.GaussianMeasure(torch.zeros(2), torch.eye(2))
        >>> law.sample(5).shape
        torch.Size([5, 2])
    """

    mean: Tensor
    covariance: Tensor

    def __post_init__(self) -> None:
        _check.floating("mean", self.mean)
        _check.floating("covariance", self.covariance)
        if self.covariance.shape[-2:] != (self.mean.shape[-1],) * 2:
            raise ArgumentError(
                "covariance",
                f"has shape {list(self.covariance.shape)}",
                f"give (..., {self.mean.shape[-1]}, {self.mean.shape[-1]})",
            )

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` independent points, (..., count, d)."""
        values, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        noise = torch.randn(
            *self.mean.shape[:-1],
            count,
            self.mean.shape[-1],
            generator=generator,
            dtype=self.mean.dtype,
            device=self.mean.device,
        )
        return self.mean.unsqueeze(-2) + noise @ root.mT


def dirac(points: Tensor) -> Measure:
    """One Dirac measure at each point: (..., d) -> a batch (...) of measures with one atom.

    Examples:
        >>> regard.measure.dirac(torch.zeros(3, 2)).points.shape  # three measures of one atom each
        torch.Size([3, 1, 2])
    """
    return Measure(points.unsqueeze(-2))


def _normalize(log_weights: Tensor) -> Tensor:
    if _check.holds(torch.isnan(log_weights).any() | (log_weights == math.inf).any()):
        raise ArgumentError(
            "log_weights",
            "has NaN or +inf entries",
            "give logarithms of non-negative finite weights (-inf is zero weight)",
        )
    total = log_weights.logsumexp(-1, keepdim=True)
    if _check.holds((total == -math.inf).any()):
        raise ArgumentError(
            "log_weights",
            "are all -inf in some measure, so its mass is zero",
            "give at least one atom a positive weight",
        )
    return log_weights - total


def _rows(measure: Measure) -> Tensor:
    """Points and marks side by side, (..., n, d [+ 1]): what makes two atoms equal."""
    points = measure.points.expand(*measure.batch_shape, -1, -1)
    if measure.marks is None:
        return points
    marks = measure.marks.to(torch.float64).expand(points.shape[:-1]).unsqueeze(-1)
    return torch.cat([points.to(torch.float64), marks], -1)


def _first_equal(rows: Tensor) -> Tensor:
    """For each row the index of the first row equal to it, (..., n)."""
    flat = rows.detach().reshape(-1, *rows.shape[-2:])
    found = [_first_equal_flat(one) for one in flat]
    return (
        torch.stack(found).reshape(rows.shape[:-1])
        if found
        else flat.new_zeros(rows.shape[:-1], dtype=torch.long)
    )


def _first_equal_flat(rows: Tensor) -> Tensor:
    count = rows.shape[0]
    if count == 0:
        return torch.zeros(0, dtype=torch.long, device=rows.device)
    _, label = torch.unique(rows + 0.0, dim=0, return_inverse=True)  # + 0.0: minus zero equals zero
    order = torch.arange(count, device=rows.device)
    first = torch.full((count,), count, device=rows.device).scatter_reduce(0, label, order, "amin")
    return first[label]


def _log_sum_at(log_values: Tensor, slots: Tensor) -> Tensor:
    """log Σ exp of the values that share a slot, written at that slot; -inf elsewhere."""
    top = torch.full_like(log_values, -math.inf).scatter_reduce(-1, slots, log_values.detach(), "amax")
    base = torch.where(top == -math.inf, torch.zeros_like(top), top)
    total = torch.zeros_like(log_values).scatter_add(-1, slots, (log_values - base.gather(-1, slots)).exp())
    return torch.where(total > 0, total, torch.ones_like(total)).log() + torch.where(
        total > 0, base, torch.full_like(base, -math.inf)
    )
