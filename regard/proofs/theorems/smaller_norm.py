"""A deviation in a norm that is never larger than another one."""

from __future__ import annotations

import math
from typing import Any

from regard._upper import Lower, Upper
from regard.certificate import Certificate
from regard.domains import Near
from regard.maps import Map
from regard.norms import EntryMax, Frobenius, Norm, TokenMax, Wasserstein
from regard.proofs.certification import smallest
from regard.proofs.imaging import outputs
from regard.proofs.subject import MultiHead
from regard.proofs.theorem import Bound, Theorem, deviations, finite

THEOREM = Theorem(
    name="smaller_norm",
    title="deviation in a smaller norm",
    statement=r"""
$\max_{ic}|d_{ic}| \le \max_i|d_i|$, and the laws of $f(x')$ and $f(x)$ have $W_p \le \max_i|d_i|$ with $d =
f(x') - f(x)$, whatever the weights of the tokens; for $n$ tokens of equal weight and $p \le 2$ also $W_p \le
\|d\|_F/\sqrt n$. So a deviation in TokenMax norm, or in Frobenius norm over $\sqrt n$, is one in EntryMax
norm and in $W_p$.
""",
    hypotheses=("a deviation in the larger norm",),
    proof=r"""
An entry of a vector is at most its length. Matching token $i$ with token $i$ is one coupling, and $W_p$ the
least cost of all: $W_p^p \le \sum_i\omega_i|d_i|^p \le \max_i|d_i|^p$. For equal weights $W_p \le W_2 \le
(\frac1n\sum_i|d_i|^2)^{1/2}$ where $p \le 2$.
""",
)


@THEOREM.deviation(MultiHead, Near, EntryMax)
@THEOREM.deviation(Map, Near, EntryMax)
def entries(subject: Any, domain: Near, norm: EntryMax) -> Bound:
    """The deviation in TokenMax norm."""
    return _by_longest(subject, domain)


@THEOREM.deviation(MultiHead, Near, Wasserstein)
@THEOREM.deviation(Map, Near, Wasserstein)
def laws(subject: Any, domain: Near, norm: Wasserstein) -> Bound:
    """The deviation in TokenMax norm, of tokens that are matched."""
    return _by_longest(subject, domain)


def _equal_weights(subject: Any, domain: Near, norm: Wasserstein) -> bool:
    return norm.p <= 2 and domain.measure.log_weights is None


@THEOREM.deviation(MultiHead, Near, Wasserstein, about=_equal_weights)
@THEOREM.deviation(Map, Near, Wasserstein, about=_equal_weights)
def equal_laws(subject: Any, domain: Near, norm: Wasserstein) -> Bound:
    """The deviation in Frobenius norm over √n."""
    part = _larger(subject, domain, Frobenius())
    tokens = outputs(subject, domain.measure.size)
    assert tokens is not None
    return Bound(
        Upper(part.value) / Lower(math.sqrt(tokens), 1),
        parts=(part,),
        note="of matched tokens, in Frobenius norm over √n",
    )


def _by_longest(subject: Any, domain: Near) -> Bound:
    part = _larger(subject, domain, TokenMax())
    return Bound(Upper(part.value), parts=(part,), note="of matched tokens, in TokenMax norm")


def _larger(subject: Any, domain: Near, norm: Norm) -> Certificate:
    return finite(smallest(deviations, subject, domain, norm), f"the deviation in {norm!r}")
