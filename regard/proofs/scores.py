"""What theorems need to know of scores: their exact bilinear form where there is one, else how fast they
change on a ball.

A score is S(x_i, x_j) + B_ij, with B fixed by the positions. For tokens in a ball, v = ∂S/∂x_j and z =
∂S/∂x_i: alpha ≥ |v|, nu ≥ the radius of a ball that holds v as j varies, kappa ≥ the same of z, reach ≥ |z|,
osc ≥ max_j S - min_j S.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard._enclosed import length, product_norm
from regard._upper import Upper, exact, exact_lower, relative_error, sizes
from regard._verb import Verb
from regard.potentials import (
    Additive,
    Bilinear,
    Cosine,
    Dot,
    Gaussian,
    Laplace,
    Potential,
    Rotary,
    SoftCap,
    StudentT,
)
from regard.potentials.base import Scaled, Sum
from regard.potentials.distance import DistancePotential
from regard.potentials.positions import PositionPotential
from regard.proofs.theorem import Refusal


@dataclass(frozen=True)
class BallFacts:
    """Tokens in a ball: radius about a center, and `reach`, the largest length of a token.

    places (n, d) and moves (n,), where they are known: token j is within moves[j] of places[j]. What is asked
    for derivatives at such sequences alone may use them.
    """

    center: Tensor
    radius: Upper
    reach: Upper
    places: Tensor | None = None
    moves: Upper | None = None


@dataclass(frozen=True)
class Slopes:
    """How fast scores change on a ball.

    `reversed_nu` is nu of the negative of the scores, where a sign helps.
    """

    alpha: Upper
    nu: Upper
    kappa: Upper
    reach: Upper
    osc: Upper
    reversed_nu: Upper

    def plus(self, other: Slopes) -> Slopes:
        """Of a sum of scores."""
        return Slopes(*(a + b for a, b in zip(self._numbers, other._numbers, strict=True)))

    def times(self, factor: float) -> Slopes:
        """Of a multiple of the scores, by a factor that may be rounded."""
        if factor == 0:
            return Slopes(*[exact(0.0)] * 6)
        made = Slopes(*(Upper(abs(factor), FACTOR) * value for value in self._numbers))
        return made if factor > 0 else replace(made, nu=made.reversed_nu, reversed_nu=made.nu)

    @property
    def _numbers(self) -> tuple[Upper, ...]:
        return self.alpha, self.nu, self.kappa, self.reach, self.osc, self.reversed_nu


@dataclass(frozen=True)
class Form:
    """S(x, y) = xᵀ A y + β·y + γ·x, with `error` a bound of the spectral norm of what rounding changed in A,
    and in β and γ; zero where they are exact.
    """

    a: Tensor
    beta: Tensor
    gamma: Tensor
    error: Upper = field(default_factory=lambda: exact(0.0))
    error_beta: Upper = field(default_factory=lambda: exact(0.0))
    error_gamma: Upper = field(default_factory=lambda: exact(0.0))
    factors: tuple[Tensor, ...] = ()  # whose product A is, up to `error`, where they are known

    @cached_property
    def norm(self) -> Upper:
        """At least |A|₂."""
        return product_norm(*(self.factors or (self.a,))) + self.error

    def shift(self, center: Tensor) -> Upper:
        """At least |Aᵀc + β|."""
        return self._moved(center @ self.a + self.beta, center, self.beta, self.error_beta)

    def pull(self, center: Tensor) -> Upper:
        """At least |A c + γ|."""
        return self._moved(self.a @ center + self.gamma, center, self.gamma, self.error_gamma)

    def _moved(self, computed: Tensor, center: Tensor, added: Tensor, error: Upper) -> Upper:
        """At least |Ac + γ| or |Aᵀc + β|: as computed, with its rounding and that of the form."""
        rounding = relative_error(2 * len(center) + 4) * (length(self.a) * length(center) + length(added))
        return length(computed) + rounding + self.error * length(center) + error


FACTOR = 8
"""Roundings that a factor of scores may have: 1/√c, one over a temperature, products of factors."""

bilinear = Verb("bilinear")
"""bilinear.one(potential, width) -> Form, or None where scores are not one bilinear form,
up to a constant.

Examples:
    >>> from regard.theorems import bilinear
    >>> form = bilinear(regard.Dot(torch.eye(2), 3 * torch.eye(2), scale=1.0), 2)
    >>> form.a.tolist()  # scores are xᵀAy
    [[3.0, 0.0], [0.0, 3.0]]
    >>> bilinear(regard.Laplace(), 2) is None
    True
