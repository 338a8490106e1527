"""Blocks and depth: the exact derivative from end to end, with per-token remainders."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._round import spectral_norm_bound
from regard._upper import Upper, total
from regard.certificate import Hypothesis
from regard.domains import Near
from regard.errors import ArgumentError
from regard.maps import Compose, Map, Residual
from regard.norms import Frobenius, SequenceNorm, TokenMax
from regard.proofs.locating import in_double, one_sequence
from regard.proofs.near.taylor import ROUNDING, norm_of_rows, slopes, start, step
from regard.proofs.question import once
from regard.proofs.setting import moves_of
from regard.proofs.theorem import Bound, Refusal, Theorem, assumed

LARGEST = 2048

THEOREM = Theorem(
    name="taylor_model",
    title="the Taylor model of a network",
    statement=r"""
Along $f = f_k\circ\dots\circ f_1$ with token $j$ of the input within $\rho_j$: after $l$ maps
$$ x'_i - x_i = \sum_j (J_l\cdots J_1)_{ij}\,d_j + \sum_{a \le l}\sum_j (J_l\cdots
J_{a+1})_{ij}\,e_j^{(a)},\qquad |e_j^{(a)}| \le \mathrm{new}_j(a), $$
$J_l$ the exact derivative of $f_l$ at the given input and $\mathrm{new}(a)$ the remainder of $f_a$ over the
moves that reach it: `remainder` for attention, $wR\kappa^2|t|^2$ with $\kappa = \|A\|R$ for attention to a
context with keys in a ball of radius $R$, $\max|\gamma|\,|t|^2/\sqrt d\,(1/(sm) + s/m^3)$ with $s =
\sqrt{|x|^2/d + \epsilon}$, $m = s - |t|/\sqrt d$ for norm layers, $\tfrac{|t|^2}2\lambda_{\max}(W_2^\top
D[(w_k\cdot w_l)^2]DW_2)^{1/2} + \tfrac{|t|^3}6\sup|\varphi'''|\dots$ for feed-forward layers. The same holds
for a tangent, with $|(Df_a(x') - Df_a(x))e|$ in place of remainders, so that the constant is the norm of the
derivative at the given input
and what it can change.
""",
    hypotheses=(
        "a remainder for every map: attention with bilinear scores, norm and feed-forward layers, affine "
        "maps, activations, sums",
    ),
    proof=r"""
Taylor's formula for each map about the value it has for the given input, and the chain rule. Norms are never
multiplied across layers: a remainder goes on through the exact derivatives. A
column is measured by $\lambda_{\max}(\sum_j\rho_j^2B_{ij}B_{ij}^\top/\lambda_j)^{1/2}$. For the norm layer
$|(1/s)''| \le 2|t|^2/(ds^3)$.
""",
)


@THEOREM.constant(Compose, Near, TokenMax)
@THEOREM.constant(Residual, Near, TokenMax)
@THEOREM.constant(Compose, Near, Frobenius)
@THEOREM.constant(Residual, Near, Frobenius)
def constant(map: Map, domain: Near, norm: SequenceNorm) -> Bound:
    """The norm of the end-to-end derivative at the given input,
    and what it can change on the way to any other of the neighborhood.
    """
    points = _points(map, domain)
    first, *rest = slopes(map, start(points, moves_of(domain)))
    beyond = [norm_of_rows(norm, column.reach()) for column in rest]
    if isinstance(norm, TokenMax):
        return Bound(_in_range(total([first.reach(8).amax(), *beyond])), (_arithmetic(),))
    n, m, wide, deep = first.blocks.shape
    if m * deep > LARGEST:
        raise Refusal(
            f"the derivative has {m * deep} inputs; in Frobenius norm the Taylor model takes up to "
            f"{LARGEST}, in TokenMax() any number"
        )
    matrix = first.blocks.permute(0, 2, 1, 3).reshape(n * wide, m * deep)
    return Bound(
        _in_range(total([Upper(spectral_norm_bound(matrix)) * (1 + ROUNDING), *beyond])), (_arithmetic(),)
    )


@THEOREM.deviation(Compose, Near, SequenceNorm)
@THEOREM.deviation(Residual, Near, SequenceNorm)
def taylor_model(map: Map, domain: Near, norm: SequenceNorm) -> Bound:
    """The norm of the moves of all tokens; says so where it is vacuous."""
    state = step(map, start(_points(map, domain), moves_of(domain)))
    linear, rest = norm_of_rows(norm, state.columns[0].reach()), norm_of_rows(norm, state.remainder())
    vacuous = float(rest) > 100 * float(linear) and math.isfinite(float(linear))
    note = "vacuous here: remainders are over a hundred times the linear part" if vacuous else ""
    return Bound(_in_range(state.deviation(norm)), (_arithmetic(),), note=note)


def _in_range(value: Upper) -> Upper:
    """A number, or a refusal: a model that leaves the range of numbers proves no infinity."""
    if not math.isfinite(float(value)):
        raise Refusal("its remainders leave the range of numbers on this domain; use a smaller radius")
    return value


def _points(map: Map, domain: Near) -> Tensor:
    one_sequence(map)
    measure = domain.measure
    if measure.log_weights is not None or measure.marks is not None:
        raise Refusal("weights and marks of the points have no Taylor model; give the points without them")
    if not once(("has value", id(map), domain), map, lambda: _has_value(map, measure.points)):
        raise Refusal(
            "the value at the given sequence is not finite; use eps > 0 in norm layers, or smaller weights"
        )
    return measure.points


def _has_value(map: Map, points: Tensor) -> bool:
    """Whether every number on the way is finite; attention does not take others."""
    try:
        return bool(torch.isfinite(in_double(map)(points)).all())
    except ArgumentError:
        return False


def _arithmetic() -> Hypothesis:
    return assumed(
        "float64 values, products and eigenvalues are right to 1e-11; that is added to every remainder"
    )
