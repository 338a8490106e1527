"""Self-attention at a point: the bound of a row grows with the covariance of the tokens under its law."""

from __future__ import annotations

from dataclasses import dataclass

from regard._upper import Upper, stack
from regard.domains import Near
from regard.normalizers import Softmax
from regard.norms import Frobenius, TokenMax
from regard.proofs.about import all_of, one_sequence_only, rows_by
from regard.proofs.point import point_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="point_covariance",
    title="softmax attention at a point, by covariances",
    statement=r"""
At one sequence, with $v_{ij} = \partial s_{ij}/\partial x_j$, $z_{ij} = \partial s_{ij}/\partial x_i$,
$y_{ij} = x_j - \mathbb{E}_ix$ and $\sigma_i^2 = \lambda_{\max}(W^\top\mathrm{Cov}_i(x)W)$, $\zeta_i^2 =
\lambda_{\max}(\mathrm{Cov}_i(z))$, $\eta_i^2 = \lambda_{\max}(W^\top\mathbb{E}_i[|v|^2yy^\top]W)$:
$$ \|J\|_F \le \sqrt{\max_j\textstyle\sum_iP_{ij}(w^2 + \eta_i^2)} + \max_i\sigma_i\zeta_i,\qquad \|J\|_\infty
\le \max_i\left(\sqrt{w^2 + \eta_i^2} + \sigma_i\zeta_i\right). $$
For $x_i^\top Ax_j + \beta\cdot x_j$: $\eta_i = \sigma_i|A^\top x_i + \beta|$, $\zeta_i^2 =
\lambda_{\max}(A\,\mathrm{Cov}_i(x)A^\top)$.
""",
    hypotheses=(
        "softmax rows",
        "scores are one bilinear form, or Gaussian without projections",
        "one sequence",
    ),
    proof=r"""
$(Df[D])_i = W^\top\{\mathbb{E}_i[d + y(v\cdot d)] + \mathrm{Cov}_i(x, z)d_i\}$. For a unit vector $e$,
$\mathbb{E}_i|We + (e\cdot W^\top y)v|^2 = |We|^2 + 2\mathrm{Cov}_i(e\cdot W^\top x, We\cdot v) +
\mathbb{E}_i(e\cdot W^\top y)^2|v|^2$. The middle term is zero where $v$ does not depend on $j$, and for
$v = (x_i - x_j)/b^2$ it is $-2(We)^\top\mathrm{Cov}_i(x)We/b^2 \le 0$. Cauchy–Schwarz in a row, then
$\sum_iP_{ij}(\dots)$ in each column.
Rounding: a law is known up to the factor $e^{2\epsilon}$ when scores are within $\epsilon$, and covariances
grow with masses.
""",
)


@dataclass(frozen=True)
class _Rows:
    laws: Upper
    spread: Upper  # w² + η_i²
    own: Upper  # σ_i ζ_i


HYPOTHESES = (
    checked("softmax rows"),
    checked("scores are one bilinear form, or Gaussian without projections"),
    checked("one sequence, rounding of its scores included"),
)


@THEOREM.constant(Head, Near, Frobenius, about=all_of(rows_by(Softmax), one_sequence_only))
def covariance_frobenius(head: Head, domain: Near, norm: Frobenius) -> Bound:
    """√(max_j Σ_i P_ij (w² + η_i²)) + max_i σ_i ζ_i."""
    rows = _rows(head, domain)
    crowd = (rows.laws * rows.spread.unsqueeze(-1)).sum(0).amax()
    return Bound(crowd.sqrt() + rows.own.amax(), HYPOTHESES)


@THEOREM.constant(Head, Near, TokenMax, about=all_of(rows_by(Softmax), one_sequence_only))
def covariance_token_max(head: Head, domain: Near, norm: TokenMax) -> Bound:
    """max_i (√(w² + η_i²) + σ_i ζ_i)."""
    rows = _rows(head, domain)
    return Bound((rows.spread.sqrt() + rows.own).amax(), HYPOTHESES)


def _rows(head: Head, domain: Near) -> _Rows:
    point = point_of(head, domain)
    laws = point.laws()
    spread, own = [], []
    for row, law in enumerate(laws):
        sigma = point.deviation(law, head.factors)
        eta = sigma * point.pull[row].where(law.value > 0).amax()
        eta = (
            eta if point.factor is not None else eta.minimum(point.weighed(row, law, head.factors))
        )  # slopes that differ from key to key
        spread.append(head.w.square() + eta.square())
        own.append(sigma * point.own(law))
    return _Rows(laws, stack(spread), stack(own))
