"""The Taylor model: through a network carry the exact derivative from the input, and from every place where a remainder arose to here.

A state says x' = x + Σ_c B_c d_c with |d_c,j| ≤ ρ_c,j: the first column is the move of the input, the others are remainders of earlier
maps. A map
multiplies every column by its exact derivative and adds a column for its own remainder. Norms are never multiplied across layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard import maps
from regard._round import product_norm_bound
from regard._verb import Verb
from regard.attention import Attention
from regard.certify.near.heads import MARGIN, LocalHeads, largest_root, matrix_norms
from regard.certify.near.linear import LinearMove
from regard.certify.near.moves import row_moves
from regard.certify.subject import subject_of
from regard.certify.theorem import Refusal
from regard.certify.tokenwise import steepness, travel
from regard.domains import Neighborhood
from regard.norms import Frobenius, SequenceNorm, TokenMax

NUMBERS = 60_000_000
"""How many numbers the derivatives of all columns may hold; beyond it, old remainders are merged into one."""
ROUNDING = 1e-11
"""What float64 may lose in values and products, relative to their sizes; added to every remainder."""


@dataclass(frozen=True)
class Column:
    """∂x_i/∂d_j (n, m, d, c) of one origin whose m tokens move by at most `radii` (m,). Columns of the same origin share that tensor."""

    blocks: Tensor
    radii: Tensor

    def plus(self, other: Column | None) -> Column:
        """The sum with a column of the same origin."""
        return self if other is None else Column(self.blocks + other.blocks, self.radii)

    def reach(self) -> Tensor:
        """At least |Σ_j B_ij d_j| for each token i: λ_max(Σ_j ρ_j² B_ij B_ijᵀ/λ_j)^{1/2} with λ_j in proportion to the blocks."""
        moving = self.radii > 0
        if not bool(moving.any()):
            return torch.zeros(len(self.blocks), dtype=torch.float64)
        if not bool(torch.isfinite(self.radii).all()):
            return torch.full((len(self.blocks),), math.inf, dtype=torch.float64)
        scaled = self.blocks[:, moving] * self.radii[moving][None, :, None, None]
        sizes = scaled.flatten(-2).norm(dim=-1).clamp_min(1e-300)
        share = (sizes / sizes.sum(-1, keepdim=True)).sqrt()
        wide = (scaled / share[..., None, None]).transpose(1, 2).flatten(-2)
        gram = wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide
        return torch.minimum(largest_root(gram), sizes.sum(-1)) * (MARGIN + ROUNDING)


@dataclass(frozen=True)
class State:
    """Tokens after some maps: their values for the given input, columns, and `cap` (n,): no token is farther than this from its value."""

    value: Tensor
    columns: tuple[Column, ...]
    cap: Tensor

    def moves(self) -> Tensor:
        """At least how far each token is from its value."""
        total = sum((column.reach() for column in self.columns), torch.zeros(len(self.value), dtype=torch.float64))
        return torch.minimum(total, self.cap) * MARGIN

    def remainder(self) -> Tensor:
        """The part of the moves that is not linear in the input."""
        return sum((column.reach() for column in self.columns[1:]), torch.zeros(len(self.value), dtype=torch.float64))

    def deviation(self, norm: SequenceNorm) -> float:
        """At least the norm of x' - x: in Frobenius norm the move of one token is measured for all rows together."""
        each = float(norm.of(self.moves().unsqueeze(-1)))
        first = self.columns[0]
        if not isinstance(norm, Frobenius) or len(first.radii) != 1:
            return each
        stacked = first.blocks[:, 0].flatten(0, 1)
        linear = float(matrix_norms(stacked)) * float(first.radii[0]) * (1 + ROUNDING)
        beyond = sum(float(norm.of(column.reach().unsqueeze(-1))) for column in self.columns[1:])
        return min(each, (linear + beyond) * MARGIN)

    def merged(self) -> State:
        """The same with fewer numbers: all remainders as one, per token."""
        if sum(column.blocks.numel() for column in self.columns) <= NUMBERS or len(self.columns) <= 2:
            return self
        n, d = self.value.shape
        return replace(self, columns=(self.columns[0], fresh(n, d, self.remainder())))


