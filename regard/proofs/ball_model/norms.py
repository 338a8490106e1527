"""Norm layers, by homogeneity: what moves along a token costs nothing (M5).

With g the token, centered, w = |g|²/d + ε, t = t_r g + t' and z = t'/(1 + t_r):

    N(g + t) = w^{-1/2} (g + z)(1 + q)^{-1/2},    q = |z|²/(dw) + ε((1 + t_r)^{-2} - 1)/w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard import maps
from regard._enclosed import computed_lengths, lengths_below
from regard._upper import Lower, Upper, exact, exact_lower, relative_error, root, sizes
from regard.proofs.ball_model.ellipsoids import Sum, ball_shape, lifted, longest, pushed, trace_roots
from regard.proofs.ball_model.quadratic import Grams, Own, Quadratic, form_norms, split, symmetric
from regard.proofs.ball_model.squares import with_forms, with_quadratic
from regard.proofs.ball_model.state import State
from regard.proofs.theorem import Refusal

FARTHEST = 0.9
"""How much of a token may be taken from it along itself."""


@dataclass(frozen=True)
class Token:
    """Centered tokens g (n, d) as numbers, with |g|² and w = |g|²/d + ε about them."""

    g: Tensor
    square: Tensor
    w: Tensor
    eps: float

    @property
    def scale(self) -> Tensor:
        """w^{-1/2}."""
        return self.w.rsqrt()

    @property
    def scale_up(self) -> Upper:
        """At least w^{-1/2}."""
        return Upper(self.scale, self.g.shape[-1] + 16)

    @property
    def over(self) -> Upper:
        """At least 1/(dw)."""
        return Upper(1 / (self.g.shape[-1] * self.w), self.g.shape[-1] + 8)

    @property
    def share(self) -> Upper:
        """At least ε/w."""
        return Upper(self.eps / self.w, self.g.shape[-1] + 8)


def normalize(state: State, map: maps.Normalize) -> State:
    """γ (x - mean)/√(variance + ε) + β."""
    wide = state.width
    whole = torch.eye(wide, dtype=torch.float64) - (1 / wide if map.centered else 0.0)
    g = state.center - state.center.mean(-1, keepdim=True) if map.centered else state.center
    square = g.square().sum(-1)
    if not bool((square > 1e-200).all()):
        raise Refusal("a norm layer gets a token that is constant, which it does not know how to scale")
    token = Token(g, square, square / wide + float(map.eps), float(map.eps))
    moves = _Moves(state, token, whole)
    gamma = torch.ones(wide, dtype=torch.float64) if map.weight is None else map.weight
    inner = whole - g.unsqueeze(-1) * g.unsqueeze(-2) / (wide * token.w)[:, None, None]
    matrix = gamma.unsqueeze(-1) * token.scale[:, None, None] * inner
    value = g * token.scale.unsqueeze(-1) * gamma
    value = value if map.bias is None else value + map.bias
    top, unit = sizes(gamma).amax(), relative_error(2 * wide + 32)
    bias = exact(0.0) if map.bias is None else computed_lengths(map.bias)
    missed = unit * computed_lengths(state.center)  # of the centered token
    off = unit * (4 * token.scale_up) * computed_lengths(gamma)
    blur = token.scale_up * top * (unit * computed_lengths(g) + 2 * missed) + unit * bias
    rest = moves.beyond(gamma).ball(state.lost(matrix, off) + blur)
    return moves.with_second(state.through(matrix, value), gamma, rest)


class _Moves:
    """Moves t of centered tokens, along them and across."""

    def __init__(self, state: State, token: Token, whole: Tensor) -> None:
        self.state, self.token = state, token
        g, square, wide = token.g, token.square, state.width
        self.unit = g / square.sqrt().unsqueeze(-1)
        across = whole - self.unit.unsqueeze(-1) * self.unit.unsqueeze(-2)
        self.across = across @ state.linear
        far = trace_roots(state.rest_shape)
        self.rest_shape = ball_shape(far, wide) if state.is_still else pushed(across, state.rest_shape)
        self.along = (state.linear.mT @ g.unsqueeze(-1)).squeeze(-1) / square.unsqueeze(-1)
        direction = (g / square.unsqueeze(-1)).unsqueeze(-1)
        # a centered token is off by a rounding of the token itself, and so is its direction
        length = lengths_below(g)
        unit = relative_error(4 * wide + 16) * (1 + computed_lengths(state.center) / length)
        size = computed_lengths(state.linear.flatten(1))
        self.slip_along = 3 * unit * (size + far) / length
        self.slip_across = 3 * unit * (root(wide) * size + far)
        self.along_first = state.inputs.reach(self.along)
        rest = state.rest(direction).map(lambda value: value.squeeze(-1))
        self.along_rest = rest * (1 + unit) + self.slip_along
        self.reach_along = self.along_first + self.along_rest
        if not float(self.reach_along.amax()) < FARTHEST:
            raise Refusal(
                "a token may shrink to a tenth of its length before a norm layer; use a smaller radius"
            )
        self.first = form_norms(self.across)
        self.rest = (far if state.is_still else longest(self.rest_shape)) + self.slip_across

    @property
    def numbers(self) -> tuple[Upper, Upper, Upper]:
        """Bounds of the remainders (M6): along g, of multiples of the first part of t', and of its rest."""
        token, rho, tau = self.token, self.reach_along, self.first + self.rest
        left: Lower = 1 - rho
        k = exact(1.0) / left
        grown = k.square() - exact_lower(1.0)
        eps, kept = token.share, 1 - token.share
        q = tau.square() * token.over * k.square() + eps * grown
        thin = exact(1.0) / kept
        bent = (q.halved() * thin * thin.sqrt()).minimum(thin.sqrt()) * k
        mixed = 2 * self.first * self.rest + self.rest.square()
        scalar = (token.over * (tau.square() * grown + mixed)).halved()
        scalar = scalar + 3 * q.square() * thin.square() * thin.sqrt() / 8
        scalar = scalar + (eps * (3 + 2 * rho) * rho.square() * k.square()).halved()
        third = rho.square() * k + bent
        return scalar, self.along_rest + third, rho + third

    def beyond(self, gamma: Tensor) -> Sum:
        """What is beyond the first two orders."""
        scalar, first, rest = self.numbers
        scale = self.token.scale_up
        found = Sum(self.state.tokens, self.state.width)
        found.segments((gamma * self.token.g * (scale * scalar).bound.unsqueeze(-1)).unsqueeze(-1))
        found.gram(gamma.unsqueeze(-1) * self.across, scale * first)
        shape = gamma.unsqueeze(-1) * self.rest_shape * gamma
        found.shape(lifted(shape, relative_error(8) * computed_lengths(shape.flatten(1))), scale * rest)
        hidden = (first + rest) * self.slip_across + self.slip_along * (self.first + self.rest)
        return found.ball(scale * sizes(gamma).amax() * hidden)

    def with_second(self, after: State, gamma: Tensor, rest: Sum) -> State:
        """-w^{-1/2}[(λ·u) T u + |T u|² g/(2dw)], in H or as a move of its own."""
        token, across, along = self.token, self.across, self.along
        square = across.mT @ across
        over = 1 / (2 * self.state.width * token.w)
        top, scale = sizes(gamma).amax(), token.scale_up
        whole = computed_lengths(across.flatten(1))
        size = computed_lengths(along) * whole + token.over.halved() * whole.square() * computed_lengths(
            token.g
        )
        unit = relative_error(4 * self.state.width + 64)
        size = size * scale * top
        if after.curved is not None:
            cross = symmetric(along[:, None, :, None] * across[:, :, None, :])
            forms = over[:, None, None, None] * token.g[:, :, None, None] * square.unsqueeze(1) + cross
            forms = -token.scale[:, None, None, None] * gamma[:, None, None] * forms
            return with_forms(after, Quadratic(forms), rest.ball(unit * size))
        own = Own(square, self.first.square(), relative_error(self.state.width + 4) * whole.square())
        grams = self._grams(gamma, own.square, unit, size)
        offset, around = split(grams, own)
        rest.ball(unit * size)
        return with_quadratic(after, torch.arange(after.tokens), offset, around, rest)

    def _grams(self, gamma: Tensor, square: Tensor, unit: Upper, size: Upper) -> Grams:
        """Of the forms above with M = TᵀT: rank two and TTᵀ."""
        g, across, along = self.token.g, self.across, self.along
        over = (1 / (2 * self.state.width * self.token.w)).unsqueeze(-1)
        turned = (across @ (square @ along.unsqueeze(-1))).squeeze(-1)
        m = square.square().sum((-2, -1)).unsqueeze(-1)
        tilted = (across @ along.unsqueeze(-1)).squeeze(-1)
        scaled = over * g
        cross = scaled.unsqueeze(-1) * turned.unsqueeze(-2)
        gram = (m * scaled).unsqueeze(-1) * scaled.unsqueeze(-2) + cross + cross.mT
        thick = along.square().sum(-1)[:, None, None] * (across @ across.mT)
        gram = gram + 0.5 * (thick + tilted.unsqueeze(-1) * tilted.unsqueeze(-2))
        f = (self.token.scale.unsqueeze(-1) * gamma).unsqueeze(-1)
        inner = -f.squeeze(-1) * (m * scaled + turned)
        whole = computed_lengths(square.flatten(1))
        return Grams(f * gram * f.mT, 16 * unit * size.square(), inner, 16 * unit * size * whole)
