"""Theorem: a statement with its source and proof, and the rules that turn it into numbers.

One theorem a file, in `theorems/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from regard._upper import Upper
from regard._verb import Verb
from regard.certificate import Certificate, Hypothesis
from regard.proofs.question import asked_by_theorem, once, parts

constants = Verb("constant")
"""constants.all(types of subject, domain, norm): the rules that bound how much a change is amplified."""

deviations = Verb("deviation")
"""deviations.all(types of subject, domain, norm):
the rules that bound how far a value moves from a given one.
"""


class Refusal(Exception):
    """A theorem does not apply: one sentence that says why, and after a semicolon what would help.

    It is for what the theorem is about. What it is not about never reaches it: types, and `about`, say so
    before.

    Examples:
        >>> from regard.proofs import Refusal
        >>> raise Refusal("rows are not laws; use Softmax()")  # in a rule of a theorem
        Traceback (most recent call last):
            ...
        regard.proofs.theorem.Refusal: rows are not laws; use Softmax()
    """

    def __init__(self, sentence: str) -> None:
        if not isinstance(sentence, str) or not sentence.strip():
            raise ValueError(
                "a Refusal needs a sentence that says why; where a theorem is not "
                "about something, say so with about="
            )
        super().__init__(sentence)


@dataclass(frozen=True)
class Bound:
    """What a theorem gives for one map on one domain.

    The value is an `Upper`: a plain float does not say that its rounding is paid for. An infinite one is a
    claim only with `unbounded`: the theorem proves that no number holds. Without it, it is a number that left
    the range of numbers, and counts as refused.

    Examples:
        >>> from regard.theorems import Bound, exact
        >>> float(Bound(exact(2.0)).value.bound)
        2.0
    """

    value: Upper
    hypotheses: tuple[Hypothesis, ...] = ()
    parts: tuple[Certificate, ...] = ()
    note: str = ""
    probability: float = 1.0
    unbounded: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.value, Upper):
            raise TypeError(
                f"a Bound of a {type(self.value).__name__}: give an Upper, by exact(…) for a number that is "
                "exact or Upper(…) for one that is certainly large enough"
            )


Rule = Callable[..., "Bound | list[Bound]"]
AnyRule = TypeVar("AnyRule", bound=Callable[..., "Bound | list[Bound]"])
About = Callable[[Any, Any, Any], bool]
"""about(subject, domain, norm): whether a rule is about this, where the types of the three cannot say it."""
Floor = Callable[[Any, Any, Any], float]
"""floor(subject, domain, norm): what the bound of a rule is not below, known without asking for it."""


@dataclass(frozen=True)
class Claim:
    """A rule of a theorem as it is registered in `constants` or `deviations`."""

    theorem: Theorem
    rule: Rule
    about: About | None
    floor: Floor | None = None

    def __call__(self, subject: Any, domain: Any, norm: Any) -> list[Bound]:
        """The bounds by this rule; none where it is about other things."""
        if self.about is not None and not self.about(subject, domain, norm):
            return []
        with parts():
            found = self.rule(subject, domain, norm)
        return found if isinstance(found, list) else [found]

    def least(self, subject: Any, domain: Any, norm: Any) -> float:
        """What no bound by this rule is below: its floor, or what it gives; 0 where a floor is not known."""
        if self.about is not None and not self.about(subject, domain, norm):
            return math.inf
        try:
            if self.floor is not None:
                return self.floor(subject, domain, norm)
            return min((float(bound.value) for bound in self(subject, domain, norm)), default=math.inf)
        except (Refusal, OverflowError, torch.linalg.LinAlgError):
            return math.inf if self.floor is None else 0.0


@dataclass(frozen=True)
class Theorem:
    """name: a slug. title: one line. statement: TeX. source: a key of references.bib with the place, or ""
    where the proof is all there is.

    proof: the proof, or where it is. hypotheses: what it needs, in words.

    Examples:
        >>> theorem = regard.theorems.THEOREMS["ball_constant"]
        >>> theorem.title, len(theorem.proof) > 100
        ('softmax attention near a given input', True)
    """

    name: str
    title: str
    statement: str
    hypotheses: tuple[str, ...]
    proof: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.name in THEOREMS:
            raise ValueError(f"there are two theorems called {self.name}")
        THEOREMS[self.name] = self

    def constant(
        self, *types: type, about: About | None = None, floor: Floor | None = None
    ) -> Callable[[AnyRule], AnyRule]:
        """Register a rule that bounds the Lipschitz constant of a subject on a domain in a norm."""
        return self._register(constants, types, about, floor)

    def deviation(
        self, *types: type, about: About | None = None, floor: Floor | None = None
    ) -> Callable[[AnyRule], AnyRule]:
        """Register a rule that bounds how far a value moves over a domain."""
        return self._register(deviations, types, about, floor)

    def _register(
        self, quantity: Verb, types: tuple[type, ...], about: About | None, floor: Floor | None
    ) -> Callable[[AnyRule], AnyRule]:
        if len(types) != 3:
            raise TypeError(
                f"a rule of {self.name} takes the types of a subject, a domain and a norm, found {types!r}"
            )

        def register(rule: AnyRule) -> AnyRule:
            quantity.another(*types)(Claim(self, rule, about, floor))
            return rule

        return register

    @property
    def rules(self) -> tuple[tuple[str, tuple[type, ...], Rule], ...]:
        """What is bounded, the types it is bounded for, and the rule, for each rule of this theorem."""
        return tuple(
            (quantity.name, types, claim.rule)
            for quantity in (constants, deviations)
            for types, claim in quantity.rules
            if isinstance(claim, Claim) and claim.theorem is self
        )

    @property
    def cited(self) -> str:
        """The title with its source."""
        return f"{self.title} {self.source}".strip()

    def certificate(self, bound: Bound, domain: Any, norm: Any, quantity: str) -> Certificate:
        """The certificate that a bound by this theorem makes."""
        theorem = f"{self.cited}: {bound.note}" if bound.note else self.cited
        return Certificate(
            float(bound.value),
            domain,
            norm,
            theorem,
            bound.hypotheses,
            bound.parts,
            probability=bound.probability,
            quantity=quantity,
        )


THEOREMS: dict[str, Theorem] = {}
"""All theorems by name, in the order in which their files load.

