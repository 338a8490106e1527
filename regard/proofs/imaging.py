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
from regard._enclosed import length, lengths, product_norm, root_of_squares
from regard._kinds import names_wrong_kinds
from regard._upper import Upper, exact, exact_lower, product, relative_error, root, sizes, total
from regard._verb import Verb
from regard.attention import Attention
from regard.domains import Ball, Domain, Near, Neighborhood, Radii, TokenSet, Whole
from regard.measure import Measure
from regard.nonexpansive import (
    Center,
    Flatten,
    GroupSort,
    IntoBall,
    MemoryStep,
    MixTokens,
    Pool,
    Reflected,
    Split,
    Unflatten,
)
from regard.norms import Frobenius, Norm, TokenMax, TokenSum
from regard.proofs.certification import declare, deviation
from regard.proofs.locating import enclosing, locate, margin_after, one_sequence, summands, tokenwise
from regard.proofs.question import once
from regard.proofs.setting import finite_ball, moves_of, radius_of, width_of
from regard.proofs.shapes import fit, widths
from regard.proofs.slicing import sliced
from regard.proofs.subject import Head, MultiHead, subject_of
from regard.proofs.theorem import Refusal
from regard.proofs.tokenwise import (
    ACTIVATION,
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


@names_wrong_kinds
def image(map: Any, domain: Domain) -> Domain:
    """A domain that holds f(x) for every x of the domain: f(D) ⊆ image(f, D).

    A PyTorch module is run at two sequences of the domain and compared with its declaration, as in `certify`.

    Examples:
        >>> layer = regard.Attention(regard.Dot(torch.eye(2), torch.eye(2)))
        >>> regard.image(layer, regard.Ball(1.0)).radius <= 1.001
        True
    """
    inner = map if isinstance(map, (maps.Map, Attention)) else declare.one(map)
    fit(inner, domain)
    if inner is not map:
        from regard.proofs.agreement import run_check  # which locates values, by images

        run_check(map, inner, domain)
    found: Domain = once(("image", id(inner), domain), inner, lambda: imaging.one(inner, domain))
    return found


def outputs(map: Any, tokens: int | None) -> int | None:
    """How many tokens come out when so many go in."""
    if isinstance(map, maps.FromQueries):
        return len(map.queries)
    if isinstance(map, (Flatten, Pool)):
        return 1
    if isinstance(map, MixTokens):
        return int(map.w.shape[0])
    if isinstance(map, Unflatten):
        return map.tokens
    if isinstance(map, (Split, maps.Residual)):
        return outputs(map.maps[0] if isinstance(map, Split) else map.map, tokens)
    for inner in map.maps if isinstance(map, maps.Compose) else ():
        tokens = outputs(inner, tokens)
    return map.queries if isinstance(map, maps.Joint) else tokens


def norm_factor(norm: Norm, tokens: int) -> Upper:
    """How large a norm can be when no token is longer than one."""
    if isinstance(norm, Frobenius):
        return root(tokens)
    return exact(float(tokens) if isinstance(norm, TokenSum) else 1.0)


# Sets of tokens


@imaging.rule(object, Domain)
def _no_rule(map: Any, domain: Domain) -> Domain:
    name = type(map).__name__
    raise Refusal(
        f"nothing is known about the image of {name}; add a rule with @imaging.rule({name}, TokenSet)"
    )


@imaging.rule(maps.Affine, TokenSet)
def _affine(map: maps.Affine, domain: TokenSet) -> TokenSet:
    """B(c, R) ↦ B(wᵀc + b, |w| R)."""
    w, b = map.w.detach().double(), None if map.b is None else map.b.detach().double()
    ball = ball_of(domain, len(w))
    if ball is None:
        return Whole(domain.tokens)
    center, radius = ball
    rounding = relative_error(2 * len(w) + 8) * affine_size(w, b, center)[0]
    return finite_ball(
        product_norm(w) * exact(radius)[0] + rounding, maps.Affine(w, b)(center)[0], domain.tokens
    )


@imaging.rule(maps.Pointwise, TokenSet)
def _pointwise(map: maps.Pointwise, domain: TokenSet) -> TokenSet:
    """B(c, R) ↦ B(φ(c), sup|φ'| R)."""
    slope: Upper = steepness.one(map.activation)
    if not isinstance(domain, Ball):
        return Whole(domain.tokens)
    if domain.center is None:
        if float(map.activation(torch.zeros(1, dtype=torch.float64))) != 0:
            raise Refusal(
                f"{type(map.activation).__name__} moves zero, and the width of a token is not known; give "
                "the ball a center"
            )
        return finite_ball(slope * radius_of(domain), None, domain.tokens)
    center = domain.center.detach().double()
    rounding = relative_error(ACTIVATION) * length(center)
    return finite_ball(slope * radius_of(domain) + rounding, map.activation(center), domain.tokens)


@imaging.rule(maps.Normalize, TokenSet)
def _normalize(map: maps.Normalize, domain: TokenSet) -> Ball:
    """B(β, max|γ| √d), with less than √d where tokens hardly differ from their mean, or B(N(c),
    slope · R) where that is smaller.
    """
    refuse_jump(map, float(least_deviation(map, domain)))
    width = normalize_width(map, domain)
    radius = largest_weight(map) * hat_radius(map, domain, width)
    everywhere = finite_ball(radius, None if map.bias is None else map.bias.detach().double(), domain.tokens)
    ball = ball_of(domain, width)
    if ball is None or not isinstance(domain, Ball):
        return everywhere
    value, margin = locate.one(map, Measure(ball[0]))
    near = travel.one(map, *ball).moves[0] + margin
    return (
        everywhere if everywhere.radius <= float(near) else finite_ball(near, value.points[0], domain.tokens)
    )


@imaging.rule(maps.Gated, TokenSet)
def _gated(map: maps.Gated, domain: TokenSet) -> TokenSet:
    """|w_outᵀ(φ(u) · g)| ≤ |w_out| min(|φ(u)| max|g|, max|φ(u)| |g|)."""
    ball = ball_of(domain, len(map.w))
    if ball is None:
        return Whole(domain.tokens)
    factor, offset = growth(map.activation)
    inner, gate = entries(map.w, map.b, *ball)[0] * factor + offset, entries(map.w_gate, map.b_gate, *ball)[0]
    most = (inner.norm() * gate.amax()).minimum(inner.amax() * gate.norm())
    return finite_ball(product_norm(map.w_out) * most, None, domain.tokens)


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
    rounding = relative_error(2 * len(balls)) * total([length(center) for center in centers])
    radius = total([radius_of(ball) for ball in balls]) + rounding
    return finite_ball(radius, sum(centers[1:], centers[0]) if centers else None, tokens)


@imaging.rule(IntoBall, TokenSet)
def _into_ball(map: IntoBall, domain: TokenSet) -> Ball:
    """B(0, R), or B(p(c), r) where that is smaller: p has the constant 1."""
    if not isinstance(domain, Ball):
        return Ball(float(map.radius), None, domain.tokens)
    if domain.center is None:
        return finite_ball(_length_after(map, radius_of(domain)), None, domain.tokens)
    about = Ball(float(map.radius), torch.zeros_like(domain.center, dtype=torch.float64), domain.tokens)
    if domain.radius >= map.radius:
        return about
    value, margin = locate.one(map, Measure(domain.center.detach().double().unsqueeze(0)))
    near = radius_of(domain) + margin
    return about if about.radius <= float(near) else finite_ball(near, value.points[0], domain.tokens)


def _length_after(map: IntoBall, radius: Upper) -> Upper:
    """At least the length of a token after it, when it was at most this before."""
    whole = exact(float(map.radius))
    if not map.smooth or float(radius) == 0:
        return radius.minimum(whole)
    least = exact_lower(float(radius)) / whole  # |x|/√(1 + |x|²/R²) grows with |x|
    return (radius / (exact_lower(1.0) + least.square()).sqrt()).minimum(whole)


@imaging.rule(GroupSort, TokenSet)
@imaging.rule(Center, TokenSet)
def _carried(map: Any, domain: TokenSet) -> TokenSet:
    """B(c, R) ↦ B(f(c), L R)."""
    if width_of(domain) is None and isinstance(domain, Ball):
        return domain  # about zero, which sorting and centering keep
    ball = ball_of(domain, width_of(domain) or 1)
    if ball is None:
        return Whole(domain.tokens)
    value, margin = locate.one(map, Measure(ball[0]))
    return finite_ball(travel.one(map, *ball).moves[0] + margin, value.points[0], domain.tokens)


@imaging.rule(MemoryStep, TokenSet)
def _remembered(map: MemoryStep, domain: TokenSet) -> TokenSet:
    """B(c, R) ↦ B(f(c), L R), or B(c - step · m, R + |step| ρ) where that is smaller: columns in B(m, ρ)."""
    columns = map.memory.detach().double().mT
    ball = ball_of(domain, columns.shape[-1])
    if ball is None:
        return Whole(domain.tokens)
    middle, step = columns.mean(0), exact(abs(float(map.step)))
    apart = lengths(columns - middle).amax()
    center = ball[0][0] - float(map.step) * middle
    rounding = relative_error(8) * (length(ball[0]) + step * length(columns))
    anywhere = finite_ball(exact(ball[1])[0] + step * apart + rounding, center, domain.tokens)
    try:
        value, margin = locate.one(map, Measure(ball[0]))
    except Refusal:
        return anywhere
    near = travel.one(map, *ball).moves[0] + margin
    return anywhere if anywhere.radius <= float(near) else finite_ball(near, value.points[0], domain.tokens)


@imaging.rule(Reflected, TokenSet)
def _reflected(map: Reflected, domain: TokenSet) -> TokenSet:
    """B(c, R) - step · B(c', R')."""
    one_sequence(map)
    held = imaging.one(map.attention, domain)
    if not isinstance(domain, Ball) or not isinstance(held, Ball):
        return Whole(domain.tokens)
    scaled = None if held.center is None else -float(map.step) * held.center.detach().double()
    rounding = exact(0.0) if scaled is None else relative_error(2) * length(scaled)
    turned = finite_ball(exact(abs(float(map.step))) * radius_of(held) + rounding, scaled, domain.tokens)
    return _sum_of([domain, turned], domain.tokens)


@imaging.rule(Split, TokenSet)
def _split(map: Split, domain: TokenSet) -> TokenSet:
    """Balls of slices side by side: centers are joined, and radii add in squares."""
    one_sequence(map)
    count = len(map.maps)
    parts = [imaging.one(inner, sliced(domain, k, count)) for k, inner in enumerate(map.maps)]
    balls = [part for part in parts if isinstance(part, Ball)]
    tokens = outputs(map, domain.tokens)
    if len(balls) < count:
        return Whole(tokens)
    radius = root_of_squares([radius_of(ball) for ball in balls])
    if all(ball.center is None for ball in balls):
        return finite_ball(radius, None, tokens)
    known = width_of(domain)
    centers = [
        _zeros(inner, None if known is None else known // count)
        if ball.center is None
        else ball.center.double()
        for inner, ball in zip(map.maps, balls, strict=True)
    ]
    return finite_ball(radius, torch.cat([center.detach() for center in centers]), tokens)


def _zeros(map: Any, width: int | None) -> Tensor:
    """Zero among the values of a map."""
    gives = widths.one(map, width).gives
    if gives is None:
        raise Refusal("the width of a slice is not known here; give the ball a center")
    return torch.zeros(gives, dtype=torch.float64)


@imaging.rule(MixTokens, TokenSet)
@imaging.rule(Pool, TokenSet)
def _mixed(map: MixTokens | Pool, domain: TokenSet) -> TokenSet:
    """Σ_j w_ij x_j with tokens no longer than ρ is no longer than Σ_j |w_ij| ρ."""
    ball = ball_of(domain, width_of(domain) or 1)
    tokens = outputs(map, domain.tokens)
    if ball is None:
        return Whole(tokens)
    longest = exact(ball[1])[0] + length(ball[0])
    if isinstance(map, MixTokens):
        weight = sizes(map.w.detach().double()).sum(-1).amax()
    elif domain.tokens is None:
        return Whole(tokens)  # a sum of tokens is as long as there are many
    else:
        weight = root(domain.tokens)
    known = width_of(domain)
    center = None if known is None else torch.zeros(known, dtype=torch.float64)
    return finite_ball(weight * longest, center, tokens)


@imaging.rule(Flatten, TokenSet)
def _flattened(map: Flatten, domain: TokenSet) -> TokenSet:
    """n tokens in B(c, R) are one in B((c, …, c), √n R)."""
    if domain.tokens is None or not isinstance(domain, Ball):
        return Whole(1)  # one token for all is as wide as there are many
    center = None if domain.center is None else domain.center.detach().double().repeat(domain.tokens)
    return finite_ball(root(domain.tokens) * radius_of(domain), center, 1)


@imaging.rule(Unflatten, TokenSet)
def _unflattened(map: Unflatten, domain: TokenSet) -> TokenSet:
    """Pieces of one token in B(c, R) are no longer than |c| + R, and within R of c where all pieces of c are
    alike.
    """
    if not isinstance(domain, Ball):
        return Whole(map.tokens)
    if domain.center is None:
        return Ball(domain.radius, None, map.tokens)
    pieces = domain.center.detach().double().unflatten(-1, (map.tokens, -1))
    middle = pieces.mean(0)
    apart = lengths(pieces - middle).amax()
    rounding = relative_error(2) * length(domain.center)
    return finite_ball(radius_of(domain) + apart + rounding, middle, map.tokens)


@imaging.rule(maps.Compose, Near)
@imaging.rule(maps.Compose, TokenSet)
def _compose(map: maps.Compose, domain: Domain) -> Domain:
    width = widths.one(map, width_of(domain)).takes
    for inner in map.maps:
        one_sequence(inner)
        domain = imaging.one(inner, with_center(domain, width))
        width = widths.one(inner, width).gives
    return with_center(domain, width)


def with_center(domain: Domain, width: int | None) -> Domain:
    """A ball about zero says how wide its tokens are, where that is known from maps before or after."""
    if width is None or not isinstance(domain, Ball) or domain.center is not None:
        return domain
    return domain.replace(center=torch.zeros(width, dtype=torch.float64))


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
    if isinstance(domain, Whole):
        return Whole(outputs(map, domain.tokens))
    width = subject.separate[0].width(width_of(domain))
    ball, tokens = ball_of(domain, width), outputs(map, domain.tokens)
    return Whole(tokens) if ball is None else _mix(subject, ball[0][0], exact(ball[1])[0], tokens)


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
    radius = radius_of(found).maximum(length(found.center))  # a query that sees nothing gives zero
    return found.replace(radius=float(radius))


def _laws(subject: MultiHead) -> None:
    normalizer = subject.separate[0].normalizer
    if not normalizer.laws:
        raise Refusal(
            f"rows of {type(normalizer).__name__} are not laws, so outputs are not averages; use Softmax(), "
            "Entmax() or Sparsemax()"
        )


def _mix(subject: MultiHead, center: Tensor, radius: Upper, tokens: int | None) -> Ball:
    """Each head gives a ball; a row that sees nothing gives zero."""
    parts = [_values(head, center, radius) for head in subject.separate]
    if subject.folded is None or subject.w_o is None:
        (value, size, reach) = parts[0]
        return finite_ball(reach + relative_error(4 * len(center) + 64) * size, value, tokens)
    folded = [
        _values(head, center, radius, output)
        for head, output in zip(subject.folded, subject.w_o, strict=True)
    ]
    value, size = (
        torch.stack([value for value, _, _ in folded]).sum(0),
        total([size for _, size, _ in folded]),
    )
    if subject.b_o is not None:
        value, size = value + subject.b_o, size + length(subject.b_o)
    reach = subject.combined([reach for _, _, reach in parts], [reach for _, _, reach in folded])
    rounding = relative_error(4 * len(center) + 4 * len(parts) + 64) * size
    return finite_ball(reach + rounding, value, tokens)


def _values(
    head: Head, center: Tensor, radius: Upper, output: Tensor | None = None
) -> tuple[Tensor, Upper, Upper]:
    """The value of a center, what its roundings are relative to, and how far values (and zero,
    where rows may be empty) are from it.
    """
    value, bias = center @ head.matrix(len(center)), head.value_bias
    size = length(center) * product([length(factor) for factor in head.factors])
    if bias is not None:
        value = value + (bias if output is None else bias @ output)
        size = size + (length(bias) if output is None else length(bias) * length(output))
    reach = head.w * radius
    sees = isinstance(head.support, (Full, Causal))  # every query sees a key at least: itself
    return value, size, reach if sees else reach.maximum(length(value))


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
    moves, points = float(moves_of(near).max()), near.measure.points
    if 2 * moves < float(torch.cdist(points, points).max()):  # a ball that holds these tokens is larger
        return near
    held = _image_ball(map, domain)
    return near if held is None or moves <= held.radius else held


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
    if not isinstance(domain, Neighborhood):
        return Radii(points, _finite(token_moves(map, domain) + margin))
    moved = Upper(deviation(map, domain, domain.norm).value)
    radius = moved + margin * norm_factor(domain.norm, value.size)
    return Neighborhood(points, float(_finite(radius)), domain.norm)


def _finite(radii: Upper) -> Tensor:
    """The numbers, roundings paid for."""
    found = radii.bound
    if not bool(torch.isfinite(found).all()):
        raise Refusal("the value may move without bound; use a smaller radius, or put a norm layer first")
    return found


def token_moves(map: Any, domain: Near) -> Upper:
    """How far each token of the value can move, (n,)."""
    moves = moves_of(domain)
    if isinstance(map, maps.Residual):
        return exact(moves) + token_moves(map.map, domain)
    if isinstance(map, maps.Added):
        return total([token_moves(part, domain) for part in summands(map)]).minimum(_longest(map, domain))
    if (
        isinstance(map, maps.ToContext) and map.attention.normalizer.rowwise
    ):  # a query that stays gives what it gave
        return _longest(map, domain).expand_as(moves).where(moves > 0)
    if isinstance(map, maps.Compose):
        last, margin = along(map.maps, domain)
        if isinstance(last, Near):
            return exact(moves_of(last)) + margin
    if tokenwise(map):
        found: Upper = travel.one(map, domain.measure.points, moves).moves
        return found
    tokens = outputs(map, domain.measure.size)
    assert tokens is not None
    return _longest(map, domain).expand_as(torch.empty(tokens, dtype=torch.float64))


def _longest(map: Any, domain: Near) -> Upper:
    return Upper(deviation(map, domain, TokenMax()).value)


def along(steps: Sequence[Any], domain: Domain) -> tuple[Domain, Upper]:
    """The image through several maps, and how far the exact value of the given sequence may be from the
    center of it.
    """
    margin = exact(0.0)
    for step in steps:
        if isinstance(domain, Near):
            margin = margin_after(step, domain.measure, margin)
        domain = imaging.one(step, domain)
    return domain, margin
