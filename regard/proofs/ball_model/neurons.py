"""Feed-forward layers, plain and gated: neurons that move together over |u| ≤ 1 (M4).

A neuron's argument moves by s = b·u + r, |r| ≤ ρ. Beyond φ's + φ''(b·u)²/2 there remain φ''(b·u)r + φ''r²/2
and the third order. Neurons one by one are segments; together, Σ_k (b_k·u)² ≤ |b|² and Σ_k (b_k·u)⁴ ≤
λ_max[(b_k·b_l)²] bound sums with unknown coefficients, by Cauchy and Schwarz.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard import maps
from regard._enclosed import computed_lengths
from regard._upper import Upper, exact, relative_error, sizes
from regard.proofs.ball_model.activations import Bend, bend
from regard.proofs.ball_model.ellipsoids import SMALLEST, Diagonal, Sum, no_diagonal, no_shape, trace_roots
from regard.proofs.ball_model.quadratic import form_norms
from regard.proofs.ball_model.squares import Squares
from regard.proofs.ball_model.state import State
from regard.proofs.ball_model.updates import each, matrix_sizes


@dataclass(frozen=True)
class Arguments:
    """wᵀx_i + b for neurons k: `value` (n, m) at the center, off by `error`, and slopes b_ik (n, m, d0);
    |b_ik·u| ≤ first, and what else moves it is at most `rest`, of which rounding is at most `slip`.
    """

    value: Tensor
    error: Upper
    along: Tensor
    first: Upper
    rest: Upper
    slip: Upper

    @property
    def reach(self) -> Upper:
        """At least how far the argument is from `value`."""
        return self.first + self.rest

    def product(self, other: Arguments) -> Upper:
        """At least |s t - (b·u)(c·u)| of two arguments."""
        return self.first * other.rest + self.rest * other.reach


def arguments(state: State, w: Tensor, b: Tensor | None) -> Arguments:
    """The arguments of neurons with weights w (d, m)."""
    columns, unit = computed_lengths(w.mT), relative_error(state.width + 4)
    value = state.center @ w if b is None else state.center @ w + b
    bias = exact(0.0) if b is None else sizes(b)
    error = unit * (computed_lengths(state.center).unsqueeze(-1) * columns + bias)
    slip = error + unit * state.linear_size.unsqueeze(-1) * columns
    along = each(w.mT, state.linear)
    rest = state.rest(w.unsqueeze(0)) + slip
    return Arguments(value, error, along, state.inputs.reach(along), rest, slip)


def feed_forward(
    state: State, first: maps.Affine, activation: maps.Activation, second: maps.Affine, residual: bool
) -> State:
    """w_2ᵀφ(w_1ᵀx + b_1) + b_2, and x more with a residual connection."""
    w_1, w_2 = first.w, second.w
    at = arguments(state, w_1, first.b)
    found: Bend = bend.one(activation, at.value, at.reach)
    value, matrix = (found.value + found.middle) @ w_2, _derivatives(found.slope, w_1, w_2)
    thick, mixing = computed_lengths(w_1.flatten()), computed_lengths(w_2.flatten())
    steep = sizes(found.slope).amax(-1)
    off = thick * mixing * (relative_error(len(w_2) + 4) * steep + found.error.amax(-1))
    active = computed_lengths(found.value) + computed_lengths(found.middle)
    blur = relative_error(len(w_2) + 6) * active + found.error.norm() + steep * at.error.norm()
    after, lost = mixed(state, matrix, off, value, second.b, residual)
    is_straight = not at.along.shape[-1] or not bool((found.second != 0).any())
    squares = Squares(at.along, 0.5 * found.second, w_2.mT.contiguous(), 0.0 if is_straight else after.far)
    beyond = _Beyond(state, w_1, at, found, squares)
    if is_straight:
        return after.with_rest(beyond.alone().ball(lost + blur * mixing))
    return squares.into(after, beyond.found().ball(lost + blur * mixing))


def _derivatives(slopes: Tensor, w_1: Tensor, w_2: Tensor) -> Tensor:
    """w_2ᵀ diag(φ') w_1ᵀ of all tokens, (n, e, d), one after the other: one is in the cache, all are not."""
    found = slopes.new_empty(len(slopes), len(w_1), w_2.shape[-1])
    for one, out in zip(slopes, found, strict=True):
        torch.mm(one * w_1, w_2, out=out)
    return found.mT


def mixed(
    state: State, matrix: Tensor, off: Upper, value: Tensor, bias: Tensor | None, residual: bool
) -> tuple[State, Upper]:
    """The state after x ↦ value + M(x - c) + bias, and x more with a residual connection; and what rounding
    hides of it, M being off by `off`.
    """
    value = value if bias is None else value + bias
    sizes_of = exact(0.0) if bias is None else computed_lengths(bias)
    if residual:
        value = value + state.center
        matrix = matrix + torch.eye(state.width, dtype=torch.float64)
        sizes_of = sizes_of + computed_lengths(state.center)
    after = state.through(matrix, value)
    sums = relative_error(8) * (computed_lengths(value) + sizes_of)
    off = off + relative_error(2) * matrix_sizes(matrix)
    return after, state.lost(matrix, off) + sums


FEW, WORTH, STRONG = 768, (0.02, 0.05), 0.1
"""From what part of a token's rest on, moves of it and of u are looked at for pairs of neurons: where there
are so few, and where there are more; of more than that at once only where they are a large part.
"""


class _Beyond:
    """What is beyond the first two orders, for neurons with weights w (d, m), and what of the second is
    bounded without pairs.
    """

    def __init__(self, state: State, w: Tensor, at: Arguments, bend: Bend, squares: Squares) -> None:
        self.state, self.w, self.at, self.bend = state, w, at, bend
        self.mixing, self.squares = squares.mixing, squares
        self.second = sizes(bend.second) + bend.error
        self.none = no_diagonal(len(at.value), self.mixing)

    def alone(self) -> Sum:
        """Neurons one by one: of rounding alone by their lengths."""
        rest = Sum(len(self.at.value), len(self.mixing))
        if not self.at.along.shape[-1]:
            return rest.ball(self.one_by_one.reach)
        return rest.diagonal(self.mixing, self.one_by_one)

    def found(self) -> Sum:
        """Neurons one by one, or together."""
        rest = Sum(len(self.at.value), len(self.mixing))
        best, around = self.one_by_one.better(self.together()), self.state.rest_shape
        worth = (best.weight - self.cubic.weight) / trace_roots(around).value.clamp_min(SMALLEST)
        shapes = no_shape(len(best.weight), len(self.mixing))
        alone = torch.ones_like(self.second.value, dtype=torch.bool)
        neurons = self.mixing.shape[-1]
        enough = worth[self.squares.chosen] > WORTH[neurons > FEW]
        for i in self.squares.chosen[enough].tolist():
            most = neurons if worth[i] > STRONG else FEW
            shapes[i], kept = self.squares.crossed(i, self.w, around[i], most)
            alone[i, kept] = False
        others = self.together(alone)
        paired = ~alone.all(-1) & (others.weight + trace_roots(shapes).value < best.weight)
        parts = others.where(paired, best)
        rest.diagonal(self.mixing, parts if self.state.curved is not None else self.squares.coarse(parts))
        return rest.shape(shapes, exact(paired.double())) if bool(paired.any()) else rest

    @cached_property
    def one_by_one(self) -> Diagonal:
        """Each neuron by itself."""
        at, half = self.at, self.second.halved()
        bent = half * at.product(at) + self.bend.beyond
        whole = self.bend.steep * at.reach + half * at.first.square()
        return self.none.segments(bent.minimum(whole) + self.bend.error * at.first.square())

    @cached_property
    def cubic(self) -> Diagonal:
        """The third order in b·u + r of all neurons, (b·u)³ + 3(b·u)²r + 3(b·u)r² + r³ with coefficients of
        which only the size is known; and what rounding hides of the second derivative and of r.
        """
        at, third, squares = self.at, self.bend.third, self.squares
        once, twice = (third * at.rest).halved(), (third * at.rest.square()).halved()
        hidden = self.bend.error * (at.first.square() + at.product(at)) + self.second * at.slip * at.reach
        found = self.none.segments(hidden).gram(third / 6, squares.sixth.sqrt())
        found = found.gram(once, squares.quartic.sqrt()).gram(twice, squares.norm)
        return found.gram(twice / 3, self.rests)

    def together(self, chosen: Tensor | None = None) -> Diagonal:
        """The same with φ''(b·u)r + φ''r²/2, of chosen neurons (n, m)."""
        bent = self.second * self.at.rest
        bent = bent if chosen is None else bent.where(chosen)
        return self.cubic.gram(bent, self.squares.norm).gram(bent.halved(), self.rests)

    @cached_property
    def rests(self) -> Upper:
        """At least (Σ_k r_k²)^{1/2}, for each token."""
        return form_norms(self.w) * self.state.longest_rest + self.at.slip.norm()


def gated(state: State, map: maps.Gated, residual: bool) -> State:
    """w_outᵀ(φ(h) g): with s and t the moves of h and g,

    φ(h + s)(g + t) = φg + φ'g s + φ t + [φ''g s²/2 + φ' s t] + φ'' s² t/2 + R(g + t), R the third order;
    (b·u)(c·u) = ((b+c)·u)²/4 - ((b-c)·u)²/4.
    """
    w_out = map.w_out
    h, g = arguments(state, map.w, map.b), arguments(state, map.w_gate, map.b_gate)
    found: Bend = bend.one(map.activation, h.value, h.reach)
    active, gate = found.value + found.middle, g.value
    slopes = (found.slope * gate).unsqueeze(-1) * map.w.mT + active.unsqueeze(-1) * map.w_gate.mT
    thick, mixing = _both_lengths(map), computed_lengths(w_out.flatten())
    largest = sizes(found.slope) * sizes(gate) + sizes(active)
    off = relative_error(len(w_out) + 12) * largest.amax(-1) + (found.error * (sizes(gate) + 1)).amax(-1)
    shifts = found.error * sizes(gate) + sizes(found.slope) * sizes(gate) * h.error + sizes(active) * g.error
    blur = relative_error(len(w_out) + 12) * computed_lengths(active * gate) + shifts.norm()
    value = (active * gate) @ w_out
    after, lost = mixed(state, w_out.mT @ slopes, thick * mixing * off, value, None, residual)
    rest = _gated_beyond(h, g, found, w_out.mT).ball(lost + blur * mixing)
    along = torch.cat([h.along, h.along + g.along, h.along - g.along], 1)
    quarter = 0.25 * found.slope
    forms = torch.cat([0.5 * found.second * gate, quarter, -quarter], 1)
    both = computed_lengths(h.along) + computed_lengths(g.along)
    rounding = relative_error(8) * both.square() * sizes(found.slope)
    rest.ball(mixing * rounding.norm())
    squares = Squares(along, forms, torch.cat([w_out.mT] * 3, -1), after.far)
    if after.curved is None and along.shape[-1]:
        rest.diagonal(squares.mixing, squares.coarse(no_diagonal(len(along), squares.mixing)))
    return squares.into(after, rest)


def _both_lengths(map: maps.Gated) -> Upper:
    return computed_lengths(map.w.flatten()) + computed_lengths(map.w_gate.flatten())


def _gated_beyond(h: Arguments, g: Arguments, found: Bend, mixing: Tensor) -> Sum:
    """What is beyond the first two orders, neuron by neuron."""
    second, gate = sizes(found.second) + found.error, sizes(g.value)
    slope = sizes(found.slope) + found.error
    bent = (second * gate).halved() * h.product(h) + slope * h.product(g)
    cubic = second.halved() * h.reach.square() * g.reach + found.beyond * (gate + g.reach)
    slip = found.error * (gate + 1) * h.first * (h.first + g.first)
    moves = no_diagonal(len(h.value), mixing).segments(bent + cubic + slip)
    return Sum(len(h.value), len(mixing)).diagonal(mixing, moves)
