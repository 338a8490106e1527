"""Blocks and depth: the exact derivative from end to end, with per-token remainders."""

from __future__ import annotations

import torch

from regard._round import outward
from regard.certify.imaging import one_sequence
from regard.certify.near.taylor import start, step
from regard.certify.setting import moves_of
from regard.certify.theorem import Bound, Refusal, Theorem, assumed
from regard.domains import Near
from regard.maps import Compose, Map, Residual
from regard.norms import SequenceNorm

THEOREM = Theorem(
    name="taylor_model",
    title="the Taylor model of a network",
    statement=r"""
Along $f = f_k\circ\dots\circ f_1$ with token $j$ of the input within $\rho_j$: after $l$ maps
$$ x'_i - x_i = \sum_j (J_l\cdots J_1)_{ij}\,d_j + \sum_{a \le l}\sum_j (J_l\cdots J_{a+1})_{ij}\,e_j^{(a)},\qquad |e_j^{(a)}| \le
\mathrm{new}_j(a), $$
$J_l$ the exact derivative of $f_l$ at the given input and $\mathrm{new}(a)$ the remainder of $f_a$ over the moves that reach it:
`remainder` for attention,
$\max|\gamma|\,|t|^2/\sqrt d\,(1/(sm) + s/m^3)$ with $s = \sqrt{|x|^2/d + \epsilon}$, $m = s - |t|/\sqrt d$ for norm layers,
$\tfrac{|t|^2}2\lambda_{\max}(W_2^\top D[(w_k\cdot w_l)^2]DW_2)^{1/2} + \tfrac{|t|^3}6\sup|\varphi'''|\dots$ for feed-forward layers.
""",
    hypotheses=("a remainder for every map: attention with bilinear scores, norm layers, feed-forward layers, affine maps, activations",),
    proof=r"""
Taylor's formula for each map about the value it has for the given input, and the chain rule. Norms are never multiplied across layers: a
remainder goes on through the exact derivatives. A
column is measured by $\lambda_{\max}(\sum_j\rho_j^2B_{ij}B_{ij}^\top/\lambda_j)^{1/2}$. For the norm layer $|(1/s)''| \le 2|t|^2/(ds^3)$.
""",
)


@THEOREM.deviation(Compose, Near, SequenceNorm)
@THEOREM.deviation(Residual, Near, SequenceNorm)
def taylor_model(map: Map, domain: Near, norm: SequenceNorm) -> Bound:
    """The norm of the moves of all tokens; says so where it is vacuous."""
    one_sequence(map)
    measure = domain.measure
    if measure.log_weights is not None or measure.marks is not None:
        raise Refusal("weights and marks of the points have no Taylor model")
    state = step.one(map, start(measure.points, moves_of(domain)))
    linear = state.columns[0].reach()
    rest = float(norm.of(state.remainder().unsqueeze(-1)))
    vacuous = rest > 100 * float(norm.of(linear.unsqueeze(-1))) and bool(torch.isfinite(linear).all())
    note = "vacuous here: remainders are over a hundred times the linear part" if vacuous else ""
    arithmetic = assumed("float64 values, products and eigenvalues are right to 1e-11; that is added to every remainder")
    return Bound(outward(state.deviation(norm)), (arithmetic,), note=note)
