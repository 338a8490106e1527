"""How far heads move on a Frobenius ball."""

from __future__ import annotations

from typing import Any

from regard.domains import Near, Radii
from regard.norms import Frobenius
from regard.proofs.about import one_token_moves
from regard.proofs.near.facts import local_facts
from regard.proofs.subject import MultiHead
from regard.proofs.theorem import Bound, Theorem, assumed, checked
from regard.proofs.theorems.ball_constant import _arithmetic, _radius

THEOREM = Theorem(
    name="ball_deviation",
    title="the move on a Frobenius ball",
    statement=r"""
On $\|X'-X\|_F \le r$ the value moves by at most the smallest of
$\|J\|r + \text{remainder}$, $\;w\sqrt{\max_j\sum_iP^u_{ij}}\,r + (\sum_i \mathrm{sat}_i^2)^{1/2}$, and
$\int_0^r L_F(\rho)\,d\rho$ with $L_F$ of `ball_constant`.
""",
    hypotheses=("softmax rows", "scores bilinear in pairs of tokens", "values affine in the tokens"),
    proof=r"""
The remainder of each row is that of `remainder`, bounded by $b_i\,\mathrm{sd}_i(\zeta)$; rows are summed in
$\ell^2$: $\mathrm{sd}_i(\zeta) \le |d_i|\,\|[\sqrt{P_k}\,\mathrm{own}_k]\| + (\sum_{k\ne i}P_{ik}(v_i\cdot
d_k)^2)^{1/2} + a|d_i|(\sum_k P_{ik}|d_k|^2)^{1/2}$, and $\sum_ib_i^2\sum_{k\ne i}P_{ik}(v_i\cdot d_k)^2 \le
r^2\max_k\lambda_{\max}(\sum_i b_i^2P_{ik}v_iv_i^\top)$.
""",
)


def _several_move(subject: Any, domain: Near, norm: Frobenius) -> bool:
    """One token that moves has theorems of its own."""
    return not isinstance(domain, Radii) or not one_token_moves(subject, domain, norm)


@THEOREM.deviation(MultiHead, Near, Frobenius, about=_several_move)
def ball_deviation(subject: Any, domain: Near, norm: Frobenius) -> Bound:
    """The smallest of the three."""
    facts = local_facts(subject, domain)
    hypotheses = [checked("softmax rows"), checked("scores bilinear in pairs of tokens"), _arithmetic()]
    if facts.ball.probability < 1:
        hypotheses.append(
            assumed("the random start of the norm at the center is drawn once, independently of the data")
        )
    moved = facts.ball.deviation(_radius(domain))
    return Bound(moved, tuple(hypotheses), probability=facts.ball.probability)
