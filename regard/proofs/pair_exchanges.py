"""exchange_pairs: exchanges of two words from given lists, by bounds that prune and runs that finish."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard._check import finite
from regard._enclosed import lengths
from regard._progress import Bar
from regard.domains import Radii
from regard.errors import ArgumentError
from regard.proofs.classifier import Classifier, check_sequence, classifier
from regard.proofs.decision import beyond_rounding, margin_certificate
from regard.proofs.exchanges import outcomes
from regard.proofs.question import question

FARTHEST = 0.2
"""Sets of words that are farther apart than this part of their length are split before a bound is tried."""

SOME = 4
"""Pairs of a set at which rounding is measured."""

Exchange = dict[int, int]
"""{position: which of its embeddings}."""


@dataclass(frozen=True)
class PairExchanges:
    """What becomes of an answer under every exchange of one or two words from given lists.

    holds: whether none changes it. count: how many there are; `proved` of them by bounds on sets of them, all
    others by running them. A bound is about exact arithmetic, and counts where the label leads by more than
    twice the rounding of the model's dtype, which is measured at some pairs of the set. bounds: the number of
    sets that were tried. changed: those that change the answer, each run; lead: the least lead of the label
    among those that were run, at the exchange `worst`.

    Examples:
        >>> from regard.maps import Affine, Compose
        >>> from regard.nonexpansive import Pool
        >>> model = Compose((Pool(), Affine(torch.eye(2, dtype=torch.float64))))
        >>> x = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
        >>> other = torch.tensor([[0.9, 0.1], [0.8, 0.1]], dtype=torch.float64)
        >>> found = regard.proofs.exchange_pairs(model, x, {0: other, 1: other})
        >>> found.holds, found.count
        (True, 8)
    """

    holds: bool
    label: int
    count: int
    proved: int
    bounds: int
    lead: float
    worst: Exchange
    changed: tuple[Exchange, ...]

    def __str__(self) -> str:
        bounds = "one bound" if self.bounds == 1 else f"{self.bounds} bounds"
        some = f"{self.proved} proved by {bounds}, {self.count - self.proved} run"
        how = some if self.bounds else "all run"
        if self.holds:
            said = f"none of these {self.count} exchanges of up to two words changes the answer {self.label}"
            return f"{said}: {how}"
        said = f"{len(self.changed)} of {self.count} exchanges of up to two words change the answer"
        return f"{said} {self.label}; the worst is {self.worst}: {how}"

    __repr__ = __str__


def exchange_pairs(
    model: Any,
    x: Tensor,
    choices: Mapping[int, Tensor],
    *,
    readout: Any = None,
    batch: int = 256,
    worth: int = 3000,
) -> PairExchanges:
    """Every exchange of one or two tokens of x (n, d) for embeddings {position: (K, d)}, decided.

    A set of pairs lies in two balls; where the label leads everywhere in them, all its pairs are proved at
    once. Otherwise the wider ball is split; sets of fewer than `worth` pairs are run, as the model runs, in
    batches. worth: about how many runs a bound costs.

    Examples:
        >>> from regard.maps import Affine, Compose
        >>> from regard.nonexpansive import Pool
        >>> model = Compose((Pool(), Affine(torch.eye(2, dtype=torch.float64))))
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        >>> far = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
        >>> regard.proofs.exchange_pairs(model, x, {0: far, 1: far}).holds  # one of them changes the answer
        False
    """
    check_sequence("x", x)
    _check(x, choices, batch, worth)
    with question():
        found = classifier(model, x, readout, "exchange_pairs")
        sizes = [len(one) for one in choices.values()]
        every = sum(sizes) + sum(one * other for one, other in itertools.combinations(sizes, 2))
        with Bar(0, every, "exchange") as bar:
            search = _Search(found, x.detach().double(), batch, worth, bar)
            for place, embeddings in choices.items():
                search.run({place: embeddings.double()}, torch.arange(len(embeddings)).unsqueeze(-1))
            for first, second in itertools.combinations(sorted(choices), 2):
                search.pairs((first, choices[first].double()), (second, choices[second].double()))
    return search.found()


def _check(x: Tensor, choices: Mapping[int, Tensor], batch: int, worth: int) -> None:
    if not choices:
        raise ArgumentError("choices", "is empty", "give embeddings (K, d) for one or more positions")
    for place, one in choices.items():
        if not isinstance(one, Tensor):
            remedy = "give embeddings (K, d) as a tensor; for token numbers there is regard.substitutions"
            raise ArgumentError("choices", f"has a {type(one).__name__} at {place}", remedy)
        if not 0 <= place < len(x):
            raise ArgumentError("choices", f"has the position {place}", f"there are {len(x)} tokens")
        if one.ndim != 2 or not len(one) or one.shape[-1] != x.shape[-1]:
            found = f"has shape {list(one.shape)} at {place}"
            raise ArgumentError("choices", found, f"give embeddings (K, {x.shape[-1]})")
        finite("choices", one)
    for name, value in (("batch", batch), ("worth", worth)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(name, f"is {value!r}", "give a whole number of at least 1")


@dataclass
class _Search:
    """What is known so far."""

    classifier: Classifier
    x: Tensor
    batch: int
    worth: int
    bar: Bar
    count: int = 0
    proved: int = 0
    bounds: int = 0
    least: float = math.inf
    worst: Exchange = field(default_factory=dict)
    changed: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.label = int(self.classifier.run(self.x).argmax(-1))

    def found(self) -> PairExchanges:
        """The answer."""
        return PairExchanges(
            not self.changed,
            self.label,
            self.count,
            self.proved,
            self.bounds,
            self.least,
            self.worst,
            tuple(self.changed),
        )

    def run(self, words: Mapping[int, Tensor], chosen: Tensor) -> None:
        """Exchanges of the words at some places for those of chosen numbers (count, places), in batches."""
        for group in chosen.split(self.batch):
            leads, others = outcomes(self.classifier.run(self._exchanged(words, group)), self.label)
            for numbers, other in zip(group.tolist(), others, strict=True):
                if other:
                    self.changed.append(dict(zip(words, numbers, strict=True)))
            lowest = min(range(len(leads)), key=leads.__getitem__)
            if leads[lowest] < self.least:
                self.least = leads[lowest]
                self.worst = dict(zip(words, group[lowest].tolist(), strict=True))
            self._done(len(group))

    def _exchanged(self, words: Mapping[int, Tensor], chosen: Tensor) -> Tensor:
        """The sequences (count, n, d) with words of chosen numbers (count, places)."""
        points = self.x.repeat(len(chosen), 1, 1)
        for (place, tokens), numbers in zip(words.items(), chosen.unbind(-1), strict=True):
            points[:, place] = tokens[numbers]
        return points

    def _done(self, count: int) -> None:
        self.count += count
        self.bar.reached(self.count)

    def pairs(self, first: tuple[int, Tensor], second: tuple[int, Tensor]) -> None:
        """All pairs of two positions: sets of them are proved, split or run."""
        waiting = [(torch.arange(len(first[1])), torch.arange(len(second[1])))]
        while waiting:
            some, others = waiting.pop()
            size = len(some) * len(others)
            if size < self.worth or (len(some) == 1 and len(others) == 1):
                self.run(dict((first, second)), torch.cartesian_prod(some, others))
                continue
            sets = ((first[0], first[1][some]), (second[0], second[1][others]))
            if self._holds(sets):
                self.proved += size
                self._done(size)
            elif _width(sets[0][1]) >= _width(sets[1][1]):
                waiting += [(some[part], others) for part in _halves(sets[0][1])]
            else:
                waiting += [(some, others[part]) for part in _halves(sets[1][1])]

    def _holds(self, sets: tuple[tuple[int, Tensor], ...]) -> bool:
        """Whether the label leads for all pairs of two sets, by one bound on the balls around them."""
        points, radii = self.x.clone(), torch.zeros(len(self.x), dtype=torch.float64)
        for place, tokens in sets:
            points[place] = tokens.mean(0)
            radii[place] = lengths(tokens - points[place], 1).bound.max()
            if not float(radii[place]) <= FARTHEST * float(points[place].norm()):
                return False
        self.bounds += 1
        rounding = self._rounding(dict(sets))
        certificate, *_ = margin_certificate(self.classifier, Radii(points, radii), (self.label,), rounding)
        return beyond_rounding(certificate, rounding)

    def _rounding(self, words: Mapping[int, Tensor]) -> float:
        """The largest rounding of a logit, measured at some pairs of two sets."""
        chosen = [torch.linspace(0, len(tokens) - 1, SOME).long() for tokens in words.values()]
        return float(self.classifier.rounding(self._exchanged(words, torch.stack(chosen, -1))).max())


def _width(tokens: Tensor) -> tuple[float, int]:
    """How far they are apart, and how many they are: what is split is the larger one."""
    return float((tokens - tokens.mean(0)).norm(dim=-1).max()), len(tokens)


def _halves(tokens: Tensor) -> list[Tensor]:
    """Which are nearer to one of two that are far apart, and which to the other; none is empty."""
    one = tokens[(tokens - tokens.mean(0)).norm(dim=-1).argmax()]
    other = tokens[(tokens - one).norm(dim=-1).argmax()]
    near = (tokens - one).norm(dim=-1) <= (tokens - other).norm(dim=-1)
    if bool(near.all()):  # all are equal
        near = torch.arange(len(tokens)) < len(tokens) // 2
    return [near.nonzero().flatten(), (~near).nonzero().flatten()]
