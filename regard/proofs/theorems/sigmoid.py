"""Sigmoid attention in TokenMax norm: rows are sums, not averages."""

from __future__ import annotations

import math

import torch

from regard._round import gamma, outward, product_norm_bound, vector_norm_bound
from regard.domains import Domain, Near
from regard.lookups import Factored, Linear
from regard.normalizers import Sigmoid
from regard.norms import TokenMax
from regard.potentials import Dot, Potential
from regard.potentials.base import linear_terms
from regard.potentials.positions import PositionPotential
from regard.proofs.about import rows_by
from regard.proofs.counts import seen_counts
from regard.proofs.rows import bounded_balls
from regard.proofs.scores import BallFacts, Form
from regard.proofs.setting import positions_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Theorem, checked

THEOREM = Theorem(
    name="sigmoid",
    title="sigmoid attention in TokenMax norm",
    statement=r"""
Weights $c_j\sigma(s_{ij} + b)$, tokens in a ball, values of length at most $\rho$, scores at most $s^*$ with
slopes $|\partial s_{ij}/\partial x_j| \le \alpha$, $|\partial s_{ij}/\partial x_i| \le \zeta$, and
$C = \max_i\sum_jc_{ij}$ keys in a row: $$ L_\infty \le C\left(w\,\sigma(s^* + b) +
\rho\,\sigma'_{\max}(\alpha + \zeta)\right),\qquad \sigma'_{\max} = \sup_{t \le s^* + b}\sigma'(t) \le
\tfrac14. $$
For $x_i^\top Ax_j$ on the ball of radius $R$ about 0: $nw(\sigma(g + b) + g/2)$, $g = \|A\|R^2$.
""",
    hypotheses=(
        "sigmoid weights",
        "values affine in the tokens",
        "tokens in a ball",
        "the number of tokens is given",
    ),
    source="(ramapuram2024)",
    proof=r"""
$(Df[D])_i = \sum_jc_j\{\sigma(s_{ij} + b)W^\top d_j + \sigma'(s_{ij} + b)(\partial_is_{ij}\cdot d_i +
\partial_js_{ij}\cdot d_j)\,u_j\}$ with values $u_j$: nothing is centered, so the bias of the values counts
in $\rho$, and so does a constant in the scores. The map is the authors'; the constant is proved here.
""",
)


@THEOREM.constant(Head, Domain, TokenMax, about=rows_by(Sigmoid))
def sigmoid(head: Head, domain: Domain, norm: TokenMax) -> Bound:
    """C (w σ(s* + b) + ρ σ'_max (α + ζ)), the smallest over balls that hold the tokens."""
    assert isinstance(head.normalizer, Sigmoid)
    counts = seen_counts(head, domain)
    fixed = _shift(head, domain, len(counts))
    values = []
    for ball, steep in bounded_balls(head, domain):
        highest, steepest = _sigmoid_bounds(_largest_score(head, ball) + fixed)
        row = head.w * highest + _value_size(head, ball) * steepest * (steep.alpha + steep.reach)
        values.append(outward(float(counts.sum(-1).max()) * row, 4000 + len(counts)))
    return Bound(
        min(values),
        (
            checked("sigmoid weights"),
            checked("every token is in a ball of finite radius"),
            checked("the number of tokens"),
        ),
    )


def _shift(head: Head, domain: Domain, tokens: int) -> float:
    """At least the bias plus the largest position bias of a pair."""
    assert isinstance(head.normalizer, Sigmoid)
    bias = -math.log(tokens) if head.normalizer.bias is None else float(head.normalizer.bias)
    positional = positions_of(head.potential)
    if positional is None:
        return bias + 1e-13 * (1 + abs(bias))
    marks = domain.measure.positions() if isinstance(domain, Near) else torch.arange(tokens)
    points = torch.zeros(tokens, 1, dtype=torch.float64)
    largest = float(positional.scores(points, points, marks, marks).max())
    return bias + largest + 1e-13 * (1 + abs(bias) + abs(largest))


def _largest_score(head: Head, ball: BallFacts) -> float:
    """At least every score without positions, or ∞ where nothing better than a weight of one is known."""
    form = head.form(len(ball.center))
    if form is None:
        return math.inf
    a, beta, pull = form.norm, form.shift(ball.center), form.pull(ball.center)
    away = outward(a * ball.radius**2 + (beta + pull) * ball.radius)
    return _at_center(form, ball) + away + _constant(head.potential, len(ball.center))


def _at_center(form: Form, ball: BallFacts) -> float:
    """At least cᵀAc + β·c + γ·c."""
    center = ball.center
    length, sizes = (
        vector_norm_bound(center),
        [vector_norm_bound(part) for part in (form.a, form.beta, form.gamma)],
    )
    rounding = gamma(4 * len(center) + 8) * (sizes[0] * length + sizes[1] + sizes[2]) * length
    errors = (form.error * length + form.error_beta + form.error_gamma) * length
    return float(center @ form.a @ center + (form.beta + form.gamma) @ center) + outward(rounding + errors)


def _constant(potential: Potential, width: int) -> float:
    """At least the part of bilinear scores that depends on no token: scale b_q·b_k."""
    terms = linear_terms(potential)
    return outward(sum(outward(abs(float(factor)) * _dot_constant(term, width)) for term, factor in terms))


def _dot_constant(potential: Potential, width: int) -> float:
    if isinstance(potential, PositionPotential):  # a bias, which is counted as such
        return 0.0
    if not isinstance(potential, Dot):  # all of a bilinear score that is left where tokens are zero
        nothing = torch.zeros(1, width, dtype=torch.float64)
        return outward(abs(float(potential.scores(nothing, nothing))) * (1 + 1e-12))
    if potential.b_q is None or potential.b_k is None:
        return 0.0
    columns = max(
        len(potential.b_q), len(potential.b_k), width if potential.w_q is None else potential.w_q.shape[-1]
    )
    b_q, b_k = (b.expand(columns) for b in (potential.b_q, potential.b_k))  # one entry stands for all
    scale = abs(float(potential.factor(width if potential.w_q is None else potential.w_q.shape[-1])))
    return outward(scale * vector_norm_bound(b_q) * vector_norm_bound(b_k))


def _sigmoid_bounds(level: float) -> tuple[float, float]:
    """At least σ(t) and at least σ'(t) for all t ≤ level."""
    level = level + 1e-12 * (1 + abs(level))
    value = 1.0 if level > 700 else outward(1 / (1 + math.exp(-max(level, -700.0))))
    return min(1.0, value), 0.25 if level >= 0 else min(
        0.25, outward(value * (1 - value) if value < 0.5 else 0.25)
    )


def _value_size(head: Head, ball: BallFacts) -> float:
    """At least the length of every value."""
    if head.value_bias is None:
        return outward(head.w * ball.reach)
    assert isinstance(head.lookup, (Linear, Factored))
    columns = head.lookup.w_v.shape[-1] if isinstance(head.lookup, Linear) else head.lookup.u.shape[-1]
    bias = vector_norm_bound(head.value_bias.expand(columns))  # one entry stands for all
    return outward(head.w * ball.reach + product_norm_bound(head._output) * bias)
