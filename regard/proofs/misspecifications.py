"""misspecification: how wrong outputs can be when the inputs were wrong,
from the inputs at hand or before there are any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._enclosed import lengths
from regard._upper import Upper, exact, relative_error, sizes
from regard.attention import Attention, as_measure
from regard.certificate import Certificate
from regard.domains import Ball, Domain, Near, Neighborhood, Whole
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.norms import Frobenius, Norm, SequenceNorm, Wasserstein
from regard.proofs.certification import certify
from regard.proofs.nearby_inputs import Pair, balls_around, bounds_nearby, share
from regard.proofs.setting import moves_of
from regard.proofs.theorem import assumed, checked
from regard.transport import distances, transport_plan, wasserstein

Points = Measure | Tensor


@dataclass(frozen=True)
class Misspecification:
    """Two inputs of a map: how far apart they are, how far apart their outputs are, and how far these could
    be at most.

    distance_in is rounded up; distance_out is measured; constant is what the map can amplify at most, on a
    set that holds both inputs; bound is a Certificate of distance_out, whose ladder has constant × distance
    and what theorems say about inputs near the first one.

    Examples:
        >>> layer, x = regard.Attention(regard.Dot()), torch.randn(3, 2, dtype=torch.float64)
        >>> found = regard.proofs.misspecification(layer, x, x + 0.01, norm=regard.TokenMax())
        >>> found.distance_out <= found.bound.value, found.expansion <= found.constant.value
        (True, True)
    """

    norm: Norm
    distance_in: float
    distance_out: float
    constant: Certificate
    bound: Certificate

    @property
    def expansion(self) -> float:
        """How many times farther apart the outputs are than the inputs; below the certified constant,
        always.
        """
        return self.distance_out / self.distance_in if self.distance_in else 0.0

    def __str__(self) -> str:
        lines = (
            f"inputs {self.distance_in:.6g} apart in {self.norm!r}",
            f"outputs {self.distance_out:.6g} apart: {self.expansion:.6g} times the inputs",
            f"certified: {self.bound}",
        )
        return "\n".join(lines)

    __repr__ = __str__


def misspecification(
    map: Any, x: Points, x_other: Points, *, norm: Norm = Wasserstein(1.0), domain: Domain | None = None
) -> Misspecification:
    """What happens to a map's output when its input is x_other in place of x: measured, and bounded by the
    best of constant × distance, all laws that are as near in W₁, tokens that move as far, each in its place,
    and tokens that come and go.

    norm: Wasserstein(p) compares measures with any numbers of atoms, exactly; norms of sequences need equal
    lengths.
    domain: a set that holds both inputs; without one, the best of a few small balls. Sentences of theorems
    that refuse are on the bound.

    Examples:
        >>> x = torch.randn(3, 2, dtype=torch.float64)
        >>> found = regard.proofs.misspecification(regard.Attention(regard.Dot()), x, x[:2])  # a token less
        >>> found.distance_out <= found.bound.value
        True
    """
    first, second = _input("x", map, x, norm), _input("x_other", map, x_other, norm)
    if first.dimension != second.dimension or (isinstance(norm, SequenceNorm) and first.size != second.size):
        found = f"has shape {list(second.points.shape)} and x {list(first.points.shape)}"
        raise ArgumentError(
            "x_other", found, "compare tokens of one width; Wasserstein(p) takes different numbers of tokens"
        )
    before, after = (
        _distance_above(first, second, norm),
        _distance(_output(map, x), _output(map, x_other), norm),
    )
    constants = [certify(map, one, norm) for one in _domains(domain, first, second, norm)]
    constant = min(constants, key=lambda certificate: certificate.value)
    hypotheses = (checked("both inputs are in the domain"), checked("the distance of the inputs"))
    pair = Pair(first, second, before, _output(map, x).size)
    bounds = [_times(constant, before, hypotheses), *bounds_nearby(map, pair, norm)]
    best, *others = sorted(bounds, key=lambda certificate: certificate.value)
    return Misspecification(norm, float(before), after, constant, replace(best, others=tuple(others)))


def apriori(map: Any, domain: Domain, norm: Norm, distance: float) -> Certificate:
    """How far outputs can be apart for any two inputs of the domain that are at most `distance` apart;
    see `replaced_distance` and `dropped_distance`.

    Examples:
        >>> unit = regard.Ball(1.0, tokens=4, width=2)
        >>> bound = regard.proofs.apriori(regard.Attention(regard.Dot()), unit, regard.TokenMax(), 0.1)
        >>> constant = regard.certify(regard.Attention(regard.Dot()), unit, regard.TokenMax())
        >>> 0 < bound.value <= 0.1 * constant.value * 1.001
        True
    """
    if not (isinstance(distance, (int, float)) and 0 <= distance < math.inf):
        raise ArgumentError("distance", f"is {distance!r}", "give a finite number that is not negative")
    hypotheses = (assumed("both inputs are in the domain"), assumed(f"inputs are at most {distance!r} apart"))
    return _times(certify(map, domain, norm), exact(float(distance)), hypotheses)


def replaced_distance(tokens: int, distance: float, p: float = 1.0) -> float:
    """How far in W_p the law of tokens moves, at most, when one of them moves by `distance`:
    distance / n^{1/p}.

    Examples:
        >>> 0.02 <= regard.proofs.replaced_distance(100, distance=2.0) < 0.0201
        True
        >>> 0.2 <= regard.proofs.replaced_distance(100, distance=2.0, p=2.0) < 0.201
        True
    """
    _count("tokens", tokens, 1)
    _not_negative("distance", distance)
    return float(share(exact(distance), tokens, p))


def dropped_distance(tokens: int | Tensor, diameter: float | None = None, p: float = 1.0) -> float:
    """How far in W_p the law of tokens moves, at most, when any one of them is left out: diameter / n^{1/p}.

    tokens: how many there are, or the sequence (n, d) itself, which gives max_i (mean_{j≠i} |x_i - x_j|^p /
    n)^{1/p} and needs no diameter.

    Examples:
        >>> 0.02 <= regard.proofs.dropped_distance(100, diameter=2.0) < 0.0201  # one of a hundred tokens
        True
    """
    if isinstance(tokens, Tensor):
        return float(_worst_drop(Neighborhood(tokens, 0.0).measure.points, p))
    _count("tokens", tokens, 2)
    if diameter is None:
        raise ArgumentError(
            "diameter", "is not given", "say how far apart tokens can be, or give the tokens themselves"
        )
    _not_negative("diameter", diameter)
    return float(share(exact(diameter), tokens, p))


# A priori distances


def _worst_drop(points: Tensor, p: float) -> Upper:
    """The mass 1/n of the token left out goes to the others in equal shares."""
    tokens = len(points)
    _count("tokens", tokens, 2)
    apart = _distances(points, points)
    farthest = apart.amax()
    if math.isinf(p) or float(farthest) == 0:
        return share(farthest, 1, p)
    mean = (_relative(apart).power(p).sum(-1) / (tokens - 1)).amax()
    return share(farthest * mean.inverse_power(p), tokens, p)


def _distances(first: Tensor, second: Tensor) -> Upper:
    """At least the distances of points, (m, n)."""
    return Upper(distances(first, second), 4 * first.shape[-1] + 64)


def _relative(apart: Upper) -> Upper:
    """Distances over the largest bound of them: one where it is attained, so that powers stay in range."""
    return Upper(apart.value / apart.value.amax(), 1)


def _count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(name, f"is {value!r}", f"give how many there are, {least} or more")


def _not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ArgumentError(name, f"is {value!r}", "give a number that is not negative")


# Certificates


def _times(constant: Certificate, distance: Upper, hypotheses: tuple[Any, ...]) -> Certificate:
    value = math.inf if math.isinf(constant.value) else float(Upper(constant.value) * distance)
    why = constant.refused if math.isinf(value) else ()
    theorem = "the constant of the map times the distance of the inputs"
    place, quantity = (constant.domain, constant.norm), "distance of the outputs"
    return Certificate(
        value, *place, theorem, hypotheses, (constant,), why, constant.probability, quantity=quantity
    )


# Inputs, outputs and where they are


def _input(name: str, map: Any, x: Points, norm: Norm) -> Measure:
    """One measure in float64, refused where the map or the norm is not defined for its weights or marks."""
    if not isinstance(norm, (Wasserstein, SequenceNorm)):
        raise ArgumentError(
            "norm", f"is {norm!r}", "give Wasserstein(p), Frobenius(), TokenMax() or TokenSum()"
        )
    measure = as_measure(name, x)
    weighted = measure.log_weights is not None
    if weighted and not (isinstance(map, Attention) and isinstance(norm, Wasserstein)):
        raise ArgumentError(
            name, "has weights", "weights are for an Attention in Wasserstein(p); give the tokens alone"
        )
    if measure.marks is not None and not isinstance(norm, Wasserstein):
        remedy = (
            "give the tokens in order; certify(map, Neighborhood(measure, "
            "radius), norm) knows other positions"
        )
        raise ArgumentError(name, "has marks", remedy)
    return Neighborhood(Measure(measure.points, measure.log_weights), 0.0).measure


def _output(map: Any, x: Points) -> Measure:
    """The law of the outputs, in the precision of the inputs; heads side by side are one wide token."""
    measure = as_measure("x", x)
    found = (
        map(Measure(measure.points, measure.log_weights))
        if measure.log_weights is not None
        else map(measure.points)
    )
    points = (found.points if isinstance(found, Measure) else found).detach()
    joined = points.reshape(-1, *points.shape[-2:]).transpose(0, 1).flatten(1)
    return Measure(joined, measure.log_weights)


def _distance(first: Measure, second: Measure, norm: Norm) -> float:
    if isinstance(norm, Wasserstein):
        return float(wasserstein(first, second, norm.p).detach())
    assert isinstance(norm, SequenceNorm)
    return float(norm.of(first.points - second.points))


def _distance_above(first: Measure, second: Measure, norm: Norm) -> Upper:
    """The distance, rounded up past the rounding of the plan that attains it."""
    if not isinstance(norm, Wasserstein):
        return Upper(_distance(first, second, norm), 4 * first.points.numel() + 64)
    if math.isinf(norm.p):
        return _largest_step(first, second)
    return _cost_above(first, second, norm.p)


def _largest_step(first: Measure, second: Measure) -> Upper:
    """W_∞ from above: a share of mass that rounds to nothing still counts,
    so weights must be none or the same.
    """
    if first.log_weights is None and second.log_weights is None:
        return Upper(float(wasserstein(first, second, math.inf).detach()), 4 * first.dimension + 64)
    if (
        first.log_weights is not None
        and second.log_weights is not None
        and torch.equal(first.log_weights, second.log_weights)
    ):
        return lengths(first.points - second.points, 1).amax()
    remedy = "the last digit of a weight can decide that distance; use a finite p"
    raise ArgumentError("norm", "is Wasserstein(inf) for measures of different weights", remedy)


def _cost_above(first: Measure, second: Measure, p: float) -> Upper:
    """W_p from above: the cost of the plan, and of carrying what its marginals miss across the whole set."""
    plan, apart = transport_plan(first, second, p), _distances(first.points, second.points)
    farthest = apart.amax()
    if float(farthest) == 0:
        return exact(0.0)
    missed = sizes(plan.sum(1) - first.masses()).sum() + sizes(plan.sum(0) - second.masses()).sum()
    carried = (sizes(plan) * _relative(apart).power(p)).where((plan != 0) & (apart.value > 0))
    cost = carried.map(torch.flatten).sum()
    if first.log_weights is not None or second.log_weights is not None or float(missed) > 1e-12:
        cost = cost + 2 * (missed + relative_error(8 * (first.size + second.size) + 64))
    return farthest * cost.inverse_power(p)


def _domains(domain: Domain | None, first: Measure, second: Measure, norm: Norm) -> tuple[Domain, ...]:
    """The given domain, which must hold both inputs, or balls that do."""
    if domain is None:
        return balls_around(
            torch.cat([first.points, second.points]), first.size if isinstance(norm, SequenceNorm) else None
        )
    for measure in (first, second):
        if not _holds(domain, measure.points):
            raise ArgumentError(
                "domain",
                f"does not hold both inputs: {domain!r}",
                "give a larger one, or none: a ball is found then",
            )
    return (domain,)


def _holds(domain: Domain, points: Tensor) -> bool:
    if isinstance(domain, Whole):
        return domain.tokens in (None, len(points))
    if isinstance(domain, Ball):
        center = torch.zeros_like(points[0]) if domain.center is None else domain.center.detach().double()
        return (
            domain.tokens in (None, len(points))
            and float(lengths(points - center, 1).amax()) <= domain.radius
        )
    if isinstance(domain, Near):
        if domain.measure.log_weights is not None or domain.measure.marks is not None:
            raise ArgumentError(
                "domain", "has weights or marks", "the inputs are compared without; give the tokens alone"
            )
        return points.shape == domain.measure.points.shape and _near(domain, points - domain.measure.points)
    raise ArgumentError(
        "domain",
        f"is {domain!r}",
        "give Whole(), Ball(radius), Neighborhood(points, radius) or Radii(points, radii)",
    )


def _near(domain: Near, offsets: Tensor) -> bool:
    if isinstance(domain, Neighborhood) and isinstance(domain.norm, Frobenius):
        return float(lengths(offsets.flatten(), 1)) <= domain.radius
    return bool((lengths(offsets, 1).bound <= moves_of(domain)).all())
