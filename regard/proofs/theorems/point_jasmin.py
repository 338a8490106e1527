"""Self-attention at a point: the bound of a row is small where its law is near one token."""

from __future__ import annotations

import torch

from regard._enclosed import product_norm
from regard._upper import Upper, exact, root
from regard.domains import Near
from regard.normalizers import Softmax
from regard.norms import Frobenius
from regard.proofs.about import all_of, one_sequence_only, rows_by
from regard.proofs.point import operator_norm, point_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="point_jasmin",
    title="softmax attention at a point, by the largest weights of rows",
    statement=r"""
At one sequence, scores $x_i^\top Ax_j + \beta\cdot x_j$, $p_{(1)} \ge p_{(2)}$ the largest weights of a row,
$g_1(p) = p_{(1)}(1 - p_{(1)} + p_{(2)})$:
$$ \|J\|_2 \le w\left(\|P\|_2 + \max_ig_1(P_i)\,(2\|A\|\|X\|_2 + \sqrt n|\beta|)\,\|X\|_2\right). $$
""",
    hypotheses=("softmax rows", "scores are one bilinear form", "one sequence"),
    source="(yudin2025, local bound)",
    proof=r"""
$J_p = \mathrm{diag}(p) - pp^\top$ has norm at most $g_1$: its largest eigenvalue is the root in $[p_{(2)},
p_{(1)}]$ of $1 = \sum_ip_i^2/(p_i - \lambda)$, and at $\lambda = g_1$ the right side is at least 1, because
$p_{(1)} - g_1 = p_{(1)}(p_{(1)} - p_{(2)})$ and $g_1 - p_i \ge (p_{(1)} - p_{(2)})(1 - p_{(1)})$ for the
others. $dS = DAX^\top + VD^\top$ with rows $v_i = A^\top x_i + \beta$, so
$\|dS\|_F \le (\|A\|\|X\|_2 + \|V\|_2)\|D\|_F$, and $\|dP\,X\|_F \le \|dP\|_F\|X\|_2$. $1 - p_{(1)}$ is summed
from the other weights, since a subtraction from one loses it.
""",
)


@THEOREM.constant(Head, Near, Frobenius, about=all_of(rows_by(Softmax), one_sequence_only))
def point_jasmin(head: Head, domain: Near, norm: Frobenius) -> Bound:
    """w (|P|₂ + max_i g₁(P_i) (2|A||X|₂ + √n|β|) |X|₂)."""
    laws, size, change = laws_and_change(head, domain)
    value = head.w * (operator_norm(laws) + indecision(laws) * change * size)
    return Bound(
        value,
        (
            checked("softmax rows"),
            checked("scores are one bilinear form"),
            checked("one sequence, rounding of its scores included"),
        ),
    )


def laws_and_change(head: Head, domain: Near) -> tuple[Upper, Upper, Upper]:
    """P̄ ≥ P, a bound of |X|₂, and a bound of |dS|_F / |D|_F, at one sequence."""
    point, points = point_of(head, domain), domain.measure.points
    form = head.form(points.shape[-1])
    if form is None:
        raise Refusal("it is for scores that are one bilinear form xᵀAy")
    size = product_norm(points)
    bias = form.shift(torch.zeros_like(form.beta))
    return point.laws(), size, 2 * form.norm * size + root(len(points)) * bias


def indecision(laws: Upper) -> Upper:
    """max_i p₍₁₎ (1 - p₍₁₎ + p₍₂₎) of laws that may be raised, with 1 - p₍₁₎ the sum of the others:
    at most 1 each.
    """
    if laws.value.shape[-1] == 1:
        return exact(0.0)
    first, second = laws.map(lambda value: value.topk(2, -1).values.movedim(-1, 0))
    top = laws.value.argmax(-1, keepdim=True)
    others = laws.map(lambda value: value.scatter(-1, top, 0.0)).sum(-1).minimum(exact(1.0))
    return (first * (others + second)).amax()
