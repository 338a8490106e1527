"""substitutions: which exchanges of words change an answer, found by running all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.proofs.decision_attack import lead

Logits = Callable[[Tensor], Tensor]
"""Token numbers (batch, n) to logits (batch, classes)."""


@dataclass(frozen=True)
class Substitutions:
    """What became of an answer under every exchange of at most `words` words from given lists.

    holds: whether no exchange changes it. count: how many there are; every one was run, so the answer
    is exact for the model as it runs. worst: the exchange {position: token} with the least lead of the label,
    which is `lead`. changed: those that change the answer.

    Examples:
        >>> table = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> logits = lambda ids: table[ids].mean(1)
        >>> found = regard.substitutions(logits, torch.tensor([0, 0]), {0: [1], 1: [1]}, words=2)
        >>> found.holds, found.count, found.worst
        (True, 3, {0: 1, 1: 1})
    """

    holds: bool
    label: int
    words: int
    count: int
    lead: float
    worst: dict[int, int]
    changed: tuple[dict[int, int], ...]

    def __str__(self) -> str:
        one = "exchange of one word" if self.words == 1 else f"exchange of up to {self.words} words"
        if self.holds:
            said = f"none of {self.count} changes the answer {self.label}"
            return f"{said} ({one}); its least lead is {self.lead:.5g}"
        said = f"{len(self.changed)} of {self.count} change the answer {self.label}"
        return f"{said} ({one}); the worst is {self.worst}"

    __repr__ = __str__


def substitutions(
    logits: Logits, tokens: Tensor, choices: Mapping[int, list[int]], *, words: int = 1, batch: int = 64
) -> Substitutions:
    """Every exchange of one word, or of up to `words`, from the lists of `choices` {position: tokens}, run in
    batches: an exact answer needs no bound.

    logits: the model on token numbers (batch, n), as it runs. tokens (n,): the sentence.

    Examples:
        >>> table = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> logits = lambda tokens: table[tokens].mean(1)
        >>> regard.substitutions(logits, torch.tensor([0, 0]), {1: [1, 2]}).holds
        True
    """
    _check(tokens, choices, words, batch)
    with torch.no_grad():
        label = int(_checked(logits(tokens.unsqueeze(0)), 1)[0].argmax())
        count = 0
        changed: list[dict[int, int]] = []
        worst: tuple[float, dict[int, int]] = (math.inf, {})
        for group in _batches(_exchanges(choices, words), batch):
            count += len(group)
            leads, others = outcomes(_checked(logits(_exchanged(tokens, group)), len(group)), label)
            pairs = sorted(zip(leads, others, group, strict=True), key=lambda one: one[0])
            changed += [exchange for _, other, exchange in pairs if other]
            worst = min(worst, (pairs[0][0], pairs[0][2]), key=lambda pair: pair[0])
    return Substitutions(not changed, label, words, count, worst[0], worst[1], tuple(changed))


def outcomes(logits: Tensor, label: int) -> tuple[list[float], list[bool]]:
    """By how much the label leads in each row (batch, classes), and whether the answer is another: in a tie
    it is the class that comes first, and a row with NaN has none, so its lead is minus infinity.
    """
    leads = lead(logits.double(), (label,))
    broken = leads.isnan()
    others = (logits.argmax(-1) != label) | broken
    return torch.where(broken, -math.inf, leads).tolist(), others.tolist()


def _checked(found: Tensor, batch: int) -> Tensor:
    """Logits of as many sentences as were asked about, between two classes or more."""
    if found.ndim != 2 or len(found) != batch or found.shape[-1] < 2:
        shape = f"gives shape {list(found.shape)} for {batch} sentences"
        raise ArgumentError(
            "logits", shape, "give a function to logits (batch, classes), two classes or more"
        )
    return found


def _check(tokens: Tensor, choices: Mapping[int, list[int]], words: int, batch: int) -> None:
    if tokens.ndim != 1 or tokens.dtype.is_floating_point or not len(tokens):
        found = f"is {tokens.dtype} of shape {list(tokens.shape)}"
        raise ArgumentError("tokens", found, "give token numbers (n,)")
    if not choices or not all(choices.values()):
        raise ArgumentError("choices", f"is {dict(choices)!r}", "give one or more tokens for each position")
    wrong = [position for position in choices if not 0 <= position < len(tokens)]
    if wrong:
        raise ArgumentError("choices", f"has the positions {wrong}", f"there are {len(tokens)} tokens")
    for name, value in (("words", words), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(name, f"is {value!r}", "give a whole number of at least 1")


def _exchanges(choices: Mapping[int, list[int]], words: int) -> Iterator[dict[int, int]]:
    for size in range(1, min(words, len(choices)) + 1):
        for positions in itertools.combinations(sorted(choices), size):
            for chosen in itertools.product(*(choices[position] for position in positions)):
                yield dict(zip(positions, chosen, strict=True))


def _batches(items: Iterator[dict[int, int]], size: int) -> Iterator[list[dict[int, int]]]:
    while group := list(itertools.islice(items, size)):
        yield group


def _exchanged(tokens: Tensor, group: list[dict[int, int]]) -> Tensor:
    found = tokens.repeat(len(group), 1)
    for row, exchange in zip(found, group, strict=True):
        for position, token in exchange.items():
            row[position] = token
    return found
