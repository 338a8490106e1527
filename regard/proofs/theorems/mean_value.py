"""A deviation from a constant: what a map can amplify, times how far the sequence may move."""

from __future__ import annotations

from typing import Any

from regard._enclosed import lengths
from regard._upper import Upper, exact, root
from regard.domains import Near, Neighborhood
from regard.maps import Map
from regard.norms import Frobenius, Norm, TokenMax, TokenSum
from regard.proofs.certification import smallest
from regard.proofs.floors import constant_floor
from regard.proofs.near.facts import local_facts
from regard.proofs.setting import moves_of
from regard.proofs.subject import MultiHead
from regard.proofs.theorem import Bound, Refusal, Theorem, constants, finite

THEOREM = Theorem(
    name="mean_value",
    title="constant times radius",
    statement=r"""
$\|f(x') - f(x)\| \le L\,\|x' - x\| \le L\,r$ for $x'$ in a neighborhood of $x$ on which $f$ has the constant
$L$, with $r$ its radius in the norm.
""",
    hypotheses=("a constant on the neighborhood",),
    proof=r"""
The definition of $L$. In a norm other than the neighborhood's: $\max_i|d_i| \le \|d\|_F \le \sqrt
n\max_i|d_i|$, $\sum_i|d_i| \le \sqrt n\,\|d\|_F$, and a Wasserstein distance is at
most $\max_i|d_i|$.
""",
)


def _without_theorems(subject: MultiHead, domain: Near, norm: Norm) -> bool:
    """Heads have theorems of their own near a sequence, which are better."""
    return not isinstance(norm, (Frobenius, TokenMax)) or not near_theorems(subject, domain)


def _floor(map: Map, domain: Near, norm: Norm) -> float:
    """What theorems can give for the constant, times the radius."""
    return float(radius_in(domain, norm)) * constant_floor(map, domain, norm)


@THEOREM.deviation(MultiHead, Near, Norm, about=_without_theorems)
@THEOREM.deviation(Map, Near, Norm, floor=_floor)
def mean_value(subject: Any, domain: Near, norm: Norm) -> Bound:
    """L r."""
    part = finite(smallest(constants, subject, domain, norm), "the constant")
    return Bound(Upper(part.value) * radius_in(domain, norm), parts=(part,))


def near_theorems(subject: MultiHead, domain: Near) -> bool:
    """Whether heads have theorems of their own near a sequence, which are better."""
    try:
        local_facts(subject, domain)
    except Refusal:
        return False
    return True


def radius_in(domain: Near, norm: Norm) -> Upper:
    """At least the norm of x' - x over the neighborhood."""
    moves = moves_of(domain)
    longest = exact(moves).amax()
    shared = isinstance(domain, Neighborhood) and isinstance(domain.norm, Frobenius)
    if isinstance(norm, Frobenius):
        return longest if shared else lengths(moves)
    if isinstance(norm, TokenSum):
        return root(len(moves)) * longest if shared else exact(moves).sum()
    return longest
