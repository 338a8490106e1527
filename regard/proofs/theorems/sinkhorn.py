"""Doubly stochastic attention in Frobenius norm."""

from __future__ import annotations

import math

import torch

from regard._enclosed import lengths, product_norm
from regard._upper import Upper, exact, exact_lower, least, relative_error, root
from regard.certificate import Hypothesis
from regard.domains import Domain, Near, Neighborhood
from regard.normalizers import Sinkhorn
from regard.norms import Frobenius
from regard.proofs.about import rows_by
from regard.proofs.rows import bounded_balls
from regard.proofs.scores import BallFacts, Slopes
from regard.proofs.setting import bias_error, moves_of, pair_bias, tokens_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Bound, Refusal, Theorem, assumed, checked

THEOREM = Theorem(
    name="sinkhorn",
    title="Sinkhorn attention in Frobenius norm",
    statement=r"""
$P$ doubly stochastic of the scores $x_i^\top A x_j$, plus anything that depends on $i$ alone or on $j$ alone,
tokens in $B(c, R)$, $X_c$ the tokens minus $c$:
$$ L_F \le w\left(1 + \|A\|\sup\|X_c\|_2^2\right) \le w\left(1 + n\|A\|R^2\right), $$
and $w(1 + \tfrac12nR(\alpha + \kappa))$ for scores with the slopes of `token_max`. Columns are balanced to a
tolerance $\tau$ after $1 + \log(\mathrm{osc}/\tau)/(-2\log\tanh(\Delta/4))$ iterations, $\Delta = \sup|s_{ij}
- s_{il} - s_{kj} + s_{kl}|$.
""",
    hypotheses=(
        "the iteration reaches a positive tolerance everywhere on the domain, and columns balanced to it "
        "count as balanced",
        "equal weights and no mask",
        "tokens in a bounded convex set",
    ),
    source="(sander2022)",
    proof=r"""
$P$ maximizes $\langle P, S\rangle - \sum P\log P$ over doubly stochastic matrices. On directions whose rows
sum to zero the entropy of each row has modulus 2, as for softmax, so $\|dP\|_F \le \frac12\|dS\|_F$.
$\|P\|_2 = 1$. Terms of the score that depend on $i$ alone or on $j$ alone do not change $P$, so the score is
$r_i^\top A r_j$ with $r = x - c$, and $\|dS\|_F \le 2\|A\|\|X_c\|_2\|D\|_F$.
$\|dP\,X_c\|_F \le \|dP\|_F\|X_c\|_2$. For other scores $\|dS\|_F \le \sqrt n(\alpha + \kappa)\|D\|_F$ up to
terms of $i$ alone. By Birkhoff's theorem an iteration contracts the oscillation of the keys' potentials by
$\tanh^2(\Delta/4)$. The gaps of the columns are differences of these potentials, the first has oscillation at
most $\mathrm{osc}$, and each takes both signs, as masses add up to one. A fixed number of iterations that
does not balance is another map. The map is the authors'; the constants are proved here.
""",
)


@THEOREM.constant(Head, Domain, Frobenius, about=rows_by(Sinkhorn))
def sinkhorn(head: Head, domain: Domain, norm: Frobenius) -> Bound:
    """w (1 + |A| sup|X_c|₂²), the smallest over balls that hold the tokens."""
    tokens = _doubly_stochastic(head, domain)
    balls = bounded_balls(head, domain)
    balanced = _require_balance(head, domain, balls)
    values = [_constant(head, domain, tokens, ball, steep) for ball, steep in balls]
    hypotheses = (
        *balanced,
        checked("equal weights and no mask"),
        checked("every token is in a ball of finite radius"),
    )
    return Bound(least(values), (*hypotheses, checked("the number of tokens")))


