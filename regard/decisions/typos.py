"""Typos of one letter, as strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from string import ascii_lowercase


def typos(word: str, letters: str = ascii_lowercase) -> list[str]:
    """Every word that is one letter away: one letter is missing, added or replaced, or two are swapped.

    The typos are in the case of the word. A word that is not of letters alone has none.

    Examples:
        >>> from regard.decisions.typos import typos
        >>> typos("It")[:4], len(typos("It"))
        (['Ait', 'At', 'Bit', 'Bt'], 129)
    """
    if not word.isalpha():
        return []
    cases: tuple[Callable[[str], str], ...] = (str.lower, str.capitalize, str.upper)
    case = next((case for case in cases if case(word) == word), None)
    found = (
        _one_letter_away(word, letters)
        if case is None
        else map(case, _one_letter_away(word.lower(), letters))
    )
    return sorted({one for one in found if one and one.lower() != word.lower()})


def _one_letter_away(word: str, letters: str) -> Iterator[str]:
    for k in range(len(word) + 1):
        yield from (word[:k] + letter + word[k:] for letter in letters)
    for k in range(len(word)):
        yield word[:k] + word[k + 1 :]
        yield from (word[:k] + letter + word[k + 1 :] for letter in letters)
        yield word[:k] + word[k + 1 : k + 2] + word[k] + word[k + 2 :]


def misspellings(text: str, spans: Sequence[tuple[int, int]]) -> dict[int, list[str]]:
    """The one-letter typos of the words of a text, by the place where each word begins.

    spans: where words begin and end. Letters are those from a to z; a word that has none of these takes the
    letters of the text.

    Examples:
        >>> from regard.decisions.typos import misspellings
        >>> {start: len(found) for start, found in misspellings("It is 1", [(0, 2), (3, 5), (6, 7)]).items()}
        {0: 129, 3: 129}
    """
    own = "".join(sorted({letter for letter in text.lower() if letter.isalpha()}))
    found = dict[int, list[str]]()
    for start, end in spans:
        word = text[start:end]
        found[start] = typos(word, ascii_lowercase if set(word.lower()) & set(ascii_lowercase) else own)
    return {start: others for start, others in found.items() if others}
