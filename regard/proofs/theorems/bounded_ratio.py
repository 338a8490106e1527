"""Rows whose scores are off: how far their output is from attention, from the ratio of the two laws."""

from __future__ import annotations

from regard._upper import Upper
from regard.proofs.theorem import Theorem
from regard.proofs.theorems.score_perturbation import perturbation

THEOREM = Theorem(
    name="bounded_ratio",
    title="outputs of rows whose scores are off",
    statement=r"""
For a law $\nu$ on the keys of a query that has mass wherever its softmax row $P$ has, with $a$ the scores,
$\mu$ the reference measure and $o$ the oscillation of $\log\nu - \log\mu - a$ over the keys,
$$ |\nu v - Pv| \le \min\left\{\tfrac12(e^o - 1)\,\nu|v - \nu v|,\ \mathrm{diam}(v)\tanh(o/4)\right\}. $$
For keys that are rounded, by $\delta_j$, $o \le 2\max_j|q\cdot\delta_j|$; where values are rounded too, $v$
are those that are kept, and the largest error of one of them is added.
""",
    hypotheses=("softmax rows", "rows that are laws, with mass on the whole support"),
    proof=r"""
$P$ has the density $h = e^{-r}/\nu(e^{-r})$ in $\nu$, $r = \log\nu - \log\mu - a$, so $h \in [m, me^o]$ with
$m \le 1$, since $\nu(h) = 1$. $v - \nu v$ has mean zero under $\nu$, so for every number $c$
$$ Pv - \nu v = \nu\{(h - c)(v - \nu v)\}, $$ and with $c$ in the middle of the interval $|h - c| \le
\frac12m(e^o - 1) \le \frac12(e^o - 1)$. The second is `score_perturbation`: $\mathrm{TV} \le \tanh(o/4)$,
and mass moves by at most the diameter.
""",
)


def ratio_bound(oscillation: Upper, spread: Upper, radius: Upper) -> Upper:
    """From o, ν|v - νv| and half the diameter of the values."""
    near = oscillation.expm1().halved() * spread
    return near.minimum(2 * radius * perturbation(oscillation))
