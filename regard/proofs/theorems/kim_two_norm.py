"""The published constant of L2 attention in Frobenius norm."""

from __future__ import annotations

from regard._upper import root
from regard.domains import Domain
from regard.norms import Frobenius
from regard.proofs.gaussian_rows import GAUSSIAN, gaussian_rows
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem
from regard.proofs.theorems import gaussian_whole

THEOREM = Theorem(
    name="kim_two_norm",
    title="L2 attention in Frobenius norm, as published",
    statement=r"""
Scores $-s|M^\top(x_i - x_j)|^2$, $s = 1/(2b^2)$, values $U^\top M^\top x_j$ (in the paper $U = sM^\top W_V$),
$\phi = W_0((n-1)/e)$: $$ L_F \le \sqrt n\,(4\phi + 1)\,\|M\|\|U\|. $$
In terms of $W_Q = M$ this is $s\sqrt n(4\phi + 1)\|W_Q\|^2\|W_V\|$: quadratic in $W_Q$. A form that is linear
in it is wrong: $(cW_Q, X/c)$ has the same rows and $c^2$ times the derivative.
""",
    hypotheses=gaussian_whole.THEOREM.hypotheses,
    source="(kim2021, Theorem 3.2)",
    proof=r"""
As for `gaussian_whole`, whose second form has $2\sqrt2$ in place of 4 and $\|MU\|$ in place of $\|M\|\|U\|$.
With masks, biases and weights $n - 1$ is $\Omega$ there.
""",
)


@THEOREM.constant(Head, Domain, Frobenius, about=GAUSSIAN)
def kim_two_norm(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """√n (4φ + 1) |M| |U|."""
    rows = gaussian_rows(head, domain)
    return Bound(root(rows.tokens) * (4 * rows.far + 1) * rows.size, rows.hypotheses)
