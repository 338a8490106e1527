"""substitutions: which exchanges of words change an answer, found by running all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._kinds import names_wrong_kinds
from regard._progress import Bar
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
        change = "changes" if len(self.changed) == 1 else "change"
        said = f"{len(self.changed)} of {self.count} {change} the answer {self.label}"
        return f"{said} ({one}); the worst is {self.worst}"

    __repr__ = __str__


@names_wrong_kinds
def substitutions(
    logits: Logits,
    tokens: Tensor | Sequence[int],
    choices: Mapping[int, Sequence[int] | Tensor],
    *,
    words: int = 1,
    batch: int = 64,
) -> Substitutions:
    """Every exchange of one word, or of up to `words`, from the lists of `choices` {position: tokens}, run in
    batches: an exact answer needs no bound.

    logits: the model on token numbers (batch, n), as it runs. tokens (n,): the sentence. A token that stands
    at a position already is no exchange, and one that is listed twice counts once.

    Examples:
        >>> table = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> logits = lambda tokens: table[tokens].mean(1)
        >>> regard.substitutions(logits, torch.tensor([0, 0]), {1: [1, 2]}).holds
        True
    """
    sentence = _tokens(tokens)
    lists = _choices(choices, sentence)
    for name, value in (("words", words), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(name, f"is {value!r}", "give a whole number of at least 1")
    words = min(words, len(lists))
    with torch.no_grad():
        label = _label(logits, sentence)
        count = 0
        changed: list[dict[int, int]] = []
        worst: tuple[float, dict[int, int]] = (math.inf, {})
        with Bar(0, _how_many(lists, words), "exchange") as bar:
            for group in _batches(_exchanges(lists, words), batch):
                count += len(group)
                leads, others = outcomes(_logits(logits, _exchanged(sentence, group)), label)
                pairs = sorted(zip(leads, others, group, strict=True), key=lambda one: one[0])
                changed += [exchange for _, other, exchange in pairs if other]
                worst = min(worst, (pairs[0][0], pairs[0][2]), key=lambda pair: pair[0])
                bar.reached(count)
    return Substitutions(not changed, label, words, count, worst[0], worst[1], tuple(changed))


def outcomes(logits: Tensor, label: int) -> tuple[list[float], list[bool]]:
    """By how much the label leads in each row (batch, classes), and whether the answer is another: in a tie
    it is the class that comes first, and a row with NaN has none, so its lead is minus infinity.
    """
    leads = lead(logits.double(), (label,))
    broken = leads.isnan()
    others = (logits.argmax(-1) != label) | broken
    return torch.where(broken, -math.inf, leads).tolist(), others.tolist()


def _label(logits: Logits, sentence: Tensor) -> int:
    """The answer for the sentence itself, which must be the same each time."""
    once, again = (_logits(logits, sentence.unsqueeze(0))[0] for _ in range(2))
    if bool(once.isnan().any()):
        raise ArgumentError("logits", "gives NaN for the sentence itself", "repair the model first")
    if not torch.equal(once, again):
        found = "gives something else for the same sentence the second time"
        raise ArgumentError("logits", found, "call model.eval(), so that nothing is dropped at random")
    return int(once.argmax())


def _logits(logits: Logits, sentences: Tensor) -> Tensor:
    """Of as many sentences as were asked about, between two classes or more."""
    try:
        found = logits(sentences)
    except IndexError as error:
        known = f"the model fails on tokens from {int(sentences.min())} to {int(sentences.max())}: {error}"
        raise ArgumentError("choices", known, "give tokens of its vocabulary") from error
    if found.ndim != 2 or len(found) != len(sentences) or found.shape[-1] < 2:
        shape = f"gives shape {list(found.shape)} for {len(sentences)} sentences"
        raise ArgumentError(
            "logits", shape, "give a function to logits (batch, classes), two classes or more"
        )
    return found


def _tokens(tokens: Tensor | Sequence[int]) -> Tensor:
    """Token numbers of one sentence."""
    try:
        found = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError("tokens", f"is {tokens!r}", "give token numbers (n,)") from None
    if found.ndim != 1 or found.dtype.is_floating_point or not len(found):
        shape = f"is {found.dtype} of shape {list(found.shape)}"
        raise ArgumentError("tokens", shape, "give token numbers (n,)")
    return found


def _choices(given: Mapping[int, Sequence[int] | Tensor], sentence: Tensor) -> dict[int, list[int]]:
    """Other tokens than those that are there, each once."""
    lists = {place: one.tolist() if isinstance(one, Tensor) else list(one) for place, one in given.items()}
    if not lists or not all(lists.values()):
        raise ArgumentError("choices", f"is {lists!r}", "give one or more tokens for each position")
    wrong = [place for place in lists if not 0 <= place < len(sentence)]
    if wrong:
        raise ArgumentError("choices", f"has the positions {wrong}", f"there are {len(sentence)} tokens")
    every = [one for some in lists.values() for one in some]
    odd = [one for one in every if isinstance(one, bool) or not isinstance(one, int)]
    if odd:
        raise ArgumentError("choices", f"has {odd[0]!r} among its tokens", "give token numbers")
    found = dict[int, list[int]]()
    for place, some in lists.items():
        if others := [one for one in dict.fromkeys(some) if one != int(sentence[place])]:
            found[place] = others
    if not found:
        raise ArgumentError("choices", "has nothing but the tokens that are there", "give others")
    return found


def _exchanges(choices: Mapping[int, list[int]], words: int) -> Iterator[dict[int, int]]:
    for size in range(1, words + 1):
        for positions in itertools.combinations(sorted(choices), size):
            for chosen in itertools.product(*(choices[position] for position in positions)):
                yield dict(zip(positions, chosen, strict=True))


def _how_many(choices: Mapping[int, list[int]], words: int) -> int:
    """All exchanges: elementary symmetric polynomials of the lengths of lists."""
    sums = [1] + [0] * words
    for some in choices.values():
        sums = [sums[0], *(sums[k] + sums[k - 1] * len(some) for k in range(1, words + 1))]
    return sum(sums[1:])


def _batches(items: Iterator[dict[int, int]], size: int) -> Iterator[list[dict[int, int]]]:
    while group := list(itertools.islice(items, size)):
        yield group


def _exchanged(tokens: Tensor, group: list[dict[int, int]]) -> Tensor:
    found = tokens.repeat(len(group), 1)
    for row, exchange in zip(found, group, strict=True):
        for position, token in exchange.items():
            row[position] = token
    return found
