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
from regard._enclosed import Vectors, half_diameters, length, lengths, lengths_below, product_norm
from regard._upper import ELEMENTARY, Lower, Upper, exact, exact_lower, relative_error, root, sizes
from regard._verb import Verb
from regard.domains import Ball, Domain, Near, Neighborhood, Shell, TokenSet
from regard.nonexpansive import Center, GroupSort, IntoBall, MemoryStep
from regard.norms import EntryMax, Frobenius, Norm, TokenSum
from regard.proofs.setting import moves_of, radius_of, shell_radius
from regard.proofs.theorem import Refusal

ACTIVATION = 1024
"""Roundings that an activation may have, relative to its argument."""


@dataclass(frozen=True)
class Travel:
    """For tokens i in balls: `slopes` (n,) is at least the constant on ball i,
    `moves` (n,) how far the value moves.
    """

    slopes: Upper
    moves: Upper


travel = Verb("travel")
"""travel.one(map, points (n, d), radii (n,)) -> Travel, for maps of one token."""

steepness = Verb("steepness")
"""steepness.one(activation) -> at least its Lipschitz constant."""


@steepness.rule(maps.Activation)
def _unknown(activation: maps.Activation) -> Upper:
    name = type(activation).__name__
    raise Refusal(f"nothing is known about the slope of {name}; add a rule with @steepness.rule({name})")


@steepness.rule(maps.Relu)
@steepness.rule(maps.Tanh)
def _unit(activation: maps.Activation) -> Upper:
    return exact(1.0)


@steepness.rule(maps.Gelu)
def _gelu(activation: maps.Gelu) -> Upper:
    """The suprema are 1.12890414... and 1.12899310...."""
    return Upper(1.12900 if activation.tanh else 1.12891)


@steepness.rule(maps.Silu)
def _silu(activation: maps.Silu) -> Upper:
    """x σ(sx) = φ(sx)/s with φ = x σ(x), so every slope s has the supremum 1.09983932... of φ'."""
    return Upper(1.09984)


def growth(activation: maps.Activation) -> tuple[Upper, Upper]:
    """k and m with |activation(z)| ≤ k|z| + m."""
    if isinstance(activation, (maps.Relu, maps.Gelu, maps.Silu, maps.Tanh)):
        return exact(1.0), exact(0.0)
    zero = activation(torch.zeros(1, dtype=torch.float64))
    return steepness.one(activation), Upper(abs(float(zero)), ELEMENTARY)


# How far a token is carried


@travel.rule(object)
def _not_tokenwise(map: Any, points: Tensor, radii: Tensor) -> Travel:
    raise Refusal(f"{type(map).__name__} does not act on each token alone")


@travel.rule(maps.Affine)
def _affine(map: maps.Affine, points: Tensor, radii: Tensor) -> Travel:
    return _straight(product_norm(map.w), radii)


@travel.rule(maps.Pointwise)
def _pointwise(map: maps.Pointwise, points: Tensor, radii: Tensor) -> Travel:
    return _straight(steepness.one(map.activation), radii)


@travel.rule(maps.Normalize)
def _normalize(map: maps.Normalize, points: Tensor, radii: Tensor) -> Travel:
    """|N(x') - N(x)| ≤ min(max|γ| r / √(low² + eps), |N(x') - β| + |N(x) - β|)."""
    low, high = deviations(map, points, radii)
    refuse_jump(map, float(low.bound.min()))
    top, width = largest_weight(map), points.shape[-1]
    slopes = top / with_eps(map, low)
    here = deviations(map, points, torch.zeros_like(radii))[1]
    saturated = top * (hat_length(map, high, width) + hat_length(map, here, width))
    return Travel(slopes, (slopes * exact(radii)).minimum(saturated).where(radii > 0))


