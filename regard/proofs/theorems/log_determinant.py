"""The log-determinant of x + f(x): a series of traces, what is left of it, and its mean over signs."""

from __future__ import annotations

from regard._upper import Upper
from regard.proofs.theorem import Theorem

THEOREM = Theorem(
    name="log_determinant",
    title="log-determinant of a residual layer",
    statement=r"""
Let $f$ have the constant $L \lt 1$ in a norm of sequences of $n$ tokens of width $d$, and let $J$ be its
derivative at $x$. Then $\det(I + J) > 0$ and
$$ \log\det(I + J) = \sum_{k\ge1}\frac{(-1)^{k+1}}k\mathrm{tr}\,J^k,\qquad \Big|\sum_{k>K}\Big| \le
\frac{nd\,L^{K+1}}{(K+1)(1 - L)}. $$
Let $v$ have independent random signs and let $N$ be a random number, independent of $v$, with $c_k =
\mathbb{P}(N \ge k) > 0$. Then
$$ S = \sum_{k\le N}\frac{(-1)^{k+1}}{k\,c_k}v^\top J^kv $$
has the mean $\log\det(I + J)$, and a finite variance where $\sum_kL^k/\sqrt{c_k} \lt \infty$.
*Control variate.* For any $J_0 = P\otimes M^\top$ whose eigenvalues are less than one in modulus, with
$S_0$ the same sum of $J_0$ for the same $v$ and $N$,
$$ S - S_0 + \sum_{i,j}\log|1 + \lambda_i(P)\lambda_j(M)| $$
has the same mean. For one head of attention with weights $P$ and values $x_j^\top M$, $J_0$ is the derivative
with the weights held still: its eigenvalues are at most $\|M\|_2$ in modulus, which is at most $L$ on a ball,
and for scores $x^\top Ay$ of tokens in the ball of radius $R$ about zero
$$ \|J - J_0\| \le 2\|M\|_2\|A\|_2R^2\ \text{ in TokenMax norm}, $$
so that without scores nothing is left to chance.
*Gradients.* With $S' = \sum_{k\le N}\frac{(-1)^{k-1}}{c_k}v^\top J^{k-1}\,\partial J\,v$, which holds one
product with $\partial J$, $\mathbb{E}S' = \partial\log\det(I + J)$.
""",
    hypotheses=("a constant below one of the map",),
    proof=r"""
The powers of $J$ have norms of at most $L^k$, so its eigenvalues $\lambda$ are at most $L$ in modulus,
whatever the norm. Complex ones come in pairs, so $\det(I + sJ) = \prod(1 + s\lambda)$ is real and does not
vanish for $0 \le s \le 1$: it is positive. $\log\prod(1 + \lambda) =
\sum_\lambda\sum_k(-1)^{k+1}\lambda^k/k$, and $|\mathrm{tr}\,J^k| \le nd\,L^k$; $\sum_{k>K}L^k/k
\le L^{K+1}/((K+1)(1-L))$.
Mean: $\mathbb{E}vv^\top = I$ gives $\mathbb{E}v^\top J^kv = \mathrm{tr}\,J^k$, and $\mathbb{E}1_{N\ge k} =
c_k$. All norms of a finite-dimensional space are equivalent, so that $|v^\top J^kv| \le CL^k$ with one $C$
for all $v$, and $\sum_k\mathbb{E}1_{N\ge k}|v^\top J^kv|/(kc_k) \le C\sum_kL^k/k$ is finite: sum and mean may
be exchanged. Variance: by Minkowski's inequality $(\mathbb{E}S^2)^{1/2} \le \sum_kCL^k/(k\sqrt{c_k})$. For
$c_k = p^{(k-m)_+}$ it is finite where $L^2 \lt p$.
Control: the same holds for $S_0$, since powers of $J_0$ go down like those of a number below one, and
$J_0^k = P^k\otimes(M^k)^\top$ has the eigenvalues $(\lambda_i(P)\lambda_j(M))^k$: the mean of $S_0$ is
$\sum_{ij}\log(1 + \lambda_i\lambda_j)$, which is real, so that it is the sum of $\log|\cdot|$. Attention:
rows of $P$ are laws, so $|\lambda_i(P)| \le 1$, and $|\lambda_j(M)| \le \|M\|_2$. Where all tokens are equal
and move alike, by $e$, weights do not change and every value moves by $M^\top e$; so no constant on a ball is
below $\|M\|_2$. $J - J_0$ sends $d$ to $M^\top\{\mathbb{E}_i[(x_j - m_i)\,x_i^\top Ad_j] +
\mathrm{Cov}_i(x)A^\top d_i\}$ in row $i$, $m_i = \mathbb{E}_ix_j$. For a unit vector $a$ and $|d_j| \le 1$
the first is at most $\mathbb{E}_i|a\cdot(x_j - m_i)|\,\|A\|R \le \|A\|R^2$, and so is the second, because a
law on a ball of radius $R$ has standard deviation at most $R$ in each direction.
Gradients: $\partial\log\det(I + J) = \mathrm{tr}((I + J)^{-1}\partial J) =
\sum_{k\ge1}(-1)^{k-1}\mathrm{tr}(J^{k-1}\partial J)$, and the mean of $S'$ is this by the same exchange. The
series is (behrmann2019), the random number of terms and the gradient are (chen2019); the control variate and
the bound of $J - J_0$ are proved here.
""",
    source="(behrmann2019; chen2019)",
)


def series_remainder(constant: Upper, size: int, terms: int) -> Upper:
    """At least how far the terms after the first ones add up: n d L^{K+1}/((K + 1)(1 - L)); size = n d.

    Examples:
        >>> rest = regard.proofs.series_remainder(regard.theorems.exact(0.5), 12, 10)
        >>> float(rest.bound) >= 12 * 0.5**11 / (11 * 0.5)
        True
    """
    power = constant
    for _ in range(terms):
        power = power * constant
    return size * power / (terms + 1) / (1 - constant)
