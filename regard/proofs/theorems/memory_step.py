"""A step down the energy of a memory: the constant is one as long as the step is not too long."""

from __future__ import annotations

from regard.domains import Domain, Near
from regard.nonexpansive import MemoryStep
from regard.norms import Norm
from regard.proofs.setting import moves_of
from regard.proofs.theorem import Bound, Theorem, checked
from regard.proofs.tokenwise import length_of_moves, memory_constant, refuse_entries, travel

THEOREM = Theorem(
    name="memory_step",
    title="step down the energy of a memory",
    statement=r"""
$x_i \mapsto x_i - cM\,\mathrm{softmax}(t(M^\top x_i + b))$ with $t > 0$ and $\Delta$ the largest distance of
two columns of $M$ has the constant
$$ \max\{1,\; ct\Delta^2/4 - 1\}\quad (c \ge 0),\qquad 1 + |c|t\Delta^2/4\quad (c < 0) $$
in Frobenius, TokenMax and TokenSum norm, in every $W_p$ and for the own token: one for $0 \le c \le
8/(t\Delta^2)$. $\Delta/2$ is at most the radius of any ball that holds the columns, and $\Delta^2/2 \le
\|M\|_2^2$.
""",
    hypotheses=("the sharpness is positive",),
    source="(ramsauer2021)",
    proof=r"""
The field $M\,\mathrm{softmax}(t(M^\top x + b))$ is the gradient of $\frac1t\log\sum_ke^{t(M_k\cdot x +
b_k)}$, whose Hessian $H(x) = tM(\mathrm{diag}\,p - pp^\top)M^\top$ is $t$ times the covariance of the columns
under the weights $p$. In a unit direction $e$ it is $t$ times the variance of the numbers $e\cdot M_k$, which
lie in an interval of length at most $\Delta$: $0 \preceq H \preceq t\Delta^2/4$ (Popoviciu's inequality). So
the derivative $I - cH$ is symmetric with eigenvalues in $[1 - ct\Delta^2/4, 1]$, or in $[1, 1 +
|c|t\Delta^2/4]$ for $c < 0$. All of space is convex, and each token goes alone. A common part of all columns
does not change $\Delta$: it only shifts values. $\|M\|^2 \ge |M(e_k - e_l)|^2/2 = |M_k - M_l|^2/2$. The
source has the energy and the step with $c = t = 1$.
""",
)


@THEOREM.constant(MemoryStep, Domain, Norm)
def memory_step(map: MemoryStep, domain: Domain, norm: Norm) -> Bound:
    """max(1, c t Δ²/4 - 1)."""
    refuse_entries(norm, "a step of a memory")
    return Bound(memory_constant(map), (checked("a step along the gradient of a convex function"),))


@THEOREM.deviation(MemoryStep, Near, Norm)
def move_bound(map: MemoryStep, domain: Near, norm: Norm) -> Bound:
    """The constant times the move of each token."""
    refuse_entries(norm, "a step of a memory")
    return Bound(length_of_moves(domain, travel.one(map, domain.measure.points, moves_of(domain)), norm))