def fresh(n: int, width: int, radii: Tensor) -> Column:
    """A column that starts here."""
    eye = torch.eye(n, dtype=torch.float64)[:, :, None, None] * torch.eye(width, dtype=torch.float64)
    return Column(eye, radii)


def start(points: Tensor, radii: Tensor) -> State:
    """The input itself; only tokens that move have columns."""
    n, d = points.shape
    moving = radii > 0
    column = fresh(n, d, radii)
    return State(points, (Column(column.blocks[:, moving], radii[moving]),), radii)


step = Verb("step")
"""step.one(map, state) -> State."""


@step.rule(object)
def _unknown(map: object, state: State) -> State:
    raise Refusal(f"{type(map).__name__} has no Taylor model")


@step.rule(maps.Compose)
def _compose(map: maps.Compose, state: State) -> State:
    inner = list(map.maps)
    while inner:
        if len(inner) >= 3 and _is_feed_forward(inner[:3]):
            state = _feed_forward(inner[0], inner[1], inner[2], state)  # type: ignore[arg-type]
            del inner[:3]
        else:
            state = step.one(inner.pop(0), state)
    return state


@step.rule(maps.Residual)
def _residual(map: maps.Residual, state: State) -> State:
    after = step.one(map.map, state)
    if after.value.shape != state.value.shape:
        raise Refusal("a residual connection around a map that changes the width")
    # A remainder from before that was merged inside goes on alone here; what became of it inside is part of the merged column.
    inside = {id(column.radii): column for column in after.columns}
    before = tuple(column.plus(inside.pop(id(column.radii), None)) for column in state.columns)
    return State(state.value + after.value, before + tuple(inside.values()), state.cap + after.cap).merged()


@step.rule(maps.Heads)
@step.rule(Attention)
def _attention(map: Attention | maps.Heads, state: State) -> State:
    heads = LocalHeads(subject_of(map), Neighborhood(state.value, 0.0, TokenMax()))
    moves = state.moves()
    if bool(torch.isinf(moves).any()):
        raise Refusal("the moves before an attention are not bounded")
    found = row_moves(heads, LinearMove(heads, 4), moves)
    columns = tuple(Column(_pushed(heads, column.blocks), column.radii) for column in state.columns)
    value = _joined(map(state.value))
    return _after(value, columns, found.remainder, found.best)


def _joined(value: Tensor) -> Tensor:
    return value if value.ndim == 2 else value.transpose(0, 1).flatten(1)


def _pushed(heads: LocalHeads, blocks: Tensor) -> Tensor:
    n, m, d, c = blocks.shape
    moved = heads.push(blocks.permute(0, 2, 1, 3).reshape(n, d, m * c))
    return moved.unflatten(-1, (m, c)).permute(0, 2, 1, 3)


def _after(value: Tensor, columns: tuple[Column, ...], remainder: Tensor, cap: Tensor) -> State:
    """The state after a map with this remainder, which is never more than the cap and the linear part together."""
    n, d = value.shape
    rounding = ROUNDING * (value.norm(dim=-1) + 1e-300)
    linear = sum((column.reach() for column in columns), torch.zeros(n, dtype=torch.float64))
    known = torch.minimum(torch.nan_to_num(remainder, nan=math.inf, posinf=math.inf), cap + linear) + rounding
    return State(value, (*columns, fresh(n, d, known)), cap + rounding).merged()


@step.rule(maps.Affine)
def _affine(map: maps.Affine, state: State) -> State:
    w = map.w.detach().double()
    columns = tuple(Column(w.mT @ column.blocks, column.radii) for column in state.columns)
    value = maps.Affine(w, None if map.b is None else map.b.detach().double())(state.value)
    return State(value, columns, product_norm_bound(w) * state.cap * MARGIN)


