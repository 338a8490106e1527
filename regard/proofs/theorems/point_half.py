"""Self-attention at a point: the derivative of softmax is at most one half."""

from __future__ import annotations

from regard.domains import Near
from regard.normalizers import Softmax
from regard.norms import Frobenius
from regard.proofs.about import all_of, one_sequence_only, rows_by
from regard.proofs.point import operator_norm
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked
from regard.proofs.theorems.point_jasmin import laws_and_change

THEOREM = Theorem(
    name="point_half",
    title="softmax attention at a point, with softmax 1/2-Lipschitz",
    statement=r"""
At one sequence, scores $x_i^\top Ax_j + \beta\cdot x_j$: $$ \|J\|_2 \le w\left(\|P\|_2 +
\tfrac12(2\|A\|\|X\|_2 + \sqrt n|\beta|)\,\|X\|_2\right). $$
""",
    hypotheses=("softmax rows", "scores are one bilinear form", "one sequence"),
    source="(nair2025, Theorem 1)",
    proof=r"""
As for `point_jasmin`, with $\|\mathrm{diag}(p) - pp^\top\|_2 \le \frac12$: the variance $\max_e\sum_jp_j(e_j
- \bar e)^2$ over unit $e$, is at most
$\frac14(\max e - \min e)^2 \le \frac14\cdot2$.
""",
)


@THEOREM.constant(Head, Near, Frobenius, about=all_of(rows_by(Softmax), one_sequence_only))
def point_half(head: Head, domain: Near, norm: Frobenius) -> Bound:
    """w (|P|₂ + ½ (2|A||X|₂ + √n|β|) |X|₂)."""
    laws, size, change = laws_and_change(head, domain)
    hypotheses = (
        checked("softmax rows"),
        checked("scores are one bilinear form"),
        checked("one sequence, rounding of its scores included"),
    )
    return Bound(head.w * (operator_norm(laws) + (change * size).halved()), hypotheses)
