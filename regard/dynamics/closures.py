"""closure: the flow of a Gaussian law, which stays Gaussian where velocities are affine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard._object import Object
from regard._verb import Verb
from regard.attention import Attention
from regard.dynamics.displacement import Displacement
from regard.dynamics.integration import SCHEME, integrate
from regard.dynamics.projected import AXES, project
from regard.dynamics.schemes import DormandPrince
from regard.errors import ArgumentError, RefusalError
from regard.lookups import Factored, Identity, Linear
from regard.measure import GaussianMeasure
from regard.moments import Mean
from regard.normalizers import Normalizer, Sigmoid, Sinkhorn, Softmax
from regard.potentials import Bilinear, Dot, Gaussian, Potential
from regard.potentials.base import Scaled, Sum
from regard.supports import Full

ROUGH = DormandPrince(1e-6)
"""How the equation of a projection is solved, whose velocity is a quadrature."""
quadratic = Verb("quadratic")
"""quadratic(potential, width) -> the Scores of potentials that are quadratic, and None for others."""


class Scores(NamedTuple):
    """xᵀ a y + b·y - yᵀ c y / 2, up to what depends on x alone."""

    a: Tensor
    b: Tensor
    c: Tensor


class Values(NamedTuple):
    """v y + b."""

    v: Tensor
    b: Tensor


class AffineVelocity(NamedTuple):
    """The velocity b + m x."""

    b: Tensor
    m: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Closure(Object):
    """t ↦ N(m(t), S(t)) with m' = b + M m, S' = M S + S Mᵀ, where b + M x is the velocity of attention to
    N(m, S) (castin2025).

    softmax, scores xᵀAy + β·y - yᵀLy/2:  b + M x = V (1 + S L)^{-1} (m + S (Aᵀx + β));
    Sinkhorn:  V (m + S^{1/2} K S^{-1/2} (x - m)),  S^{1/2} Aᵀ S^{1/2} = U diag(t) Zᵀ, K = U diag(k) Zᵀ,
    k = (√(1 + 4t²) - 1) / 2t.
    With sigmoid weights σ(xᵀAy + bias) velocities are not affine; then b + M x is the affine field that is
    closest to them in L² of the law, and `exact` is false (`regard.dynamics.projected`).

    Examples:
        >>> law = regard.dynamics.GaussianMeasure(torch.zeros(1), torch.eye(1))
        >>> growing = regard.dynamics.closure(regard.Attention(regard.Dot(scale=0.5)), law)  # a Closure
        >>> growing.blow_up(), round(float(growing.at(0.5).covariance), 4)  # 1/(1 - t)
        (1.0, 2.0)
    """

    start: GaussianMeasure
    scores: Scores
    values: Values
    balanced: bool
    less: float
    bias: float | None = None

    @property
    def exact(self) -> bool:
        """Whether the law stays Gaussian; else its mean and covariance are those of a projection."""
        return self.bias is None

    def at(self, t: float) -> GaussianMeasure:
        """The law at time t, integrated to nearly all digits (a projection to six); BlowUpError beyond a
        blow-up.
        """
        if not (isinstance(t, (int, float)) and math.isfinite(t) and t >= 0):
            raise ArgumentError("t", f"is {t!r}", "give a time that is not negative")
        state = torch.cat([self.start.mean.unsqueeze(-2), self.start.covariance], -2).double()
        scheme = SCHEME if self.exact else ROUGH
        end = integrate(self._velocity, state, float(t), scheme) if t > 0 else state
        return GaussianMeasure(end[0], (end[1:] + end[1:].mT) / 2)

    def blow_up(self) -> float:
        """The time at which the covariance leaves all bounds; infinity where it never does.

        With softmax, dot products with a symmetric A and V = v·1 the covariance is (S^{-1} - 2tvA)^{-1}, so
        the time is 1/(2 λ_max(vSA)). With Sinkhorn, with sigmoid weights (which are at most one), or Gaussian
        scores whose projection of keys is invertible, velocities grow linearly and there is none. Other cases
        are refused.
        """
        a, c = self.scores.a, self.scores.c
        if self.balanced or self.bias is not None:
            return math.inf
        if bool(c.any()):
            if float(torch.linalg.cond(c)) < 1e12:
                return math.inf
            reason = "keys are projected to fewer dimensions, and no closed form is known; ask at(t)."
            raise RefusalError("blow_up", [reason])
        factor = float(self.values.v[0, 0])
        scalar = torch.equal(self.values.v, factor * torch.eye(len(a), dtype=a.dtype))
        if not (scalar and torch.equal(a, a.mT)) or self.less:
            reason = "the closed form needs a symmetric A, values v·x and no displacement; ask at(t)."
            raise RefusalError("blow_up", [reason])
        root = _root(self.start.covariance.double())
        largest = float(torch.linalg.eigvalsh(factor * root @ a @ root)[-1])
        return 1 / (2 * largest) if largest > 0 else math.inf

    def velocity(self, law: GaussianMeasure) -> AffineVelocity:
        """The velocity b + m x of attention to this law."""
        mean, covariance = law.mean.double(), law.covariance.double()
        inner = self._inner(mean, covariance)
        v, shift = self.values
        matrix = v @ inner.m - self.less * torch.eye(len(mean), dtype=mean.dtype)
        return AffineVelocity(v @ inner.b + shift, matrix)

    def _inner(self, mean: Tensor, covariance: Tensor) -> AffineVelocity:
        if self.bias is not None:
            field = project(self.scores.a, self.bias, mean, _root(covariance))
            return AffineVelocity(field.value - field.slope @ mean, field.slope)
        return self._balanced(mean, covariance) if self.balanced else self._tilted(mean, covariance)

    def _tilted(self, mean: Tensor, covariance: Tensor) -> AffineVelocity:
        a, b, c = self.scores
        eye = torch.eye(len(mean), dtype=mean.dtype)
        right = torch.cat([(mean + covariance @ b).unsqueeze(-1), covariance @ a.mT], -1)
        solved = torch.linalg.solve(eye + covariance @ c, right)
        return AffineVelocity(solved[:, 0], solved[:, 1:])

    def _balanced(self, mean: Tensor, covariance: Tensor) -> AffineVelocity:
        """S^{1/2} K S^{-1/2} = S^{1/2} h(N Nᵀ) S^{1/2} Aᵀ, h(s) = 2/(1 + √(1+4s)): no inverse is taken."""
        root = _root(covariance)
        inner = root @ self.scores.a.mT @ root
        squares, vectors = torch.linalg.eigh(inner @ inner.mT)
        damping = vectors @ torch.diag(2 / (1 + (1 + 4 * squares.clamp_min(0)).sqrt())) @ vectors.mT
        matrix = root @ damping @ root @ self.scores.a.mT
        return AffineVelocity(mean - matrix @ mean, matrix)

    def _velocity(self, t: float, state: Tensor) -> Tensor:
        if not torch.isfinite(state).all():
            return torch.full_like(state, math.nan)
        mean, covariance = state[0], (state[1:] + state[1:].mT) / 2
        affine = self.velocity(GaussianMeasure(mean, covariance))
        turned = affine.m @ covariance
        return torch.cat([(affine.b + affine.m @ mean).unsqueeze(-2), turned + turned.mT], -2)


def closure(attention: Attention | Displacement, gaussian: GaussianMeasure) -> Closure:
    """The flow of a Gaussian law under attention, or under its displacement: exact for softmax and Sinkhorn
    with dot products, Gaussian scores and sums of them, projected for sigmoid weights of dot products in at
    most three dimensions. A law counts as one key: n tokens with sigmoid weights move n times as fast.
    Other velocities that are not affine are refused.

    Examples:
        >>> from regard.dynamics import GaussianMeasure, closure
        >>> law = GaussianMeasure(torch.zeros(1), torch.eye(1))
        >>> closure(regard.Attention(regard.Dot(scale=0.5)), law).exact
        True
    """
    inner, less = (attention.map, 1.0) if isinstance(attention, Displacement) else (attention, 0.0)
    if not isinstance(inner, Attention):
        raise ArgumentError(
            "attention", f"is a {type(inner).__name__}", "give an Attention, or Displacement(attention)"
        )
    if not isinstance(gaussian, GaussianMeasure):
        raise ArgumentError("gaussian", f"is a {type(gaussian).__name__}", "give a GaussianMeasure")
    if gaussian.mean.ndim != 1 or not len(gaussian.mean):
        raise ArgumentError("gaussian", f"has a mean of shape {list(gaussian.mean.shape)}", "give one law")
    for name, value in (("mean", gaussian.mean), ("covariance", gaussian.covariance)):
        if not torch.isfinite(value).all():
            raise ArgumentError("gaussian", f"has a {name} with entries that are not finite", "give numbers")
    covariance = gaussian.covariance.double()
    scale = max(float(covariance.abs().max()), 1e-300)
    if not torch.allclose(covariance, covariance.mT, atol=1e-10 * scale) or bool(
        (torch.linalg.eigvalsh(covariance) < -1e-10 * scale).any()
    ):
        found = "has a covariance that is not symmetric and positive"
        raise ArgumentError("gaussian", found, "give a covariance matrix")
    width = len(gaussian.mean)
    scores, values = quadratic(inner.potential, width), _values(inner, width)
    reasons = _refusals(inner, scores, values)
    if reasons or scores is None or values is None:
        raise RefusalError("closure", reasons)
    if isinstance(inner.normalizer, Softmax):
        scores = Scores(*(part / inner.normalizer.temperature for part in scores))
    bias = float(inner.normalizer.bias) if isinstance(inner.normalizer, Sigmoid) else None  # type: ignore[arg-type]
    return Closure(gaussian, scores, values, isinstance(inner.normalizer, Sinkhorn), less, bias)


def _refusals(attention: Attention, scores: Scores | None, values: Values | None) -> list[str]:
    reasons = []
    if scores is None:
        name = type(attention.potential).__name__
        reasons.append(f"{name} scores of one head are not a quadratic form, so velocities are not affine.")
    if values is None:
        reasons.append("values must be affine in keys, of one head: Identity, Linear or Factored.")
    width = 0 if values is None else len(values.b)
    reasons += _about_rows(attention.normalizer) + _about_sigmoid(attention, width)
    if not isinstance(attention.support, Full):
        reasons.append("a law has no positions: the support must be Full().")
    if not isinstance(attention.moment, Mean):
        reasons.append("velocities are means: the moment must be Mean().")
    return reasons


def _about_sigmoid(attention: Attention, width: int) -> list[str]:
    """What a projection needs: scores as they are, since each key is weighed by itself."""
    normalizer, potential = attention.normalizer, attention.potential
    if not isinstance(normalizer, Sigmoid):
        return []
    reasons = []
    if normalizer.bias is None or (isinstance(normalizer.bias, Tensor) and normalizer.bias.ndim):
        reasons.append("a law has no number of keys that bias=None could mean: give Sigmoid(bias) a number.")
    biased = isinstance(potential, Dot) and not (potential.b_q is None and potential.b_k is None)
    if biased or not isinstance(potential, (Dot, Bilinear)):
        reasons.append("with sigmoid weights scores must be xᵀAy: Dot() without biases, or Bilinear(a).")
    if width > AXES:
        reasons.append(f"a projection is an integral in {width} dimensions, and is taken in at most {AXES}.")
    return reasons


def _about_rows(normalizer: Normalizer) -> list[str]:
    if isinstance(normalizer, (Sinkhorn, Sigmoid)):
        return []
    if isinstance(normalizer, Softmax):
        one = not isinstance(normalizer.temperature, Tensor) or normalizer.temperature.ndim == 0
        return [] if one else ["one temperature for each head: give one head."]
    name = type(normalizer).__name__
    return [
        f"{name} weights of a Gaussian law give velocities that are not affine, so it does not stay Gaussian."
    ]


def _values(attention: Attention, width: int) -> Values | None:
    lookup = attention.lookup
    if isinstance(lookup, Identity):
        return Values(torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
    if isinstance(lookup, Linear):
        matrix, shift = lookup.w_v, lookup.b_v
    elif isinstance(lookup, Factored):
        matrix, shift = lookup.w @ lookup.u, lookup.b
    else:
        return None
    if matrix.shape != (width, width) or (shift is not None and shift.shape != (width,)):
        return None
    none = torch.zeros(width, dtype=torch.float64)
    return Values(matrix.double().mT, none if shift is None else shift.double())


@quadratic.rule(Potential)
def _other(potential: Potential, width: int) -> Scores | None:
    return None


@quadratic.rule(Bilinear)
def _bilinear(potential: Bilinear, width: int) -> Scores | None:
    if potential.a.shape != (width, width):
        return None
    zero = torch.zeros(width, dtype=torch.float64)
    return Scores(potential.a.double(), zero, torch.zeros(width, width, dtype=torch.float64))


@quadratic.rule(Dot)
def _dot(potential: Dot, width: int) -> Scores | None:
    q, k, b_q, _ = _projections(potential, width)
    if q is None or k is None or b_q is None:
        return None
    scale = potential.factor(q.shape[-1])
    if isinstance(scale, Tensor) and scale.ndim:
        return None
    return Scores(scale * q @ k.mT, scale * k @ b_q, torch.zeros(width, width, dtype=torch.float64))


@quadratic.rule(Gaussian)
def _gaussian(potential: Gaussian, width: int) -> Scores | None:
    q, k, b_q, b_k = _projections(potential, width)
    if q is None or k is None or b_q is None or b_k is None:
        return None
    bandwidth = potential.bandwidth_at(k.shape[-1])
    if isinstance(bandwidth, Tensor) and bandwidth.ndim:
        return None
    precision = float(bandwidth) ** -2
    return Scores(precision * q @ k.mT, precision * k @ (b_q - b_k), precision * k @ k.mT)


@quadratic.rule(Sum)
def _sum(potential: Sum, width: int) -> Scores | None:
    parts = [quadratic(term, width) for term in potential.terms]
    if any(part is None for part in parts):
        return None
    return Scores(*(sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)))


@quadratic.rule(Scaled)
def _scaled(potential: Scaled, width: int) -> Scores | None:
    inner = quadratic(potential.potential, width)
    if inner is None or (isinstance(potential.factor, Tensor) and potential.factor.ndim):
        return None
    return Scores(*(float(potential.factor) * part for part in inner))


def _projections(potential: Dot | Gaussian, width: int) -> tuple[Tensor | None, ...]:
    """w_q, w_k, b_q, b_k of one head in float64; None where there are several, or another width."""
    eye = torch.eye(width, dtype=torch.float64)
    q, k = (eye if w is None else w.double() for w in (potential.w_q, potential.w_k))
    if q.ndim != 2 or k.ndim != 2 or len(q) != width or len(k) != width:
        return None, None, None, None
    none = torch.zeros(q.shape[-1], dtype=torch.float64)
    biases = [none if b is None else b.double() for b in (potential.b_q, potential.b_k)]
    if any(b.ndim != 1 for b in biases):
        return None, None, None, None
    return q, k, *(b.expand(q.shape[-1]) for b in biases)


def _root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.mT