@step.rule(maps.Normalize)
def _normalize(map: maps.Normalize, state: State) -> State:
    """|N(x + t) - N(x) - DN t| ≤ max|γ| |t|²/√d (1/(s m) + s/m³), s = √(|x|²/d + eps), m = s - |t|/√d."""
    weight, bias = (None if t is None else t.detach().double() for t in (map.weight, map.bias))
    map = maps.Normalize(map.eps, weight, bias, map.centered)
    moves = state.moves()
    width = state.value.shape[-1]
    centered = state.value - state.value.mean(-1, keepdim=True) if map.centered else state.value
    size = (centered.square().mean(-1) + map.eps).sqrt() / MARGIN
    least = size - moves / math.sqrt(width)
    top = 1.0 if map.weight is None else float(map.weight.abs().max())
    bent = top * moves.square() / math.sqrt(width) * (1 / (size * least) + size / least**3) * MARGIN
    remainder = torch.where(least > 0, bent, torch.full_like(bent, math.inf))
    gains = torch.func.vmap(torch.func.jacrev(map))(state.value)
    columns = tuple(Column(gains.unsqueeze(1) @ column.blocks, column.radii) for column in state.columns)
    return _after(map(state.value), columns, remainder, travel.one(map, state.value, moves).moves)


@step.rule(maps.Pointwise)
def _pointwise(map: maps.Pointwise, state: State) -> State:
    """|φ(x + t) - φ(x) - φ'(x) t| ≤ |φ''| |t|²/2 for each entry, and for each token by its length."""
    moves = state.moves()
    slope = _slopes(map.activation, state.value)[0]
    bent = curvature_of(map.activation)[0] / 2 * moves.square()
    columns = tuple(Column(slope[:, None, :, None] * column.blocks, column.radii) for column in state.columns)
    return _after(map(state.value), columns, bent, travel.one(map, state.value, moves).moves)


def _is_feed_forward(inner: Sequence[object]) -> bool:
    return isinstance(inner[0], maps.Affine) and isinstance(inner[1], maps.Pointwise) and isinstance(inner[2], maps.Affine)


def _feed_forward(first: maps.Affine, act: maps.Pointwise, second: maps.Affine, state: State) -> State:
    """Both layers at once: |w_2ᵀ(φ''(h)(w_1ᵀt)²)|/2 ≤ |t|²/2 λ_max(w_2ᵀD[(w_k·w_l)²]D w_2)^{1/2}, and the third derivative beside it."""
    moves = state.moves()
    w_1, w_2 = first.w.detach().double(), second.w.detach().double()
    hidden = maps.Affine(w_1, None if first.b is None else first.b.detach().double())(state.value)
    slope, bend = _slopes(act.activation, hidden)
    second_order, third_order = curvature_of(act.activation)
    pairs = (w_1.mT @ w_1).square()
    weighted = bend.unsqueeze(-1) * w_2
    sharp = largest_root(weighted.mT @ pairs @ weighted)
    columns_1, columns_2 = w_1.norm(dim=0), w_2.norm(dim=1)
    steepest = float(columns_1.max()) * float(largest_root((w_1 * columns_2) @ w_1.mT)) ** 2
    taylor = moves.square() / 2 * sharp + moves**3 / 6 * third_order * steepest
    whole = second_order / 2 * moves.square() * product_norm_bound(w_1) ** 2 * product_norm_bound(w_2)
    remainder = torch.minimum(whole, taylor) if third_order < math.inf else whole
    if isinstance(act.activation, maps.Relu):
        remainder = _crossed(hidden, moves.unsqueeze(-1) * columns_1 * MARGIN, w_2)
    gains = (w_1.unsqueeze(0) * slope.unsqueeze(1)) @ w_2
    columns = tuple(Column(gains.mT.unsqueeze(1) @ column.blocks, column.radii) for column in state.columns)
    value = maps.Affine(w_2, None if second.b is None else second.b.detach().double())(act(hidden))
    cap = product_norm_bound(w_1) * steepness.one(act.activation) * product_norm_bound(w_2) * moves * MARGIN
    return _after(value, columns, remainder * MARGIN, cap)


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
