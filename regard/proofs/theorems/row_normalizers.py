"""Sparse laws, entmax and sparsemax: their constants grow with the number of tokens, in TokenMax norm too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from regard._enclosed import Numbers
from regard._upper import UNIT, Lower, Upper, exact, least, root, sizes, stack
from regard.domains import Domain, Near
from regard.errors import ArgumentError
from regard.normalizers import Entmax, Normalizer, Sparsemax
from regard.norms import Frobenius, TokenMax
from regard.proofs.about import all_of, one_sequence_only, rows_by
from regard.proofs.counts import seen_counts
from regard.proofs.point import Point, point_of
from regard.proofs.rows import bounded_balls
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="row_normalizers",
    title="entmax and sparsemax attention",
    statement=r"""
Rows $p = c\,[(\alpha - 1)s - \theta]_+^{1/(\alpha-1)}$, $1 < \alpha \le 2$, have the derivative
$\mathrm{diag}(t) - tt^\top/T$ with $t_j = c_j(p_j/c_j)^{2-\alpha}$ on the support, $T = \sum_jt_j \le
C^{\alpha-1}$, $C$ the
number of keys that the row sees. Tokens in $B(c, R)$, slopes $a$ and $\kappa$ of scores as for `token_max`
($a$ there is $\alpha$), $m_j$ rows that see key $j$:
$$ L_\infty \le w\left(1 + T R(a + \kappa)\right),\qquad L_F \le w\left(\sqrt{\max_jm_j} +
Ra\sqrt{T\max_jm_jc_j^{\alpha-1}} + TR\kappa\right). $$
At one sequence, with $J_i$ the derivative of row $i$, $\sigma_i^2 = \lambda_{\max}(W^\top X^\top J_iXW)$,
$\zeta_i^2 = \lambda_{\max}(AX^\top J_iXA^\top)$, $a_i = |A^\top x_i + \beta|$:
$$ \|J\|_\infty \le \max_i(w + \sigma_ia_i\sqrt{T_i} + \sigma_i\zeta_i),\qquad
\|J\|_F \le w\sqrt{\max_j\textstyle\sum_iP_{ij}} + \sqrt{\max_j\textstyle\sum_it_{ij}\sigma_i^2a_i^2} +
\max_i\sigma_i\zeta_i. $$
""",
    hypotheses=(
        "entmax rows with 1 < alpha ≤ 2, or sparsemax",
        "values affine in the tokens",
        "tokens in a ball, or one sequence",
        "the number of tokens is given",
    ),
    source="(peters2019; martins2016)",
    proof=r"""
