"""The published constant of dot-product self-attention as a map of measures on a ball."""

from __future__ import annotations

from regard.domains import TokenSet
from regard.normalizers import Softmax
from regard.norms import Wasserstein
from regard.proofs.about import rows_by
from regard.proofs.setting import equivariant
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked
from regard.proofs.theorems.castin_general import pull_on_ball

THEOREM = Theorem(
    name="castin_mean_field",
    title="dot-product attention of measures on a ball, as published",
    statement=r"""
Scores $x^\top A y$, laws on the ball of radius $R$ about 0, $g = \|A\|R^2$: $$ L_{W_p} \le \|W\|(1 +
3g)e^{2g}. $$ With a query bias, $g$ is that of `castin_general`.
""",
    hypotheses=(
        "softmax rows",
        "scores are one bilinear form",
        "tokens in a ball about 0",
        "no masks, no positions",
    ),
    source="(castin2024, mean-field bound)",
    proof=r"""
It is never below `wasserstein`: $e^{2g}(1 + 2g) + g \le (1 + 3g)e^{2g}$. A query bias is one more, constant
coordinate of the tokens.
""",
)


@THEOREM.constant(Head, TokenSet, Wasserstein, about=rows_by(Softmax))
def castin_mean_field(head: Head, domain: TokenSet, norm: Wasserstein) -> Bound:
    """|W| (1 + 3g) e^{2g}."""
    equivariant(head, domain)
    g = pull_on_ball(head, domain)
    hypotheses = (
        checked("softmax rows"),
        checked("scores are one bilinear form"),
        checked("every token is in a ball about 0"),
    )
    value = head.w * (1 + 3 * g) * (2 * g).exp()
    return Bound(value, (*hypotheses, checked("no masks and no positions")))
