"""Two inputs of a map: what theorems about inputs near the first say of the distance of the outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._enclosed import lengths
from regard._upper import Upper, exact_lower
from regard.certificate import Certificate
from regard.domains import Ball, Edited, NearbyLaws, Radii, Vocabulary
from regard.measure import Measure
from regard.norms import Frobenius, Norm, TokenMax, TokenSum, Wasserstein
from regard.proofs.certification import deviation
from regard.proofs.setting import middle


@dataclass(frozen=True)
class Pair:
    """Both inputs, at least their distance, and how many tokens the outputs of the first have."""

    first: Measure
    second: Measure
    apart: Upper
    outputs: int

    @property
    def weighted(self) -> bool:
        """Whether one of them has weights."""
        return self.first.log_weights is not None or self.second.log_weights is not None


def bounds_nearby(map: Any, pair: Pair, norm: Norm) -> list[Certificate]:
    """All laws as near in W₁, tokens that move as far, tokens that come and go: bounds that are finite."""
    found = []
    if isinstance(norm, Wasserstein) and norm.p == 1.0:
        found += [_as_bound(name, deviation(map, laws, norm), norm) for name, laws in _laws(pair).items()]
        found += [
            _as_bound("tokens that come and go", deviation(map, edit, norm), norm) for edit in _edits(pair)
        ]
    if not pair.weighted and pair.first.size == pair.second.size:
        found.append(_in_place(map, pair, norm))
    return [certificate for certificate in found if math.isfinite(certificate.value)]


def share(length: Upper, tokens: int, p: float) -> Upper:
    """length / n^{1/p}."""
    Wasserstein(p)  # p is checked there
    return length if math.isinf(p) else length / exact_lower(tokens).inverse_power(p)


def _laws(pair: Pair) -> dict[str, NearbyLaws]:
    """All laws that are as near to the first as the second is: on a ball that holds both, and those whose
    mass stays or goes to tokens of the second, which is one of them.
    """
    points = torch.cat([pair.first.points, pair.second.points])
    smallest = min(balls_around(points, None), key=lambda ball: ball.radius)
    apart = float(pair.apart)
    return {
        "all laws as near in W₁": NearbyLaws(pair.first, apart, smallest),
        "all laws as near in W₁, on the tokens of both": NearbyLaws(
            pair.first, apart, Vocabulary(pair.second.points)
        ),
    }


def _in_place(map: Any, pair: Pair, norm: Norm) -> Certificate:
    """Token i moves to token i: W_p ≤ (Σ |Δ_i|^p / n)^{1/p} ≤ max |Δ_i|, for the tokens of the outputs."""
    radii = lengths(pair.second.points - pair.first.points, 1).bound
    known: dict[float, Norm] = {1.0: TokenSum(), 2.0: Frobenius()}
    by_law = isinstance(norm, Wasserstein)
    p = norm.p if isinstance(norm, Wasserstein) and norm.p in known else math.inf
    matched = known.get(p, TokenMax()) if by_law else norm
    found = deviation(map, Radii(pair.first.points, radii), matched)
    finite = by_law and math.isfinite(found.value)
    value = float(share(Upper(found.value), pair.outputs, p)) if finite else found.value
    return _as_bound("tokens that move as far, each in its place", found, norm, value)


def _edits(pair: Pair) -> list[Edited]:
    """The edit that makes the second of the first: what is between a common beginning and a common end goes
    and comes. None where no token stays.
    """
    if pair.weighted:
        return []
    first, second = pair.first.points, pair.second.points
    least = min(len(first), len(second))
    head = _common(first[:least], second[:least])
    tail = _common(first[head:].flip(0)[: least - head], second[head:].flip(0)[: least - head])
    gone, come = range(head, len(first) - tail), second[head : len(second) - tail]
    if head + tail == 0 or not (len(gone) or len(come)):
        return []
    return [Edited(first, tuple(gone), len(come), Vocabulary(come) if len(come) else None)]


def _common(first: Tensor, second: Tensor) -> int:
    """How many tokens are equal before one is not."""
    same = (first == second).all(-1)
    return len(same) if bool(same.all()) else int(same.int().argmin())


def _as_bound(name: str, found: Certificate, norm: Norm, value: float | None = None) -> Certificate:
    """A deviation from the first input, as a bound of the distance of the outputs."""
    return Certificate(
        found.value if value is None else value,
        found.domain,
        norm,
        name,
        found.hypotheses,
        (found,),
        probability=found.probability,
        quantity="distance of the outputs",
    )


def balls_around(points: Tensor, tokens: int | None) -> tuple[Ball, ...]:
    """Balls that hold all points: about the origin, their mean, the middle of their box,
    and nearly the smallest one.
    """
    centers = (
        torch.zeros_like(points[0]),
        points.mean(0),
        0.5 * (points.amax(0) + points.amin(0)),
        middle(points),
    )
    return tuple(Ball(float(lengths(points - center, 1).amax()), center, tokens) for center in centers)
