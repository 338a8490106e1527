"""certify: every theorem that matches runs, and the smallest bound wins."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from regard._kinds import names_wrong_kinds
from regard._verb import Verb
from regard.attention import Attention
from regard.certificate import Certificate
from regard.domains import Ball, Domain, Edited, Near, NearbyLaws
from regard.errors import ArgumentError
from regard.maps import Heads, Map, Residual
from regard.norms import EntryMax, Frobenius, Norm, OwnToken, TokenMax, TokenSum, Wasserstein
from regard.proofs.law_rows import ball_around
from regard.proofs.question import answering, once, question
from regard.proofs.shapes import fit
from regard.proofs.subject import Head, MultiHead, subject_of
from regard.proofs.theorem import NO_THEOREM, Refusal, constants, deviations, rungs

declare = Verb("declare")
"""declare.one(module) -> Map: what a module of torch does, as a value; rules are in modules.py.

Examples:
    >>> module, x = torch.nn.Linear(2, 3).double(), torch.randn(4, 2).double()
    >>> torch.allclose(regard.declare(module)(x), module(x))
    True
"""

remedies = Verb("remedies")
"""remedies.one(subject) -> the smallest changes that would make a constant finite, as sentences."""


@names_wrong_kinds
def certify(map: Any, domain: Domain, norm: Norm) -> Certificate:
    """How much the map can amplify a change: |f(x) - f(x')| ≤ value · |x - x'| for all x, x' of the domain,
    in the norm.

    map: an Attention, a map of `regard.maps`, or a PyTorch module that has a rule. A module is run at two
    sequences of the domain and compared with its declaration; an error is raised where they differ. Every
    theorem that matches runs; the result is the smallest bound, with the others on its ladder. Infinity is an
    answer: it comes with the reasons, and with what would help. Of NearbyLaws any two are compared, in
    Wasserstein(p).

    Examples:
        >>> layer = regard.Attention(regard.Dot(torch.eye(4), torch.eye(4)))
        >>> bound = regard.certify(layer, regard.Ball(1.0, tokens=8), regard.TokenMax())
        >>> seen = regard.falsify(layer, regard.Ball(1.0, tokens=8), regard.TokenMax(), restarts=1, steps=9)
        >>> seen.value <= bound.value
        True
    """
    _check_arguments(domain, norm)
    if isinstance(domain, Edited):
        remedy = "it is about what lies around one input: use deviation(map, domain, norm)"
        raise ArgumentError("domain", f"is {domain!r}", remedy)
    with question():
        if isinstance(domain, NearbyLaws):
            return _with_run(_between_laws(map, domain, norm), map, domain)
        return _with_run(_smallest(constants, map, domain, norm), map, domain)


@names_wrong_kinds
def deviation(map: Any, domain: Domain, norm: Norm) -> Certificate:
    """How far the value can move: |f(x') - f(x)| ≤ value for all x' near x. Often far below constant ×
    radius.

    domain: a Neighborhood or Radii around x; what `inserted`, `deleted` and `replaced` make, where the
    outputs of tokens that stay are compared; or NearbyLaws.

    Examples:
        >>> x, layer = torch.randn(5, 4, dtype=torch.float64), regard.Attention(regard.Dot())
        >>> typo = regard.one_token(x, 2, 0.1)
        >>> proved = regard.deviation(layer, typo, regard.Frobenius()).value
        >>> regard.falsify_deviation(layer, typo, regard.Frobenius()).value <= proved < 1
        True
    """
    _check_arguments(domain, norm)
    deviation_domain(domain)
    if isinstance(norm, OwnToken):
        raise ArgumentError(
            "norm",
            "is OwnToken()",
            "it is not a distance between sequences: certify() it, or use TokenMax() here",
        )
    with question():
        return _with_run(_smallest(deviations, map, domain, norm), map, domain)


def deviation_domain(domain: Domain) -> None:
    """A deviation is from a given sequence."""
    if not isinstance(domain, (Near, Edited, NearbyLaws)):
        raise ArgumentError(
            "domain",
            f"is {domain!r}",
            "a deviation is from a given sequence: give Neighborhood(points, radius), Radii(points, radii) "
            "or inserted(points, Vocabulary(words))",
        )


def _check_arguments(domain: Domain, norm: Norm) -> None:
    if not isinstance(domain, Domain):
        raise ArgumentError(
            "domain",
            f"is {domain!r}",
            "give Whole(), Ball(radius), Shell(inner, outer), Neighborhood(points, radius) or "
            "Radii(points, radii)",
        )
    if not isinstance(norm, Norm):
        raise ArgumentError(
            "norm", f"is {norm!r}", "give Frobenius(), TokenMax(), TokenSum() or Wasserstein(p)"
        )


def _smallest(quantity: Verb, map: Any, domain: Domain, norm: Norm) -> Certificate:
    key = (quantity.name, id(map), domain, norm)
    return once(key, map, lambda: _answer(quantity, map, domain, norm))


def _declared(map: Any) -> Any:
    """An attention or a map as it is, a module as its declaration."""
    if isinstance(map, (Attention, Map)):
        return map
    return once(("declared", id(map)), map, lambda: declare.one(map))


def _with_run(found: Certificate, map: Any, domain: Domain) -> Certificate:
    """A finite bound of a module, with the check that the module computes its declaration."""
    from regard.proofs.agreement import run_check  # which locates values, by certificates

    if math.isinf(found.value) or _declared(map) is map:
        return found
    ran = run_check(map, _declared(map), domain)
    others = tuple(replace(other, hypotheses=(*other.hypotheses, ran)) for other in found.others)
    return replace(found, hypotheses=(*found.hypotheses, ran), others=others)


def _between_laws(map: Any, domain: NearbyLaws, norm: Norm) -> Certificate:
    """The constant on a ball that holds all laws, or what theorems say of two laws near the given one."""
    if not isinstance(norm, Wasserstein):
        raise ArgumentError("norm", f"is {norm!r}", "laws are compared in Wasserstein(p)")
    held = _smallest(constants, map, ball_around(domain), norm)
    try:
        declared = _declared(map)
        inner = declared.map if isinstance(declared, Residual) else declared
        if not isinstance(inner, (Attention, Heads)):
            return replace(held, domain=domain)
        subject = subject_of(inner, residual=isinstance(declared, Residual))
    except Refusal as refusal:
        return replace(held, domain=domain, refused=(*held.refused, str(refusal)))
    found, refused = rungs(constants, subject, domain, norm)
    ladder = sorted([*found, replace(held, domain=domain, others=())], key=lambda rung: rung.value)
    return replace(ladder[0], others=(*ladder[1:], *held.others), refused=(*held.refused, *refused))


def _answer(quantity: Verb, map: Any, domain: Domain, norm: Norm) -> Certificate:
    try:
        declared = _declared(map)
        fit(declared, domain)
        subject = prepare(declared)
    except Refusal as refusal:
        return _none(quantity.name, domain, norm, [str(refusal)], [])
    with answering(declared):
        return smallest(quantity, subject, domain, norm)


def smallest(quantity: Verb, subject: Any, domain: Domain, norm: Norm) -> Certificate:
    """The smallest bound of a subject, with the others on its ladder."""
    key = ("smallest", quantity.name, id(subject), domain, norm)
    return once(key, subject, lambda: _best(quantity, subject, domain, norm))


def _best(quantity: Verb, subject: Any, domain: Domain, norm: Norm) -> Certificate:
    found, refused = rungs(quantity, subject, domain, norm)
    head = _only(subject)
    if head is not None:
        more, reasons = rungs(quantity, head, domain, norm)
        found, refused = found + more, refused + reasons
    best = min(found, key=lambda certificate: certificate.value, default=None)
    if best is None:
        return _none(quantity.name, domain, norm, refused, _help(quantity, subject, domain, norm, refused))
    others = tuple(other for other in found if other is not best)
    help = _help(quantity, subject, domain, norm, refused) if math.isinf(best.value) else []
    return replace(best, others=others, refused=(*best.refused, *refused, *help))


def prepare(declared: Any) -> Any:
    """What theorems are about: heads for attention, the map itself for the algebra."""
    return subject_of(declared) if isinstance(declared, (Attention, Heads)) else declared


def _only(subject: Any) -> Any:
    """The single head of a subject that has no other and no residual connection; None otherwise."""
    if not isinstance(subject, MultiHead) or len(subject.separate) > 1 or subject.residual:
        return None
    return subject.separate[0] if subject.folded is None else subject.folded[0]


def _help(quantity: Verb, subject: Any, domain: Domain, norm: Norm, refused: list[str]) -> list[str]:
    """What would help: bounded tokens, where they are not; a norm with theorems,
    where no refusal says what to do.
    """
    bounded = isinstance(domain, (Near, Ball))
    found = [] if bounded else list(remedies.one(subject))
    return (
        found
        if any(";" in sentence for sentence in (*refused, *found))
        else [*found, _elsewhere(quantity, subject, domain, norm)]
    )


NORMS = (TokenMax(), Frobenius(), TokenSum(), EntryMax(), Wasserstein(2.0))


def _elsewhere(quantity: Verb, subject: Any, domain: Domain, norm: Norm) -> str:
    """A sentence for what no theorem is about, with the norms in which there are theorems about it."""
    subjects = [subject] if _only(subject) is None else [subject, _only(subject)]
    known = [repr(other) for other in NORMS if type(other) is not type(norm) and any(
        quantity.all(type(one), type(domain), type(other)) for one in subjects
    )]  # fmt: skip
    why = (
        f"no theorem bounds the {quantity.name} of {_named(subject)} in {norm!r} on a {type(domain).__name__}"
    )
    if not known:
        return f"{why}; add a rule with Theorem.{quantity.name}({type(subject).__name__}, Domain, Norm)"
    return f"{why}; there are theorems in {' and '.join(known[:2])}"


def _named(subject: Any) -> str:
    """What a subject is, in the words of its declaration."""
    if isinstance(subject, MultiHead):
        subject = subject.separate[0]
    if isinstance(subject, Head):
        return (
            f"{type(subject.normalizer).__name__} rows of {type(subject.attention.potential).__name__} scores"
        )
    return type(subject).__name__


@remedies.rule(object)
def _nothing(subject: Any) -> tuple[str, ...]:
    return ()


def _none(quantity: str, domain: Any, norm: Norm, refused: list[str], help: list[str]) -> Certificate:
    return Certificate(math.inf, domain, norm, NO_THEOREM, refused=(*refused, *help), quantity=quantity)
