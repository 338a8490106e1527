"""Changes of a text, one unit at a time: a typo, a replacement, a deletion.

A unit is a word, or a token where a text has no words (residues, atoms, characters without spaces).
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from regard.errors import ArgumentError

WORD_LENGTHS = (2, 20)
"""Mean lengths of what stands between spaces for which a text is made of words."""
WIDE = 4
"""A Chinese character counts as so many letters."""
TRIES = 2000
"""How many entries of the vocabulary are tried on either side of a unit's own."""


@dataclass(frozen=True)
class Unit:
    """A word or a token of a text: where it is, and the tokens it became."""

    start: int
    end: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """A text as its tokenizer reads it.

    kind: what its units are, "word" or "token"; longest: how many tokens the model takes.
    """

    text: str
    tokenizer: Any
    kind: str
    units: tuple[Unit, ...]
    longest: int

    @classmethod
    def of(cls, text: str, tokenizer: Any, longest: int) -> Reading:
        """The units of a text; none where the tokenizer does not report which token is from where."""
        kind = "word" if has_words(text) else "token"
        if not getattr(tokenizer, "is_fast", False):
            return cls(text, tokenizer, kind, (), longest)
        spans = tokenizer(text, return_offsets_mapping=True, **_cut(longest))["offset_mapping"]
        places = _words(text) if kind == "word" else _pieces(spans, text)
        units = (Unit(start, end, _tokens_within(spans, start, end)) for start, end in places)
        return cls(text, tokenizer, kind, tuple(unit for unit in units if unit.tokens), longest)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, cut to what the model takes."""
        return list(self.tokenizer(text, verbose=False, **_cut(self.longest))["input_ids"])

    def knows(self, other: str) -> bool:
        """Whether another text has no more unknown tokens than this one."""
        unknown: Any = getattr(self.tokenizer, "unk_token_id", None)
        return unknown is None or self.ids(other).count(unknown) <= self.ids(self.text).count(unknown)

    def letters(self, unit: Unit) -> str:
        """The text of a unit."""
        return self.text[unit.start : unit.end]

    def written(self, unit: Unit, other: str) -> str:
        """The text with other letters in place of a unit."""
        return self.text[: unit.start] + other + self.text[unit.end :]


def has_words(text: str) -> bool:
    """Whether spaces separate words: pieces longer than single letters and shorter than sequences."""
    pieces = text.split()
    least, most = WORD_LENGTHS
    return len(pieces) > 1 and least <= sum(map(_letters, text)) / len(pieces) <= most


def _letters(character: str) -> int:
    """How many letters a character counts as."""
    return 0 if character.isspace() else WIDE if unicodedata.east_asian_width(character) in "WF" else 1


def typo(reading: Reading, unit: Unit) -> str | None:
    """Two neighboring letters change places, in the middle of the unit if they differ there; those of a unit
    of one letter are it and the next one. Where a text has no words, no typo adds an unknown token.
    """
    text, middle = reading.text, (unit.start + unit.end) // 2
    inside = sorted(range(unit.start, unit.end - 1), key=lambda at: abs(at - middle))
    for at in [*inside, unit.end - 1]:
        pair = text[at : at + 2]
        if len(pair) == 2 and pair.replace("_", "a").isalnum() and pair[0] != pair[1]:
            other = text[:at] + pair[::-1] + text[at + 2 :]
            if reading.kind == "word" or reading.knows(other):
                return other
    return None


def replacement(reading: Reading, unit: Unit) -> str | None:
    """Another unit stands there: one of the same text that looks like it, or else the entry of the vocabulary
    nearest to it that does, since vocabularies are sorted by frequency. No replacement adds an unknown token.
    """
    unknown: Any = getattr(reading.tokenizer, "unk_token_id", None)
    ids, own = reading.ids(reading.text), reading.letters(unit)
    rest = [number for place, number in enumerate(ids) if place not in unit.tokens]
    for candidate in _candidates(reading, unit, ids[unit.tokens[0]]):
        other = _in_case_of(own, candidate)
        if other.casefold() == own.casefold() or not _look_alike(own, other):
            continue
        try:
            changed = reading.ids(reading.written(unit, other))
        except ArgumentError:  # the alphabet of a training lacks a letter
            continue
        if changed.count(unknown) <= rest.count(unknown):
            return reading.written(unit, other)
    return None


def deletion(reading: Reading, unit: Unit) -> str | None:
    """The unit is omitted."""
    shorter = (reading.text[: unit.start].rstrip() + reading.text[unit.end :]).strip()
    return shorter or None


CHANGES: dict[str, Callable[[Reading, Unit], str | None]] = {
    "typo": typo,
    "replacement": replacement,
    "deletion": deletion,
}


def _cut(longest: int) -> dict[str, Any]:
    return {"truncation": True, "max_length": longest}


def _words(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\w+", text)]


def _pieces(spans: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Where tokens are, without the spaces around them; a character of several tokens once."""
    found = []
    for start, end in dict.fromkeys((start, end) for start, end in spans if text[start:end].strip()):
        piece = text[start:end]
        found.append((end - len(piece.lstrip()), start + len(piece.rstrip())))
    return found


def _tokens_within(spans: list[tuple[int, int]], start: int, end: int) -> tuple[int, ...]:
    return tuple(i for i, (a, b) in enumerate(spans) if a < b and a < end and b > start)


def _candidates(reading: Reading, unit: Unit, first: int) -> Iterator[str]:
    """Units of the text, from half a text away on, and entries of the vocabulary around the unit's first."""
    middle = reading.units.index(unit) + len(reading.units) // 2
    for other in (*reading.units[middle:], *reading.units, *reading.units[:middle]):
        yield reading.letters(other)
    tokenizer = reading.tokenizer
    special, size = set(tokenizer.all_special_ids), len(tokenizer)
    for distance in range(1, TRIES + 1):
        for number in (first - distance, first + distance):
            if 0 <= number < size and number not in special:
                tokens = tokenizer.convert_ids_to_tokens([number])
                if isinstance(tokens[0], str):  # vocabularies may have gaps
                    yield tokenizer.convert_tokens_to_string(tokens).strip()


def _in_case_of(own: str, other: str) -> str:
    """Other letters in upper case where the unit is, and in lower case where it is."""
    if own.istitle():
        return other.capitalize()
    return other.upper() if own.isupper() else other.lower() if own.islower() else other


def _look_alike(own: str, other: str) -> bool:
    """Whether both are letters, numbers or the same signs, of about the same length."""
    short, long = sorted((len(own), len(other)))
    return _shape(own) == _shape(other) and long <= 2 * short


def _shape(text: str) -> str:
    """Kinds of characters in their order; several of one kind are one."""
    return "".join(kind for kind, _ in itertools.groupby(map(_kind, text)))


def _kind(character: str) -> str:
    """A letter with or without case, a digit, or the character itself."""
    if character.isalpha():
        return "a" if character.isupper() or character.islower() else "o"
    return "0" if character.isdecimal() else character
