"""Compositions: the product of constants, each on the image of the domain before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard._enclosed import length, product_norm
from regard._upper import Upper, product, relative_error, root
from regard.attention import Attention
from regard.certificate import Certificate
from regard.domains import Ball, Domain, Near, TokenSet
from regard.errors import ArgumentError
from regard.lookups import Factored, Identity, Linear, Lookup
from regard.maps import Compose, Heads, Mapping, Normalize
from regard.norms import Norm, OwnToken
from regard.potentials import Dot, Potential
from regard.potentials.base import simple_parts, with_simple_parts
from regard.potentials.positions import PositionPotential
from regard.proofs.causality import follow_own_tokens
from regard.proofs.certification import certify, deviation
from regard.proofs.floors import move_floor, product_floor, slope_near
from regard.proofs.imaging import along, image, norm_factor, outputs, with_center
from regard.proofs.locating import enclosing, in_double, one_sequence, slip
from regard.proofs.question import once
from regard.proofs.setting import balls_of, width_of
from regard.proofs.shapes import widths
from regard.proofs.subject import Head, single_heads, subject_of
from regard.proofs.theorem import OUT_OF_RANGE, Bound, Refusal, Theorem, checked, finite
from regard.proofs.tokenwise import hat_radius

THEOREM = Theorem(
    name="composition",
    title="composition",
    statement=r"""
