"""Gaussian scores on the whole space: one constant for all tokens, however far apart."""

from __future__ import annotations

from regard._upper import root
from regard.domains import Domain
from regard.norms import Frobenius, TokenMax
from regard.proofs.gaussian_rows import GAUSSIAN, gaussian_rows
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem

THEOREM = Theorem(
    name="gaussian_whole",
    title="Gaussian attention on the whole space",
    statement=r"""
Scores $-|M^\top(x_i - x_j)|^2/(2b^2) + B_{ij}$, values $U^\top M^\top x_j$, $W = MU$, and every row sees
itself. With $\Omega = \max_i\sum_{j\ne i}e^{B_{ij} - B_{ii}}$ ($n - 1$ without bias) and $\omega =
W_0(\Omega/e) \sim \log n$, for all tokens: $$ L_\infty \le \|W\| + 4\omega\|U\|\|M\|,\qquad
L_F \le \min\{\sqrt n(\|W\| + 2\omega\|U\|\|M\|) + 2\omega\|U\|\|M\|,\; \sqrt n(\|W\| +
2\sqrt2\,\omega\|U\|\|M\|)\}. $$ The bandwidth does not enter, and the growth with $n$ is real: a token at 0
between tokens at $\pm b\sqrt{2(1 + \omega)}$ reaches $2\omega$.
""",
    hypotheses=(
        "softmax rows of a Gaussian score",
        "queries and keys are projected alike, and values are functions of projected keys",
        "every row sees its own token",
        "the number of tokens is given",
    ),
    source="(kim2021, Theorem 3.2)",
    proof=r"""
With $a_j = M^\top(x_j - x_i)$, $u_j = |a_j|^2/(2b^2)$ and $e_j = M^\top d_j$: $(Df[D])_i = W^\top\mathbb{E}_i
d - b^{-2}U^\top\mathbb{E}_i[(a - \mathbb{E}_i a)\,a\cdot(e_j - e_i)]$. The own token has $u_i = 0$, so
$\mathbb{E}_i u = \sum_{j\ne i} q_ju_je^{-u_j}/(1 + \sum_{j\ne i} q_je^{-u_j})$ with $q_j = e^{B_{ij} -
B_{ii}}$. It is at most $m$ when $\sum_j q_j(u_j - m)e^{-u_j} \le m$; since $(u - m)e^{-u} \le e^{-1-m}$, $m =
W_0(\Omega/e)$ will do. So $\mathbb{E}_i|a|^2 \le 2b^2\omega$. Split $e_j - e_i$: the part of $e_i$ is
$b^{-2}\mathrm{Cov}_i(a)e_i$, at most $2\omega|e_i|$; the part of $e_j$ is at most $b^{-2}\mathbb{E}_i|a -
\mathbb{E}_ia||a|\max_j|e_j| \le 2\omega\max_j|e_j|$. In Frobenius norm the first is diagonal in rows; or take
both together with $|e_j - e_i| \le \sqrt2\|M\|\|D\|_F$, for each of $n$ rows. The theorem for two norms is
the authors'; the constants are proved here.
""",
)


@THEOREM.constant(Head, Domain, TokenMax, about=GAUSSIAN)
def gaussian_token_max(head: Head, domain: Domain, norm: TokenMax) -> Bound:
    """|W| + 4 ω |U| |M|."""
    rows = gaussian_rows(head, domain)
    return Bound(head.w + 4 * rows.far * rows.size, rows.hypotheses)


@THEOREM.constant(Head, Domain, Frobenius, about=GAUSSIAN)
def gaussian_frobenius(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """The smaller of √n (|W| + 2ω|U||M|) + 2ω|U||M| and √n (|W| + 2√2 ω|U||M|)."""
    rows = gaussian_rows(head, domain)
    many, look = root(rows.tokens), 2 * rows.far * rows.size
    value = (many * (head.w + look) + look).minimum(many * (head.w + root(2) * look))
    return Bound(value, rows.hypotheses)
