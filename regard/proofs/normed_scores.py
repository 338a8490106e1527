"""Slopes of scores whose queries and keys pass a norm layer: they are bounded everywhere, and steep only
where a projected token is short.

z = wᵀx + b for tokens in B(c, R) has lengths in [ℓ, ρ], r coordinates, and ẑ = z/√(|z|²/r + ε). The
derivative of ẑ in z has norm at most √r/√(ℓ² + rε), and |ẑ| ≤ √r ρ/√(ρ² + rε) ≤ √r: |ẑ| grows with |z|. A
ball is convex, so the feature Mᵀẑ + s has the slope λ = |M| |w| √r/√(ℓ² + rε) on it, is no longer than
|M||ẑ| + |s|, and stays within min(|M||ẑ|, λR) of a point. Rotary positions turn features and keep
their lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard._enclosed import length, lengths, lengths_below, product_norm
from regard._upper import Upper, exact, exact_lower, relative_error, root, sizes
from regard.normed import Normed
from regard.potentials import NormedDot
from regard.proofs.scores import FACTOR, BallFacts, Slopes, slopes, turned_slopes


@dataclass(frozen=True)
class FeatureBounds:
    """Of the queries or of the keys, for tokens in a ball: how fast features change, how long they are, and
    the radius of a ball that holds them. same: whether their derivative is the same at every token.
    """

    slope: Upper
    size: Upper
    around: Upper
    same: bool


@slopes.rule(NormedDot)
def _normed(potential: NormedDot, ball: BallFacts) -> Slopes:
    """v = scale · (Dk_j)ᵀq_i, z = scale · (Dq_i)ᵀk_j."""
    scale, query, key = _sides(potential, ball)
    alpha, reach = scale * key.slope * query.size, scale * query.slope * key.size
    nu = exact(0.0) if key.same else alpha
    return Slopes(alpha, nu, scale * query.slope * key.around, reach, 2 * scale * query.size * key.around, nu)


@turned_slopes.rule(NormedDot)
def _turned(potential: NormedDot, ball: BallFacts) -> Slopes:
    """The same of features that are turned, each pair by an angle of its own."""
    scale, query, key = _sides(potential, ball)
    alpha, reach = scale * key.slope * query.size, scale * query.slope * key.size
    return Slopes(alpha, alpha, reach, reach, 2 * scale * query.size * key.size, alpha)


def _sides(potential: NormedDot, ball: BallFacts) -> tuple[Upper, FeatureBounds, FeatureBounds]:
    query = feature_bounds(potential.w_q, potential.b_q, potential.query, ball)
    key = feature_bounds(potential.w_k, potential.b_k, potential.key, ball)
    return Upper(abs(float(potential.factor(feature_width(potential, len(ball.center))))), FACTOR), query, key


def largest_score(potential: NormedDot) -> Upper | None:
    """At least |score| of any two tokens; None where queries or keys pass no norm."""
    if potential.query is None or potential.key is None:
        return None
    widths = [0 if w is None else int(w.shape[-1]) for w in (potential.w_q, potential.w_k)]
    query, key = (
        longest_feature(norm, width)
        for norm, width in zip((potential.query, potential.key), widths, strict=True)
    )
    return Upper(abs(float(potential.factor(potential.query.width(widths[0])))), FACTOR) * query * key


def longest_feature(norm: Normed, width: int) -> Upper:
    """At least |Mᵀẑ + s| for any z of this width."""
    size = _mixed(norm) * root(width)
    return size if norm.shift is None else size + length(norm.shift.double().expand(norm.width(width)))


def feature_width(potential: NormedDot, width: int) -> int:
    """How wide features are, of tokens of this width."""
    projected = width if potential.w_q is None else int(potential.w_q.shape[-1])
    return projected if potential.query is None else potential.query.width(projected)


def feature_bounds(w: Tensor | None, b: Tensor | None, norm: Normed | None, ball: BallFacts) -> FeatureBounds:
    """Bounds of the feature of one token in the ball."""
    width, steep = len(ball.center) if w is None else w.shape[-1], product_norm(w)
    if norm is None:
        size = steep * ball.reach
        size = size if b is None else size + length(b.double().expand(width))
        return FeatureBounds(steep, size, steep * ball.radius, True)
    everywhere = _lengths(w, b, ball.center.unsqueeze(0), ball.radius)
    here = (
        everywhere if ball.places is None or ball.moves is None else _lengths(w, b, ball.places, ball.moves)
    )
    floor, longest = exact_lower(float(width)) * exact_lower(norm.eps), _mixed(norm) * root(width)
    slope, anywhere = (
        longest * steep / (exact_lower(nearest).square() + floor).sqrt() for nearest, _ in (here, everywhere)
    )
    farthest = here[1]
    size = longest * (exact(farthest) / (exact_lower(farthest).square() + floor).sqrt()).minimum(exact(1.0))
    shifted = size if norm.shift is None else size + length(norm.shift.double().expand(norm.width(width)))
    return FeatureBounds(slope, shifted, size.minimum(anywhere * ball.radius), False)


def _mixed(norm: Normed) -> Upper:
    """At least |diag(gain) u|₂."""
    if norm.gain is None or norm.u is None:
        return product_norm(norm.u) if norm.gain is None else sizes(norm.gain.double()).amax()
    scaled = norm.gain.double().unsqueeze(-1) * norm.u.double()
    return product_norm(scaled) + relative_error(2) * length(scaled)


def _lengths(w: Tensor | None, b: Tensor | None, places: Tensor, moves: Upper) -> tuple[float, float]:
    """At most the smallest and at least the largest |wᵀx + b| for tokens within `moves` of places (n, d)."""
    points = places if w is None else places @ w.double()
    points = points if b is None else points + b.double()
    size = lengths(places) if w is None else (1 + length(w)) * lengths(places)
    size = size if b is None else size + length(b.double().expand(points.shape[-1]))
    spread = product_norm(w) * moves + relative_error(4 * places.shape[-1] + 8) * size
    nearest, farthest = lengths_below(points) - spread, lengths(points) + spread
    return max(0.0, float(nearest.amin())), float(farthest.amax())
