"""Residual connections: the constant of x + f(x) is at most one more than that of f."""

from __future__ import annotations

from typing import Any

from regard._upper import Upper
from regard._verb import Verb
from regard.attention import Attention
from regard.certificate import Certificate, Hypothesis
from regard.domains import Domain, Near
from regard.maps import Heads, Residual
from regard.norms import Norm, SequenceNorm, Wasserstein
from regard.proofs.certification import certify, deviation, smallest
from regard.proofs.floors import constant_floor, deviation_floor
from regard.proofs.locating import keeps_tokens, one_sequence, tokenwise
from regard.proofs.subject import subject_of
from regard.proofs.theorem import THEOREMS, Bound, Refusal, Theorem, checked, constants, deviations, finite
from regard.proofs.theorems.mean_value import radius_in

THEOREM = Theorem(
    name="residual",
    title="residual connection",
    statement=r"""
$x \mapsto x + f(x)$ has the constant $1 + L$ in every norm of sequences. As a map of measures it is $\mu
\mapsto (\mathrm{id} + T_\mu)_\#\mu$, and $1 + L$ needs an $L$ that holds for
every coupling, atom by atom: a constant of $\mu \mapsto T_{\mu\#}\mu$ alone says nothing about it.
""",
    hypotheses=(
        "a constant of what it goes around",
        "in Wasserstein norms: a constant that holds coupling by coupling",
    ),
    proof=r"""
The triangle inequality. For measures take the optimal coupling of $\mu$ and $\nu$: $\|X + T_\mu(X) - Y -
T_\nu(Y)\|_{L^p} \le \|X - Y\|_{L^p} + \|T_\mu(X) - T_\nu(Y)\|_{L^p}$, and the last term is
at most $L\,\|X - Y\|_{L^p}$ for this coupling.
""",
)

COUPLED = (
    "wasserstein",
    "energy",
    "heads",
    "affine",
    "pointwise",
    "normalize",
    "gated",
    "projection",
    "group_sort",
    "memory_step",
    "slices",
    "reflection",
    "composition",
    "residual",
    "addition",
    "cross",
)
"""Theorems whose constants hold for every coupling when their parts do (`cross` of queries, each alone)."""

INNER = "what it goes around"
TOGETHER = "attention with its residual connection"


def _floor(map: Residual, domain: Domain, norm: Norm) -> float:
    """One more than what theorems can give for the map inside."""
    return 1.0 + constant_floor(map.map, domain, norm)


@THEOREM.constant(Residual, Domain, Norm, floor=_floor)
def residual(map: Residual, domain: Domain, norm: Norm) -> Bound:
    """1 + L."""
    one_sequence(map.map)
    if not keeps_tokens(map.map):
        raise Refusal("what it goes around gives a different number of tokens than it takes")
    part = finite(certify(map.map, domain, norm), INNER)
    hypotheses: tuple[Hypothesis, ...] = ()
    if isinstance(norm, Wasserstein):
        part, hypotheses = (
            smallest_for_couplings(map.map, part, norm),
            (checked("the constant holds coupling by coupling"),),
        )
    return Bound(1 + Upper(part.value), hypotheses, (part,))


def _around_attention(map: Residual, domain: Domain, norm: Norm) -> bool:
    return isinstance(map.map, (Attention, Heads))


@THEOREM.constant(Residual, Domain, Norm, about=_around_attention)
def joint_bound(map: Residual, domain: Domain, norm: Norm) -> Bound:
    """The bound of attention with its residual, where a theorem sees both together."""
    return _together(constants, map, domain, norm)


def _move_floor(map: Residual, domain: Near, norm: SequenceNorm) -> float:
    """r and what theorems can give for the map inside."""
    return float(radius_in(domain, norm)) + deviation_floor(map.map, domain, norm)


@THEOREM.deviation(Residual, Near, SequenceNorm, floor=_move_floor)
def move_bound(map: Residual, domain: Near, norm: SequenceNorm) -> Bound:
    """r plus the deviation of f, where the map is x + f(x)."""
    one_sequence(map.map)
    part = finite(deviation(map.map, domain, norm), INNER)
    return Bound(radius_in(domain, norm) + Upper(part.value), parts=(part,))


@THEOREM.deviation(Residual, Near, Norm, about=_around_attention)
def joint_move_bound(map: Residual, domain: Near, norm: Norm) -> Bound:
    """The deviation of attention with its residual, where a theorem sees both together."""
    return _together(deviations, map, domain, norm)


def _together(quantity: Verb, map: Residual, domain: Domain, norm: Norm) -> Bound:
    assert isinstance(map.map, (Attention, Heads))
    one_sequence(map.map)
    part = finite(smallest(quantity, subject_of(map.map, residual=True), domain, norm), TOGETHER)
    return Bound(Upper(part.value), part.hypotheses, part.parts, part.theorem)


def smallest_for_couplings(map: Any, part: Certificate, norm: Wasserstein) -> Certificate:
    """The smallest bound that holds for every coupling."""
    if tokenwise(map):
        return part
    rungs = [rung for rung in (part, *part.others) if _holds_for_couplings(rung)]
    if not rungs:
        why = f"the constant is by {part.theorem!r}, which does not hold coupling by coupling"
        raise Refusal(f"{why}; use TokenMax() or Frobenius()")
    return min(rungs, key=lambda rung: rung.value)


def _holds_for_couplings(rung: Certificate) -> bool:
    known = any(f"{rung.theorem}:".startswith(f"{THEOREMS[name].cited}:") for name in COUPLED)
    return known and all(_holds_for_couplings(inner) for inner in rung.parts)