Examples:
    >>> from regard.theorems import THEOREMS
    >>> THEOREMS["composition"].title, len(THEOREMS) > 30
    ('composition', True)
"""

NO_THEOREM = "no theorem"
"""What a certificate says in place of a theorem where nothing is claimed."""
OUT_OF_RANGE = "the bound leaves the range of numbers; use a smaller domain or smaller weights"


def rungs(quantity: Verb, subject: Any, domain: Any, norm: Any) -> tuple[list[Certificate], list[str]]:
    """Every theorem that matches, as certificates, and the sentences of those that refuse.

    Where a theorem asks, only those that may be the smallest: what is known to be above another is left out.
    """
    found: list[Certificate] = []
    refused: list[str] = []
    least = math.inf
    for claim in _in_order(quantity.all(type(subject), type(domain), type(norm))):
        if claim.floor and found and asked_by_theorem() and claim.least(subject, domain, norm) >= least:
            continue
        theorem = claim.theorem
        try:
            for bound in claim(subject, domain, norm):
                if 0 <= float(bound.value) < math.inf or bound.unbounded:
                    found.append(theorem.certificate(bound, domain, norm, quantity.name))
                    least = min(least, found[-1].value)
                else:
                    refused.append(f"{theorem.title}: {OUT_OF_RANGE}")
        except (OverflowError, torch.linalg.LinAlgError):  # eigenvalues of what is not finite
            refused.append(f"{theorem.title}: {OUT_OF_RANGE}")
        except Refusal as refusal:
            refused.append(f"{theorem.title}: {refusal}")
    return found, list(dict.fromkeys(refused))


def least_of(quantity: Verb, subject: Any, domain: Any, norm: Any) -> float:
    """What no theorem gives less than, as far as that is known without asking those that have floors."""
    claims = quantity.all(type(subject), type(domain), type(norm))
    key = ("least", quantity.name, id(subject), domain, norm)
    return once(key, subject, lambda: min(claim.least(subject, domain, norm) for claim in _in_order(claims)))


def _in_order(claims: list[Any]) -> list[Claim]:
    """As they were registered; where a theorem asks, those that can be left out come last."""
    return sorted(claims, key=lambda claim: asked_by_theorem() and claim.floor is not None)


def finite(part: Certificate, what: str) -> Certificate:
    """A part that a bound is made of, or a refusal that says why `what` has none."""
    if math.isfinite(part.value):
        return part
    proved = [part.theorem] if part.theorem != NO_THEOREM else []
    raise Refusal(f"{what} has no finite bound on {part.domain}: {'. '.join([*proved, *part.refused][:2])}")


def checked(statement: str) -> Hypothesis:
    """A hypothesis that was verified here."""
    return Hypothesis(statement, True)


def assumed(statement: str) -> Hypothesis:
    """A hypothesis that is taken on trust."""
    return Hypothesis(statement, False)
