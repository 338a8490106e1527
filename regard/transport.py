"""Transport: how far two measures are apart, as the least cost of moving one into the other.

On a line sorting is enough; elsewhere POT solves the linear program. Marks take no part: the distance is
between points.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from regard import _check
from regard._kinds import names_wrong_kinds
from regard.errors import ArgumentError, ConvergenceWarning, MissingExtraError, RefusalError
from regard.measure import Measure

_DUST = 1e-12
"""Shares of mass below this are rounding of the weights; measures without weights have no dust,
their shares are integers.
"""


@names_wrong_kinds
def wasserstein(mu: Measure | Tensor, nu: Measure | Tensor, p: float = 1.0) -> Tensor:
    """W_p(μ, ν) = (min over couplings of ∫ |x - y|^p)^{1/p}, exact up to rounding; p = ∞ is the largest step
    (villani2009, Definition 6.1).

    A Tensor (n, d) means the uniform measure on its rows; the numbers of atoms may differ. Batches broadcast.
    The gradient in the points is that of the cost under the optimal plan, which is exact where that plan is
    the only one; weights have none.

    Examples:
        >>> float(regard.wasserstein(torch.zeros(3, 1), torch.full((2, 1), 2.0)))
        2.0
    """
    first, second, batch = _pair(mu, nu, p)
    _refuse_learned_weights(mu=mu, nu=nu)
    found = [
        _length(a, b, _solve(a, b, p), p)
        for a, b in zip(_flat(first, batch), _flat(second, batch), strict=True)
    ]
    return torch.stack(found).reshape(batch) if found else torch.zeros(batch, dtype=torch.float64)


def _refuse_learned_weights(**measures: Measure | Tensor) -> None:
    """A plan that is held fixed says nothing of weights: better no answer than the gradient zero."""
    for name, measure in measures.items():
        weights = measure.log_weights if isinstance(measure, Measure) else None
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            found = "has weights that require a gradient, but only points get one here"
            raise ArgumentError(name, found, "detach them, log_weights.detach(), or move points, not masses")


def transport_plan(mu: Measure | Tensor, nu: Measure | Tensor, p: float = 1.0) -> Tensor:
    """An optimal coupling of two measures: masses (n, m),
    rows sum to the weights of μ and columns to those of ν.

    Examples:
        >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.1], [0.1]])
        >>> regard.transport.transport_plan(x, y).tolist()  # each goes to the near one
        [[0.0, 0.5], [0.5, 0.0]]
    """
    first, second, batch = _pair(mu, nu, p)
    if len(batch):
        raise ArgumentError("mu and nu", f"have batch shape {list(batch)}", "give one pair of measures")
    plan = _solve(first, second, p)
    return plan / plan.sum()


def entropic_wasserstein(
    mu: Measure | Tensor,
    nu: Measure | Tensor,
    p: float = 1.0,
    regularization: float = 1e-2,
    iterations: int = 10_000,
) -> Tensor:
    """An estimate of W_p, not a bound: the cost of the coupling that minimizes ∫ |x - y|^p + regularization ·
    KL (cuturi2013, 3).

    Its plan is a coupling up to the tolerance of the iteration, so it is mostly above W_p; p must be finite.
    It has no gradient; wasserstein has one.

    Examples:
        >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]])
        >>> round(float(regard.transport.entropic_wasserstein(x, y)), 3), float(regard.wasserstein(x, y))
        (2.0, 2.0)
    """
    first, second, batch = _pair(mu, nu, p)
    _check.positive("regularization", regularization)
    if math.isinf(p):
        raise ArgumentError(
            "p",
            "is infinity",
            "an entropic estimate needs a finite p; wasserstein(mu, nu, math.inf) is exact",
        )
    pairs = zip(_flat(first, batch), _flat(second, batch), strict=True)
    return torch.tensor(
        [_entropic(a, b, p, regularization, iterations) for a, b in pairs], dtype=torch.float64
    ).reshape(batch)


def distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j| (n, m) in float64, from differences: products would lose the digits of near points.

    Examples:
        >>> regard.transport.distances(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])).tolist()
        [[5.0]]
    """
    return torch.cdist(x.detach().double(), y.detach().double(), compute_mode="donot_use_mm_for_euclid_dist")


