"""Sigmoid attention in TokenMax norm: rows are sums, not averages."""

from __future__ import annotations

import math

import torch

from regard._enclosed import Numbers, length, product_norm
from regard._upper import ELEMENTARY, Upper, exact, exact_lower, least, relative_error, total
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
from regard.proofs.scores import FACTOR, BallFacts, Form
from regard.proofs.setting import BIAS, positions_of
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
    fixed = _shift(head, domain, len(counts.value))
    values = []
    for ball, steep in bounded_balls(head, domain):
        highest, steepest = _sigmoid_bounds(head, ball, fixed)
        row = head.w * highest + _value_size(head, ball) * steepest * (steep.alpha + steep.reach)
        values.append(counts.sum(-1).amax() * row)
    return Bound(
        least(values),
        (
            checked("sigmoid weights"),
            checked("every token is in a ball of finite radius"),
            checked("the number of tokens"),
        ),
    )


def _shift(head: Head, domain: Domain, tokens: int) -> Numbers:
    """The bias plus the largest position bias of a pair."""
    assert isinstance(head.normalizer, Sigmoid)
    bias = -math.log(tokens) if head.normalizer.bias is None else float(head.normalizer.bias)
    positional, largest = positions_of(head.potential), 0.0
    if positional is not None:
        marks = domain.measure.positions() if isinstance(domain, Near) else torch.arange(tokens)
        points = torch.zeros(tokens, 1, dtype=torch.float64)
        largest = float(positional.scores(points, points, marks, marks).max())
    error = relative_error(ELEMENTARY) * exact(abs(bias)) + relative_error(BIAS) * exact(abs(largest))
    return _sum(bias, largest, error)


def _sum(first: float, second: float, error: Upper) -> Numbers:
    """A sum of two numbers that are within `error` together."""
    rounding = relative_error(2) * (exact(abs(first)) + exact(abs(second)))
    return Numbers(torch.tensor(first + second, dtype=torch.float64), error + rounding)


def _sigmoid_bounds(head: Head, ball: BallFacts, fixed: Numbers) -> tuple[Upper, Upper]:
    """At least σ(s + b) and at least σ'(s + b) for all scores of the ball; one and a quarter where nothing
    is known about them.
    """
    form = head.form(len(ball.center))
    if form is None:
        return exact(1.0), exact(0.25)
    center, beta, pull = _at_center(form, ball), form.shift(ball.center), form.pull(ball.center)
    away = form.norm * ball.radius.square() + (beta + pull) * ball.radius
    level = _sum(float(center.center), float(fixed.center), center.error + fixed.error)
    value = level.logistic(away + _constant(head.potential, len(ball.center)))
    v = float(value)  # σ' = σ(1 - σ) grows with σ up to 1/2
    return value, exact(v) * (1 - exact_lower(v)) if v < 0.5 else exact(0.25)


def _at_center(form: Form, ball: BallFacts) -> Numbers:
    """cᵀAc + β·c + γ·c."""
    center = ball.center
    far, a, beta, gamma = (length(part) for part in (center, form.a, form.beta, form.gamma))
    rounding = relative_error(4 * len(center) + 8) * (a * far + beta + gamma) * far
    errors = (form.error * far + form.error_beta + form.error_gamma) * far
    return Numbers(center @ form.a @ center + (form.beta + form.gamma) @ center, rounding + errors)


def _constant(potential: Potential, width: int) -> Upper:
    """At least the part of bilinear scores that depends on no token: scale b_q·b_k."""
    terms = linear_terms(potential)
    return total([Upper(abs(float(factor)), FACTOR) * _dot_constant(term, width) for term, factor in terms])


def _dot_constant(potential: Potential, width: int) -> Upper:
    if isinstance(potential, PositionPotential):  # a bias, which is counted as such
        return exact(0.0)
    if not isinstance(potential, Dot):  # all of a bilinear score that is left where tokens are zero
        nothing = torch.zeros(1, width, dtype=torch.float64)
        return Upper(abs(float(potential.scores(nothing, nothing))), REST)
    if potential.b_q is None or potential.b_k is None:
        return exact(0.0)
    columns = max(
        len(potential.b_q), len(potential.b_k), width if potential.w_q is None else potential.w_q.shape[-1]
    )
    b_q, b_k = (b.expand(columns) for b in (potential.b_q, potential.b_k))  # one entry stands for all
    scale = abs(float(potential.factor(width if potential.w_q is None else potential.w_q.shape[-1])))
    return Upper(scale, FACTOR) * length(b_q) * length(b_k)


REST = 4096
"""Roundings that a score of zero tokens may have."""


def _value_size(head: Head, ball: BallFacts) -> Upper:
    """At least the length of every value."""
    if head.value_bias is None:
        return head.w * ball.reach
    assert isinstance(head.lookup, (Linear, Factored))
    columns = head.lookup.w_v.shape[-1] if isinstance(head.lookup, Linear) else head.lookup.u.shape[-1]
    bias = length(head.value_bias.expand(columns))  # one entry stands for all
    return head.w * ball.reach + product_norm(head._output) * bias
