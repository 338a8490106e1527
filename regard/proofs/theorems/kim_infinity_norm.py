"""The published constant of L2 attention for the largest entry."""

from __future__ import annotations

from torch import Tensor

from regard._upper import Upper, exact, relative_error, root, sizes
from regard.domains import Domain
from regard.norms import EntryMax
from regard.proofs.gaussian_rows import GAUSSIAN, gaussian_rows
from regard.proofs.setting import width_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem
from regard.proofs.theorems import gaussian_whole

THEOREM = Theorem(
    name="kim_infinity_norm",
    title="L2 attention for the largest entry",
    statement=r"""
Scores $-s|M^\top(x_i - x_j)|^2$, values $U^\top M^\top x_j$ (in the paper $U = sM^\top W_V$), $M$ with $c$
columns, $\phi = W_0((n-1)/e)$: $$ \max_{ij}|(Df[D])_{ij}| \le \|U^\top\|_\infty\|M^\top\|_\infty(1 + 4\sqrt
c\,\phi)\max_{ij}|D_{ij}|,\qquad \|Z\|_\infty = \max_i\textstyle\sum_j|Z_{ij}|. $$
""",
    hypotheses=gaussian_whole.THEOREM.hypotheses,
    source="(kim2021, Theorem 3.2)",
    proof=r"""
$(Df[D])_i = U^\top\{M^\top\mathbb{E}_id + 2s\,\mathbb{E}_i[(a - \mathbb{E}_ia)\,a^\top M^\top(d_i - d_j)]\}$
with $a_j = M^\top(x_j - x_i)$ and $s\,\mathbb{E}_i|a|^2 \le \phi$ as for `gaussian_whole`. The entries of
$M^\top(d_i - d_j)$ are at most $2\|M^\top\|_\infty\max|D|$, so coordinate $k$ of the expectation is at most
$2\|M^\top\|_\infty\max|D|\;\mathbb{E}_i|(a - \mathbb{E}_ia)_k|\,|a|_1 \le 2\sqrt
c\,\|M^\top\|_\infty\max|D|\;\mathbb{E}_i|a|^2$. With masks, biases and weights $n - 1$ is $\Omega$ there.
""",
)


@THEOREM.constant(Head, Domain, EntryMax, about=GAUSSIAN)
def kim_infinity_norm(head: Head, domain: Domain, norm: EntryMax) -> Bound:
    """|Uᵀ|_∞ |Mᵀ|_∞ (1 + 4 √c φ)."""
    rows = gaussian_rows(head, domain)
    columns = head.width(width_of(domain)) if rows.projection is None else rows.projection.shape[-1]
    projected = column_sum_bound(*(() if rows.projection is None else (rows.projection,)))
    value = column_sum_bound(*rows.after) * projected * (1 + 4 * root(columns) * rows.far)
    return Bound(value, rows.hypotheses)


def column_sum_bound(*factors: Tensor) -> Upper:
    """At least the largest column sum of absolute values of a product; none is the identity.

    The rounding of the product is added.
    """
    if not factors:
        return exact(1.0)
    product, most, inner = factors[0], sizes(factors[0]), 0
    for factor in factors[1:]:
        inner += factor.shape[0]
        product, most = product @ factor, most @ sizes(factor)
    return (sizes(product).sum(0) + relative_error(2 * inner + 4) * most.sum(0)).amax()
