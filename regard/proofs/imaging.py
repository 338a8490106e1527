"""image: where a map sends a domain.

Sets of tokens go to balls; neighborhoods of a sequence go to neighborhoods of its value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard import maps
from regard._round import EPS, gamma, outward, product_norm_bound, vector_norm_bound
from regard._verb import Verb
from regard.attention import Attention
from regard.domains import Ball, Domain, Near, Neighborhood, Radii, TokenSet, Whole
from regard.measure import Measure
from regard.norms import Frobenius, Norm, TokenMax, TokenSum
from regard.proofs.certification import declare, deviation
from regard.proofs.locating import enclosing, locate, margin_after, one_sequence, summands, tokenwise
from regard.proofs.setting import finite_ball, moves_of, width_of
from regard.proofs.shapes import fit
from regard.proofs.subject import Head, MultiHead, subject_of
from regard.proofs.theorem import Refusal
from regard.proofs.tokenwise import (
    SLACK,
    affine_size,
    ball_of,
    entries,
    growth,
    hat_radius,
    largest_weight,
    least_deviation,
    normalize_width,
    refuse_jump,
    steepness,
    travel,
)
from regard.supports import Causal, Full

imaging = Verb("imaging")
"""imaging.one(map, domain) -> a domain that holds f(x) for every x of the domain."""


def image(map: Any, domain: Domain) -> Domain:
    """A domain that holds f(x) for every x of the domain: f(D) ⊆ image(f, D)."""
    inner = map if isinstance(map, (maps.Map, Attention)) else declare.one(map)
    fit(inner, domain)
    found: Domain = imaging.one(inner, domain)
    return found


def outputs(map: Any, tokens: int | None) -> int | None:
    """How many tokens come out when so many go in."""
    if isinstance(map, maps.FromQueries):
        return len(map.queries)
    for inner in map.maps if isinstance(map, maps.Compose) else ():
        tokens = outputs(inner, tokens)
    return map.queries if isinstance(map, maps.Joint) else tokens


def norm_factor(norm: Norm, tokens: int) -> float:
    """How large a norm can be when no token is longer than one."""
    if isinstance(norm, Frobenius):
        return outward(math.sqrt(tokens))
    return float(tokens) if isinstance(norm, TokenSum) else 1.0


# Sets of tokens


@imaging.rule(object, Domain)
def _no_rule(map: Any, domain: Domain) -> Domain:
    name = type(map).__name__
    raise Refusal(f"nothing is known of the image of {name}; add a rule with @imaging.rule({name}, TokenSet)")


@imaging.rule(maps.Affine, TokenSet)
def _affine(map: maps.Affine, domain: TokenSet) -> TokenSet:
    """B(c, R) ↦ B(wᵀc + b, |w| R)."""
    w, b = map.w.detach().double(), None if map.b is None else map.b.detach().double()
    ball = ball_of(domain, len(w))
    if ball is None:
        return Whole(domain.tokens)
    center, radius = ball
    rounding = gamma(2 * len(w) + 8) * float(affine_size(w, b, center))
    return finite_ball(
        outward(product_norm_bound(w) * float(radius) + rounding), maps.Affine(w, b)(center)[0], domain.tokens
    )


@imaging.rule(maps.Pointwise, TokenSet)
def _pointwise(map: maps.Pointwise, domain: TokenSet) -> TokenSet:
    """B(c, R) ↦ B(φ(c), sup|φ'| R)."""
    slope = float(steepness.one(map.activation))
    if not isinstance(domain, Ball):
        return Whole(domain.tokens)
    if domain.center is None:
        if float(map.activation(torch.zeros(1, dtype=torch.float64))) != 0:
            raise Refusal(
                f"{type(map.activation).__name__} moves zero, and the width of a token is not known; give "
                "the ball a center"
            )
        return finite_ball(outward(slope * domain.radius), None, domain.tokens)
    center = domain.center.detach().double()
    return finite_ball(
        outward(slope * domain.radius + 1e-13 * vector_norm_bound(center)),
        map.activation(center),
        domain.tokens,
    )


@imaging.rule(maps.Normalize, TokenSet)
def _normalize(map: maps.Normalize, domain: TokenSet) -> Ball:
    """B(β, max|γ| √d), with less than √d where tokens hardly differ from their mean, or B(N(c),
    slope · R) where that is smaller.
    """
    refuse_jump(map, least_deviation(map, domain))
    width = normalize_width(map, domain)
    radius = outward(largest_weight(map) * hat_radius(map, domain, width))
    everywhere = finite_ball(radius, None if map.bias is None else map.bias.detach().double(), domain.tokens)
    ball = ball_of(domain, width)
    if ball is None or not isinstance(domain, Ball):
        return everywhere
    value, margin = locate.one(map, Measure(ball[0]))
    near = outward(float(travel.one(map, *ball).moves) + margin)
    return everywhere if everywhere.radius <= near else finite_ball(near, value.points[0], domain.tokens)


@imaging.rule(maps.Gated, TokenSet)
def _gated(map: maps.Gated, domain: TokenSet) -> TokenSet:
    """|w_outᵀ(φ(u) · g)| ≤ |w_out| min(|φ(u)| max|g|, max|φ(u)| |g|)."""
    ball = ball_of(domain, len(map.w))
    if ball is None:
        return Whole(domain.tokens)
    factor, offset = growth(map.activation)
    inner, gate = entries(map.w, map.b, *ball)[0] * factor + offset, entries(map.w_gate, map.b_gate, *ball)[0]
    product = min(vector_norm_bound(inner) * float(gate.max()), float(inner.max()) * vector_norm_bound(gate))
    return finite_ball(outward(product_norm_bound(map.w_out) * product), None, domain.tokens)


@imaging.rule(maps.Residual, TokenSet)
def _residual(map: maps.Residual, domain: TokenSet) -> TokenSet:
    """The sum of two sets: centers and radii add."""
    one_sequence(map.map)
    return _sum_of([domain, imaging.one(map.map, domain)], domain.tokens)


@imaging.rule(maps.Added, TokenSet)
def _added(map: maps.Added, domain: TokenSet) -> TokenSet:
    """The sum of the images: centers and radii add."""
    return _sum_of([imaging.one(part, domain) for part in summands(map)], domain.tokens)


def _sum_of(sets: Sequence[Domain], tokens: int | None) -> TokenSet:
    """The ball that holds sums of one token of each set."""
    balls = [found for found in sets if isinstance(found, Ball)]
    if len(balls) < len(sets):
        return Whole(tokens)
    centers = [ball.center.detach().double() for ball in balls if ball.center is not None]
    if len({len(center) for center in centers}) > 1:
        raise Refusal("the terms of the sum have tokens of different widths; give them one width")
    rounding = len(balls) * EPS * sum(vector_norm_bound(center) for center in centers)
    return finite_ball(
        outward(sum(ball.radius for ball in balls) + rounding),
        sum(centers[1:], centers[0]) if centers else None,
        tokens,
    )


@imaging.rule(maps.Compose, Near)
@imaging.rule(maps.Compose, TokenSet)
def _compose(map: maps.Compose, domain: Domain) -> Domain:
    for inner in map.maps:
        one_sequence(inner)
        domain = imaging.one(inner, domain)
    return domain


@imaging.rule(Attention, TokenSet)
@imaging.rule(maps.Heads, TokenSet)
@imaging.rule(maps.FromQueries, TokenSet)
@imaging.rule(maps.Joint, TokenSet)
def _averages(map: Any, domain: TokenSet) -> TokenSet:
    """Rows are averages of values, so they lie in the balls that hold the values: B(Σ_h (c W_h + b_h) + b_o,
    radius by heads).
    """
    one_sequence(map)
    subject = subject_of(map if isinstance(map, (Attention, maps.Heads)) else map.attention)
    _laws(subject)
    width = subject.separate[0].width(width_of(domain))
    ball, tokens = ball_of(domain, width), outputs(map, domain.tokens)
    return Whole(tokens) if ball is None else _mix(subject, ball[0][0], float(ball[1]), tokens)


@imaging.rule(maps.ToContext, TokenSet)
def _context(map: maps.ToContext, domain: TokenSet) -> Ball:
    """Averages of the values of a context that does not move: any ball that holds them."""
    context = map.context.points if isinstance(map.context, Measure) else map.context
    held = Neighborhood(context.detach(), 0.0, TokenMax())
    found = _averages(map.attention, enclosing(held).replace(tokens=domain.tokens))
    assert isinstance(found, Ball)
    weights = map.context.log_weights if isinstance(map.context, Measure) else None
    full = isinstance(map.attention.support, Full) and (
        weights is None or bool((weights > -math.inf).any(-1).all())
    )
    if full or found.center is None:
        return found
    return found.replace(
        radius=max(found.radius, vector_norm_bound(found.center))
    )  # a query that sees nothing gives zero


def _laws(subject: MultiHead) -> None:
    normalizer = subject.separate[0].normalizer
    if not normalizer.laws:
        raise Refusal(
            f"rows of {type(normalizer).__name__} are not laws, so outputs are no averages; use Softmax(), "
            "Entmax() or Sparsemax()"
        )


def _mix(subject: MultiHead, center: Tensor, radius: float, tokens: int | None) -> Ball:
    """Each head gives a ball; a row that sees nothing gives zero."""
    parts = [_values(head, center, radius) for head in subject.separate]
    if subject.folded is None or subject.w_o is None:
        (value, size, reach) = parts[0]
        return finite_ball(outward(reach + gamma(4 * len(center) + 64) * size), value, tokens)
    folded = [
        _values(head, center, radius, output)
        for head, output in zip(subject.folded, subject.w_o, strict=True)
    ]
    total = torch.stack([value for value, _, _ in folded]).sum(0)
    total = total if subject.b_o is None else total + subject.b_o
    size = sum(size for _, size, _ in folded) + (
        0.0 if subject.b_o is None else vector_norm_bound(subject.b_o)
    )
    reach = subject.combined([reach for _, _, reach in parts], [reach for _, _, reach in folded])
    return finite_ball(outward(reach + gamma(4 * len(center) + 4 * len(parts) + 64) * size), total, tokens)


def _values(
    head: Head, center: Tensor, radius: float, output: Tensor | None = None
) -> tuple[Tensor, float, float]:
    """The value of a center, what its roundings are relative to, and how far values (and zero,
    where rows may be empty) are from it.
    """
    value, bias = center @ head.matrix(len(center)), head.value_bias
    size = vector_norm_bound(center) * math.prod(vector_norm_bound(factor) for factor in head.factors)
    if bias is not None:
        value = value + (bias if output is None else bias @ output)
        size = size + vector_norm_bound(bias) * (1.0 if output is None else vector_norm_bound(output))
    reach = outward(head.w * radius)
    sees = isinstance(head.support, (Full, Causal))  # every query sees a key at least: itself
    return value, size, reach if sees else max(reach, outward(vector_norm_bound(value)))


# Neighborhoods of a sequence


@imaging.rule(maps.Map, Near)
@imaging.rule(Attention, Near)
def _near(map: Any, domain: Near) -> Domain:
    """The neighborhood of the value that the deviation gives,
    or the image of a ball of tokens where that is smaller.
    """
    one_sequence(map)
    try:
        near = _around(map, domain)
    except Refusal:
        return imaging.one(map, enclosing(domain))
    held = _image_ball(map, domain)
    return near if held is None or float(moves_of(near).max()) <= held.radius else held


def _image_ball(map: Any, domain: Near) -> Ball | None:
    """The image as a ball, where it is one."""
    try:
        held = imaging.one(map, enclosing(domain))
    except Refusal:
        return None
    return held if isinstance(held, Ball) else None


def _around(map: Any, domain: Near) -> Near:
    value, margin = locate.one(map, domain.measure)
    points = value.points if value.log_weights is None and value.marks is None else value
    if isinstance(domain, Radii):
        return Radii(points, _finite((token_moves(map, domain) + margin) * SLACK))
    assert isinstance(domain, Neighborhood)
    radius = deviation(map, domain, domain.norm).value + margin * norm_factor(domain.norm, value.size)
    return Neighborhood(
        points, float(_finite(torch.tensor(outward(radius), dtype=torch.float64))), domain.norm
    )


def _finite(radii: Tensor) -> Tensor:
    if not bool(torch.isfinite(radii).all()):
        raise Refusal("the value may move without bound; use a smaller radius, or put a norm layer first")
    return radii


def token_moves(map: Any, domain: Near) -> Tensor:
    """How far each token of the value can move, (n,)."""
    if isinstance(map, maps.Residual):
        return moves_of(domain) + token_moves(map.map, domain)
    if isinstance(map, maps.Added):
        apart = torch.stack([token_moves(part, domain) for part in summands(map)]).sum(0)
        return apart.clamp(max=deviation(map, domain, TokenMax()).value)
    if (
        isinstance(map, maps.ToContext) and map.attention.normalizer.rowwise
    ):  # a query that stays gives what it gave
        moves = moves_of(domain)
        return torch.where(moves > 0, torch.full_like(moves, deviation(map, domain, TokenMax()).value), 0.0)
    if isinstance(map, maps.Compose):
        last, margin = along(map.maps, domain)
        if isinstance(last, Near):
            return moves_of(last) + margin
    if tokenwise(map):
        return travel.one(map, domain.measure.points, moves_of(domain)).moves
    return torch.full((domain.measure.size,), deviation(map, domain, TokenMax()).value, dtype=torch.float64)


def along(steps: Sequence[Any], domain: Domain) -> tuple[Domain, float]:
    """The image through several maps, and how far the exact value of the given sequence may be from the
    center of it.
    """
    margin = 0.0
    for step in steps:
        if isinstance(domain, Near):
            margin = margin_after(step, domain.measure, margin)
        domain = imaging.one(step, domain)
    return domain, margin