def _require_balance(
    head: Head, domain: Domain, balls: list[tuple[BallFacts, Slopes]]
) -> tuple[Hypothesis, Hypothesis]:
    """Refuse an iteration that may stop before its columns are balanced."""
    assert isinstance(head.normalizer, Sinkhorn)
    tolerance, allowed = head.normalizer.tolerance, head.normalizer.max_iterations
    if tolerance == 0:
        why = f"tolerance 0 runs exactly {allowed} iterations, not the balanced coupling"
        raise Refusal(f"{why}; give a tolerance, e.g. Sinkhorn(tolerance=1e-6)")
    bias = pair_bias(head, domain)
    fixed = exact(0.0) if bias is None else Upper(bias.max() - bias.min(), 1) + 2 * bias_error(bias)
    needed = min(iterations(*_spread(head, ball, steep, fixed), tolerance) for ball, steep in balls)
    if needed > allowed:
        why = (
            f"{needed:.3g} iterations are sure to balance columns to {tolerance:g} on this domain, and "
            f"max_iterations is {allowed}"
        )
        raise Refusal(f"{why}; raise it, which costs nothing where fewer suffice, or use a smaller domain")
    reached = f"at most {needed:.0f} iterations reach the tolerance {tolerance:g}"
    return checked(reached), assumed(f"columns balanced to {tolerance:g} count as balanced")


def _spread(head: Head, ball: BallFacts, steep: Slopes, fixed: Upper) -> tuple[Upper, Upper]:
    """At least how much scores of a row differ, and |s_ij - s_il - s_kj + s_kl|."""
    form = head.form(len(ball.center))
    crossed = 2 * steep.osc
    crossed = crossed if form is None else crossed.minimum(4 * form.norm * ball.radius.square())
    return steep.osc + fixed, crossed + 2 * fixed


SEEN = 1024
"""Roundings of a gap of columns, relative to one and to the scores: a smaller gap is not seen."""


def iterations(row: Upper, crossed: Upper, tolerance: float) -> float:
    """How many iterations are enough, 1 + log(osc/τ)/(-2 log tanh(Δ/4)); infinite where rounding hides the
    tolerance.
    """
    if float(row) <= tolerance:
        return 1.0
    visible = exact_lower(tolerance) - relative_error(SEEN) * (1 + row)
    quarter = crossed.halved().halved()
    rate = 2 * quarter.tanh().fall(lambda t: -torch.log(t))
    rate = rate.maximum(4 * (2 * quarter).exp_minus())  # -log tanh z ≥ 2 exp(-2z)
    needed = float((row / visible).grow(torch.log) / rate)
    return 2 + math.ceil(needed) if math.isfinite(needed) else math.inf


def _constant(head: Head, domain: Domain, tokens: int, ball: BallFacts, steep: Slopes) -> Upper:
    size, form = _size(domain, tokens, ball), head.form(len(ball.center))
    change = (root(tokens) * (steep.alpha + steep.kappa)).halved() if form is None else form.norm * size
    return head.w * (1 + change * size)


def _size(domain: Domain, tokens: int, ball: BallFacts) -> Upper:
    """At least |X_c|₂ for all sequences of the domain."""
    largest = root(tokens) * ball.radius
    if not isinstance(domain, Near):
        return largest
    rounding = relative_error(4) * largest
    moves = moves_of(domain)
    shared = isinstance(domain, Neighborhood) and isinstance(domain.norm, Frobenius)
    moved = exact(moves).amax() if shared else lengths(moves)
    return largest.minimum(product_norm(domain.measure.points - ball.center) + rounding + moved)


def _doubly_stochastic(head: Head, domain: Domain) -> int:
    """How many tokens there are, or a sentence about what is missing."""
    if type(head.support).__name__ != "Full":
        raise Refusal("Sinkhorn rows under a mask have no theorem; use the full support")
    if isinstance(domain, Near) and domain.measure.log_weights is not None:
        raise Refusal("Sinkhorn rows of tokens with weights have no theorem; use equal weights")
    tokens = tokens_of(domain)
    if tokens is None:
        raise Refusal(
            "the bound grows with the number of tokens; say how many there are, e.g. Ball(radius, tokens=n)"
        )
    return tokens
