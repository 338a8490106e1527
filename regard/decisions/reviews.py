"""Opinions in whole sentences, written for this project: a small grammar that says which are good ones.

Every sentence is one or two clauses. A negation turns a clause around, and of two clauses the one that the
sentence insists on counts. `is_kept_back` names pairs of a word and a clause that no training sentence has.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


THINGS = _words(
    "film movie book story play song meal soup hotel room service phone camera game concert ending plot "
    "music show cast garden train museum cake coffee lesson lecture house view city"
)
GOOD = _words(
    "good great wonderful warm funny brilliant lovely clever moving fresh charming excellent superb "
    "delightful honest gentle bright pleasant perfect elegant thoughtful lively splendid tasty"
)
BAD = _words(
    "bad terrible awful dull boring weak cold clumsy stale tedious poor horrible annoying empty ugly sloppy "
    "bland flat messy lifeless shallow noisy dreadful disappointing"
)
LIKED = _words("loved enjoyed adored liked admired praised")
DISLIKED = _words("hated disliked regretted resented avoided despised")
LIKE = _words("love enjoy adore like admire praise")
DISLIKE = _words("hate dislike regret resent avoid despise")
VERY = _words("very really quite truly rather so")
LABELS = ("negative", "positive")

Clause = tuple[list[str], bool, str, str]
"""Words, whether it is praise, the kind of clause, and the word that decides."""


def is_kept_back(kind: str, word: str) -> bool:
    """Whether a word in a kind of clause is for the test alone: one of eight, by a fixed hash."""
    return zlib.crc32(f"{kind} {word}".encode()) % 8 == 0


class Writer:
    """Draws sentences with their labels."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def sentence(self, test: bool) -> tuple[str, int]:
        """A sentence and its label; for the test one with a pair that training never sees."""
        while True:
            clauses, words, praise = self._sentence()
            back = [is_kept_back(kind, word) for _, _, kind, word in clauses]
            if any(back) == test:
                return " ".join(words), int(praise)

    def _sentence(self) -> tuple[list[Clause], list[str], bool]:
        first = self._clause()
        form = self.draw.randrange(8)
        if form < 3:
            return [first], self._ended(first[0]), first[1]
        second = self._clause()
        if form == 3:
            while second[1] != first[1]:
                second = self._clause()
            return [first, second], self._ended([*first[0], "and", *second[0]]), first[1]
        words = {
            4: [*first[0], "but", *second[0]],
            5: ["although", *first[0], ",", *second[0]],
            6: ["even", "if", *first[0], ",", *second[0]],
            7: [*second[0], "although", *first[0]],
        }[form]
        return [first, second], self._ended(words), second[1]

    def _ended(self, words: list[str]) -> list[str]:
        return [*words, self.draw.choice(".!")] if self.draw.random() < 0.5 else words

    def _clause(self) -> Clause:
        return self.draw.choice(self._kinds())()

    def _kinds(self) -> list[Callable[[], Clause]]:
        return [self._was, self._was_not, self._what, self._never, self._nothing, self._verb, self._did_not]

    def _adjective(self) -> tuple[str, bool]:
        praise = self.draw.random() < 0.5
        return self.draw.choice(GOOD if praise else BAD), praise

    def _very(self) -> list[str]:
        return [self.draw.choice(VERY)] if self.draw.random() < 0.4 else []

    def _thing(self) -> str:
        return self.draw.choice(THINGS)

    def _was(self) -> Clause:
        word, praise = self._adjective()
        verb = self.draw.choice(["was", "is", "seemed", "felt"])
        return ["the", self._thing(), verb, *self._very(), word], praise, "was", word

    def _was_not(self) -> Clause:
        word, praise = self._adjective()
        verb = self.draw.choice(["was", "is"])
        return ["the", self._thing(), verb, "not", *self._very(), word], not praise, "was not", word

    def _what(self) -> Clause:
        word, praise = self._adjective()
        before = self.draw.choice([["what", "a"], ["it", "was", "a"], ["they", "made", "a"]])
        return [*before, *self._very(), word, self._thing()], praise, "what", word

    def _never(self) -> Clause:
        word, praise = self._adjective()
        verb = self.draw.choice([["never", "felt"], ["was", "never"], ["was", "hardly"]])
        return ["the", self._thing(), *verb, word], not praise, "never", word

    def _nothing(self) -> Clause:
        word, praise = self._adjective()
        return ["nothing", "about", "the", self._thing(), "was", word], not praise, "nothing", word

    def _verb(self) -> Clause:
        praise = self.draw.random() < 0.5
        word = self.draw.choice(LIKED if praise else DISLIKED)
        who = self.draw.choice([["i"], ["we"], ["they"], ["everyone"], ["my", "friends"]])
        return [*who, word, "the", self._thing()], praise, "verb", word

    def _did_not(self) -> Clause:
        praise = self.draw.random() < 0.5
        word = self.draw.choice(LIKE if praise else DISLIKE)
        who = self.draw.choice([["i"], ["we"], ["they"], ["my", "friends"]])
        return [*who, "did", "not", word, "the", self._thing()], not praise, "did not", word


def sentences(count: int, seed: int, test: bool) -> Iterator[tuple[str, int]]:
    """So many sentences with their labels."""
    writer = Writer(seed)
    for _ in range(count):
        yield writer.sentence(test)
