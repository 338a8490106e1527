"""Norm layers, by homogeneity: what moves along a token costs nothing (M5).

With g the token, centered, w = |g|²/d + ε, t = t_r g + t' and z = t'/(1 + t_r):

    N(g + t) = w^{-1/2} (g + z)(1 + q)^{-1/2},    q = |z|²/(dw) + ε((1 + t_r)^{-2} - 1)/w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard import maps
from regard._enclosed import computed_lengths, lengths_below, near_largest_roots
from regard._upper import Lower, Upper, exact, exact_lower, relative_error, root, sizes
from regard.proofs.ball_model.ellipsoids import (
    Sum,
    ball_shape,
    lift,
    lifted,
    longest,
    pushed,
    roundest,
    trace_roots,
)
from regard.proofs.ball_model.quadratic import Grams, Own, Quadratic, split, symmetric
from regard.proofs.ball_model.squares import with_forms, with_quadratic
from regard.proofs.ball_model.state import State
from regard.proofs.ball_model.updates import Update, symmetric_products
from regard.proofs.theorem import Refusal

FARTHEST = 0.9
"""How much of a token may be taken from it along itself, before nothing is known about its direction."""


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
    g = state.center - state.center.mean(-1, keepdim=True) if map.centered else state.center
    square = g.square().sum(-1)
    if not bool((square > 1e-200).all()):
        raise Refusal(
            "a norm layer gets a token that is constant, which it does not know how to scale; use a smaller "
            "radius, or an eps above zero"
        )
    token = Token(g, square, square / wide + float(map.eps), float(map.eps))
    moves = _Moves(state, token, map.centered)
    gamma = torch.ones(wide, dtype=torch.float64) if map.weight is None else map.weight
    matrix = _update(gamma * token.scale.unsqueeze(-1), g, 1 / (wide * token.w), map.centered)
    value = g * token.scale.unsqueeze(-1) * gamma
    value = value if map.bias is None else value + map.bias
    top, unit = sizes(gamma).amax(), relative_error(2 * wide + 32)
    bias = exact(0.0) if map.bias is None else computed_lengths(map.bias)
    missed = unit * computed_lengths(state.center)  # of the centered token
    blurred = unit * (1 + computed_lengths(state.center) / lengths_below(g))  # of its direction
    off = 8 * blurred * token.scale_up * top
    blur = token.scale_up * top * (unit * computed_lengths(g) + 2 * missed) + unit * bias
    rest = moves.beyond(gamma).ball(state.lost(matrix, off) + blur)
    largest = wide * gamma.square().sum()
    astray = ~((moves.reach_along.bound < FARTHEST) & (rest.trace < largest))
    if bool(astray.any()) and not bool(state.is_quiet[astray].all()):
        return _anywhere(normalize(state.without(astray), map), map, astray)
    return moves.with_second(state.through(matrix, value), gamma, rest)


def _anywhere(after: State, map: maps.Normalize, astray: Tensor) -> State:
    """With tokens of which nothing is known before the norm layer (M10): all its values are β + Γy with
    |y| ≤ √d, and Σ y = 0 where tokens are centered.
    """
    wide = after.width
    gamma = torch.ones(wide, dtype=torch.float64) if map.weight is None else map.weight
    bias = torch.zeros(wide, dtype=torch.float64) if map.bias is None else map.bias
    inner = wide * torch.eye(wide, dtype=torch.float64) - (1.0 if map.centered else 0.0)
    shape = lifted(
        gamma.unsqueeze(-1) * inner * gamma, relative_error(8) * wide * sizes(gamma).norm().square()
    )
    center, shapes = after.center.clone(), after.shape.clone()
    center[astray], shapes[astray] = bias, shape
    return replace(after.without(astray), center=center, shape=shapes)


def _update(scale: Tensor, g: Tensor, share: Tensor, centered: bool) -> Update:
    """F(I - 11ᵀ/d - share ggᵀ), without the second where tokens are not centered."""
    left, right = g.unsqueeze(-1), (share.unsqueeze(-1) * g).unsqueeze(-1)
    if centered:
        ones = torch.ones_like(left)
        left, right = torch.cat([ones, left], -1), torch.cat([ones / g.shape[-1], right], -1)
    return Update(scale.expand_as(g), left, right)


class _Moves:
    """Moves t of centered tokens, along them and across."""

    def __init__(self, state: State, token: Token, centered: bool) -> None:
        self.state, self.token = state, token
        g, square, wide = token.g, token.square, state.width
        across = _update(torch.ones_like(g), g, 1 / square, centered)
        self.across = across @ state.linear
        far = roundest(state.shape) if state.is_still else trace_roots(state.rest_shape)
        self.rest_shape = ball_shape(far, wide) if state.is_still else pushed(across, state.rest_shape)
        self.along = (state.linear.mT @ g.unsqueeze(-1)).squeeze(-1) / square.unsqueeze(-1)
        direction = (g / square.unsqueeze(-1)).unsqueeze(-1)
        # a centered token is off by a rounding of the token itself, and so is its direction
        length = lengths_below(g)
        unit = relative_error(4 * wide + 32) * (1 + computed_lengths(state.center) / length)
        size = state.linear_size
        self.slip_along = 3 * unit * (size + far) / length
        self.slip_across = 3 * unit * (root(wide) * size + far)
        self.along_first = state.inputs.reach(self.along)
        rest = state.rest(direction).map(lambda value: value.squeeze(-1))
        self.along_rest = rest * (1 + unit) + self.slip_along
        self.reach_along = self.along_first + self.along_rest
        self.square = symmetric_products(self.across, self.across)
        columns = self.across.shape[-1]
        still = exact(torch.zeros(state.tokens, dtype=torch.float64))
        self.first = near_largest_roots(self.square, columns) if columns else still
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
        found.shape(self._scaled(gamma, self.square, self.across.shape[-1]), scale * first)
        found.shape(self._scaled(gamma, self.rest_shape), scale * rest)
        hidden = (first + rest) * self.slip_across + self.slip_along * (self.first + self.rest)
        return found.ball(scale * sizes(gamma).amax() * hidden)

    @staticmethod
    def _scaled(gamma: Tensor, shape: Tensor, terms: int = 0) -> Tensor:
        """ΓQΓ of a Q whose entries are sums of so many products."""
        trace = Upper(shape.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0.0), shape.shape[-1])
        error = relative_error(terms + 8) * sizes(gamma).amax().square() * trace
        return lift((shape * gamma).mul_(gamma.unsqueeze(-1)), error)

    def with_second(self, after: State, gamma: Tensor, rest: Sum) -> State:
        """-w^{-1/2}[(λ·u) T u + |T u|² g/(2dw)], in H or as a move of its own."""
        token, across, along = self.token, self.across, self.along
        if not across.shape[-1]:
            return after.with_rest(rest)
        over = 1 / (2 * self.state.width * token.w)
        top, scale = sizes(gamma).amax(), token.scale_up
        whole = computed_lengths(across.flatten(1))
        size = computed_lengths(along) * whole + token.over.halved() * whole.square() * computed_lengths(
            token.g
        )
        unit = relative_error(4 * self.state.width + 64)
        size = size * scale * top
        if after.curved is not None:
            square = across.mT @ across
            cross = symmetric(along[:, None, :, None] * across[:, :, None, :])
            forms = over[:, None, None, None] * token.g[:, :, None, None] * square.unsqueeze(1) + cross
            forms = -token.scale[:, None, None, None] * gamma[:, None, None] * forms
            return with_forms(after, Quadratic(forms), rest.ball(unit * size))
        # TTᵀ has the norms of TᵀT, and that is all that is asked of it
        error = relative_error(self.state.width + across.shape[-1] + 4) * whole.square()
        own = Own(self.square, self.first.square(), error)
        grams = self._grams(gamma, unit, size)
        offset, around = split(grams, own)
        rest.ball(unit * size)
        return with_quadratic(after, torch.arange(after.tokens), offset, around, rest)

    def _grams(self, gamma: Tensor, unit: Upper, size: Upper) -> Grams:
        """Of the forms above with M = TᵀT: rank two and TTᵀ."""
        g, across, along = self.token.g, self.across, self.along
        over = (1 / (2 * self.state.width * self.token.w)).unsqueeze(-1)
        tilted = (across @ along.unsqueeze(-1)).squeeze(-1)
        turned = (self.square @ tilted.unsqueeze(-1)).squeeze(-1)
        m = torch.linalg.vector_norm(self.square, dim=(-2, -1)).square().unsqueeze(-1)
        scaled = over * g
        left = torch.stack([m * scaled + turned, scaled, 0.5 * tilted], -1)
        gram = 0.5 * along.square().sum(-1)[:, None, None] * self.square
        gram = gram + left @ torch.stack([scaled, turned, tilted], -2)
        f = (self.token.scale.unsqueeze(-1) * gamma).unsqueeze(-1)
        inner = -f.squeeze(-1) * (m * scaled + turned)
        whole = computed_lengths(self.square.flatten(1))
        return Grams(f * gram * f.mT, 16 * unit * size.square(), inner, 16 * unit * size * whole)