@travel.rule(maps.Gated)
def _gated(map: maps.Gated, points: Tensor, radii: Tensor) -> Travel:
    """|w_out| (k|w| max|gate| + max|activation| |w_gate|), the maxima over entries and over the ball."""
    inner, gate = entries(map.w, map.b, points, radii), entries(map.w_gate, map.b_gate, points, radii)
    factor, offset = growth(map.activation)
    first = steepness.one(map.activation) * product_norm(map.w) * gate.amax(-1)
    second = (factor * inner.amax(-1) + offset) * product_norm(map.w_gate)
    slopes = product_norm(map.w_out) * (first + second)
    return Travel(slopes, (slopes * exact(radii)).where(radii > 0))


@travel.rule(IntoBall)
def _into_ball(map: IntoBall, points: Tensor, radii: Tensor) -> Travel:
    """No farther than the token moves, and no farther than the ball is wide."""
    return Travel(exact(torch.ones_like(radii)), exact(radii.clamp(max=2 * float(map.radius))))


@travel.rule(Center)
@travel.rule(GroupSort)
def _carried(map: Any, points: Tensor, radii: Tensor) -> Travel:
    return Travel(exact(torch.ones_like(radii)), exact(radii))


@travel.rule(MemoryStep)
def _remembered(map: MemoryStep, points: Tensor, radii: Tensor) -> Travel:
    return _straight(memory_constant(map), radii)


def memory_constant(map: MemoryStep) -> Upper:
    """max(1, c t (Δ/2)² - 1), Δ the largest distance of two columns of the memory; 1 + |c| t (Δ/2)² for a
    step up.
    """
    columns = Vectors(map.memory.detach().double().mT.unsqueeze(0), exact(0.0))
    seen = torch.ones(1, columns.shape[-2], dtype=torch.bool)
    bent = (
        Upper(abs(float(map.step))) * Upper(float(map.sharpness)) * half_diameters(columns, seen)[0].square()
    )
    if map.step < 0:
        return 1 + bent
    return exact(1.0) if float(bent) <= 2 else bent - exact_lower(1.0)


def _straight(slope: Upper, radii: Tensor) -> Travel:
    return Travel(slope.expand_as(radii), (slope * exact(radii)).where(radii > 0))


# What the rules need


def entries(w: Tensor, b: Tensor | None, points: Tensor, radii: Tensor) -> Upper:
    """At least |(wᵀx + b)_c| for x in the balls, (n, c)."""
    w, b = w.detach().double(), None if b is None else b.detach().double()
    rounding = relative_error(2 * len(w) + 8) * affine_size(w, b, points)
    moved = exact(radii).unsqueeze(-1) * lengths(w.mT)
    return sizes(maps.Affine(w, b)(points)) + rounding.unsqueeze(-1) + moved


def affine_size(w: Tensor, b: Tensor | None, points: Tensor) -> Upper:
    """|w|_F |x_i| + |b|: what roundings of wᵀx_i + b are relative to."""
    linear = length(w) * lengths(points)
    return linear if b is None else linear + length(b)


def largest_weight(map: maps.Normalize) -> Upper:
    """max|γ|."""
    return exact(1.0) if map.weight is None else sizes(map.weight.detach().double()).amax()


def deviations(map: maps.Normalize, points: Tensor, radii: Tensor) -> tuple[Lower, Upper]:
    """Bounds from below and above of the root mean square of x - mean (of x, for RMSNorm) over the balls."""
    points = points.double()
    width = points.shape[-1]
    away = points - points.mean(-1, keepdim=True) if map.centered else points
    reach = exact(radii)
    reach = reach + relative_error(2 * width + 8) * lengths(points) if map.centered else reach
    scale = math.sqrt(width)
    return (lengths_below(away) - reach) / Upper(scale, 1), (lengths(away) + reach) / Lower(scale, 1)


def with_eps(map: maps.Normalize, deviation: Lower) -> Lower:
    """At most √(s² + eps), for s at least the deviation; the square of a small one may vanish."""
    return (deviation.square() + exact_lower(map.eps)).sqrt().maximum(deviation)


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