$f = f_k\circ\dots\circ f_1$ on $D_1$, with $f_i(D_i) \subseteq D_{i+1}$: $L(f; D_1) \le \prod_i L(f_i; D_i)$.
The deviation of $f$ is that of $f_k$ on $D_k$. A norm layer $\gamma\hat x + \beta$ before attention may be
folded into it: with $\Gamma = \mathrm{diag}(\gamma)$ and $\Pi$ the centering ($\Pi = I$ for RMSNorm), the
same scores and values come from $\hat x$ with $W' = \Pi\Gamma W$, $b' = W^\top\beta + b$ in place of each
projection, and $|\hat x| \le \sqrt d$:
$$ L \le L(\text{attention}';\ B(0, \sqrt d))\cdot L(x \mapsto \hat x). $$
""",
    hypotheses=("a bound of every map on the image before it",),
    proof=r"""
Lipschitz constants multiply; each is needed only where its argument can be, for both sequences that are
compared. Folding is an identity, because $\hat x = \Pi\hat x$.
The norms of folded matrices are rounded: roundings are checked to be below $10^{-9}$ of each norm, and the
bounds are powers and exponentials of at most 709 of these norms, so
$10^{-6}$ of the bound covers them.
""",
)


FOLDING = Upper(1e-6)
"""What the rounding of folded matrices may change in a bound, relative to it."""


def _floor(map: Compose, domain: Domain, norm: Norm) -> float:
    """What the maps do at a given sequence."""
    return product_floor(_steps_of(map), domain, norm)


@THEOREM.constant(Compose, Domain, Norm, floor=_floor)
def composition(map: Compose, domain: Domain, norm: Norm) -> Bound:
    """The product along the images."""
    if isinstance(norm, OwnToken):
        follow_own_tokens(map.maps, domain)
    parts: list[Certificate] = []
    steps = _steps_of(map)
    width = widths.one(map, width_of(domain)).takes
    for k, step in enumerate(steps):
        domain = image(steps[k - 1], domain) if k else domain
        domain, width = with_center(domain, width), widths.one(step, width).gives
        one_sequence(step)
        parts.append(finite(certify(step, domain, norm), type(step).__name__))
    return Bound(product([Upper(part.value) for part in parts]), parts=tuple(parts))


def _floor_over_balls(map: Compose, domain: Near, norm: Norm) -> float:
    """On balls the theorems of this file are all there is."""
    ways = (map.maps, _folded(map)) if _pair(map.maps) else (_steps_of(map),)
    return min(_floor_from_ball(steps, domain, norm) for steps in ways)


def _floor_from_ball(steps: Sequence[Mapping], domain: Near, norm: Norm) -> float:
    """What maps do at a given sequence, where a norm layer that is first is asked about the whole ball."""
    found = product_floor(steps, domain, norm)
    if not (found > 0 and isinstance(steps[0], Normalize)):
        return found
    return found / slope_near(steps[0], domain, norm) * certify(steps[0], enclosing(domain), norm).value


@THEOREM.constant(Compose, Near, Norm, floor=_floor_over_balls)
def over_balls(map: Compose, domain: Near, norm: Norm) -> Bound:
    """The same on a ball that holds the neighborhood:
    better where the neighborhood grows past what norm layers allow.
    """
    part = finite(certify(map, enclosing(domain), norm), "the composition")
    return Bound(Upper(part.value), parts=(part,), note="on a ball that holds the neighborhood")


def _norm_first(map: Compose, domain: Domain, norm: Norm) -> bool:
    return _pair(map.maps)


def _folded_floor(map: Compose, domain: Domain, norm: Norm) -> float:
    """What the two maps of `folded_bound` do at a given sequence."""
    return product_floor(_folded(map), domain, norm)


@THEOREM.constant(Compose, Domain, Norm, about=_norm_first, floor=_folded_floor)
def folded_bound(map: Compose, domain: Domain, norm: Norm) -> Bound:
    """L(attention') · L(x ↦ x̂), the weights of a norm layer folded into the attention after it."""
    plain, inner = _folded(map)
    first = finite(certify(plain, domain, norm), "Normalize")
    second = finite(certify(inner, _hats(plain, inner, domain), norm), type(inner).__name__)
    value = Upper(first.value) * Upper(second.value) * (1 + FOLDING)
    return Bound(
        value,
        (checked("roundings of folded matrices are below 1e-9 of their norms"),),
        (first, second),
        "norm layer folded in",
    )


def _folded(map: Compose) -> tuple[Normalize, Attention | Heads]:
    """x ↦ x̂, and the attention of x̂."""
    layer, attention = map.maps
    assert isinstance(layer, Normalize)
    assert isinstance(attention, (Attention, Heads))
    one_sequence(attention)
    inner = once(("fold", id(map)), map, lambda: fold(layer, attention))
    return Normalize(layer.eps, centered=layer.centered), inner


def _move_floor(map: Compose, domain: Near, norm: Norm) -> float:
    """How far the maps move a value, each by as much as the one before it."""
    return move_floor(map.maps, domain, norm)


@THEOREM.deviation(Compose, Near, Norm, floor=_move_floor)
def move_bound(map: Compose, domain: Near, norm: Norm) -> Bound:
    """The deviation of the last map over the image of what comes before."""
    last = map.maps[-1]
    for step in map.maps:
        one_sequence(step)
    held, margin = along(map.maps[:-1], domain)
    if not isinstance(held, Near):
        raise Refusal("the value inside is not followed around the given sequence")
    part = finite(deviation(last, held, norm), type(last).__name__)
    tokens = outputs(last, held.measure.size)
    assert tokens is not None
    slipped = norm_factor(norm, tokens) * slip(last, held.measure, margin)
    return Bound(Upper(part.value) + slipped, parts=(part,))


def _pair(maps: tuple[Mapping, ...]) -> bool:
    return len(maps) == 2 and isinstance(maps[0], Normalize) and isinstance(maps[1], (Attention, Heads))


def _steps_of(map: Compose) -> list[Mapping]:
    return once(("steps", id(map)), map, lambda: _steps(map.maps))


def _steps(maps: tuple[Mapping, ...]) -> list[Mapping]:
    """The maps, with each norm layer and the attention after it as one."""
    if _pair(maps):
        return list(maps)
    found: list[Mapping] = []
    for inner in maps:
        if found and _pair((found[-1], inner)):
            found[-1] = Compose((found[-1], inner))
        else:
            found.append(inner)
    return found


# Folding


def fold(layer: Normalize, attention: Attention | Heads) -> Attention | Heads:
    """The attention of x̂ that equals the attention of γx̂ + β."""
    attention, layer = in_double(attention), in_double(layer)
    inner = attention.attention if isinstance(attention, Heads) else attention
    made = inner.replace(potential=_potential(layer, inner.potential), lookup=_lookup(layer, inner.lookup))
    joined = Heads(made, attention.w_o, attention.b_o) if isinstance(attention, Heads) else made
    subject = subject_of(joined)
    for before, after in zip(single_heads(inner), subject.folded or subject.separate, strict=True):
        _check_values(layer, before, after)
        _check_scores(layer, before, after)
    return joined


def _potential(layer: Normalize, potential: Potential) -> Potential:
    try:
        return with_simple_parts(potential, lambda part: _simple(layer, part))
    except ArgumentError as error:  # a potential that may see tokens beside its parts
        raise Refusal(str(error)) from None


def _simple(layer: Normalize, potential: Potential) -> Potential:
    if isinstance(potential, PositionPotential):
        return potential
    if not isinstance(potential, Dot):
        raise Refusal(f"a norm layer is folded into dot products, not into {type(potential).__name__}")
    if layer.weight is None and layer.bias is None and not layer.centered:
        return potential
    w_q, b_q = _projection(layer, potential.w_q, potential.b_q)
    w_k, b_k = _projection(layer, potential.w_k, potential.b_k)
    return Dot(w_q, w_k, potential.factor(w_q.shape[-1]), b_q, b_k)


def _lookup(layer: Normalize, lookup: Lookup) -> Lookup:
    if isinstance(lookup, (Identity, Linear)):
        linear = lookup if isinstance(lookup, Linear) else None
        w, b = _projection(
            layer, None if linear is None else linear.w_v, None if linear is None else linear.b_v
        )
        return Linear(w, b)
    if isinstance(lookup, Factored):
        w, b = _projection(layer, lookup.w, None)
        offset = None if b is None else (b.unsqueeze(-2) @ lookup.u).squeeze(-2)
        return Factored(
            w, lookup.u, lookup.b if offset is None else offset if lookup.b is None else offset + lookup.b
        )
    raise Refusal(f"values by {type(lookup).__name__} are not folded")


def _projection(layer: Normalize, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """ΠΓw and b + wᵀβ."""
    if w is None:
        known = layer.weight if layer.weight is not None else layer.bias
        if known is None:
            raise Refusal(
                "the width of a token is not known here; give the attention "
                "projections, or the norm layer a weight"
            )
        w = torch.eye(len(known), dtype=torch.float64)
    offset = None if layer.bias is None else layer.bias @ w
    w = w if layer.weight is None else layer.weight.unsqueeze(-1) * w
    w = w - w.mean(-2, keepdim=True) if layer.centered else w
    b = b if offset is None else offset if b is None else offset + b
    if not all(bool(torch.isfinite(made).all()) for made in (w, b) if made is not None):
        raise Refusal(OUT_OF_RANGE)
    return w, b


def _size(layer: Normalize, w: Tensor | None, b: Tensor | None, width: int) -> Upper:
    """√d |Γw|_F + |β||w|_F + |b|: what roundings of a folded projection of x̂ are relative to."""
    w = torch.eye(width, dtype=torch.float64) if w is None else w
    size = root(width) * length(w if layer.weight is None else layer.weight.unsqueeze(-1) * w)
    size = size if layer.bias is None else size + length(layer.bias) * length(w)
    return size if b is None else size + length(b)


def _check_values(layer: Normalize, before: Attention, after: Head) -> None:
    """The rounding of ΠΓW is far below |ΠΓW|."""
    width, lookup = after.width(None), before.lookup
    first = lookup.w_v if isinstance(lookup, Linear) else lookup.w if isinstance(lookup, Factored) else None
    size = _size(layer, first, None, width) * product([length(factor) for factor in after.factors[1:]])
    _check_rounding(root(width) * after.w, size, width, "values")


def _check_scores(layer: Normalize, before: Attention, after: Head) -> None:
    """The rounding of scores of x̂ is far below |A'| d."""
    width = after.width(None)
    for old, new in zip(_dots(before.potential), _dots(after.potential), strict=True):
        size = _size(layer, old.w_q, old.b_q, width) * _size(layer, old.w_k, old.b_k, width)
        keys = None if new.w_k is None else new.w_k.mT
        _check_rounding(width * product_norm(new.w_q, keys), size, width, "scores")


def _check_rounding(norm: Upper, size: Upper, width: int, what: str) -> None:
    if not float(4 * relative_error(2 * width + 16) * size) <= 1e-9 * float(norm):
        raise Refusal(f"folding the norm layer into these {what} leaves little but rounding")


def _dots(potential: Potential) -> list[Dot]:
    return [part for part in simple_parts(potential) if isinstance(part, Dot)]


def _hats(plain: Normalize, inner: Attention | Heads, domain: Domain) -> Ball:
    """A ball that holds x̂ for the tokens of the domain."""
    width = width_of(domain) or subject_of(inner).separate[0].width(None)
    origin = torch.zeros(width, dtype=torch.float64)
    if isinstance(domain, Near):
        tokens = enclosing(domain).tokens
        near = image(plain, domain)
        balls = balls_of(near, width) if isinstance(near, Near) else []
        best = min(balls, key=lambda ball: float(ball.radius), default=None)
        full = float(root(width))
        if best is None or float(best.radius) >= full:
            return Ball(full, origin, tokens)
        return Ball(float(best.radius), best.center, tokens)
    assert isinstance(domain, TokenSet)
    return Ball(float(hat_radius(plain, domain, width)), origin, domain.tokens)
