"""Where tokens are, as theorems see it: balls that hold them, how many there are,
what fixed biases their pairs have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._enclosed import Numbers, length, lengths
from regard._upper import Upper, exact, relative_error, root, sizes
from regard.attention import log_counts
from regard.domains import (
    Ball,
    Box,
    Domain,
    Edited,
    Hull,
    Near,
    NearbyLaws,
    Neighborhood,
    Radii,
    Shell,
    Whole,
)
from regard.parameters import walk
from regard.potentials import Potential, SoftCap
from regard.potentials.base import linear_terms, of_terms
from regard.potentials.positions import PositionPotential
from regard.proofs.scores import BallFacts
from regard.proofs.subject import Head
from regard.proofs.theorem import OUT_OF_RANGE, Refusal
from regard.supports import Full


def width_of(domain: Domain) -> int | None:
    """The width of a token, where the domain says it."""
    if isinstance(domain, Ball):
        return None if domain.center is None else len(domain.center)
    if isinstance(domain, Edited):
        return int(domain.points.shape[-1])
    return int(domain.measure.points.shape[-1]) if isinstance(domain, (Near, NearbyLaws)) else None


def tokens_of(domain: Domain) -> int | None:
    """How many tokens there are, where the domain says it."""
    return int(domain.measure.size) if isinstance(domain, Near) else domain.tokens  # type: ignore[attr-defined]


def moves_of(domain: Near) -> Tensor:
    """How far each token may move."""
    if isinstance(domain, Radii):
        return domain.radii.double()
    if isinstance(domain, Box):
        return (exact(domain.radii.double()) * root(domain.measure.points.shape[-1])).bound
    if isinstance(domain, Hull):
        moves = torch.zeros(domain.measure.size, dtype=torch.float64)
        moves[domain.token] = lengths(domain.corners - domain.corners[0], 1).amax().bound
        return moves
    assert isinstance(domain, Neighborhood)
    return torch.full((domain.measure.size,), float(domain.radius), dtype=torch.float64)


def balls_of(domain: Domain, width: int) -> list[BallFacts]:
    """Balls that hold every token; any of them may be used."""
    origin = torch.zeros(width, dtype=torch.float64)
    if isinstance(domain, Whole):
        return [BallFacts(origin, Upper(math.inf), Upper(math.inf))]
    if isinstance(domain, Shell):
        radius = shell_radius(domain, width)
        return [BallFacts(origin, radius, radius)]
    if isinstance(domain, Ball):
        center, radius = (
            origin if domain.center is None else domain.center.detach().double(),
            radius_of(domain),
        )
        return [BallFacts(center, radius, length(center) + radius)]
    assert isinstance(domain, Near)
    points, moves = domain.measure.points, exact(moves_of(domain))
    reach = (lengths(points) + moves).amax()
    centers = (origin, points.mean(0), 0.5 * (points.amax(0) + points.amin(0)))
    return [BallFacts(center, (lengths(points - center, 1) + moves).amax(), reach) for center in centers]


def middle(points: Tensor, steps: int = 200) -> Tensor:
    """Nearly the center of the smallest ball that holds points: steps of 1/k towards the farthest
    (badoiu2003).
    """
    center = points.mean(0)
    for step in range(1, steps + 1):
        farthest = points[(points - center).norm(dim=-1).argmax()]
        center = center + (farthest - center) / (step + 1)
    return center


def radius_of(domain: Ball | Neighborhood) -> Upper:
    """The radius, which is given and exact."""
    return exact(float(domain.radius))


def finite_ball(radius: Upper, center: Tensor | None, tokens: int | None) -> Ball:
    """A ball whose radius and center were computed; a refusal where they left the range of numbers."""
    if not math.isfinite(radius) or not (center is None or bool(torch.isfinite(center).all())):
        raise Refusal(OUT_OF_RANGE)
    return Ball(float(radius), center, tokens)


def shell_radius(domain: Shell, width: int) -> Upper:
    """At least the length of a token: √d · outer about zero; about their means tokens are anywhere."""
    return Upper(math.inf) if domain.centered else root(width) * exact(float(domain.outer))


def pair_bias(head: Head, domain: Domain) -> Tensor | None:
    """The fixed bias B (n, n) of pairs: positions, masks (-inf), log-counts.

    None where there is none at all.
    """
    support = head.attention.support
    measure = domain.measure if isinstance(domain, Near) else None
    weights = None if measure is None else log_counts(measure)
    positional = positions_of(head.potential)
    if positional is None and weights is None and isinstance(support, Full):
        return None
    tokens = tokens_of(domain)
    if tokens is None:
        raise Refusal(
            "masks and position biases depend on how many tokens there are; say "
            "it, e.g. Ball(radius, tokens=n)"
        )
    marks = torch.arange(tokens) if measure is None else measure.positions()
    points = torch.zeros(tokens, 1, dtype=torch.float64)
    bias = torch.zeros(tokens, tokens, dtype=torch.float64)
    bias = bias if positional is None else bias + positional.scores(points, points, marks, marks).double()
    bias = bias if weights is None else bias + weights.unsqueeze(-2)
    bias = bias.masked_fill(~support.allows(marks, marks).expand(tokens, tokens), -math.inf)
    if not bool((bias < math.inf).all()):
        raise Refusal(
            "a bias of a pair is infinite or not a number; give numbers, or -inf for what is hidden"
        )
    if bool((bias.amax(-1) == -math.inf).any()):
        raise Refusal("some query sees no key, so its row is not a law; remove it from the sequence")
    return bias


def equivariant(head: Head, domain: Domain, remedy: str = "use TokenMax() or Frobenius()") -> None:
    """Refuse what looks at positions: a law of tokens does not know them."""
    parts = [part for part in walk(head.potential) if isinstance(part, Potential)]
    if any(part.positional for part in parts) or not isinstance(head.attention.support, Full):
        raise Refusal(f"masks and positions are not functions of the law of tokens; {remedy}")
    for part in parts:
        if part.positional is None:
            name = type(part).__name__
            line = "positional: ClassVar[bool] = False"
            raise Refusal(f"{name} does not say whether it looks at marks; if not, write `{line}` in {name}")


def positions_of(potential: Potential) -> Potential | None:
    """The part of a potential that only looks at positions."""
    terms = linear_terms(potential)
    for term, _ in terms:
        if not isinstance(term, PositionPotential) and any(
            isinstance(part, PositionPotential) for part in walk(term)
        ):
            what = "a soft cap" if isinstance(term, SoftCap) else type(term).__name__
            remedy = "add the bias outside: SoftCap(Dot(), cap) + Alibi(...)"
            raise Refusal(f"{what} over a position bias has no theorem; {remedy}")
    return of_terms([(term, factor) for term, factor in terms if isinstance(term, PositionPotential)])


def crowding(head: Head, domain: Domain, osc: Upper, queries: int | None = None) -> Upper:
    """N = max_j Σ_i sup P_ij, when scores of a row differ by at most `osc` beside the fixed biases.

    sup P_ij = 1/(1 + Σ_{k≠j} exp(B_ik - B_ij - osc)); without biases N = n/(1 + (n - 1) exp(-osc)).
    """
    bias = pair_bias(head, domain)
    tokens = tokens_of(domain)
    if bias is None and tokens is None:
        raise Refusal(
            "this bound grows with the number of tokens; say how many there are, e.g. Ball(radius, "
            "tokens=n), or use TokenMax()"
        )
    if bias is None:
        assert tokens is not None
        return exact(tokens if queries is None else queries) / (1 + (tokens - 1) * osc.exp_minus())
    seen = bias > -math.inf
    scores = Numbers(bias - bias.amax(-1, keepdim=True), bias_error(bias))
    weights = scores.exp()
    others = scores.exp_low().sum().unsqueeze(-1) - weights
    return (exact(1.0) / (1 + osc.exp_minus() * (others / weights))).where(seen).sum(0).amax()


def bias_error(bias: Tensor) -> Upper:
    """How far computed biases, and differences of them, may be from the true ones:
    a few units of the largest.
    """
    return relative_error(BIAS) * (1 + sizes(torch.where(bias > -math.inf, bias, 0.0)).amax())


BIAS = 64
"""Roundings that a fixed bias may have, relative to the largest one and to one."""
