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

from regard._enclosed import length, lengths, product_norm
from regard._upper import ELEMENTARY, Upper, exact, relative_error, sizes
from regard.domains import Near
from regard.potentials import Gaussian
from regard.proofs.scores import FACTOR, Form, bandwidth_of
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
    error: Upper
    pull: Upper
    unit: Upper
    factor: Tensor | None
    off: Upper
    norms: dict[tuple[int, ...], Upper] = field(default_factory=dict)

    @cached_property
    def reach(self) -> Upper:
        """At least the length of every r."""
        return lengths(self.tokens, 1).amax()

    def laws(self) -> Upper:
        """P̄ ≥ P (n, n), at most one; zero where a key is masked."""
        computed = self.scores.softmax(-1).clamp_min(1e-300)
        law = Upper(computed, len(self.tokens) + 2 * ELEMENTARY + 4) * (2 * self.error).exp().unsqueeze(-1)
        return law.minimum(exact(1.0)).where(self.scores > -math.inf)

    def centered(self, masses: Upper) -> Tensor:
        """Rows √masses_j (r_j - m), m their mean: a factor of a covariance that is large enough, up to
        `_rounding`.
        """
        paid = masses.bound
        mean = paid @ self.tokens / paid.sum().clamp_min(1e-300)
        return paid.sqrt().unsqueeze(-1) * (self.tokens - mean)

    def deviation(self, masses: Upper, factors: tuple[Tensor, ...]) -> Upper:
        """At least the largest standard deviation, over unit vectors,
        of the product of factors applied to tokens with these masses.
        """
        return product_norm(self.centered(masses), *factors) + self._norm(factors) * self._rounding(masses)

    def weighed(self, row: int, law: Upper, factors: tuple[Tensor, ...]) -> Upper:
        """At least λ_max(Wᵀ E[|v|² y yᵀ] W)^½ of a row, y = x_j - E x:
        the mean is known as well as the law is.
        """
        masses = law * self.pull[row].square()
        mean = law.value @ self.tokens / law.value.sum()
        drift = (4 * self.error[row] + relative_error(20 * len(self.tokens) + 400)).expm1()
        drift = drift + relative_error(128)
        matrix = masses.bound.sqrt().unsqueeze(-1) * (self.tokens - mean)
        return product_norm(matrix, *factors) + self._norm(factors) * drift * self.reach * masses.sum().sqrt()

    def own(self, masses: Upper) -> Upper:
        """At least the largest standard deviation of the query slope."""
        factors = () if self.factor is None else (self.factor,)
        total = length(self.centered(masses)) + self._rounding(masses)
        return self.unit * self.deviation(masses, factors) + self.off * total

    def _norm(self, factors: tuple[Tensor, ...]) -> Upper:
        """At least the norm of a product, computed once: the rows of a sequence share their factors."""
        key = tuple(id(factor) for factor in factors)
        if key not in self.norms:
            self.norms[key] = product_norm(*factors)
        return self.norms[key]

    def _rounding(self, masses: Upper) -> Upper:
        """At least what rounding changed in `centered`, in Frobenius norm."""
        return relative_error(32) * self.reach * masses.sum().sqrt()


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
    center, width = points.mean(0), points.shape[-1]
    tokens, size = points - center, length(form.a)
    slopes = tokens @ form.a + (center @ form.a + form.beta)
    far, unit = lengths(tokens, 1), relative_error(4 * width + 20)
    off = (unit * size + form.error) * (far + length(center)) + unit * length(form.beta) + form.error_beta
    pull = lengths(slopes) + off
    error = (off + unit * pull) * far.amax()
    scores, error = _add_bias(slopes @ tokens.mT, error, bias)
    steep = pull.map(lambda value: value.unsqueeze(-1).expand(bias.shape))
    return Point(tokens, scores, error, steep, exact(1.0), form.a.mT, form.error)


def _gaussian(head: Head, points: Tensor, bias: Tensor) -> Point:
    """s_ij = -|r_i - r_j|²/(2b²) + B_ij, ∂s/∂x_j = (x_i - x_j)/b², ∂s/∂x_i = (x_j - x_i)/b²."""
    term, factor = moving_term(head.potential)
    if not isinstance(term, Gaussian) or term.w_q is not None or term.w_k is not None or factor < 0:
        raise Refusal(
            "at a point it is for scores that are one bilinear form, or Gaussian() without projections"
        )
    if term.b_q is not None or term.b_k is not None:
        raise Refusal("at a point Gaussian scores with biases have no theorem here; leave b_q and b_k out")
    square = bandwidth_of(term, points.shape[-1]) ** 2
    units = FACTOR + 2
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    scores = -0.5 * (factor / square) * apart.square()
    error = relative_error(2 * points.shape[-1] + units + 16) * sizes(scores).amax(-1)
    scores, error = _add_bias(scores, error, bias)
    unit = Upper(factor / square, units)
    pull = unit * Upper(apart, points.shape[-1] + 4)
    return Point(points - points.mean(0), scores, error, pull, unit, None, exact(0.0))


def _add_bias(scores: Tensor, error: Upper, bias: Tensor) -> tuple[Tensor, Upper]:
    """Scores with the fixed bias, and what rounding adds: of the bias, of the sum,
    and of differences inside a softmax.
    """
    fixed = torch.where(bias > -math.inf, bias, torch.zeros_like(bias))
    size = (sizes(scores) + sizes(fixed)).amax(-1)
    return scores + bias, error + relative_error(80) * size


def operator_norm(weights: Upper) -> Upper:
    """At least |P|₂ for every P with 0 ≤ P ≤ weights, entry by entry:
    a matrix that is not negative grows with its entries.
    """
    return product_norm(weights.bound)
