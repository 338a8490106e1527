"""What theorems need to know of scores: their exact bilinear form where there is one, else how fast they
change on a ball.

A score is S(x_i, x_j) + B_ij, with B fixed by the positions. For tokens in a ball, v = ∂S/∂x_j and z =
∂S/∂x_i: alpha ≥ |v|, nu ≥ the radius of a ball that holds v as j varies, kappa ≥ the same of z, reach ≥ |z|,
osc ≥ max_j S - min_j S.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard._round import gamma, outward, product_norm_bound, spectral_norm_bound, up, vector_norm_bound
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
    """Tokens in a ball: radius about a center, and `reach`, the largest length of a token."""

    center: Tensor
    radius: float
    reach: float


@dataclass(frozen=True)
class Slopes:
    """How fast scores change on a ball.

    `reversed_nu` is nu of the negative of the scores, where a sign helps.
    """

    alpha: float
    nu: float
    kappa: float
    reach: float
    osc: float
    reversed_nu: float

    def plus(self, other: Slopes) -> Slopes:
        """Of a sum of scores."""
        return Slopes(*(outward(a + b) for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> Slopes:
        """Of a multiple of the scores."""
        if factor == 0:
            return Slopes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        made = Slopes(*(outward(abs(factor) * value) for value in astuple(self)))
        return made if factor > 0 else replace(made, nu=made.reversed_nu, reversed_nu=made.nu)


@dataclass(frozen=True)
class Form:
    """S(x, y) = xᵀ A y + β·y + γ·x, with `error` a bound of the spectral norm of what rounding changed in A,
    and in β and γ.
    """

    a: Tensor
    beta: Tensor
    gamma: Tensor
    error: float
    error_beta: float
    error_gamma: float
    factors: tuple[Tensor, ...] = ()  # whose product A is, up to `error`, where they are known

    @cached_property
    def norm(self) -> float:
        """At least |A|₂."""
        if self.factors:
            return up(product_norm_bound(*self.factors) + self.error)
        return up(spectral_norm_bound(self.a) + self.error)

    def shift(self, center: Tensor) -> float:
        """At least |Aᵀc + β|."""
        size, length = vector_norm_bound(self.a), vector_norm_bound(center)
        rounding = gamma(2 * len(center) + 4) * (size * length + vector_norm_bound(self.beta))
        return up(
            vector_norm_bound(center @ self.a + self.beta)
            + outward(rounding + self.error * length + self.error_beta)
        )

    def pull(self, center: Tensor) -> float:
        """At least |A c + γ|."""
        size, length = vector_norm_bound(self.a), vector_norm_bound(center)
        rounding = gamma(2 * len(center) + 4) * (size * length + vector_norm_bound(self.gamma))
        return up(
            vector_norm_bound(self.a @ center + self.gamma)
            + outward(rounding + self.error * length + self.error_gamma)
        )


bilinear = Verb("bilinear")
"""bilinear.one(potential, width) -> Form, or None where scores are not one bilinear form,
up to a constant.
"""

slopes = Verb("slopes")
"""slopes.one(potential, ball) -> Slopes."""


# Bilinear forms


@bilinear.rule(Potential)
def _curved(potential: Potential, width: int) -> None:
    return None


@bilinear.rule(PositionPotential)
def _fixed(potential: PositionPotential, width: int) -> Form:
    zero = torch.zeros(width, dtype=torch.float64)
    return Form(torch.zeros(width, width, dtype=torch.float64), zero, zero, 0.0, 0.0, 0.0)


@bilinear.rule(Bilinear)
def _bilinear(potential: Bilinear, width: int) -> Form:
    zero = torch.zeros(width, dtype=torch.float64)
    return Form(potential.a.double(), zero, zero, 0.0, 0.0, 0.0)


@bilinear.rule(Dot)
def _dot(potential: Dot, width: int) -> Form:
    w_q, w_k = _matrix(potential.w_q, width), _matrix(potential.w_k, width)
    scale = float(potential.factor(w_q.shape[-1]))
    b_q, b_k = (
        torch.zeros(w_q.shape[-1], dtype=torch.float64) if b is None else b.double().expand(w_q.shape[-1])
        for b in (potential.b_q, potential.b_k)
    )
    size_q, size_k = vector_norm_bound(w_q), vector_norm_bound(w_k)
    unit = gamma(w_q.shape[-1] + 4) * abs(scale)
    return Form(
        scale * (w_q @ w_k.mT),
        scale * (w_k @ b_q),
        scale * (w_q @ b_k),
        outward(unit * size_q * size_k),
        outward(unit * size_k * vector_norm_bound(b_q)),
        outward(unit * size_q * vector_norm_bound(b_k)),
        (scale * w_q, w_k.mT),
    )


@bilinear.rule(Sum)
def _sum(potential: Sum, width: int) -> Form | None:
    forms = [bilinear.one(term, width) for term in potential.terms]
    if any(form is None for form in forms):
        return None
    total = forms[0]
    for form in forms[1:]:
        rounding = gamma(4) * (vector_norm_bound(total.a) + vector_norm_bound(form.a))
        small = gamma(4) * (vector_norm_bound(total.beta) + vector_norm_bound(form.beta))
        tiny = gamma(4) * (vector_norm_bound(total.gamma) + vector_norm_bound(form.gamma))
        total = Form(
            total.a + form.a,
            total.beta + form.beta,
            total.gamma + form.gamma,
            outward(total.error + form.error + rounding),
            outward(total.error_beta + form.error_beta + small),
            outward(total.error_gamma + form.error_gamma + tiny),
        )
    return total


@bilinear.rule(Scaled)
def _scaled(potential: Scaled, width: int) -> Form | None:
    form = bilinear.one(potential.potential, width)
    if form is None:
        return None
    factor = float(potential.factor)
    more = gamma(4) * abs(factor)
    return Form(
        factor * form.a,
        factor * form.beta,
        factor * form.gamma,
        outward(abs(factor) * form.error + more * vector_norm_bound(form.a)),
        outward(abs(factor) * form.error_beta + more * vector_norm_bound(form.beta)),
        outward(abs(factor) * form.error_gamma + more * vector_norm_bound(form.gamma)),
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
        raise Refusal(f"nothing is known of the slopes of {name}; add a rule with {rules}")
    return _form_slopes(form, ball)


@slopes.rule(PositionPotential)
def _still(potential: PositionPotential, ball: BallFacts) -> Slopes:
    return Slopes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _form_slopes(form: Form, ball: BallFacts) -> Slopes:
    """v = Aᵀx_i + β for every j; z = A x_j + γ."""
    a = form.norm
    alpha = outward(form.shift(ball.center) + a * ball.radius)
    return Slopes(
        alpha,
        0.0,
        outward(a * ball.radius),
        outward(form.pull(ball.center) + a * ball.radius),
        outward(2 * ball.radius * alpha),
        0.0,
    )


@slopes.rule(Sum)
def _sum_slopes(potential: Sum, ball: BallFacts) -> Slopes:
    total = Slopes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for term in potential.terms:
        total = total.plus(slopes.one(term, ball))
    return total


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
    shared = inner.nu == 0 and bilinear.one(potential.potential, len(ball.center)) is not None
    nu = inner.alpha / 2 if shared else inner.alpha
    osc = min(inner.osc, outward(2 * float(potential.cap)))
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
    if not isinstance(inner, Dot):
        raise Refusal(f"rotary positions have a theorem for Dot, not for {type(inner).__name__}")
    w_q, w_k, q, k = _projection_bounds(inner, ball)
    scale = abs(float(inner.factor(len(ball.center) if inner.w_q is None else inner.w_q.shape[-1])))
    alpha, reach = outward(scale * w_k * q), outward(scale * w_q * k)
    return Slopes(alpha, alpha, reach, reach, outward(2 * scale * q * k), alpha)


def _projection_bounds(potential: Any, ball: BallFacts) -> tuple[float, float, float, float]:
    """Bounds of |w_q|, |w_k|, |w_qᵀx + b_q| and |w_kᵀy + b_k| for tokens in the ball."""
    sizes = [1.0 if w is None else product_norm_bound(w) for w in (potential.w_q, potential.w_k)]
    widths = [len(ball.center) if w is None else w.shape[-1] for w in (potential.w_q, potential.w_k)]
    pairs = zip((potential.b_q, potential.b_k), widths, strict=True)
    biases = [
        0.0 if b is None else vector_norm_bound(b.double().expand(c)) for b, c in pairs
    ]  # a bias of width one acts on every coordinate
    return (*sizes, *(outward(w * ball.reach + b) for w, b in zip(sizes, biases, strict=True)))  # type: ignore[return-value]


def is_tied(potential: DistancePotential) -> bool:
    """Whether queries and keys are projected alike, so that the score depends on x_i - x_j alone."""
    same_weights = same(potential.w_q, potential.w_k)
    return same_weights and same(potential.b_q, potential.b_k)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and bool((a == b).all()))


def _apart(potential: DistancePotential, ball: BallFacts) -> tuple[float, float, float]:
    """Bounds of |w_q|, |w_k| and |q_i - k_j| for tokens in the ball."""
    w_q, w_k, q, k = _projection_bounds(potential, ball)
    if is_tied(potential):
        return w_q, w_k, outward(2 * w_k * ball.radius)
    center = ball.center
    offset = (center if potential.w_q is None else center @ potential.w_q.double()) - (
        center if potential.w_k is None else center @ potential.w_k.double()
    )
    for bias, sign in ((potential.b_q, 1.0), (potential.b_k, -1.0)):
        offset = offset if bias is None else offset + sign * bias.double()
    rounding = gamma(4 * len(center) + 8) * len(center) * (q + k)
    return (
        w_q,
        w_k,
        min(outward(q + k), outward(vector_norm_bound(offset) + (w_q + w_k) * ball.radius + rounding)),
    )


@slopes.rule(Gaussian)
def _gaussian(potential: Gaussian, ball: BallFacts) -> Slopes:
    """s = -|q - k|²/(2b²): v = w_k (q_i - k_j)/b², z = -w_q (q_i - k_j)/b²."""
    w_q, w_k, apart = _apart(potential, ball)
    unit = float(potential.bandwidth) ** -2 * (1 + 1e-15)
    alpha, kappa = outward(w_k * apart * unit), outward(w_q * w_k * ball.radius * unit)
    plain = potential.w_q is None and potential.w_k is None
    # Where v = (x_i - x_j)/b², the cross term 2 Cov(e·Wᵀx, We·v) = -2 (We)ᵀC(We)/b² is not positive.
    nu = outward(w_k * w_k * ball.radius * unit)
    osc = min(outward(2 * ball.radius * alpha), outward(0.5 * unit * apart * apart))
    return Slopes(alpha, 0.0 if plain else nu, kappa, outward(w_q * apart * unit), osc, nu)


@slopes.rule(Laplace)
def _laplace(potential: Laplace, ball: BallFacts) -> Slopes:
    """s = -|q - k|/b is Lipschitz, differentiable almost everywhere with unit slopes."""
    w_q, w_k, apart = _apart(potential, ball)
    unit = (1 + 1e-15) / float(potential.bandwidth)
    alpha, reach = outward(w_k * unit), outward(w_q * unit)
    return Slopes(
        alpha, alpha, reach, reach, min(outward(2 * ball.radius * alpha), outward(apart * unit)), alpha
    )


@slopes.rule(StudentT)
def _student(potential: StudentT, ball: BallFacts) -> Slopes:
    """The slope (ν+1) u / (ν b² + u²) in u = |q - k| is largest at u = b√ν."""
    w_q, w_k, apart = _apart(potential, ball)
    nu, bandwidth = float(potential.nu), float(potential.bandwidth)
    steepest = bandwidth * math.sqrt(nu)
    u = min(apart, steepest)
    slope = outward((nu + 1) * u / (nu * bandwidth**2 + u * u))
    slope = outward((nu + 1) / (2 * steepest)) if apart >= steepest * (1 - 1e-9) else slope
    alpha, reach = outward(w_k * slope), outward(w_q * slope)
    osc = min(
        outward(2 * ball.radius * alpha),
        outward(0.5 * (nu + 1) * math.log1p(apart * apart / (nu * bandwidth**2)))
        if math.isfinite(apart)
        else math.inf,
    )
    return Slopes(alpha, alpha, reach, reach, osc, alpha)


@slopes.rule(Cosine)
def _cosine(potential: Cosine, ball: BallFacts) -> Slopes:
    """z/√(|z|² + eps) is 1/√eps-Lipschitz with values in the unit ball."""
    w_q, w_k, _, _ = _projection_bounds(potential, ball)
    unit = outward(abs(float(potential.scale)) / math.sqrt(potential.eps))
    alpha, reach = outward(w_k * unit), outward(w_q * unit)
    return Slopes(
        alpha,
        alpha,
        reach,
        reach,
        min(outward(2 * ball.radius * alpha), outward(2 * abs(float(potential.scale)))),
        alpha,
    )


@slopes.rule(Additive)
def _additive(potential: Additive, ball: BallFacts) -> Slopes:
    """v = w_k (u · tanh'), z = w_q (u · tanh') with tanh' in (0, 1]:
    both lie in a ball half as wide as their reach.
    """
    w_q, w_k, _, _ = _projection_bounds(potential, ball)
    length, total = vector_norm_bound(potential.v), outward(float(potential.v.double().abs().sum()))
    alpha, reach = outward(w_k * length), outward(w_q * length)
    return Slopes(
        alpha,
        alpha / 2,
        reach / 2,
        reach,
        min(outward(2 * ball.radius * alpha), outward(2 * total)),
        alpha / 2,
    )
