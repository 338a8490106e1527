"""Residual connections: one more than what they go around."""

from __future__ import annotations

import math
from typing import Any

from regard._round import outward
from regard.attention import Attention
from regard.certificate import Certificate, Hypothesis
from regard.certify.certification import certify, deviation, smallest
from regard.certify.locating import one_sequence, tokenwise
from regard.certify.subject import subject_of
from regard.certify.theorem import THEOREMS, Bound, Refusal, Theorem, checked
from regard.certify.theorems.mean_value import radius_in
from regard.domains import Domain, Near
from regard.maps import FromQueries, Heads, Joint, Residual
from regard.norms import Norm, Wasserstein

THEOREM = Theorem(
    name="residual",
    title="residual connection",
    statement=r"""
$x \mapsto x + f(x)$ has the constant $1 + L$ in every norm of sequences. As a map of measures it is $\mu \mapsto (\mathrm{id} +
T_\mu)_\#\mu$, and $1 + L$ needs an $L$ that holds for
every coupling, atom by atom: a constant of $\mu \mapsto T_{\mu\#}\mu$ alone says nothing of it.
""",
    hypotheses=("a constant of what it goes around", "in Wasserstein norms: a constant that holds coupling by coupling"),
    proof=r"""
The triangle inequality. For measures take the optimal coupling of $\mu$ and $\nu$: $\|X + T_\mu(X) - Y - T_\nu(Y)\|_{L^p} \le \|X -
Y\|_{L^p} + \|T_\mu(X) - T_\nu(Y)\|_{L^p}$, and the last term is
at most $L\,\|X - Y\|_{L^p}$ for this coupling.
""",
)

COUPLED = ("wasserstein", "heads", "affine", "pointwise", "normalize", "gated", "composition", "residual", "addition", "cross")
"""Theorems whose constants hold for every coupling when their parts do (`wasserstein` for p = 2 and ∞; `cross` of queries, each alone)."""


@THEOREM.constant(Residual, Domain, Norm)
def residual(map: Residual, domain: Domain, norm: Norm) -> Bound:
    """1 + L."""
    one_sequence(map.map)
    if isinstance(map.map, (FromQueries, Joint)):
        raise Refusal("what it goes around gives another number of tokens than it takes")
    part = certify(map.map, domain, norm)
    hypotheses: tuple[Hypothesis, ...] = ()
    if isinstance(norm, Wasserstein):
        part, hypotheses = coupled(map.map, part, norm), (checked("the constant holds coupling by coupling"),)
    _finite(part)
    return Bound(outward(1 + part.value), hypotheses, (part,))


@THEOREM.constant(Residual, Domain, Norm)
def joined(map: Residual, domain: Domain, norm: Norm) -> Bound:
    """The bound of attention with its residual, where a theorem sees both together."""
    return _together("constant", map, domain, norm)


@THEOREM.deviation(Residual, Near, Norm)
def carried(map: Residual, domain: Near, norm: Norm) -> Bound:
    """r plus the deviation of what it goes around."""
    one_sequence(map.map)
    if isinstance(norm, Wasserstein):
        raise Refusal("deviations of residuals are of matched tokens; use Frobenius() or TokenMax()")
    part = _finite(deviation(map.map, domain, norm))
    return Bound(outward(radius_in(domain, norm) + part.value), parts=(part,))


@THEOREM.deviation(Residual, Near, Norm)
def carried_together(map: Residual, domain: Near, norm: Norm) -> Bound:
    """The deviation of attention with its residual, where a theorem sees both together."""
    return _together("deviation", map, domain, norm)


def _together(quantity: str, map: Residual, domain: Domain, norm: Norm) -> Bound:
    if not isinstance(map.map, (Attention, Heads)):
        raise Refusal("")
    one_sequence(map.map)
    part = smallest(quantity, subject_of(map.map, residual=True), domain, norm)
    if math.isinf(part.value):
        raise Refusal("")
    return Bound(part.value, part.hypotheses, part.parts, part.theorem)


def _finite(part: Certificate) -> Certificate:
    if math.isinf(part.value):
        raise Refusal(f"what it goes around has no finite bound: {' '.join(part.refused[:2])}".strip())
    return part


def coupled(map: Any, part: Certificate, norm: Wasserstein) -> Certificate:
    """The smallest bound that holds for every coupling."""
    if tokenwise(map):
        return part
    if norm.p != 2 and not math.isinf(norm.p):
        raise Refusal(
            f"the constant of attention in W_{norm.p:g} does not hold coupling by coupling; use Wasserstein(2) or Wasserstein(math.inf)"
        )
    rungs = [rung for rung in (part, *part.others) if _holds_coupled(rung)]
    if not rungs:
        raise Refusal(f"no constant here holds coupling by coupling: {' '.join(part.refused[:1])}".strip())
    return min(rungs, key=lambda rung: rung.value)


def _holds_coupled(rung: Certificate) -> bool:
    known = any(f"{rung.theorem}:".startswith(f"{THEOREMS[name].cited}:") for name in COUPLED)
    return known and all(_holds_coupled(inner) for inner in rung.parts)