"""

slopes = Verb("slopes")
"""slopes.one(potential, ball) -> Slopes.

Examples:
    >>> known = {types[0].__name__ for types, _ in regard.theorems.slopes.rules}
    >>> {"Gaussian", "Cosine"} <= known  # a potential of your own joins with @slopes.rule
    True
"""


turned_slopes = Verb("turned_slopes")
"""turned_slopes.one(potential, ball) -> Slopes where pairs of features are turned, each by its own angle."""


# Bilinear forms


@bilinear.rule(Potential)
def _curved(potential: Potential, width: int) -> None:
    return None


@bilinear.rule(PositionPotential)
def _fixed(potential: PositionPotential, width: int) -> Form:
    zero = torch.zeros(width, dtype=torch.float64)
    return Form(torch.zeros(width, width, dtype=torch.float64), zero, zero)


@bilinear.rule(Bilinear)
def _bilinear(potential: Bilinear, width: int) -> Form:
    zero = torch.zeros(width, dtype=torch.float64)
    return Form(potential.a.double(), zero, zero)


@bilinear.rule(Dot)
def _dot(potential: Dot, width: int) -> Form:
    w_q, w_k = _matrix(potential.w_q, width), _matrix(potential.w_k, width)
    scale = float(potential.factor(w_q.shape[-1]))
    b_q, b_k = (
        torch.zeros(w_q.shape[-1], dtype=torch.float64) if b is None else b.double().expand(w_q.shape[-1])
        for b in (potential.b_q, potential.b_k)
    )
    unit = relative_error(w_q.shape[-1] + 4 + FACTOR) * exact(abs(scale))
    return Form(
        scale * (w_q @ w_k.mT),
        scale * (w_k @ b_q),
        scale * (w_q @ b_k),
        unit * length(w_q) * length(w_k),
        unit * length(w_k) * length(b_q),
        unit * length(w_q) * length(b_k),
        (scale * w_q, w_k.mT),
    )


@bilinear.rule(Sum)
def _sum(potential: Sum, width: int) -> Form | None:
    forms = [bilinear.one(term, width) for term in potential.terms]
    if any(form is None for form in forms):
        return None
    total, unit = forms[0], relative_error(4)
    for form in forms[1:]:
        total = Form(
            total.a + form.a,
            total.beta + form.beta,
            total.gamma + form.gamma,
            total.error + form.error + unit * (length(total.a) + length(form.a)),
            total.error_beta + form.error_beta + unit * (length(total.beta) + length(form.beta)),
            total.error_gamma + form.error_gamma + unit * (length(total.gamma) + length(form.gamma)),
        )
    return total


@bilinear.rule(Scaled)
def _scaled(potential: Scaled, width: int) -> Form | None:
    form = bilinear.one(potential.potential, width)
    if form is None:
        return None
    factor, unit = float(potential.factor), relative_error(4 + FACTOR)
    size = exact(abs(factor))
    return Form(
        factor * form.a,
        factor * form.beta,
        factor * form.gamma,
        size * (form.error + unit * length(form.a)),
        size * (form.error_beta + unit * length(form.beta)),
        size * (form.error_gamma + unit * length(form.gamma)),
    )


def _matrix(weight: Tensor | None, width: int) -> Tensor:
    return torch.eye(width, dtype=torch.float64) if weight is None else weight.detach().double()


# Slopes on a ball


@slopes.rule(Potential)
def _unknown(potential: Potential, ball: BallFacts) -> Slopes:
    """From the bilinear form, where there is one."""
    form = bilinear.one(potential, len(ball.center))
    if form is None:
        name = type(potential).__name__
        rules = f"@slopes.rule({name}), or with @bilinear.rule({name}) where scores are bilinear"
        raise Refusal(f"nothing is known about the slopes of {name}; add a rule with {rules}")
    return _form_slopes(form, ball)


@slopes.rule(PositionPotential)
def _still(potential: PositionPotential, ball: BallFacts) -> Slopes:
    return Slopes(*[exact(0.0)] * 6)


def _form_slopes(form: Form, ball: BallFacts) -> Slopes:
    """v = Aᵀx_i + β for every j; z = A x_j + γ."""
    kappa, zero = form.norm * ball.radius, exact(0.0)
    alpha = form.shift(ball.center) + kappa
    return Slopes(alpha, zero, kappa, form.pull(ball.center) + kappa, 2 * ball.radius * alpha, zero)


@slopes.rule(Sum)
def _sum_slopes(potential: Sum, ball: BallFacts) -> Slopes:
    first, *others = (slopes.one(term, ball) for term in potential.terms)
    for other in others:
        first = first.plus(other)
    return first


@slopes.rule(Scaled)
def _scaled_slopes(potential: Scaled, ball: BallFacts) -> Slopes:
    factor = float(potential.factor)
    if isinstance(potential.potential, Sum):  # terms with signs of their own
        return _sum_slopes(Sum(tuple(Scaled(term, factor) for term in potential.potential.terms)), ball)
    return slopes.one(potential.potential, ball).times(factor)


@slopes.rule(SoftCap)
def _capped(potential: SoftCap, ball: BallFacts) -> Slopes:
    """cap · tanh(s/cap) has slope φ' in [0, 1] of its score,
    so v and z lie between zero and those of the score.
    """
    inner = slopes.one(potential.potential, ball)
    shared = bilinear.one(potential.potential, len(ball.center)) is not None  # v does not depend on j
    nu = inner.alpha.halved() if shared else inner.alpha
    osc = inner.osc.minimum(2 * exact(float(potential.cap)))
    return Slopes(inner.alpha, nu, inner.reach, inner.reach, osc, nu)


@slopes.rule(Rotary)
def _rotary(potential: Rotary, ball: BallFacts) -> Slopes:
    """s = scale (w_qᵀx_i + b_q)ᵀ Rot (w_kᵀx_j + b_k): a rotation depends on the pair and keeps lengths,
    and nothing more is used.
    """
    inner = potential.potential
    if isinstance(inner, Scaled):
        return _rotary(
            Rotary(inner.potential, potential.base, potential.frequencies, potential.interleaved), ball
        ).times(float(inner.factor))
    found: Slopes = turned_slopes.one(inner, ball)
    return found


@turned_slopes.rule(Potential)
def _turned(inner: Potential, ball: BallFacts) -> Slopes:
    raise Refusal(f"rotary positions have a theorem for Dot and NormedDot, not for {type(inner).__name__}")


@turned_slopes.rule(Dot)
def _turned_dot(inner: Dot, ball: BallFacts) -> Slopes:
    w_q, w_k, q, k = _projection_bounds(inner, ball)
    width = len(ball.center) if inner.w_q is None else inner.w_q.shape[-1]
    scale = Upper(abs(float(inner.factor(width))), FACTOR)
    alpha, reach = scale * w_k * q, scale * w_q * k
    return Slopes(alpha, alpha, reach, reach, 2 * scale * q * k, alpha)


def _projection_bounds(potential: Any, ball: BallFacts) -> tuple[Upper, Upper, Upper, Upper]:
    """Bounds of |w_q|, |w_k|, |w_qᵀx + b_q| and |w_kᵀy + b_k| for tokens in the ball."""
    w_q, q = _projection_bound(potential.w_q, potential.b_q, ball)
    w_k, k = _projection_bound(potential.w_k, potential.b_k, ball)
    return w_q, w_k, q, k


def _projection_bound(weight: Tensor | None, bias: Tensor | None, ball: BallFacts) -> tuple[Upper, Upper]:
    """Bounds of |w| and of |wᵀx + b|; a bias of width one acts on every coordinate."""
    width, norm = len(ball.center) if weight is None else weight.shape[-1], product_norm(weight)
    reach = norm * ball.reach
    return norm, reach if bias is None else reach + length(bias.double().expand(width))


def is_tied(potential: DistancePotential) -> bool:
    """Whether queries and keys are projected alike, so that the score depends on x_i - x_j alone."""
    same_weights = same(potential.w_q, potential.w_k)
    return same_weights and same(potential.b_q, potential.b_k)


def bandwidth_of(potential: Gaussian, width: int) -> float:
    """Return the bandwidth for tokens of this width, before they are projected."""
    return float(potential.bandwidth_at(width if potential.w_k is None else potential.w_k.shape[-1]))


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and bool((a == b).all()))


def _apart(potential: DistancePotential, ball: BallFacts) -> tuple[Upper, Upper, Upper]:
    """Bounds of |w_q|, |w_k| and |q_i - k_j| for tokens in the ball."""
    w_q, w_k, q, k = _projection_bounds(potential, ball)
    if is_tied(potential):
        return w_q, w_k, 2 * w_k * ball.radius
    center = ball.center
    offset = (center if potential.w_q is None else center @ potential.w_q.double()) - (
        center if potential.w_k is None else center @ potential.w_k.double()
    )
    for bias, sign in ((potential.b_q, 1.0), (potential.b_k, -1.0)):
        offset = offset if bias is None else offset + sign * bias.double()
    rounding = relative_error(4 * len(center) + 8) * len(center) * (q + k)
    return w_q, w_k, (q + k).minimum(length(offset) + (w_q + w_k) * ball.radius + rounding)


@slopes.rule(Gaussian)
def _gaussian(potential: Gaussian, ball: BallFacts) -> Slopes:
    """s = -|q - k|²/(2b²): v = w_k (q_i - k_j)/b², z = -w_q (q_i - k_j)/b²."""
    w_q, w_k, apart = _apart(potential, ball)
    unit = exact(1.0) / exact_lower(bandwidth_of(potential, len(ball.center))).square()
    alpha, kappa = w_k * apart * unit, w_q * w_k * ball.radius * unit
    plain = potential.w_q is None and potential.w_k is None
    # Where v = (x_i - x_j)/b², the cross term 2 Cov(e·Wᵀx, We·v) = -2 (We)ᵀC(We)/b² is not positive.
    nu = w_k * w_k * ball.radius * unit
    osc = (2 * ball.radius * alpha).minimum((unit * apart.square()).halved())
    return Slopes(alpha, exact(0.0) if plain else nu, kappa, w_q * apart * unit, osc, nu)


@slopes.rule(Laplace)
def _laplace(potential: Laplace, ball: BallFacts) -> Slopes:
    """s = -|q - k|/b is Lipschitz, differentiable almost everywhere with unit slopes."""
    w_q, w_k, apart = _apart(potential, ball)
    unit = exact(1.0) / exact_lower(float(potential.bandwidth))
    alpha, reach = w_k * unit, w_q * unit
    osc = (2 * ball.radius * alpha).minimum(apart * unit)
    return Slopes(alpha, alpha, reach, reach, osc, alpha)


@slopes.rule(StudentT)
def _student(potential: StudentT, ball: BallFacts) -> Slopes:
    """s = -(ν+1)/2 log(1 + u²/(νb²)) of u = |q - k|."""
    w_q, w_k, apart = _apart(potential, ball)
    nu, bandwidth = float(potential.nu), float(potential.bandwidth)
    slope = _student_slope(nu, bandwidth, float(apart))
    alpha, reach = w_k * slope, w_q * slope
    square = exact_lower(nu) * exact_lower(bandwidth).square()
    whole = ((exact(nu) + 1) * (apart.square() / square).log1p()).halved()
    return Slopes(alpha, alpha, reach, reach, (2 * ball.radius * alpha).minimum(whole), alpha)


def _student_slope(nu: float, bandwidth: float, farthest: float) -> Upper:
    """The slope (ν+1) u / (νb² + u²), the largest for u ≤ farthest: it grows up to u = b√ν and is
    (ν+1)/(2b√ν) there.
    """
    steepest = exact_lower(bandwidth) * exact_lower(nu).sqrt()
    if farthest >= float(steepest):
        return (exact(nu) + 1) / (2 * steepest)
    u = exact_lower(farthest)
    return (
        (exact(nu) + 1) * exact(farthest) / (exact_lower(nu) * exact_lower(bandwidth).square() + u.square())
    )


@slopes.rule(Cosine)
def _cosine(potential: Cosine, ball: BallFacts) -> Slopes:
    """z/√(|z|² + eps) is 1/√eps-Lipschitz with values in the unit ball."""
    w_q, w_k, _, _ = _projection_bounds(potential, ball)
    scale = exact(abs(float(potential.scale)))
    unit = scale / exact_lower(potential.eps).sqrt()
    alpha, reach = w_k * unit, w_q * unit
    return Slopes(alpha, alpha, reach, reach, (2 * ball.radius * alpha).minimum(2 * scale), alpha)


@slopes.rule(Additive)
def _additive(potential: Additive, ball: BallFacts) -> Slopes:
    """v = w_k (u · tanh'), z = w_q (u · tanh') with tanh' in (0, 1]:
    both lie in a ball half as wide as their reach.
    """
    w_q, w_k, _, _ = _projection_bounds(potential, ball)
    size, most = length(potential.v), 2 * sizes(potential.v.double()).sum()
    alpha, reach = w_k * size, w_q * size
    nu, osc = alpha.halved(), (2 * ball.radius * alpha).minimum(most)
    return Slopes(alpha, nu, reach.halved(), reach, osc, nu)
