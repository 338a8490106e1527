"""Maps that act on each token alone: how steep they are around a token,
and how far a token that moves is carried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import maps
from regard._round import gamma, outward, product_norm_bound, vector_norm_bound
from regard._verb import Verb
from regard.domains import Ball, Domain, Near, Neighborhood, Shell, TokenSet
from regard.norms import EntryMax, Frobenius, Norm, TokenSum
from regard.proofs.setting import moves_of, shell_radius
from regard.proofs.theorem import Refusal

SLACK = 1 + 1e-12
"""A factor that is larger than what roundings of a few thousand operations can add."""


@dataclass(frozen=True)
class Travel:
    """For tokens i in balls: `slopes` (n,) is at least the constant on ball i,
    `moves` (n,) how far the value moves.
    """

    slopes: Tensor
    moves: Tensor


travel = Verb("travel")
"""travel.one(map, points (n, d), radii (n,)) -> Travel, for maps of one token."""

steepness = Verb("steepness")
"""steepness.one(activation) -> at least its Lipschitz constant."""


@steepness.rule(maps.Activation)
def _unknown(activation: maps.Activation) -> float:
    name = type(activation).__name__
    raise Refusal(f"nothing is known of the slope of {name}; add a rule with @steepness.rule({name})")


@steepness.rule(maps.Relu)
@steepness.rule(maps.Tanh)
def _unit(activation: maps.Activation) -> float:
    return 1.0


@steepness.rule(maps.Gelu)
def _gelu(activation: maps.Gelu) -> float:
    """The suprema are 1.12890414... and 1.12899310...."""
    return 1.12900 if activation.tanh else 1.12891


@steepness.rule(maps.Silu)
def _silu(activation: maps.Silu) -> float:
    """x σ(sx) = φ(sx)/s with φ = x σ(x), so every slope s has the supremum 1.09983932... of φ'."""
    return 1.09984


def growth(activation: maps.Activation) -> tuple[float, float]:
    """k and m with |activation(z)| ≤ k|z| + m."""
    if isinstance(activation, (maps.Relu, maps.Gelu, maps.Silu, maps.Tanh)):
        return 1.0, 0.0
    zero = activation(torch.zeros(1, dtype=torch.float64))
    return float(steepness.one(activation)), outward(abs(float(zero)))


# How far a token is carried


@travel.rule(object)
def _not_tokenwise(map: Any, points: Tensor, radii: Tensor) -> Travel:
    raise Refusal(f"{type(map).__name__} does not act on each token alone")


@travel.rule(maps.Affine)
def _affine(map: maps.Affine, points: Tensor, radii: Tensor) -> Travel:
    return _straight(product_norm_bound(map.w), radii)


@travel.rule(maps.Pointwise)
def _pointwise(map: maps.Pointwise, points: Tensor, radii: Tensor) -> Travel:
    return _straight(float(steepness.one(map.activation)), radii)


@travel.rule(maps.Normalize)
def _normalize(map: maps.Normalize, points: Tensor, radii: Tensor) -> Travel:
    """|N(x') - N(x)| ≤ min(max|γ| r / √(low² + eps), |N(x') - β| + |N(x) - β|)."""
    low, high = deviations(map, points, radii)
    refuse_jump(map, float(low.min()))
    top = largest_weight(map)
    slopes = top * SLACK / (low.square() + map.eps).sqrt()
    here = deviations(map, points, torch.zeros_like(radii))[1]
    saturated = (
        top * SLACK * (hat_length(map, high, points.shape[-1]) + hat_length(map, here, points.shape[-1]))
    )
    return Travel(slopes, torch.where(radii > 0, torch.minimum(slopes * radii * SLACK, saturated), 0.0))


@travel.rule(maps.Gated)
def _gated(map: maps.Gated, points: Tensor, radii: Tensor) -> Travel:
    """|w_out| (k|w| max|gate| + max|activation| |w_gate|), the maxima over entries and over the ball."""
    inner, gate = entries(map.w, map.b, points, radii), entries(map.w_gate, map.b_gate, points, radii)
    factor, offset = growth(map.activation)
    first = steepness.one(map.activation) * product_norm_bound(map.w) * gate.amax(-1)
    second = (factor * inner.amax(-1) + offset) * product_norm_bound(map.w_gate)
    slopes = product_norm_bound(map.w_out) * (first + second) * SLACK
    return Travel(slopes, torch.where(radii > 0, slopes * radii * SLACK, 0.0))


def _straight(slope: float, radii: Tensor) -> Travel:
    return Travel(torch.full_like(radii, slope), torch.where(radii > 0, slope * radii * SLACK, 0.0))


# What the rules need


def lengths(points: Tensor) -> Tensor:
    """At least the length of each token."""
    return points.norm(dim=-1) * SLACK


def entries(w: Tensor, b: Tensor | None, points: Tensor, radii: Tensor) -> Tensor:
    """At least |(wᵀx + b)_c| for x in the balls, (n, c)."""
    w, b = w.detach().double(), None if b is None else b.detach().double()
    rounding = gamma(2 * len(w) + 8) * affine_size(w, b, points)
    return (
        maps.Affine(w, b)(points).abs() + rounding.unsqueeze(-1) + radii.unsqueeze(-1) * w.norm(dim=0) * SLACK
    ) * SLACK


def affine_size(w: Tensor, b: Tensor | None, points: Tensor) -> Tensor:
    """|w|_F |x_i| + |b|: what roundings of wᵀx_i + b are relative to."""
    offset = 0.0 if b is None else vector_norm_bound(b)
    return vector_norm_bound(w) * lengths(points) + offset


