"""Maps at a value, for tokens that move about it: the derivative there, what is beyond it,
and how much it can change.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard import maps
from regard._enclosed import Vectors, computed_lengths, largest_roots
from regard._round import product_norm_bound
from regard._upper import Lower, Upper, exact, relative_error, root, sizes, total
from regard._verb import Verb
from regard.attention import Attention
from regard.domains import Neighborhood
from regard.nonexpansive import Center
from regard.norms import TokenMax
from regard.proofs.locating import in_double, one_sequence
from regard.proofs.near.context_head import ContextHead
from regard.proofs.near.facts import local_facts
from regard.proofs.near.steepness import derivative_change
from regard.proofs.subject import subject_of
from regard.proofs.theorem import Refusal
from regard.proofs.tokenwise import steepness, travel


@dataclass(frozen=True)
class Stage:
    """A map at a value, for tokens within some moves of it.

    push: its exact derivative on blocks. remainder, cap (n,): what is beyond the linear part, and how far the
    value moves at all.
    change: for tangents within τ (n,), how far (Df(x') - Df(x)) e can be.
    lost: for tangents of lengths τ (n,), what rounding of the derivative and of products with it can hide.
    blur (n,): how far the value may be from the true one, beside what the remainder counts.
    """

    value: Tensor
    push: Callable[[Tensor], Tensor]
    remainder: Upper
    cap: Upper
    change: Callable[[Upper], Upper]
    lost: Callable[[Upper], Upper]
    blur: Upper


stage = Verb("stage")
"""stage.one(map, value, moves) -> Stage, for maps that are not made of others;
moves (n,) are how far each token may be from its value.
"""


@dataclass(frozen=True)
class FeedForward:
    """Two affine maps with an activation between them, whose remainder is known as a whole."""

    first: maps.Affine
    activation: maps.Activation
    second: maps.Affine


def group_feed_forward(inner: Sequence[object]) -> list[object]:
    """The maps of a composition, with feed-forward layers as one."""
    found: list[object] = []
    rest = list(inner)
    while rest:
        first, middle, last = (*rest[:3], None, None)[:3]
        if (
            isinstance(first, maps.Affine)
            and isinstance(middle, maps.Pointwise)
            and isinstance(last, maps.Affine)
        ):
            found.append(FeedForward(first, middle.activation, last))
            del rest[:3]
        else:
            found.append(rest.pop(0))
    return found


@stage.rule(object)
def _unknown(map: object, value: Tensor, moves: Tensor) -> Stage:
    raise Refusal(f"{type(map).__name__} has no Taylor model")


@stage.rule(maps.Heads)
@stage.rule(Attention)
def _attention(map: Attention | maps.Heads, value: Tensor, moves: Tensor) -> Stage:
    one_sequence(map)
    facts = local_facts(subject_of(map), Neighborhood(value, 0.0, TokenMax()))
    heads, found = facts.heads, facts.rows(moves)

    def push(blocks: Tensor) -> Tensor:
        n, m, d, c = blocks.shape
        moved = heads.push(blocks.permute(0, 2, 1, 3).reshape(n, d, m * c))
        return moved.unflatten(-1, (m, c)).permute(0, 2, 1, 3)

    def change(tangents: Upper) -> Upper:
        return derivative_change(heads, found.scores, tangents)

    def lost(tangents: Upper) -> Upper:
        return 2 * heads.jacobian_error(tangents.bound)  # of the blocks, and of the product with them

    blur = total([4 * values.w * values.local.means.error for values in heads.joined])
    return Stage(in_double(map)(value), push, found.remainder, found.best, change, lost, blur)


@stage.rule(maps.ToContext)
def _context(map: maps.ToContext, value: Tensor, moves: Tensor) -> Stage:
    """|D²f[t, e]| = |E[(v - Ev)(z·t - Ez·t)(z·e - Ez·e)]| ≤ 2wRκ²|t||e| for keys in a ball of radius R, κ =
    |A|R, whatever the queries.

    Each query is on its own, and Df = Cov(v, z) for keys that are centered, so that those far away lose no
    digits.
    """
    local, rho = ContextHead(map, value), exact(moves)
    steep, lost = local.spread * local.kappa, local.error * local.spread
    bend = 2 * steep * local.kappa * rho
    cap = (steep * rho).minimum(2 * local.spread)
    remainder = (bend * rho).halved() + lost * (1 + local.kappa * rho)
    turned = bend + lost * local.kappa
    lose = _product_loss(local.gains)
    change = partial(operator.mul, turned)
    return Stage(local.value, partial(torch.matmul, local.gains), remainder, cap, change, lose, _none(rho))


@stage.rule(maps.Affine)
def _affine(map: maps.Affine, value: Tensor, moves: Tensor) -> Stage:
    map = _double(map)
    rho, gains = exact(moves), map.w.mT.expand(len(value), 1, -1, -1)
    cap = Upper(product_norm_bound(map.w)) * rho
    push = partial(torch.matmul, map.w.mT)
    return Stage(map(value), push, _none(rho), cap, _none, _product_loss(gains), _affine_blur(map, value))


@stage.rule(Center)
def _center(map: Center, value: Tensor, moves: Tensor) -> Stage:
    """Linear, with the constant one."""
    rho, width = exact(moves), value.shape[-1]
    matrix = torch.eye(width, dtype=torch.float64) - 1.0 / width
    product = _product_loss(matrix.expand(len(value), 1, -1, -1))
    off = relative_error(4) * root(width)  # of 1/d, in every entry

    def lost(tangents: Upper) -> Upper:
        return product(tangents) + off * tangents

    blur = relative_error(width + 4) * 2 * computed_lengths(value)
    return Stage(map(value), partial(torch.matmul, matrix), _none(rho), rho, _none, lost, blur)


@stage.rule(maps.Normalize)
def _normalize(map: maps.Normalize, value: Tensor, moves: Tensor) -> Stage:
    """|N(x + t) - N(x) - DN t| ≤ max|γ| |t|²/√d (1/(s m) + s/m³), |D²N[t, e]| ≤ 4 max|γ| |t||e|/(√d m²); s² =
    |x|²/d + eps, m = s - |t|/√d.

    With g the centered token and |g| ≤ √d s: |(1/s)'e| ≤ |e|/(√d s²), |(1/s)''[t, e]| ≤ 2|t||e|/(d s³).
    """
    weight, bias = (None if t is None else t.detach().double() for t in (map.weight, map.bias))
    map, wide, rho = maps.Normalize(map.eps, weight, bias, map.centered), value.shape[-1], exact(moves)
    centered = (
        Vectors(value - value.mean(-1, keepdim=True), relative_error(wide + 4) * computed_lengths(value))
        if map.centered
        else None
    )
    tokens = Vectors(value, exact(0.0)) if centered is None else centered
    low = (tokens.lengths_low().square() / wide + Lower(float(map.eps))).sqrt()
    high = (tokens.lengths().square() / wide + Upper(float(map.eps))).sqrt()
    shared = rho * root(wide) / wide  # |t|/√d
    least = low - shared
    top = exact(1.0) if weight is None else sizes(weight).amax()
    blur = (
        64 * relative_error(wide + 8) * (1 + computed_lengths(value) / low)
    )  # what the mean of a token takes of its digits
    if float(blur.amax()) > 1e-6:
        raise Refusal(
            "a norm layer gets a token whose mean is so large that float64 has no "
            "digits left; center the tokens"
        )
    rounding = top * blur * (rho / least + root(wide))
    over = exact(1.0) / (low * least) + high / (least.square() * least)
    remainder = top * rho * shared * over + rounding
    bend = top * (4 * shared / least.square() + blur / least)
    dead = least.value <= 0
    remainder, bend = (
        part.map(lambda found: torch.where(dead, math.inf, found)) for part in (remainder, bend)
    )
    gains = _normalize_gains(map, value)
    cap: Upper = travel.one(map, value, moves).moves
    change, push = partial(operator.mul, bend), partial(torch.matmul, gains)
    return Stage(map(value), push, remainder, cap, change, _product_loss(gains), _none(rho))


def _normalize_gains(map: maps.Normalize, value: Tensor) -> Tensor:
    """Γ(Π - x̂x̂ᵀ/d)/s for each token, (n, 1, d, d): x̂ = Πx/s, with Π the centering, or the identity."""
    wide = value.shape[-1]
    away = value - value.mean(-1, keepdim=True) if map.centered else value
    inverse = (away.square().mean(-1, keepdim=True) + map.eps).rsqrt()
    hat = away * inverse
    whole = torch.eye(wide, dtype=torch.float64) - (1 / wide if map.centered else 0.0)
    gains = (whole - hat.unsqueeze(-1) * hat.unsqueeze(-2) / wide) * inverse.unsqueeze(-1)
    return (gains if map.weight is None else map.weight.unsqueeze(-1) * gains).unsqueeze(1)


@stage.rule(maps.Pointwise)
def _pointwise(map: maps.Pointwise, value: Tensor, moves: Tensor) -> Stage:
    """|φ(x + t) - φ(x) - φ'(x) t| ≤ |φ''| |t|²/2 for each entry, and for each token by its length."""
    rho = exact(moves)
    slope = _slopes(map.activation, value)[0][:, None, :, None]
    bend = Upper(curvature_of(map.activation)[0])
    turned = (bend * rho).minimum(2 * Upper(float(steepness.one(map.activation))))
    cap: Upper = travel.one(map, value, moves).moves
    beyond = bend.halved() * rho.square()
    loss = relative_error(64) * Upper(
        float(steepness.one(map.activation))
    )  # of a slope, and a product with it
    blur = loss * computed_lengths(value)
    change, push = partial(operator.mul, turned), partial(torch.mul, slope)
    return Stage(map(value), push, beyond, cap, change, partial(operator.mul, loss), blur)


@stage.rule(FeedForward)
def _feed_forward(map: FeedForward, value: Tensor, moves: Tensor) -> Stage:
    """Both layers at once: |w_2ᵀ(φ''(h)(w_1ᵀt)²)|/2 ≤ |t|²/2 λ_max(w_2ᵀD[(w_k·w_l)²]D w_2)^{1/2}, and the
    third derivative beside it.

    sup |D²f[t, e]| over unit t and e is that over t = e, for each output direction a symmetric form.
    """
    first, second, rho = _double(map.first), _double(map.second), exact(moves)
    w_1, w_2 = first.w, second.w
    hidden = first(value)
    slope, bend = _slopes(map.activation, hidden)
    hidden_blur = relative_error(2 * len(w_1) + 4) * (
        sizes(value) @ sizes(w_1) + (exact(0.0) if first.b is None else sizes(first.b))
    )
    norms = Upper(product_norm_bound(w_1)), Upper(product_norm_bound(w_2))
    most = norms[0] * Upper(float(steepness.one(map.activation))) * norms[1]
    bends = _relu_bends if isinstance(map.activation, maps.Relu) else _smooth_bends
    layer = _Layer(w_1, w_2, hidden, bend, hidden_blur, norms)
    beyond, turned = bends(map.activation, layer, rho)
    turned = turned.minimum(2 * most)
    gains = ((w_1.unsqueeze(0) * slope.unsqueeze(1)) @ w_2).mT.unsqueeze(1)
    thick = computed_lengths(w_1.flatten()) * computed_lengths(w_2.flatten())
    steep = Upper(float(steepness.one(map.activation)))
    bent = exact(0.0) if isinstance(map.activation, maps.Relu) else Upper(curvature_of(map.activation)[0])
    off = thick * (
        relative_error(sum(w_1.shape) + 64) * steep + bent * hidden_blur.amax()
    )  # of the derivative
    product = _product_loss(gains)
    active = map.activation(hidden)
    blur = _affine_blur(second, active) + norms[1] * steep * hidden_blur.norm()
    change, push = partial(operator.mul, turned), partial(torch.matmul, gains)

    def lost(tangents: Upper) -> Upper:
        return product(tangents) + off * tangents

    return Stage(second(active), push, beyond, most * rho, change, lost, blur)


@dataclass(frozen=True)
class _Layer:
    """A feed-forward layer at a value: its weights with at least their norms, the hidden entries with at
    least what they lost, and φ'' there.
    """

    w_1: Tensor
    w_2: Tensor
    hidden: Tensor
    bend: Tensor
    blur: Upper
    norms: tuple[Upper, Upper]

    @property
    def columns(self) -> Upper:
        """At least |w_1k|."""
        return computed_lengths(self.w_1.mT)

    @property
    def rows(self) -> Upper:
        """At least |w_2k|."""
        return computed_lengths(self.w_2)


def _relu_bends(activation: maps.Activation, layer: _Layer, rho: Upper) -> tuple[Upper, Upper]:
    """What is beyond the linear part, and how much the derivative changes: only where an entry can cross
    zero, and a sign may be a rounding.
    """
    reach = rho.unsqueeze(-1) * layer.columns + 2 * layer.blur
    beyond = _beyond_kinks(layer.hidden, reach, layer.w_2, layer.norms[1])
    both = (layer.columns * layer.rows).map(lambda value: value.expand_as(layer.hidden))
    return beyond, both.where(reach.bound >= layer.hidden.abs()).sum(-1)


def _smooth_bends(activation: maps.Activation, layer: _Layer, rho: Upper) -> tuple[Upper, Upper]:
    """The same from the second derivative at the value and the third anywhere,
    or from the second anywhere.
    """
    columns, rows = layer.columns, layer.rows
    second_order, third_order = (Upper(found) for found in curvature_of(activation))
    lost = (third_order * layer.blur * columns.square() * rows).sum(-1)
    sharp = _sharpest(layer.w_1, layer.w_2, layer.bend, columns, rows) + lost
    steepest = columns.amax() * _weighted_norm(layer.w_1, rows)
    anywhere = second_order * layer.norms[0].square() * layer.norms[1]
    bent = anywhere.minimum(sharp + rho * third_order * steepest)
    beyond = rho.square().halved() * bent.minimum(sharp + rho / 3 * third_order * steepest)
    return beyond, bent * rho


def _product_loss(gains: Tensor) -> Callable[[Upper], Upper]:
    """What a rounded product of gains (n, 1, e, d) with a tangent can hide: γ |G|_F |t|, for each token."""
    size = relative_error(gains.shape[-1] + 4) * computed_lengths(gains.flatten(1))
    return partial(operator.mul, size)


def _affine_blur(map: maps.Affine, value: Tensor) -> Upper:
    """What wᵀx + b loses, for each token: γ (|w|_F |x| + |b|)."""
    bias = exact(0.0) if map.b is None else computed_lengths(map.b)
    size = computed_lengths(map.w.flatten()) * computed_lengths(value) + bias
    return relative_error(len(map.w) + 4) * size


def _sharpest(w_1: Tensor, w_2: Tensor, bend: Tensor, columns: Upper, rows: Upper) -> Upper:
    """At least λ_max(w_2ᵀD[(w_k·w_l)²]D w_2)^{1/2} with D = diag φ''(h), for each token; terms cancel,
    their rounding does not.
    """
    weighted = bend.unsqueeze(-1) * w_2
    whole = (sizes(bend) * columns.square() * rows).sum(-1)
    rounding = relative_error(4 * w_1.shape[-1] + 2 * len(w_1) + 64) * whole.square()
    return largest_roots(weighted.mT @ (w_1.mT @ w_1).square() @ weighted, error=rounding)


def _weighted_norm(w_1: Tensor, rows: Upper) -> Upper:
    """At least λ_max(Σ_k |w_2k| w_1k w_1kᵀ)."""
    scaled = w_1 * rows.value.sqrt()
    found = largest_roots(scaled @ scaled.mT, scaled.shape[-1]).square()
    return Upper(found.value, found.roundings + rows.roundings + 4)


def _beyond_kinks(hidden: Tensor, reach: Upper, w_2: Tensor, norm: Upper) -> Upper:
    """What is beyond the linear part of max(h, 0): an entry adds only how far it can go beyond zero."""
    beyond = reach - Lower(hidden.abs())
    return (norm * beyond.norm()).minimum((beyond * computed_lengths(w_2)).sum(-1))


def _slopes(activation: maps.Activation, x: Tensor) -> tuple[Tensor, Tensor]:
    """φ'(x) and φ''(x), entry by entry."""
    at = x.detach().requires_grad_()
    with torch.enable_grad():
        first = _derivative(activation(at), at)
        second = _derivative(first, at)
    return first.detach(), second.detach()


def _derivative(value: Tensor, at: Tensor) -> Tensor:
    """That of each entry of a value by its own entry; zero where the value does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(at)
    return torch.autograd.grad(value.sum(), at, create_graph=True)[0]


def curvature_of(activation: maps.Activation) -> tuple[float, float]:
    """At least sup |φ''| and sup |φ'''|; infinite where they are not known or do not exist."""
    if isinstance(activation, maps.Gelu):
        return (0.79789, 0.77877) if not activation.tanh else (0.79789, 0.77670)
    if isinstance(activation, maps.Silu):
        return 0.50001 * abs(activation.slope), 0.30819 * activation.slope**2
    if isinstance(activation, maps.Tanh):
        return 0.76981, 2.00001
    return math.inf, math.inf


def _double(map: maps.Affine) -> maps.Affine:
    """An affine map in float64."""
    return maps.Affine(map.w.detach().double(), None if map.b is None else map.b.detach().double())


def _none(moves: Upper) -> Upper:
    return exact(torch.zeros_like(moves.value))