$(Df[D])_i = W^\top(\mathbb{E}_id + X^\top J_ids_i)$. $J = T\,\mathrm{Cov}_{t/T}$, so $e\cdot W^\top X^\top
J\delta$ is at most $T$ times a product of standard deviations under $t/T$, which are at most $wR$ and
$a\max_j|d_j|$ or $\kappa|d_i|$; also at most $\sigma_i\sqrt{\sum_jt_j\delta_j^2}$ as $J \preceq
\mathrm{diag}(t)$. $T \le C^{\alpha-1}$ because $\rho \mapsto \rho^{2-\alpha}$ is concave, $t_j \le
c_j^{\alpha-1}$.
The law is piecewise smooth and Lipschitz, so derivatives of its pieces suffice; $J$ grows with $t$
($x^\top Jx = \min_m\sum_jt_j(x_j - m)^2$), so at a point every $t$ that rounding allows is taken at its
largest. The weights $\mathbb{E}_i|d|^2$ of softmax may **not** stand in for $\sum_jt_j|d_j|^2$. The laws are
the authors'; the constants are proved here.
""",
)

HYPOTHESES = (checked("entmax rows with 1 < alpha ≤ 2, or sparsemax"), checked("the number of tokens"))
SPARSE = rows_by(Entmax, Sparsemax)
Side = TypeVar("Side", Upper, Lower)
BALL = (*HYPOTHESES, checked("every token is in a ball of finite radius"))
POINT = (*HYPOTHESES, checked("one sequence, rounding of its scores included"))


@THEOREM.constant(Head, Domain, TokenMax, about=SPARSE)
def sparse_token_max(head: Head, domain: Domain, norm: TokenMax) -> Bound:
    """w (1 + T R (a + κ)), the smallest over balls that hold the tokens."""
    alpha = order_of(head.normalizer)
    total = _total(seen_counts(head, domain), alpha)
    values = [
        head.w * (1 + total * ball.radius * (steep.alpha + steep.kappa))
        for ball, steep in bounded_balls(head, domain)
    ]
    return Bound(least(values), BALL)


@THEOREM.constant(Head, Domain, Frobenius, about=SPARSE)
def sparse_frobenius(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """w (√m + R a √(T m') + T R κ), the smallest over balls that hold the tokens."""
    alpha = order_of(head.normalizer)
    counts = seen_counts(head, domain)
    seen = counts.value > 0
    total, rows = _total(counts, alpha), root(int(seen.sum(0).max()))
    crowd = counts.power(alpha - 1).where(seen).sum(0).amax()
    values = []
    for ball, steep in bounded_balls(head, domain):
        keys = ball.radius * steep.alpha * (total * crowd).sqrt()
        values.append(head.w * (rows + keys + total * ball.radius * steep.kappa))
    return Bound(least(values), BALL)


@THEOREM.constant(Head, Near, TokenMax, about=all_of(SPARSE, one_sequence_only))
def sparse_token_max_at_point(head: Head, domain: Near, norm: TokenMax) -> Bound:
    """max_i (w + σ_i a_i √T_i + σ_i ζ_i)."""
    rows = _rows(head, domain)
    totals = rows.slopes.sum(-1).sqrt()
    return Bound((head.w + rows.keys * totals + rows.own).amax(), POINT)


@THEOREM.constant(Head, Near, Frobenius, about=all_of(SPARSE, one_sequence_only))
def sparse_frobenius_at_point(head: Head, domain: Near, norm: Frobenius) -> Bound:
    """w √(max_j Σ_i P_ij) + √(max_j Σ_i t_ij σ_i² a_i²) + max_i σ_i ζ_i."""
    rows = _rows(head, domain)
    crowd = rows.laws.sum(0).amax().sqrt()
    keys = (rows.slopes * rows.keys.square().unsqueeze(-1)).sum(0).amax().sqrt()
    return Bound(head.w * crowd + keys + rows.own.amax(), POINT)


@dataclass(frozen=True)
class _Rows:
    laws: Upper
    slopes: Upper
    keys: Upper  # σ_i a_i
    own: Upper  # σ_i ζ_i


def _rows(head: Head, domain: Near) -> _Rows:
    """Bounds of all that the formulas at a point need."""
    alpha = order_of(head.normalizer)
    if domain.measure.log_weights is not None:
        raise Refusal(
            "at a point sparse laws of tokens with weights have no theorem here; repeat the tokens instead"
        )
    point = point_of(head, domain)
    laws, slopes = sparse_bounds(alpha, point)
    sigma = stack([point.deviation(row, head.factors) for row in slopes])
    own = stack([point.own(row) for row in slopes])
    return _Rows(laws, slopes, sigma * point.pull.amax(-1), sigma * own)


def sparse_bounds(alpha: float, point: Point) -> tuple[Upper, Upper]:
    """p̄ ≥ p and t̄ ≥ t for all scores within the error of those at a point, from a threshold that is
    certainly not above the true one.
    """
    scaled, seen = (alpha - 1) * point.scores, point.scores > -math.inf
    rounded = Upper(UNIT) * sizes(torch.where(seen, scaled, 0.0))
    scores = Numbers(scaled, (exact(alpha - 1) * point.error).unsqueeze(-1) + rounded)
    least_scores, most_scores = scores.smallest(), scores.largest()
    top = least_scores.amax(-1, keepdim=True)
    low, high = torch.nextafter(top - 1, top - 2), most_scores.amax(-1, keepdim=True)
    for _ in range(60):  # the largest threshold at which the law of the lowest scores has a mass of one
        middle = 0.5 * (low + high)
        mass = _above(least_scores, middle, Lower).inverse_power(alpha - 1).sum(-1).unsqueeze(-1)
        enough = mass.bound >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    excess = _above(most_scores, low, Upper)
    positive = (excess.value > 0) & seen
    laws = excess.minimum(exact(1.0)).inverse_power(alpha - 1).where(positive)
    slopes = exact(torch.ones_like(scaled)) if alpha == 2 else laws.power(2 - alpha)
    return laws, slopes.where(positive)


def _above(scores: Tensor, threshold: Tensor, side: type[Side]) -> Side:
    """(s - θ)₊ of numbers: a difference is rounded once."""
    return side((scores - threshold).clamp_min(0.0), 1)


def order_of(normalizer: Normalizer) -> float:
    """α of a sparse law, or a sentence about why there is no bound."""
    if isinstance(normalizer, Sparsemax):
        return 2.0
    if not isinstance(normalizer, Entmax):
        raise Refusal(
            f"rows of {type(normalizer).__name__} are not sparse laws; give Entmax(alpha) or Sparsemax()"
        )
    if normalizer.alpha == 1:
        raise Refusal("entmax with alpha = 1 is softmax; write Softmax(), which has theorems of its own")
    if normalizer.alpha > 2:
        raise Refusal(
            "entmax with alpha > 2 has infinite slope at the edge of its support; use 1 < alpha ≤ 2"
        )
    return float(normalizer.alpha)


def _total(counts: Upper, alpha: float) -> Upper:
    """C^{α-1}, the largest over rows."""
    return counts.sum(-1).amax().power(alpha - 1)


@dataclass(frozen=True)
class Conjecture:
    """A number that is supported by numerical search and is not proved; it never enters a certificate."""

    value: float
    proved: float
    statement: str

    def __float__(self) -> float:
        return self.value


def entmax_constant(alpha: float, n: int) -> Conjecture:
    """How much α-entmax of n scores can stretch, in Euclidean norms: a conjecture, next to the constant 1
    that is proved (peters2019).

    max_{a+b≤n} (1/a + 1/b) / (a^{1-q} + b^{1-q})^{3-α}, q = 2/(3-α). It is 2^{α-2} for small n and tends to 1
    as n grows. Proved are that it is the supremum over v ⊥ 1 of |v|₂²/|v|_q², and that this is at most 1;
    that its maximizers have two levels is not.
    """
    if not 1 < alpha <= 2 or n < 2:
        raise ArgumentError("alpha and n", f"are {alpha} and {n}", "give 1 < alpha ≤ 2 and n ≥ 2")
    q = 2 / (3 - alpha)
    pairs = ((a, b) for a in range(1, n) for b in range(a, n - a + 1))
    value = max((1 / a + 1 / b) / (a ** (1 - q) + b ** (1 - q)) ** (3 - alpha) for a, b in pairs)
    return Conjecture(value, 1.0, "the maximizers over v ⊥ 1 of |v|₂²/|v|_q² have two levels")
