"""Scores that are wrong by a little: how far the law moves, whatever the law is."""

from __future__ import annotations

from regard._upper import Upper, exact
from regard.certificate import Certificate
from regard.domains import Whole
from regard.errors import ArgumentError
from regard.norms import Wasserstein
from regard.proofs.theorem import Bound, Theorem, assumed

THEOREM = Theorem(
    name="score_perturbation",
    title="laws of perturbed scores",
    statement=r"""
If the error of the scores has oscillation $\sup(a - a') - \inf(a - a') \le o$, then for every $\mu$
$$ \mathrm{TV}(\Psi_{e^a}\mu, \Psi_{e^{a'}}\mu) \le \tanh(o/4),\qquad W_1 \le \mathrm{diam}\cdot\tanh(o/4), $$
attained by two atoms. For kernels of relative error $\eta < 1$, $o = \log\frac{1+\eta}{1-\eta}$ and $\|\hat P
- P\|_1 \le 2\tanh(o/4) = 2\eta/(1 + \sqrt{1-\eta^2})$.
""",
    hypotheses=("the oscillation of the error of the scores", "the diameter of the set of points"),
    proof=r"""
The second law has density $h = e^{-u}/P(e^{-u})$ in the first, $P$, where $u = a - a'$. For an event $B$ of
probability $\theta$ under $P$, $m$ and $M$ the means of $e^{-u}$ on $B$ and on its complement: $P'(B) - P(B)
= \theta m/(\theta m + (1-\theta)M) - \theta$ with $e^{-o} \le m/M \le e^o$. It is largest at $m/M = e^o$, and
there over $\theta$ at $\theta = 1/(1 + e^{o/2})$, where it is $\frac{e^{o/2} - 1}{e^{o/2} + 1} = \tanh(o/4)$.
Two atoms of masses $\theta$ and $1 - \theta$ attain it. Moving a mass $t$ costs at most $t\,\mathrm{diam}$.
""",
)


def score_perturbation(oscillation: float, diameter: float = 1.0) -> Certificate:
    """How far in W₁ laws move when scores are wrong: diam · tanh(o/4);
    with the diameter 1 it bounds total variation too.

    Examples:
        >>> import math
        >>> found = regard.proofs.score_perturbation(1.0)  # scores off by up to 1 against each other
        >>> 0 <= found.value - math.tanh(0.25) < 1e-9
        True
    """
    for name, value in (("oscillation", oscillation), ("diameter", diameter)):
        if not value >= 0:
            raise ArgumentError(name, f"is {value}", "give a number that is not negative")
    hypotheses = (
        assumed(f"errors of the scores of one query differ by at most {oscillation!r}"),
        assumed(f"points are at most {diameter!r} apart"),
    )
    moved = exact(diameter) * perturbation(exact(oscillation))
    return THEOREM.certificate(Bound(moved, hypotheses), Whole(), Wasserstein(1.0), "distance of the laws")


def perturbation(oscillation: Upper) -> Upper:
    """At least tanh(o/4), the total variation."""
    return oscillation.halved().halved().tanh().minimum(exact(1.0))
