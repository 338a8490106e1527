"""One token moves, as a typo moves it: every other row in closed form."""

from __future__ import annotations

from typing import Any

import torch

from regard._upper import exact, stack
from regard.domains import Radii
from regard.norms import Frobenius
from regard.proofs.about import one_token_moves
from regard.proofs.near.facts import local_facts
from regard.proofs.near.moves import SLIGHTLY
from regard.proofs.near.token import OtherRows
from regard.proofs.subject import MultiHead
from regard.proofs.theorem import Bound, Theorem, checked
from regard.proofs.theorems.ball_constant import _arithmetic

THEOREM = Theorem(
    name="one_token",
    title="one token moves",
    statement=r"""
Token $j$ moves by $\delta$, $|\delta| \le r$. For $i \ne j$, with $\theta_i = s_{ij} - \log\sum_{k\ne
j}e^{s_{ik}}$, $\Delta_i = x_j - E_i[x \mid \text{not } j]$, $p_i(t) = \sigma(\theta_i + t)$:
$$ u_i' - u_i = p_i(t_i)\,\delta + (p_i(t_i) - p_i(0))\,\Delta_i,\qquad t_i = v_{ij}\cdot\delta. $$
All rows and heads see the same $\delta$, so if each is bounded by $a_i + c_it_i^2$ in square, together they
are by $\sum a_i + r^2\lambda_{\max}(\sum c_iv_{ij}v_{ij}^\top)$. Row $j$ moves beyond its linear part by
$$ T(\delta,\delta) + O(r^3),\qquad T(\delta,\delta) = P_j(\mathrm{own}_j\cdot\delta)V^\top\delta +
P_jz_j\,\delta^\top A\delta + \tfrac12\sum_kP_kz_k(\mathrm{own}_k\cdot\delta)^2, $$
or as in `remainder`.
""",
    hypotheses=(
        "one radius is not zero",
        "softmax rows",
        "scores bilinear in pairs of tokens",
        "values affine in the tokens",
    ),
    proof=r"""
Only the weight of key $j$ in row $i$ and its value change, which is the formula. $a_i + c_it^2$ dominates $(w
p(t)r + |p(t)-p(0)||V^\top\Delta|)^2$, or what is left of it after its linear part, on a
fine grid of $t$ where both sides are monotone between points. The linear part is the exact column of the
Jacobian, all heads together; or the numbers $p(t)$, $(p(t)-p(0))/t$ stay
in the middle of their ranges, and half the ranges are added. $T$ is the exact second derivative of all heads
together, bounded by its norm as a matrix in either of two ways; the third order is $\varphi_3$ of
`remainder`, $P_j' - P_j$ beyond its linear part and $1 - 1/Z$.
""",
)


@THEOREM.deviation(MultiHead, Radii, Frobenius, about=one_token_moves)
def one_token(subject: Any, domain: Radii, norm: Frobenius) -> Bound:
    """The smaller of: the linear column and what is beyond it;
    the row of the token and the others on their own.
    """
    token = int(domain.radii.argmax())
    radius = float(domain.radii[token])
    facts = local_facts(subject, domain)
    moves = torch.zeros(facts.heads.n, dtype=torch.float64)
    moves[token] = radius
    rows, at = (facts.row(token, moves), 0) if facts.large else (facts.rows(moves), token)
    own = rows.remainder[at]
    own = own if facts.large else own.minimum(facts.own_row(token).remainder(radius))
    own_whole = rows.best[at].minimum(rows.linear[at] + own)
    rest, column, r = OtherRows(facts.heads, token, radius), facts.column(token), exact(radius)
    beyond = column.whole * r + stack([rest.remainder, own]).norm()
    others = column.rest * r + rest.remainder
    nearly = SLIGHTLY * (float(column.rest) - float(column.error)) * radius
    if float(others) > nearly:  # else no bound is much smaller than what is nearly attained
        others = others.minimum(rest.whole)
    return Bound(
        beyond.minimum(stack([own_whole, others]).norm()),
        (
            checked("one token moves"),
            checked("softmax rows"),
            checked("scores bilinear in pairs of tokens"),
            _arithmetic(),
        ),
    )
