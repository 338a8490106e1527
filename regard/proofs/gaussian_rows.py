"""What theorems about Gaussian scores on the whole space share: a bound of the mean squared distance from
a query to the keys it attends to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import Numbers, product_norm
from regard._upper import ELEMENTARY, TINY, UNIT, Upper, exact, relative_error, sizes
from regard.domains import Domain
from regard.lookups import Factored
from regard.normalizers import Softmax
from regard.potentials import Gaussian
from regard.proofs.about import all_of, rows_by, scores_by
from regard.proofs.scores import is_tied, same
from regard.proofs.setting import bias_error, pair_bias, tokens_of
from regard.proofs.subject import Head
from regard.proofs.terms import moving_term
from regard.proofs.theorem import Hypothesis, Refusal, checked


@dataclass(frozen=True)
class GaussianRows:
    """Keys k_j = Mᵀx_j, values Uᵀk_j + constant, and `far` ≥ E_i |k_i - k_j|² / (2 b²) for every row and
    all tokens.
    """

    projection: Tensor | None
    after: tuple[Tensor, ...]
    far: Upper
    tokens: int

    @property
    def size(self) -> Upper:
        """At least |M| |U|."""
        return product_norm(self.projection) * product_norm(*self.after)

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """What was verified on the way."""
        projected = "queries and keys are projected alike, and values are functions of projected keys"
        return (
            checked("softmax rows of a Gaussian score"),
            checked(projected),
            checked("every row sees its own token"),
            checked("the number of tokens"),
        )


GAUSSIAN = all_of(rows_by(Softmax), scores_by(Gaussian))
"""What theorems about Gaussian rows are about."""


def gaussian_rows(head: Head, domain: Domain) -> GaussianRows:
    """The facts, or a sentence that says what is missing."""
    term, factor = moving_term(head.potential)
    assert isinstance(term, Gaussian)
    if not factor > 0:
        raise Refusal(
            "a score that grows with the distance has no constant on the whole space; use a positive factor"
        )
    if not is_tied(term):
        raise Refusal("the theorem needs w_q and w_k tied (and b_q, b_k): give both the same projection")
    tokens = tokens_of(domain)
    if tokens is None:
        raise Refusal(
            "the constant grows like the logarithm of the number of tokens; say it, e.g. Whole(tokens=n)"
        )
    level = math.nextafter(float(log_rivals(head, domain, tokens).largest()) - 1, math.inf)
    return GaussianRows(term.w_k, _after(head, term.w_k), lambert_bound(level), tokens)


def _after(head: Head, projection: Tensor | None) -> tuple[Tensor, ...]:
    """The matrices from projected keys to outputs."""
    if projection is None:
        return head.factors
    if not isinstance(head.lookup, Factored) or not same(head.lookup.w, projection):
        raise Refusal(
            "values must not see what scores do not: with projections w_q = w_k = w, use the lookup "
            "Factored(w, u)"
        )
    return head.factors[1:]


def log_rivals(head: Head, domain: Domain, tokens: int) -> Numbers:
    """log Ω, Ω = max_i Σ_{j≠i} exp(B_ij - B_ii): what the other keys of a row weigh against its own token,
    distances apart.
    """
    bias = pair_bias(head, domain)
    if bias is None:
        value = torch.tensor(tokens - 1, dtype=torch.float64).log()
        return Numbers(value, relative_error(ELEMENTARY) * sizes(value) if tokens > 1 else exact(0.0))
    own = bias.diagonal()
    if bool((own == -math.inf).any()):
        row = int((own == -math.inf).nonzero()[0])
        raise Refusal(
            f"row {row} does not see its own token, and then no constant holds for all tokens; let rows "
            "see themselves, or use Ball(radius)"
        )
    apart = (bias - own.unsqueeze(-1)).masked_fill(torch.eye(tokens, dtype=torch.bool), -math.inf)
    farthest = sizes(torch.where(apart > -math.inf, apart, 0.0)).amax()
    summed = relative_error(tokens + 2 * ELEMENTARY) * (1 + farthest)
    return Numbers(apart.logsumexp(-1).amax(), bias_error(bias) + summed)


def lambert_bound(level: float) -> Upper:
    """At least W₀(exp(level)): the root w of w + log w = level, by Newton's method, and raised until the sum
    is certainly not below the level.
    """
    if math.isinf(level):
        return exact(0.0) if level < 0 else Upper(math.inf)
    w = math.log1p(math.exp(level)) if level < 700 else level
    if w < TINY:
        return Upper(TINY)  # W₀(y) ≤ y
    for _ in range(60):
        w = w * (1 + level - math.log(w)) / (1 + w)
    while _sum_with_log(w) < level:
        w *= 1 + (36 + 9 * abs(level) / (1 + w)) * UNIT
    return exact(w)


def _sum_with_log(w: float) -> float:
    """At most w + log w."""
    error = relative_error(ELEMENTARY + 2) * exact(w + abs(math.log(w)))
    return float(Numbers(torch.tensor(w + math.log(w), dtype=torch.float64), error).smallest())
