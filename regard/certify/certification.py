"""certify: every theorem that matches runs, and the smallest bound wins."""

from __future__ import annotations

import math
from typing import Any

from regard._verb import Verb
from regard.attention import Attention
from regard.certificate import Certificate
from regard.certify.subject import MultiHead, subject_of
from regard.certify.theorem import Refusal, rungs
from regard.domains import Ball, Domain, Near
from regard.errors import ArgumentError
from regard.maps import Heads, Map
from regard.norms import Norm

declare = Verb("declare")
"""declare.one(module) -> Map: what a module of torch does, as a value; rules are in modules.py."""

remedies = Verb("remedies")
"""remedies.one(subject) -> the smallest changes that would make a constant finite, as sentences."""


def certify(map: Any, domain: Domain, norm: Norm) -> Certificate:
    """How much the map can amplify a change: |f(x) - f(x')| ≤ value · |x - x'| for all x, x' of the domain, in the norm.

    map: an Attention, a map of `regard.maps`, or a module of torch that has a rule. Every theorem that matches runs; the result is the
    smallest bound, with the others on its ladder. Infinity is an answer: it comes with the reasons, and with what would help.
    """
    _check_arguments(domain, norm)
    return _smallest("constant", map, domain, norm)


def deviation(map: Any, domain: Domain, norm: Norm) -> Certificate:
    """How far the value can move: |f(x') - f(x)| ≤ value for all x' near x. Often far below constant × radius.

    domain: a Neighborhood or Radii around x.
    """
    _check_arguments(domain, norm)
    deviation_domain(domain)
    return _smallest("deviation", map, domain, norm)


def deviation_domain(domain: Domain) -> None:
    """A deviation is from a given sequence."""
    if not isinstance(domain, Near):
        raise ArgumentError(
            "domain", f"is {domain!r}", "a deviation is from a given sequence: give Neighborhood(points, radius) or Radii(points, radii)"
        )


def _check_arguments(domain: Domain, norm: Norm) -> None:
    if not isinstance(domain, Domain):
        raise ArgumentError(
            "domain",
            f"is {domain!r}",
            "give Whole(), Ball(radius), Shell(inner, outer), Neighborhood(points, radius) or Radii(points, radii)",
        )
    if not isinstance(norm, Norm):
        raise ArgumentError("norm", f"is {norm!r}", "give Frobenius(), TokenMax(), TokenSum() or Wasserstein(p)")


def _smallest(quantity: str, map: Any, domain: Domain, norm: Norm) -> Certificate:
    try:
        subject = prepared(map)
    except Refusal as refusal:
        return _none(quantity, domain, norm, [str(refusal)], [])
    return smallest(quantity, subject, domain, norm)


def smallest(quantity: str, subject: Any, domain: Domain, norm: Norm) -> Certificate:
    """The smallest bound of a subject, with the others on its ladder."""
    found, refused = rungs(quantity, subject, domain, norm)
    head = _only(subject)
    if head is not None:
        more, reasons = rungs(quantity, head, domain, norm)
        found, refused = found + more, refused + reasons
    finite = [certificate for certificate in found if not math.isnan(certificate.value)]
    best = min(finite, key=lambda certificate: certificate.value, default=None)
    if best is None:
        return _none(quantity, domain, norm, refused, _help(subject, domain))
    others = tuple(other for other in finite if other is not best)
    help = _help(subject, domain) if math.isinf(best.value) else []
    return _with(best, others=others, refused=(*best.refused, *refused, *help))


def prepared(map: Any) -> Any:
    """What theorems are about: heads for attention, the map itself for the algebra, a declared module."""
    if isinstance(map, (Attention, Heads)):
        return subject_of(map)
    if isinstance(map, Map):
        return map
    found = declare.one(map)
    return subject_of(found) if isinstance(found, (Attention, Heads)) else found


def _only(subject: Any) -> Any:
    """The one head of a subject that is nothing more than it."""
    if not isinstance(subject, MultiHead) or len(subject.separate) > 1 or subject.residual:
        return None
    return subject.separate[0] if subject.folded is None else subject.folded[0]


def _help(subject: Any, domain: Domain) -> list[str]:
    """Where tokens are not bounded, what would help; elsewhere the refusals say it."""
    bounded = isinstance(domain, Near) or (isinstance(domain, Ball) and math.isfinite(domain.radius))
    return [] if bounded else list(remedies.one(subject))


@remedies.rule(object)
def _nothing(subject: Any) -> tuple[str, ...]:
    return ()


def _none(quantity: str, domain: Any, norm: Norm, refused: list[str], help: list[str]) -> Certificate:
    return Certificate(math.inf, domain, norm, "no theorem", refused=(*refused, *help), quantity=quantity)


def _with(certificate: Certificate, **changes: Any) -> Certificate:
    import dataclasses

    return dataclasses.replace(certificate, **changes)
