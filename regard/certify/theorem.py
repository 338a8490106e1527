"""Theorem: a statement with its source and proof, and the rules that turn it into numbers. One theorem a file, in `theorems/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from regard.certificate import Certificate, Hypothesis


class Refusal(Exception):
    """A theorem does not apply: one sentence that says why, and what would help; empty where it is not about such things at all."""


@dataclass(frozen=True)
class Bound:
    """What a theorem gives for one map on one domain."""

    value: float
    hypotheses: tuple[Hypothesis, ...] = ()
    parts: tuple[Certificate, ...] = ()
    note: str = ""
    probability: float = 1.0


Rule = Callable[..., "Bound | list[Bound]"]
AnyRule = TypeVar("AnyRule", bound=Callable[..., "Bound | list[Bound]"])


@dataclass(frozen=True)
class Theorem:
    """name: a slug. title: one line. statement: TeX. source: a key of references.bib with the place, or "" where the proof is all there is.

    proof: the proof, or where it is. hypotheses: what it needs, in words.
    """

    name: str
    title: str
    statement: str
    hypotheses: tuple[str, ...]
    proof: str
    source: str = ""
    rules: list[tuple[str, tuple[type, ...], Rule]] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.name in THEOREMS:
            raise ValueError(f"there are two theorems called {self.name}")
        THEOREMS[self.name] = self

    def constant(self, *types: type) -> Callable[[AnyRule], AnyRule]:
        """Register a rule that bounds the Lipschitz constant of a subject on a domain in a norm."""
        return self._register("constant", types)

    def deviation(self, *types: type) -> Callable[[AnyRule], AnyRule]:
        """Register a rule that bounds how far a value moves over a domain."""
        return self._register("deviation", types)

    def _register(self, quantity: str, types: tuple[type, ...]) -> Callable[[AnyRule], AnyRule]:
        def register(rule: AnyRule) -> AnyRule:
            self.rules.append((quantity, types, rule))
            return rule

        return register

    @property
    def cited(self) -> str:
        """The title with its source."""
        return f"{self.title} {self.source}".strip()

    def certificate(self, bound: Bound, domain: Any, norm: Any, quantity: str) -> Certificate:
        """The certificate that a bound by this theorem makes."""
        theorem = f"{self.cited}: {bound.note}" if bound.note else self.cited
        return Certificate(
            float(bound.value), domain, norm, theorem, bound.hypotheses, bound.parts, probability=bound.probability, quantity=quantity
        )


THEOREMS: dict[str, Theorem] = {}
"""All theorems by name, in the order in which their files load."""


def rungs(quantity: str, subject: Any, domain: Any, norm: Any) -> tuple[list[Certificate], list[str]]:
    """Every theorem that matches, as certificates, and the sentences of those that refuse."""
    found, refused = [], []
    for theorem in THEOREMS.values():
        for kind, types, rule in theorem.rules:
            if kind != quantity or not all(isinstance(a, t) for a, t in zip((subject, domain, norm), types, strict=True)):
                continue
            try:
                bounds = rule(subject, domain, norm)
                for bound in bounds if isinstance(bounds, list) else [bounds]:
                    found.append(theorem.certificate(bound, domain, norm, quantity))
            except OverflowError:  # the bound leaves the range of numbers
                found.append(theorem.certificate(Bound(math.inf), domain, norm, quantity))
            except Refusal as refusal:
                if str(refusal):
                    refused.append(f"{theorem.title}: {refusal}")
    return found, refused


def checked(statement: str) -> Hypothesis:
    """A hypothesis that was verified here."""
    return Hypothesis(statement, True)


def assumed(statement: str) -> Hypothesis:
    """A hypothesis that is taken on trust."""
    return Hypothesis(statement, False)