def largest_weight(map: maps.Normalize) -> float:
    """max|γ|."""
    return 1.0 if map.weight is None else float(map.weight.detach().double().abs().max())


def deviations(map: maps.Normalize, points: Tensor, radii: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds from below and above of the root mean square of x - mean (of x, for RMSNorm) over the balls."""
    points = points.double()
    width = points.shape[-1]
    away = points - points.mean(-1, keepdim=True) if map.centered else points
    size = away.norm(dim=-1) / math.sqrt(width)
    rounding = gamma(2 * width + 8) * lengths(points) if map.centered else 0.0
    reach = radii / math.sqrt(width) * SLACK + rounding
    return ((size / SLACK - reach) / SLACK).clamp_min(0.0), (size * SLACK + reach) * SLACK


def refuse_jump(map: maps.Normalize, least: float) -> None:
    """Refuse a norm layer without eps where a token may be its own mean (zero, for RMSNorm):
    it has no value there.
    """
    if map.eps > 0 or least > 0:
        return
    if map.centered:
        remedy = "use eps > 0, or Shell(inner) with inner > 0, about the mean of each token"
        raise Refusal(f"with eps = 0 LayerNorm jumps at constant tokens; {remedy}")
    raise Refusal(
        "with eps = 0 RMSNorm jumps at zero; use eps > 0, or Shell(inner, centered=False) with inner > 0"
    )


def hat_length(map: maps.Normalize, deviation: Tensor, width: int) -> Tensor:
    """At least |x̂| = √width s/√(s² + eps), which grows with the deviation s; never more than √width."""
    full = math.sqrt(width) * SLACK
    fraction = torch.where(deviation > 0, 1 / (1 + map.eps / deviation.square()).sqrt(), 0.0)
    return (full * fraction.nan_to_num(1.0) * SLACK).clamp(max=full)


def ball_of(domain: Domain, width: int) -> tuple[Tensor, Tensor] | None:
    """The center (1, width) and radius (1,) of a ball that holds the tokens; None where there is none."""
    if isinstance(domain, Shell) and math.isfinite(radius := shell_radius(domain, width)):
        domain = Ball(radius, None, domain.tokens)
    if not isinstance(domain, Ball):
        return None
    center = (
        torch.zeros(width, dtype=torch.float64) if domain.center is None else domain.center.detach().double()
    )
    return center.unsqueeze(0), torch.tensor([float(domain.radius)], dtype=torch.float64)


def least_deviation(map: maps.Normalize, domain: Domain) -> float:
    """At most the root mean square of x - mean over all tokens of the domain."""
    if isinstance(
        domain, Shell
    ):  # |x|² = |x - mean|² + d mean²: far from the mean is far from zero, not the converse
        return float(domain.inner) if domain.centered or not map.centered else 0.0
    if isinstance(domain, Near):
        return float(deviations(map, domain.measure.points, moves_of(domain))[0].min())
    ball = ball_of(domain, 1) if isinstance(domain, Ball) and domain.center is not None else None
    return 0.0 if ball is None else float(deviations(map, *ball)[0])


def normalize_width(map: maps.Normalize, domain: Domain) -> int:
    """The width of a token, from the weights or from the domain."""
    if isinstance(domain, Near):
        return int(domain.measure.points.shape[-1])
    for known in (domain.center if isinstance(domain, Ball) else None, map.weight, map.bias):
        if known is not None:
            return len(known)
    raise Refusal(
        "the width of a token is not known here; give the domain a center, e.g. Ball(radius, "
        "torch.zeros(d)), or the norm layer a weight"
    )


def hat_radius(map: maps.Normalize, domain: TokenSet, width: int) -> float:
    """At least |x̂| over the domain: √d, or less where the tokens hardly differ from their mean."""
    if isinstance(domain, Shell):
        if domain.centered and not map.centered:  # the mean of a token is free
            return math.sqrt(width) * SLACK
        outer = torch.tensor([outward(float(domain.outer))], dtype=torch.float64)
        return float(hat_length(map, outer, width))
    ball = ball_of(domain, width)
    if ball is None:
        return math.sqrt(width) * SLACK
    return float(hat_length(map, deviations(map, *ball)[1], width))


def length_of_moves(domain: Near, found: Travel, norm: Norm) -> float:
    """How far the sequence moves in a norm when each token is carried by at most `moves`,
    or by `slopes` times its own move.
    """
    if isinstance(norm, Frobenius):
        return min(vector_norm_bound(found.moves), _longest_shared(domain, found))
    if isinstance(norm, TokenSum):
        return min(
            outward(float(found.moves.sum())),
            outward(math.sqrt(len(found.moves)) * _longest_shared(domain, found)),
        )
    return float(
        found.moves.max()
    )  # TokenMax; EntryMax and Wasserstein distances of matched tokens are not larger


def _longest_shared(domain: Near, found: Travel) -> float:
    """A Frobenius ball shares its radius among the tokens: max slope × radius."""
    if isinstance(domain, Neighborhood) and isinstance(domain.norm, Frobenius):
        return outward(float(found.slopes.max()) * float(domain.radius))
    return math.inf


def refuse_entries(norm: Norm, what: str) -> None:
    """Refuse EntryMax: a constant for the lengths of tokens does not bound single entries."""
    if isinstance(norm, EntryMax):
        raise Refusal(f"{what} is bounded in lengths of tokens, not entry by entry; use TokenMax()")
