"""Approximate rows: how far their output is from attention,
from the gap of the variational principle alone.
"""

from __future__ import annotations

import torch

from regard._upper import Upper, exact
from regard.proofs.theorem import Theorem

THEOREM = Theorem(
    name="approximation",
    title="outputs of approximate rows",
    statement=r"""
For a law $\nu$ on the keys of a query and its softmax row $P$, with $a$ the scores and $\mu$ the reference
measure, $$ \mathrm{gap} = \log\mu(e^a) - \{\nu(a) - \mathrm{KL}(\nu|\mu)\} = \mathrm{KL}(\nu|P), $$
$$ |\nu v - Pv| \le \|\nu - P\|_1\,\rho,\qquad \|\nu - P\|_1 \le \min\{\sqrt{2\,\mathrm{gap}},\ 2\sqrt{1 -
e^{-\mathrm{gap}}}\}, $$ $\rho$ the radius of the values that the query sees, about any center, or half their
diameter. No row $P$ is computed.
""",
    hypotheses=("softmax rows", "rows that are laws on the support", "outputs that are means of values"),
    source="(tsybakov2009, Lemmas 2.5 and 2.6)",
    proof=r"""
The identity is the Gibbs variational principle with its remainder written out. $\nu - P$ has total mass zero,
so $(\nu - P)v = (\nu - P)(v
- c)$ for every $c$; and it is $\frac12\|\nu - P\|_1$ times a difference of two laws, whose means of $v$ are
at most the diameter apart. Pinsker's inequality is better for small gaps, that of Bretagnolle and Huber for
large ones. Scores wrong by at most $\delta$ change the gap by at most $2\delta$.
""",
)


def total_variation_bound(gap: Upper) -> Upper:
    """At least |ν - P|₁, from a bound of KL(ν | P)."""
    pinsker = (2 * gap).sqrt()
    large = 2 * gap.grow(lambda x: -torch.expm1(-x)).sqrt()
    return pinsker.minimum(large, exact(2.0))
