"""Sets of moves by their widths in all directions: |a·e| ≤ (aᵀQa)^{1/2}, and sums of such sets (M1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, near_largest_roots
from regard._upper import UNIT, Lower, Upper, exact, relative_error, root, sizes
from regard.proofs.ball_model.updates import Map, Update, half_products, push_error, symmetric_products

SMALLEST = 1e-140
"""No weight of a sum is less, so that what is nothing may be divided by it."""


def lifted(shape: Tensor, error: Upper) -> Tensor:
    """Q̃ + error I, no less than any Q within `error` (...,) of Q̃ in spectral norm, and than its symmetric
    part.
    """
    return lift(shape.clone(), error)


def lift(shape: Tensor, error: Upper) -> Tensor:
    """The same, in the place of a tensor that nobody else has."""
    for one in _flat(shape):
        one.copy_((one + one.mT).mul_(0.5))  # a matrix at a time stays in the cache
    added = (error + Upper(4 * UNIT) * computed_lengths(shape.flatten(-2))).bound
    shape.diagonal(dim1=-2, dim2=-1).add_(added.unsqueeze(-1))
    return shape


def pushed(matrix: Map, shape: Tensor) -> Tensor:
    """M Q Mᵀ, no less than the true one."""
    error = push_error(matrix, computed_lengths(shape.flatten(-2)))
    return lift(turned(matrix, shape), error)


def turned(matrix: Map, shape: Tensor) -> Tensor:
    """M Q Mᵀ as computed."""
    if isinstance(matrix, Update):
        return matrix.push(shape)
    return symmetric_products(matrix @ shape, matrix.expand(len(shape), -1, -1))


def ball_shape(lengths: Upper, width: int) -> Tensor:
    """All moves that are at most so long, (n,)."""
    return lengths.square().bound[..., None, None] * torch.eye(width, dtype=torch.float64)


def no_shape(n: int, width: int) -> Tensor:
    """Nothing moves."""
    return torch.zeros(n, width, width, dtype=torch.float64)


def widths(shape: Tensor, directions: Tensor) -> Upper:
    """At least (aᵀQa)^{1/2} for directions (n or 1, d, m), (n, m)."""
    squares = torch.stack(
        [_squares(one, by) for one, by in zip(shape, directions.expand(len(shape), -1, -1), strict=True)]
    )
    lengths = computed_lengths(directions.mT)
    rounding = relative_error(2 * shape.shape[-1] + 4) * computed_lengths(shape.flatten(-2)).unsqueeze(-1)
    return (Upper(squares) + rounding * lengths.square()).sqrt()


def _squares(shape: Tensor, directions: Tensor) -> Tensor:
    """aᵀQa of one token for directions (d, m)."""
    return half_products(shape, directions).mul_(directions).sum(0).mul_(2.0).clamp_min_(0.0)


def longest(shape: Tensor) -> Upper:
    """At least |e|, for each token: λ_max(Q)^{1/2}."""
    return near_largest_roots(shape)


def trace_roots(shapes: Tensor) -> Upper:
    """At least tr(Q)^{1/2}."""
    return Upper(_traces(shapes).clamp_min(0.0).sqrt(), shapes.shape[-1] + 4)


def roundest(shapes: Tensor) -> Upper:
    """At least |e|, without an eigenvalue: no more than the largest sum of a row, which is exact for balls,
    or than tr(Q)^{1/2}.
    """
    rows = sizes(shapes).sum(-1).amax(-1).sqrt()
    return rows.minimum(trace_roots(shapes))


@dataclass(frozen=True)
class Diagonal:
    """Sets of moves Σ_k c_k m_k along given columns m_k, whose lengths are at most `lengths` (m,): Σ_k D_k
    m_k m_kᵀ with D = `entries` (n, m), for the weights whose sum is `weight` (n,). size: at least its trace.
    """

    lengths: Tensor
    weight: Tensor
    entries: Tensor
    size: Upper

    def segments(self, halves: Upper) -> Diagonal:
        """|c_k| ≤ halves (n, m)."""
        half = halves.bound
        weights = (half * self.lengths).clamp_min(SMALLEST)
        return self._with(Upper(weights).sum(-1), half * (half / weights))

    def gram(self, factors: Upper, radius: Upper) -> Diagonal:
        """c_k = f_k w_k with |f_k| ≤ factors (n, m) and |w| ≤ radius (n,)."""
        f, far = factors.bound, radius.bound
        weight = (far * torch.linalg.vector_norm(f * self.lengths, dim=-1)).clamp_min(SMALLEST)
        return self._with(Upper(weight), (far.square() / weight).unsqueeze(-1) * f.square())

    def _with(self, weight: Upper, entries: Tensor) -> Diagonal:
        size = (Upper(entries, 8) * Upper(self.lengths.square(), 1)).sum(-1)
        return Diagonal(
            self.lengths, (Upper(self.weight) + weight).bound, self.entries + entries, self.size + size
        )

    @property
    def reach(self) -> Upper:
        """At least how long the moves are: the root of the trace of their ellipsoid."""
        return (Upper(self.weight) * self.size).sqrt()

    def better(self, other: Diagonal) -> Diagonal:
        """For each token the smaller of two: the trace of a sum is the square of its weight."""
        return self.where(self.weight <= other.weight, other)

    def where(self, mine: Tensor, other: Diagonal) -> Diagonal:
        """Another for tokens (n,) where `mine` is false."""
        return Diagonal(
            self.lengths,
            torch.where(mine, self.weight, other.weight),
            torch.where(mine.unsqueeze(-1), self.entries, other.entries),
            Upper(torch.where(mine, self.size.bound, other.size.bound)),
        )


def no_diagonal(n: int, mixing: Tensor) -> Diagonal:
    """No move along the columns of mixing (d, m)."""
    none = torch.zeros(n, dtype=torch.float64)
    lengths = computed_lengths(mixing.mT).bound
    return Diagonal(lengths, none, none.unsqueeze(-1).expand(-1, len(lengths)), exact(none))


def _traces(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _flat(matrices: Tensor) -> Tensor:
    """(…, a, b) as (m, a, b)."""
    return matrices.reshape(-1, *matrices.shape[-2:])


class Sum:
    """The ellipsoid of a sum of sets of moves: (Σ s_k)(Σ Q_k/s_k) for any weights s_k > 0 (M1).

    Weights are the lengths tr(Q_k)^{1/2}: many segments in random directions then cost (π/2)^{1/2}, where
    boxes cost the root of the width. With a `metric` MᵀM (1, d, d) they are those after the map M that comes
    next. Tokens may be those of several heads, (h, n), each with a metric.
    """

    def __init__(self, n: int | tuple[int, ...], width: int, metric: Tensor | None = None) -> None:
        tokens = n if isinstance(n, tuple) else (n,)
        self._metric = metric
        self._weight = torch.full(tokens, SMALLEST, dtype=torch.float64)
        whole = self._weight.new_tensor(width) if metric is None else _traces(metric)
        self._metric_root = whole.sqrt()
        self._matrix = torch.zeros(*tokens, width, width, dtype=torch.float64)
        self._error = Upper(torch.zeros(tokens, dtype=torch.float64))
        self._size = Upper(torch.zeros(tokens, dtype=torch.float64))
        self._count = 1

    def shape(self, shape: Tensor, factor: Upper | None = None) -> Sum:
        """A set with this shape (n, d, d), every move of it times a number that is at most `factor` (n,)."""
        times = torch.ones_like(self._weight) if factor is None else factor.bound
        weight = (times * self._roots(shape)).clamp_min(SMALLEST)
        self._matrix.addcmul_((times.square() / weight)[..., None, None], shape)
        size = Upper(times.square() / weight, 3) * computed_lengths(shape.flatten(-2))
        return self._counted(weight, size)

    def gram(self, columns: Tensor, factor: Upper) -> Sum:
        """V w with |w| ≤ factor (n,), for matrices V (n, d, p) whose entries may be rounded twice."""
        times, whole = factor.bound, computed_lengths(columns.flatten(-2))
        weight = (times * whole.value).clamp_min(SMALLEST)
        scale = times.square() / weight
        for one, matrix, number in zip(_flat(columns), _flat(self._matrix), scale.flatten(), strict=True):
            if bool(number):
                matrix.addmm_(number * one, one.mT)
        self._counted(weight, Upper(scale, 3) * whole.square(), columns.shape[-1])
        return self.ball(relative_error(2) * whole * factor)

    def ball(self, radius: Upper) -> Sum:
        """Any move that is at most so long, (n,)."""
        width = self._matrix.shape[-1]
        size = radius.bound.clamp_min(SMALLEST)
        weight = size * self._metric_root
        self._matrix.diagonal(dim1=-2, dim2=-1).add_((size.square() / weight).unsqueeze(-1))
        return self._counted(weight, Upper(size.square() / weight, 3) * root(width))

    def segments(self, columns: Tensor) -> Sum:
        """Σ_k c_k v_k with |c_k| ≤ 1 for the columns v_k of (n, d, p), whose entries may be rounded twice."""
        turned = columns if self._metric is None else self._metric @ columns
        weights = (columns * turned).sum(-2).clamp_min(0.0).sqrt().clamp_min(SMALLEST)
        _flat(self._matrix).baddbmm_(_flat(columns / weights.unsqueeze(-2)), _flat(columns).mT)
        size = (Upper(columns.square().sum(-2)) / Lower(weights)).sum(-1)
        size = Upper(size.value, size.roundings + columns.shape[-2] + 2)
        self._counted(Upper(weights).sum(-1).bound, size, columns.shape[-1])
        return self.ball(relative_error(2) * computed_lengths(columns.mT).sum(-1))

    def diagonal(self, mixing: Tensor, parts: Diagonal) -> Sum:
        """Moves Σ_k c_k m_k along the columns m_k of mixing (d, m), as `parts` say."""
        for i in (parts.entries != 0).any(-1).nonzero().flatten().tolist():
            entries = parts.entries[i]
            more = symmetric_products((entries * mixing).unsqueeze(0), mixing.unsqueeze(0))[0]
            self._matrix[i] += more
        return self._counted(parts.weight, parts.size, 2 * mixing.shape[-1] + 16)

    def mixture(self, factors: Upper, shapes: Tensor, lengths: Upper, terms: int) -> Sum:
        """Σ_j f_ij e_j for each row i, with |f_ij| ≤ factors (n, m), e_j in ellipsoids of shapes (m, d, d),
        whose lengths are tr^{1/2}; each shape is off by at most `terms` roundings of that length squared.
        """
        weights, times = self._roots(shapes).clamp_min(SMALLEST), factors.bound
        weights = weights.unsqueeze(-2)
        matrix = torch.einsum("...ij,...jab->...iab", times / weights, shapes)
        size = (Upper(times / weights, 1) * lengths.square().unsqueeze(-2)).sum(-1)
        error = relative_error(terms + weights.shape[-1] + 12) * size
        return self.add(Upper(times * weights, 1).sum(-1).bound + SMALLEST, matrix, error)

    def _roots(self, shapes: Tensor) -> Tensor:
        """About tr(MQMᵀ)^{1/2}; any weights are sound."""
        if self._metric is None:
            return _traces(shapes).clamp_min(0.0).sqrt()
        return (shapes * self._metric).sum((-2, -1)).clamp_min(0.0).sqrt()

    def add(self, weight: Tensor, matrix: Tensor, error: Upper) -> Sum:
        """What another sum has gathered: Σ s_k, Σ Q_k/s_k and what rounding may have changed in it."""
        self._matrix.add_(matrix)
        self._error = self._error + error
        return self._counted(weight, computed_lengths(matrix.flatten(-2)))

    def _counted(self, weight: Tensor, size: Upper, terms: int = 1) -> Sum:
        self._weight = self._weight + weight
        self._error = self._error + relative_error(terms + 8) * size
        self._size = self._size + size
        self._count += 1
        return self

    def better(self, other: Sum) -> Sum:
        """For each token the smaller of two sums."""
        mine = self.trace <= other.trace
        found = Sum(tuple(self._weight.shape), self._matrix.shape[-1])
        found._weight = torch.where(mine, self._weight, other._weight)
        found._matrix = torch.where(mine[..., None, None], self._matrix, other._matrix)
        found._error, found._size = (
            Upper(torch.where(mine, a.bound, b.bound))
            for a, b in ((self._error, other._error), (self._size, other._size))
        )
        found._count = max(self._count, other._count)
        return found

    @property
    def trace(self) -> Tensor:
        """About the trace of the shape."""
        return self._weight * _traces(self._matrix)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Upper]:
        """Σ s_k, Σ Q_k/s_k and what rounding may have changed in it, for `add`."""
        return self._weight, self._matrix, self._error

    def done(self) -> Tensor:
        """The shape of the sum (n, d, d)."""
        weight = Upper(self._weight, self._count + 2)
        shape = weight.bound[..., None, None] * self._matrix
        return lift(shape, weight * (self._error + relative_error(self._count + 4) * self._size))
