"""What theorems need to know at one sequence, with the rounding of scores counted: every number is a bound
from above.

With r = x - c for a center c, a row's scores are known up to an error and a constant, so its law is known up
to a factor exp(2 error). A covariance is at most Σ_j P̄_j (r_j - m)(r_j - m)ᵀ for every m, and every P̄ ≥ P:
that is a norm of a matrix with rows √P̄_j (r_j - m).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from regard._round import EPS, gamma, outward, product_norm_bound, spectral_norm_bound, vector_norm_bound
from regard.domains import Near
from regard.potentials import Gaussian
from regard.proofs.scores import Form
from regard.proofs.setting import pair_bias
from regard.proofs.subject import Head
from regard.proofs.terms import moving_term
from regard.proofs.theorem import Refusal


@dataclass(frozen=True)
class Point:
    """Tokens r (n, d) about a center, scores (n, n) that are within `error` (n,) up to constants of rows, and
    slopes of scores.

    pull (n, n): at least |∂s_ij/∂x_j|. A query slope is `unit` · factorᵀ r_j up to constants, `factor` None
    being the identity; `off` is at least the norm of what rounding changed in the factor.
    """

    tokens: Tensor
    scores: Tensor
    error: Tensor
    pull: Tensor
    unit: float
    factor: Tensor | None
    off: float
    norms: dict[tuple[int, ...], float] = field(default_factory=dict)

    @cached_property
    def reach(self) -> float:
        """At least the length of every r."""
        return max(vector_norm_bound(token) for token in self.tokens)

    def laws(self) -> Tensor:
        """P̄ ≥ P (n, n), at most one; zero where a key is masked."""
        slack = torch.exp((2 * self.error).clamp(max=700)).unsqueeze(-1) * (
            1 + gamma(4 * len(self.tokens) + 100)
        )
        raised = (self.scores.softmax(-1) * slack + 1e-300).clamp(max=1.0)
        return raised.masked_fill(self.scores == -math.inf, 0.0)

    def centered(self, masses: Tensor) -> Tensor:
        """Rows √masses_j (r_j - m), m their mean: a factor of a covariance that is large enough."""
        mean = masses @ self.tokens / masses.sum().clamp_min(1e-300)
        return masses.sqrt().unsqueeze(-1) * (self.tokens - mean)

    def deviation(self, masses: Tensor, factors: tuple[Tensor, ...]) -> float:
        """At least the largest standard deviation, over unit vectors,
        of the product of factors applied to tokens with these masses.
        """
        return outward(
            product_norm_bound(self.centered(masses), *factors) + self._norm(factors) * self._rounding(masses)
        )

    def weighed(self, row: int, law: Tensor, factors: tuple[Tensor, ...]) -> float:
        """At least λ_max(Wᵀ E[|v|² y yᵀ] W)^½ of a row, y = x_j - E x:
        the mean is known as well as the law is.
        """
        masses = law * self.pull[row].square() * (1 + 1e-14)
        mean = law @ self.tokens / law.sum()
        drift = math.expm1(min(700.0, 4 * float(self.error[row]) + gamma(20 * len(law) + 400))) + 64 * EPS
        matrix = masses.sqrt().unsqueeze(-1) * (self.tokens - mean)
        slack = outward(drift * self.reach * math.sqrt(float(masses.sum())))
        return outward(product_norm_bound(matrix, *factors) + self._norm(factors) * slack)

    def own(self, masses: Tensor) -> float:
        """At least the largest standard deviation of the query slope."""
        factors = () if self.factor is None else (self.factor,)
        total = vector_norm_bound(self.centered(masses)) + self._rounding(masses)
        return outward(self.unit * self.deviation(masses, factors) + self.off * total)

    def _norm(self, factors: tuple[Tensor, ...]) -> float:
        """At least the norm of a product, computed once: the rows of a sequence share their factors."""
        key = tuple(id(factor) for factor in factors)
        if key not in self.norms:
            self.norms[key] = product_norm_bound(*factors)
        return self.norms[key]

    def _rounding(self, masses: Tensor) -> float:
        return outward(16 * EPS * self.reach * math.sqrt(float(masses.sum())))


def point_of(head: Head, domain: Near) -> Point:
    """The facts at one sequence, for one bilinear form or a Gaussian score without projections."""
    if ("point", id(domain)) not in head.facts:
        head.facts["point", id(domain)] = _point(head, domain)
    return head.facts["point", id(domain)]


def _point(head: Head, domain: Near) -> Point:
    points = domain.measure.points
    head.factors  # noqa: B018 (values without a theorem are refused here)
    bias = pair_bias(head, domain)
    bias = torch.zeros(len(points), len(points), dtype=torch.float64) if bias is None else bias
    form = head.form(points.shape[-1])
    return _gaussian(head, points, bias) if form is None else _bilinear(form, points, bias)


def _bilinear(form: Form, points: Tensor, bias: Tensor) -> Point:
    """s_ij = v_i·r_j + B_ij up to constants of rows, v_i = Aᵀx_i + β."""
    center = points.mean(0)
    tokens, width, size, far = (
        points - center,
        points.shape[-1],
        vector_norm_bound(form.a),
        vector_norm_bound(center),
    )
    slopes = tokens @ form.a + (center @ form.a + form.beta)
    lengths = torch.tensor([vector_norm_bound(token) for token in tokens], dtype=torch.float64)
    unit = gamma(4 * width + 20)
    off = (unit * size + form.error) * (lengths + far) + unit * vector_norm_bound(form.beta) + form.error_beta
    pull = torch.tensor([vector_norm_bound(slope) for slope in slopes], dtype=torch.float64) * (
        1 + 1e-15
    ) + off * (1 + 1e-12)
    scores = slopes @ tokens.mT
    error = (off + unit * pull) * float(lengths.max()) * (1 + 1e-12)
    scores, error = _add_bias(scores, error, bias)
    return Point(tokens, scores, error, pull.unsqueeze(-1).expand(bias.shape), 1.0, form.a.mT, form.error)


def _gaussian(head: Head, points: Tensor, bias: Tensor) -> Point:
    """s_ij = -|r_i - r_j|²/(2b²) + B_ij, ∂s/∂x_j = (x_i - x_j)/b², ∂s/∂x_i = (x_j - x_i)/b²."""
    term, factor = moving_term(head.potential)
    if not isinstance(term, Gaussian) or term.w_q is not None or term.w_k is not None or factor < 0:
        raise Refusal(
            "at a point it is for scores that are one bilinear form, or Gaussian() without projections"
        )
    if term.b_q is not None or term.b_k is not None:
        raise Refusal("at a point Gaussian scores with biases have no theorem here; leave b_q and b_k out")
    unit = outward(factor / float(term.bandwidth) ** 2)
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") * (
        1 + gamma(2 * points.shape[-1] + 20)
    )
    scores = -0.5 * unit * apart.square()
    error = scores.abs().amax(-1) * gamma(
        8 * points.shape[-1] + 9000
    )  # `unit` is rounded up by a few thousand roundings
    scores, error = _add_bias(scores, error, bias)
    return Point(points - points.mean(0), scores, error, unit * apart * (1 + 1e-14), unit, None, 0.0)


def _add_bias(scores: Tensor, error: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with the fixed bias, and what rounding adds: of the bias, of the sum,
    and of differences inside a softmax.
    """
    fixed = torch.where(bias > -math.inf, bias, torch.zeros_like(bias))
    size = (scores.abs() + fixed.abs()).amax(-1)
    return scores + bias, error + 40 * EPS * size


def operator_norm(weights: Tensor) -> float:
    """At least |P|₂ for every P with 0 ≤ P ≤ weights, entry by entry:
    a matrix that is not negative grows with its entries.
    """
    return spectral_norm_bound(weights)