# What is compared


def _pair(mu: Measure | Tensor, nu: Measure | Tensor, p: float) -> tuple[Measure, Measure, torch.Size]:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not p >= 1:
        raise ArgumentError("p", f"is {p!r}", "give a number of at least 1; infinity is allowed")
    first, second = _measure("mu", mu), _measure("nu", nu)
    if first.dimension != second.dimension:
        raise ArgumentError(
            "nu",
            f"lives in dimension {second.dimension} and mu in {first.dimension}",
            "compare measures on one space",
        )
    return first, second, _check.broadcast("mu and nu", first.batch_shape, second.batch_shape)


def _measure(name: str, value: Measure | Tensor) -> Measure:
    if not isinstance(value, (Measure, Tensor)):
        raise ArgumentError(
            name,
            f"is a {type(value).__name__}",
            "give a Measure, or a Tensor (n, d) for the uniform measure on its rows",
        )
    measure = value if isinstance(value, Measure) else Measure(value)
    if not measure.size:
        raise ArgumentError(name, "has no atoms", "give at least one")
    weights = None if measure.log_weights is None else measure.log_weights.detach().double().cpu()
    return Measure(measure.points.double().cpu(), weights)


def _flat(measure: Measure, batch: torch.Size) -> list[Measure]:
    points = measure.points.expand(*batch, -1, -1).reshape(-1, measure.size, measure.dimension)
    if measure.log_weights is None:
        return [Measure(one) for one in points]
    weights = measure.log_weights.expand(*batch, -1).reshape(-1, measure.size)
    return [Measure(one, weight) for one, weight in zip(points, weights, strict=True)]


