"""Sentences of a report: what is said, and every number and name in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from regard.certificate import round_up


class Proved(float):
    """A number with a certificate: printed rounded up, so that it stays true."""


@dataclass(frozen=True)
class Sentence:
    """A text; numbers: those that are in it, by what they are; names: the modules, tokens and columns in
    it.
    """

    text: str
    numbers: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Sentence) -> Sentence:
        text = f"{self.text} {other.text}".strip()
        return Sentence(text, {**self.numbers, **other.numbers}, {**self.names, **other.names})

    @property
    def facts(self) -> dict[str, dict[str, float] | dict[str, str]]:
        """What is checked about it."""
        return {"numbers": self.numbers, "names": self.names}


def say(template: str, **facts: float | str) -> Sentence:
    """A sentence from a template without numbers of its own: numbers are printed as people write them, and
    kept as they are.
    """
    shown = {name: _written(value) for name, value in facts.items()}
    numbers = {name: value for name, value in facts.items() if not isinstance(value, str)}
    names = {name: value for name, value in facts.items() if isinstance(value, str)}
    return Sentence(template.format(**shown), numbers, names)


def joined(parts: list[Sentence], between: str) -> Sentence:
    """Several parts as one sentence; numbers and names of the later ones are counted."""
    numbers = {f"{key} {place}": v for place, part in enumerate(parts) for key, v in part.numbers.items()}
    names = {f"{key} {place}": v for place, part in enumerate(parts) for key, v in part.names.items()}
    return Sentence(between.join(part.text for part in parts), numbers, names)


def inputs_named(inputs: Sequence[int]) -> Sentence:
    """Inputs by their numbers: input 1; inputs 1, 2 and 4."""
    named = joined([say("{input}", input=place + 1) for place in inputs], ", ")
    text = " and ".join(named.text.rsplit(", ", 1))
    return Sentence(f"{counted(len(inputs), 'input')} {text}", named.numbers)


def _written(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Proved):
        return round_up(value)
    return f"{value:,}" if isinstance(value, int) else in_words(value)


def in_words(value: float) -> str:
    """A number in a sentence: three digits, and no exponent where people would not write one."""
    if math.isnan(value):
        return "a number that was not measured"
    if math.isinf(value):
        return "infinity" if value > 0 else "minus infinity"
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """A noun in the number that a count asks for, without the count."""
    return noun if count == 1 else f"{noun}s"
