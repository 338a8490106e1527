"""Maps at a value, for tokens that move about it: the derivative there, what is beyond it, and how much it can change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import maps
from regard._round import EPS, gamma, product_norm_bound
from regard._verb import Verb
from regard.attention import Attention
from regard.certify.locating import doubled, one_sequence
from regard.certify.near.context_head import ContextHead
from regard.certify.near.heads import LocalHeads
from regard.certify.near.linear import LinearMove
from regard.certify.near.matrix_norms import MARGIN, largest_root
from regard.certify.near.moves import row_moves
from regard.certify.near.steepness import derivative_change
from regard.certify.subject import subject_of
from regard.certify.theorem import Refusal
from regard.certify.tokenwise import steepness, travel
from regard.domains import Neighborhood
from regard.norms import TokenMax


@dataclass(frozen=True)
class Stage:
    """A map at a value, for tokens within some moves of it.

    push: its exact derivative on blocks. remainder, cap (n,): what is beyond the linear part, and how far the value moves at all.
    change: for tangents within τ (n,), how far (Df(x') - Df(x)) e can be.
    """

    value: Tensor
    push: Callable[[Tensor], Tensor]
    remainder: Tensor
    cap: Tensor
    change: Callable[[Tensor], Tensor]


stage = Verb("stage")
"""stage.one(map, value, moves) -> Stage, for maps that are not made of others."""


@dataclass(frozen=True)
class FeedForward:
    """Two affine maps with an activation between them, whose remainder is known as a whole."""

    first: maps.Affine
    activation: maps.Activation
    second: maps.Affine


def grouped(inner: Sequence[object]) -> list[object]:
    """The maps of a composition, with feed-forward layers as one."""
    found: list[object] = []
    rest = list(inner)
    while rest:
        first, middle, last = (*rest[:3], None, None)[:3]
        if isinstance(first, maps.Affine) and isinstance(middle, maps.Pointwise) and isinstance(last, maps.Affine):
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
    heads = LocalHeads(subject_of(map), Neighborhood(value, 0.0, TokenMax()))
    found = row_moves(heads, LinearMove(heads, 4), moves)

    def push(blocks: Tensor) -> Tensor:
        n, m, d, c = blocks.shape
        moved = heads.push(blocks.permute(0, 2, 1, 3).reshape(n, d, m * c))
        return moved.unflatten(-1, (m, c)).permute(0, 2, 1, 3)

    return Stage(doubled(map)(value), push, found.remainder, found.best, lambda tangents: derivative_change(heads, moves, tangents))


@stage.rule(maps.ToContext)
def _context(map: maps.ToContext, value: Tensor, moves: Tensor) -> Stage:
    """|D²f[t, e]| = |E[(v - Ev)(z·t - Ez·t)(z·e - Ez·e)]| ≤ 2wRκ²|t||e| for keys in a ball of radius R, κ = |A|R, whatever the queries.

    Each query is on its own, and Df = Cov(v, z) for keys that are centered, so that those far away lose no digits.
    """
    local = ContextHead(map, value)
    steep, lost = local.spread * local.kappa, local.error * local.spread
    bend = 2 * steep * local.kappa * moves * MARGIN
    cap = torch.clamp(steep * moves, max=2 * local.spread) * MARGIN
    remainder = bend * moves / 2 + lost * (1 + local.kappa * moves)
    turned = bend + lost * local.kappa
    return Stage(local.value, lambda blocks: local.gains @ blocks, remainder, cap, lambda tangents: turned * tangents)


@stage.rule(maps.Affine)
def _affine(map: maps.Affine, value: Tensor, moves: Tensor) -> Stage:
    w = map.w.detach().double()
    after = maps.Affine(w, None if map.b is None else map.b.detach().double())(value)
    return Stage(after, lambda blocks: w.mT @ blocks, torch.zeros_like(moves), product_norm_bound(w) * moves * MARGIN, torch.zeros_like)


@stage.rule(maps.Normalize)
def _normalize(map: maps.Normalize, value: Tensor, moves: Tensor) -> Stage:
    """|N(x + t) - N(x) - DN t| ≤ max|γ| |t|²/√d (1/(s m) + s/m³), |D²N[t, e]| ≤ 4 max|γ| |t||e|/(√d m²); s² = |x|²/d + eps, m = s - |t|/√d.

    With g the centered token and |g| ≤ √d s: |(1/s)'e| ≤ |e|/(√d s²), |(1/s)''[t, e]| ≤ 2|t||e|/(d s³).
    """
    weight, bias = (None if t is None else t.detach().double() for t in (map.weight, map.bias))
    map = maps.Normalize(map.eps, weight, bias, map.centered)
    width = math.sqrt(value.shape[-1])
    centered = value - value.mean(-1, keepdim=True) if map.centered else value
    size = (centered.square().mean(-1) + map.eps).sqrt() / MARGIN
    least = size - moves / width
    top = 1.0 if weight is None else float(weight.abs().max())
    infinite = torch.full_like(moves, math.inf)
    blur = 64 * (value.shape[-1] + 8) * EPS * (1 + value.norm(dim=-1) / size)  # what the mean of a token takes of its digits
    if float(blur.max()) > 1e-6:
        raise Refusal("a norm layer gets a token whose mean is so large that float64 has no digits left; center the tokens")
    rounding = top * blur * (moves / least + width)
    remainder = torch.where(least > 0, top * moves.square() / width * (1 / (size * least) + size / least**3) * MARGIN + rounding, infinite)
    bend = torch.where(least > 0, top * (4 * moves / (width * least.square()) + blur / least) * MARGIN, infinite)
    gains = torch.func.vmap(torch.func.jacrev(map))(value).unsqueeze(1)
    return Stage(
        map(value), lambda blocks: gains @ blocks, remainder, travel.one(map, value, moves).moves, lambda tangents: bend * tangents
    )


@stage.rule(maps.Pointwise)
def _pointwise(map: maps.Pointwise, value: Tensor, moves: Tensor) -> Stage:
    """|φ(x + t) - φ(x) - φ'(x) t| ≤ |φ''| |t|²/2 for each entry, and for each token by its length."""
    slope = _slopes(map.activation, value)[0][:, None, :, None]
    bend = curvature_of(map.activation)[0]
    cap = travel.one(map, value, moves).moves
    turned = min(bend, math.inf) * moves if bend < math.inf else torch.full_like(moves, 2 * float(steepness.one(map.activation)))
    return Stage(map(value), lambda blocks: slope * blocks, bend / 2 * moves.square(), cap, lambda tangents: turned * tangents)


@stage.rule(FeedForward)
def _feed_forward(map: FeedForward, value: Tensor, moves: Tensor) -> Stage:
    """Both layers at once: |w_2ᵀ(φ''(h)(w_1ᵀt)²)|/2 ≤ |t|²/2 λ_max(w_2ᵀD[(w_k·w_l)²]D w_2)^{1/2}, and the third derivative beside it."""
    w_1, w_2 = map.first.w.detach().double(), map.second.w.detach().double()
    hidden = maps.Affine(w_1, None if map.first.b is None else map.first.b.detach().double())(value)
    slope, bend = _slopes(map.activation, hidden)
    second_order, third_order = curvature_of(map.activation)
    weighted = bend.unsqueeze(-1) * w_2
    sharp = largest_root(weighted.mT @ (w_1.mT @ w_1).square() @ weighted)
    columns, rows = w_1.norm(dim=0), w_2.norm(dim=1)
    steepest = float(columns.max()) * float(largest_root((w_1 * rows) @ w_1.mT)) ** 2
    norms = product_norm_bound(w_1), product_norm_bound(w_2)
    # sup |D²f[t, e]| over unit t and e is that over t = e, for each output direction a symmetric form
    first = torch.minimum(second_order * norms[0] ** 2 * norms[1] * torch.ones_like(moves), sharp + moves * third_order * steepest)
    whole = moves.square() / 2 * torch.minimum(first, sharp + moves / 3 * third_order * steepest)
    blur = gamma(len(w_1) + 2) * (value.abs() @ w_1.abs() + (0.0 if map.first.b is None else map.first.b.detach().double().abs()))
    reach = moves.unsqueeze(-1) * columns * MARGIN + 2 * blur  # where an entry can be: a sign may be a rounding
    if isinstance(map.activation, maps.Relu):
        whole = _crossed(hidden, reach, w_2)
    most = norms[0] * steepness.one(map.activation) * norms[1]
    turned = torch.minimum(torch.nan_to_num(first * moves, nan=math.inf), torch.full_like(moves, 2 * most)) * MARGIN
    if isinstance(map.activation, maps.Relu):  # the slope changes only where an entry can cross zero
        turned = torch.minimum(turned, ((reach >= hidden.abs()).double() * columns * rows).sum(-1) * MARGIN)
    gains = ((w_1.unsqueeze(0) * slope.unsqueeze(1)) @ w_2).mT.unsqueeze(1)
    after = maps.Affine(w_2, None if map.second.b is None else map.second.b.detach().double())(map.activation(hidden))
    return Stage(after, lambda blocks: gains @ blocks, whole * MARGIN, most * moves * MARGIN, lambda tangents: turned * tangents)


def _crossed(hidden: Tensor, moves: Tensor, w_2: Tensor) -> Tensor:
    """What is beyond the linear part of max(h, 0): an entry adds only how far it can go beyond zero."""
    beyond = (moves - hidden.abs()).clamp_min(0.0)
    return torch.minimum(product_norm_bound(w_2) * beyond.norm(dim=-1), beyond @ w_2.norm(dim=1))


def _slopes(activation: maps.Activation, x: Tensor) -> tuple[Tensor, Tensor]:
    """φ'(x) and φ''(x), entry by entry."""
    one = torch.ones_like(x)

    def slope(at: Tensor) -> Tensor:
        return torch.func.jvp(activation, (at,), (one,))[1]

    first, second = torch.func.jvp(slope, (x,), (one,))[:2]
    return first, second


def curvature_of(activation: maps.Activation) -> tuple[float, float]:
    """At least sup |φ''| and sup |φ'''|; infinite where they are not known or do not exist."""
    if isinstance(activation, maps.Gelu):
        return (0.79789, 0.77877) if not activation.tanh else (0.79789, 0.77670)
    if isinstance(activation, maps.Silu):
        return 0.50001 * abs(activation.slope), 0.30819 * activation.slope**2
    if isinstance(activation, maps.Tanh):
        return 0.76981, 2.00001
    return math.inf, math.inf
