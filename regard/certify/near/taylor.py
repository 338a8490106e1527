"""The Taylor model: through a network carry the exact derivative from the input, and from every place where a remainder arose to here.

A state says x' = x + Σ_c B_c d_c with |d_c,j| ≤ ρ_c,j: the first column is the move of the input, the others are remainders of earlier
maps. A map
multiplies every column by its exact derivative and adds a column for its own remainder. A tangent goes the same way, with what the
derivative
may change in place of remainders. Norms are never multiplied across layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import maps
from regard._round import EPS, gamma, outward, product_norm_bound
from regard._verb import Verb
from regard.attention import Attention
from regard.certify.locating import doubled, one_sequence, summands
from regard.certify.near.heads import LocalHeads
from regard.certify.near.linear import LinearMove, shares
from regard.certify.near.matrix_norms import MARGIN, largest_root, matrix_norms
from regard.certify.near.moves import row_moves
from regard.certify.near.steepness import derivative_change
from regard.certify.setting import balls_of, positions_of
from regard.certify.subject import subject_of
from regard.certify.theorem import Refusal
from regard.certify.tokenwise import steepness, travel
from regard.domains import Neighborhood
from regard.measure import Measure
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

    def size(self) -> Tensor:
        """Σ_j |B_ij|_F ρ_j for each token i, no less than the reach."""
        if not bool(torch.isfinite(self.radii).all()):
            return torch.full((len(self.blocks),), math.inf, dtype=torch.float64)
        return self.blocks.flatten(-2).norm(dim=-1) @ self.radii

    def reach(self, steps: int = 0) -> Tensor:
        """At least |Σ_j B_ij d_j| for each token i: λ_max(Σ_j ρ_j² B_ij B_ijᵀ/λ_j)^{1/2} λ in proportion to the blocks, or better."""
        moving = self.radii > 0
        if not bool(moving.any()):
            return torch.zeros(len(self.blocks), dtype=torch.float64)
        if not bool(torch.isfinite(self.radii).all()):
            return torch.full((len(self.blocks),), math.inf, dtype=torch.float64)
        scaled = self.blocks[:, moving] * self.radii[moving][None, :, None, None]
        sizes = scaled.flatten(-2).norm(dim=-1).clamp_min(1e-300)
        share = (shares(scaled, steps) if steps else sizes / sizes.sum(-1, keepdim=True)).sqrt()
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


@dataclass(frozen=True)
class Stage:
    """A map at a value, for tokens within some moves of it.

    push: its exact derivative on blocks. remainder, cap (n,): what is beyond the linear part, and how far the value moves at all. change:
    for
    tangents within τ (n,), how far (Df(x') - Df(x)) e can be.
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


def step(map: object, state: State) -> State:
    """The state after a map."""
    return _run(map, state, None)[0]


def slopes(map: object, state: State) -> tuple[Column, ...]:
    """The columns of a tangent |e_j| ≤ 1 after a map, anywhere within the moves of a state."""
    n, d = state.value.shape
    found = _run(map, state, (fresh(n, d, torch.ones(n, dtype=torch.float64)),))[1]
    assert found is not None
    return found


Tangents = tuple[Column, ...] | None


def _run(map: object, state: State, tangents: Tangents) -> tuple[State, Tangents]:
    if isinstance(map, maps.Compose):
        for inner in _grouped(map.maps):
            state, tangents = _run(inner, state, tangents)
        return state, tangents
    if isinstance(map, maps.Residual):
        after, turned = _run(map.map, state, tangents)
        return _around(state, after), None if tangents is None or turned is None else _total([tangents, turned])
    if isinstance(map, maps.Added):
        return _added([_run(part, state, tangents) for part in summands(map)])
    moves = state.moves()
    if bool(torch.isinf(moves).any()):
        raise Refusal("the moves before a map are not bounded")
    found = stage.one(map, state.value, moves)
    after = _after(found.value, _pushed(found, state.columns), found.remainder, found.cap)
    return after, None if tangents is None else _turned(found, tangents)


def _pushed(found: Stage, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    return tuple(Column(found.push(column.blocks), column.radii) for column in columns)


def _turned(found: Stage, tangents: tuple[Column, ...]) -> tuple[Column, ...]:
    """A tangent after a map: through the derivative at the center, and what the derivative may be more."""
    n, d = found.value.shape
    reach = total_reach(tangents)
    change = torch.nan_to_num(found.change(reach), nan=math.inf, posinf=math.inf) + ROUNDING * reach
    return _merged((*_pushed(found, tangents), fresh(n, d, change)))


def _around(state: State, after: State) -> State:
    """A residual connection."""
    if after.value.shape != state.value.shape:
        raise Refusal("a residual connection around a map that changes the width")
    return State(state.value + after.value, _total([state.columns, after.columns]), state.cap + after.cap)


def _added(found: list[tuple[State, Tangents]]) -> tuple[State, Tangents]:
    """A sum of maps of one state: columns of the same origin add with their directions."""
    values, columns, caps = zip(*((state.value, state.columns, state.cap) for state, _ in found), strict=True)
    if len({value.shape for value in values}) > 1:
        raise Refusal("a sum of maps that give tokens of different widths")
    turned = [tangents for _, tangents in found if tangents is not None]
    return State(sum(values[1:], values[0]), _total(list(columns)), sum(caps[1:], caps[0])), _total(turned) if turned else None


def _total(parts: list[tuple[Column, ...]]) -> tuple[Column, ...]:
    """The sum, with a column for its rounding: what cancels leaves the rounding of what it was."""
    n, _, d, _ = parts[0][0].blocks.shape
    joined = parts[0]
    for part in parts[1:]:
        joined = _joined(joined, part)
    lost = sum((column.size() for part in parts for column in part), torch.zeros(n, dtype=torch.float64))
    return _merged((*joined, fresh(n, d, ROUNDING * lost)))


def _joined(before: tuple[Column, ...], after: tuple[Column, ...]) -> tuple[Column, ...]:
    """Sums of columns of the same origin. One from before that was merged inside goes on alone; what became of it is in the merged one."""
    inside = {id(column.radii): column for column in after}
    known = tuple(column.plus(inside.pop(id(column.radii), None)) for column in before)
    return _merged(known + tuple(inside.values()))


def _merged(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The same with fewer numbers: all remainders as one, per token."""
    if sum(column.blocks.numel() for column in columns) <= NUMBERS or len(columns) <= 2:
        return columns
    n, _, d, _ = columns[0].blocks.shape
    return columns[0], fresh(n, d, total_reach(columns[1:]))


def total_reach(columns: tuple[Column, ...]) -> Tensor:
    """At least the length of the sum of columns, for each token."""
    total = columns[0].reach()
    for column in columns[1:]:
        total = total + column.reach()
    return total


def _after(value: Tensor, columns: tuple[Column, ...], remainder: Tensor, cap: Tensor) -> State:
    """The state after a map with this remainder, which is never more than the cap and the linear part together."""
    n, d = value.shape
    rounding = ROUNDING * (value.norm(dim=-1) + 1e-300)
    known = torch.minimum(torch.nan_to_num(remainder, nan=math.inf, posinf=math.inf), cap + total_reach(columns)) + rounding
    return State(value, _merged((*columns, fresh(n, d, known))), cap + rounding)


def _grouped(inner: Sequence[object]) -> list[object]:
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


# Maps


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


class ContextHead:
    """One head at queries x (n, d) with given keys: value (n, e), gains (n, 1, e, d) = Df, and the sizes that bounds need.

    spread ≥ wR and kappa ≥ |A|R: how far values, and slopes of scores, are from a center; error: what rounding may change, relative to
    spread · kappa in a derivative and to spread in a value.
    """

    def __init__(self, map: maps.ToContext, x: Tensor) -> None:
        one_sequence(map)
        self.head = subject_of(map.attention).separate[0]
        given = map.context if isinstance(map.context, Measure) else Measure(map.context)
        width = x.shape[-1]
        form = self.head.form(width) if self.head.softmax and given.points.ndim == 2 and given.points.shape[-1] == width else None
        if form is None:
            raise Refusal("attention to a context has a Taylor model for softmax rows of bilinear scores and one context")
        ball = min(balls_of(Neighborhood(given.points.detach(), 0.0, TokenMax()), width), key=lambda ball: ball.radius)
        center = torch.zeros(width, dtype=torch.float64) if ball.center is None else ball.center.detach().double()
        self.spread, self.kappa = self.head.w * ball.radius, form.norm * ball.radius
        keys, pull = given.points.detach().double() - center, x @ form.a + form.beta
        law = self._law(map, given, pull @ keys.mT)
        self.error = self._rounding(float(x.norm(dim=-1).max()) * form.norm + float(form.beta.norm()), keys)
        away = keys - (law @ keys).unsqueeze(1)  # (n, keys, d)
        matrix = self.head.matrix(width)
        self.gains = ((law.unsqueeze(-1) * (away @ matrix)).mT @ (away @ form.a.mT)).unsqueeze(1)
        value = doubled(map)(x)
        self.value = value.reshape(value.shape[-2:])

    def _law(self, map: maps.ToContext, given: Measure, scores: Tensor) -> Tensor:
        """The rows; zero for a query that sees nothing."""
        marks, others = torch.arange(len(scores)), given.positions()
        positional = positions_of(self.head.potential)
        if positional is not None:
            points = given.points.detach().double()
            scores = scores + positional.scores(points.new_zeros(len(scores), points.shape[-1]), points, marks, others)
        if given.log_weights is not None:
            scores = scores + given.log_weights.detach().double()
        scores = scores.masked_fill(~map.attention.support.allows(marks, others).expand_as(scores), -math.inf)
        return scores.softmax(-1).nan_to_num(0.0)

    def _rounding(self, pull: float, keys: Tensor) -> float:
        """Scores are right to η, so weights to a factor e^{2η}; covariances are sums of at most (2 + 2) spread · kappa."""
        count, width = keys.shape
        eta = 8 * gamma(4 * width + 16) * math.sqrt(width) * pull * float(keys.norm(dim=-1).max())
        if not eta < 1e-3:
            raise Refusal("scores of the context are so large that float64 leaves no digits of the weights; center or scale the tokens")
        return outward(16 * (4 * eta + gamma(4 * (count + width) + 64)) * math.sqrt(width))


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