def hat_length(map: maps.Normalize, deviation: Upper, width: int) -> Upper:
    """At least |x̂| = √width s/√(s² + eps), which grows with the deviation s; never more than √width."""
    s = deviation.bound
    return (root(width) * (exact(s) / with_eps(map, exact_lower(s)))).minimum(root(width)).where(s > 0)


def ball_of(domain: Domain, width: int) -> tuple[Tensor, Tensor] | None:
    """The center (1, width) and radius (1,) of a ball that holds the tokens; None where there is none."""
    if isinstance(domain, Shell) and math.isfinite(radius := shell_radius(domain, width)):
        domain = Ball(float(radius), None, domain.tokens)
    if not isinstance(domain, Ball):
        return None
    center = (
        torch.zeros(width, dtype=torch.float64) if domain.center is None else domain.center.detach().double()
    )
    return center.unsqueeze(0), torch.tensor([float(domain.radius)], dtype=torch.float64)


def least_deviation(map: maps.Normalize, domain: Domain) -> Lower:
    """At most the root mean square of x - mean over all tokens of the domain."""
    if isinstance(
        domain, Shell
    ):  # |x|² = |x - mean|² + d mean²: far from the mean is far from zero, not the converse
        return exact_lower(float(domain.inner) if domain.centered or not map.centered else 0.0)
    if isinstance(domain, Near):
        return deviations(map, domain.measure.points, moves_of(domain))[0].amin()
    ball = ball_of(domain, 1) if isinstance(domain, Ball) and domain.center is not None else None
    return exact_lower(0.0) if ball is None else deviations(map, *ball)[0][0]


def normalize_width(map: maps.Normalize, domain: Domain) -> int:
    """The width of a token, from the weights or from the domain."""
    if isinstance(domain, Near):
        return int(domain.measure.points.shape[-1])
    for known in (domain.center if isinstance(domain, Ball) else None, map.weight, map.bias):
        if known is not None:
            return len(known)
    raise Refusal(
        "the width of a token is not known here; say it in the domain, Ball(radius, width=d), or give the "
        "norm layer a weight"
    )


def hat_radius(map: maps.Normalize, domain: TokenSet, width: int) -> Upper:
    """At least |x̂| over the domain: √d, or less where the tokens hardly differ from their mean."""
    if isinstance(domain, Shell):
        if domain.centered and not map.centered:  # the mean of a token is free
            return root(width)
        return hat_length(map, exact(float(domain.outer)), width)
    ball = ball_of(domain, width)
    return root(width) if ball is None else hat_length(map, deviations(map, *ball)[1], width)[0]


def length_of_moves(domain: Near, found: Travel, norm: Norm) -> Upper:
    """How far the sequence moves in a norm when each token is carried by at most `moves`,
    or by `slopes` times its own move.
    """
    if isinstance(norm, Frobenius):
        return lengths(found.moves.bound).minimum(_longest_shared(domain, found))
    if isinstance(norm, TokenSum):
        return found.moves.sum().minimum(root(len(moves_of(domain))) * _longest_shared(domain, found))
    return found.moves.amax()  # TokenMax; EntryMax and Wasserstein distances of matched tokens are not larger


def _longest_shared(domain: Near, found: Travel) -> Upper:
    """A Frobenius ball shares its radius among the tokens: max slope × radius."""
    if isinstance(domain, Neighborhood) and isinstance(domain.norm, Frobenius):
        return found.slopes.amax() * radius_of(domain)
    return Upper(math.inf)


def refuse_entries(norm: Norm, what: str) -> None:
    """Refuse EntryMax: a constant for the lengths of tokens does not bound single entries."""
    if isinstance(norm, EntryMax):
        raise Refusal(f"{what} is bounded in lengths of tokens, not entry by entry; use TokenMax()")