def shares(mu: Measure, nu: Measure) -> tuple[Tensor, Tensor, float]:
    """The masses of both measures with one common total, and the share of it that counts as none.

    Without weights they are integers, lcm(n, m)/n and lcm(n, m)/m, so that sums and comparisons are exact.

    Examples:
        >>> mu, nu = regard.Measure(torch.zeros(2, 1)), regard.Measure(torch.zeros(3, 1))
        >>> [part.tolist() for part in regard.transport.shares(mu, nu)[:2]]  # six in all, whole numbers
        [[3.0, 3.0], [2.0, 2.0, 2.0]]
    """
    if mu.log_weights is None and nu.log_weights is None:
        total = math.lcm(mu.size, nu.size)
        first, second = (
            torch.full((one.size,), float(total // one.size), dtype=torch.float64) for one in (mu, nu)
        )
        return first, second, 0.0
    first, second = mu.masses(), nu.masses()
    return first, second * (first.sum() / second.sum()), _DUST


# How it is solved: plans (n, m) with the total of `shares`


def _solve(mu: Measure, nu: Measure, p: float) -> Tensor:
    a, b, dust = shares(mu, nu)
    if mu.dimension == 1:
        return _staircase(mu.points.detach().squeeze(-1), nu.points.detach().squeeze(-1), a, b, dust)
    apart = distances(mu.points, nu.points)
    return _bottleneck(apart, a, b, dust) if math.isinf(p) else _program(_powers(apart, p), a, b)


def _length(mu: Measure, nu: Measure, plan: Tensor, p: float) -> Tensor:
    """(Σ plan |x - y|^p)^{1/p} over the largest distance that is used, so that no power leaves the range;
    differentiable in the points. Where points meet, the gradient of their distance is zero.
    """
    rows, columns = (plan > 0).nonzero(as_tuple=True)
    apart = torch.linalg.vector_norm(mu.points[rows] - nu.points[columns], dim=-1)
    largest = apart.detach().max()
    if math.isinf(p) or not float(largest):
        return apart.max()
    shares = plan[rows, columns] / plan.sum()
    return largest * (shares * (apart / largest) ** p).sum() ** (1 / p)


def _powers(apart: Tensor, p: float) -> Tensor:
    return (apart / apart.max().clamp_min(1e-300)) ** p


def _staircase(x: Tensor, y: Tensor, a: Tensor, b: Tensor, dust: float) -> Tensor:
    """The coupling of quantile functions, optimal on a line for every p (santambrogio2015, Chapter 2)."""
    order, other = x.argsort(), y.argsort()
    ends, others = a[order].cumsum(0), b[other].cumsum(0)
    levels = torch.cat([ends, others]).clamp(max=float(min(ends[-1], others[-1]))).sort().values
    widths = torch.diff(levels, prepend=levels.new_zeros(1))
    middles = levels - widths / 2
    rows = order[torch.searchsorted(ends, middles).clamp(max=len(x) - 1)]
    columns = other[torch.searchsorted(others, middles).clamp(max=len(y) - 1)]
    kept = torch.where(widths > dust, widths, torch.zeros_like(widths))
    return torch.zeros(len(x), len(y), dtype=torch.float64).index_put((rows, columns), kept, accumulate=True)


def _program(cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The linear program of transport, by the network simplex of POT."""
    try:
        import ot
    except ImportError:
        raise MissingExtraError("POT", "transport") from None
    keep, others = a > 0, b > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it would say is read from its log
        inner, log = ot.emd(
            a[keep].numpy(),
            b[others].numpy(),
            cost[keep][:, others].contiguous().numpy(),
            numItermax=10**8,
            log=True,
        )
    _require_solution(log)
    plan = torch.zeros_like(cost)
    plan[keep.nonzero(), others.nonzero().mT] = torch.as_tensor(inner)
    return plan


def _require_solution(log: dict[str, Any]) -> None:
    if log["result_code"] != 1:
        raise RefusalError("wasserstein", [f"POT did not solve the linear program: {log['warning']}"])


def _bottleneck(apart: Tensor, a: Tensor, b: Tensor, dust: float) -> Tensor:
    """The least r for which steps of at most r can move everything:
    bisection over the distances that occur.
    """
    levels = apart[a > 0][:, b > 0].unique()
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _mass_beyond(_within(apart, levels[middle], a, b), apart, levels[middle]) > dust:
            low = middle + 1
        else:
            high = middle
    plan = _within(apart, levels[high], a, b)
    return torch.where(apart <= levels[high], plan, torch.zeros_like(plan))


def _within(apart: Tensor, level: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _program((apart > level).double(), a, b)


def _mass_beyond(plan: Tensor, apart: Tensor, level: Tensor) -> float:
    """The mass that cannot be moved by steps of at most `level`."""
    return float(plan[apart > level].sum())


def _entropic(mu: Measure, nu: Measure, p: float, regularization: float, iterations: int) -> float:
    cost, log_a, log_b = (
        distances(mu.points, nu.points) ** p / regularization,
        mu.log_masses(),
        nu.log_masses(),
    )
    potential = torch.zeros_like(log_b)
    for _ in range(iterations):
        other = -torch.logsumexp(log_b + potential - cost, -1)
        plan = (log_a.unsqueeze(-1) + log_b + other.unsqueeze(-1) + potential - cost).exp()
        if float((plan.sum(-2) - log_b.exp()).abs().sum()) < 1e-9:
            break
        potential = -torch.logsumexp(log_a.unsqueeze(-1) + other.unsqueeze(-1) - cost, -2)
    else:
        message = (
            f"the entropic plan is not a coupling after {iterations} iterations; take a larger "
            "regularization or more iterations"
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
    return float((plan * cost * regularization).sum()) ** (1 / p)
