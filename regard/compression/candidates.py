"""Cheaper ways to attend to a context: what is kept of the keys, and the rows that follow from it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._object import Object
from regard._upper import Upper, exact
from regard.compression.expectation import clustered
from regard.domains import Ball
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.normalizers import FeatureMap, PositiveRandom
from regard.normalizers.linear import FeatureKernel
from regard.potentials import Bilinear, Dot
from regard.proofs.cells import Cells
from regard.proofs.key_form import key_form
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal

BLOCK = 64
"""Keys that share the steps of their quantized channels."""
LOWEST = -1e30
"""A logarithm that is left of features that vanish."""


@dataclass(frozen=True)
class Beside:
    """Keys that stay as they are, beside a context: logits (m, t) of each query, -inf where it does not see
    one, and values (t, e).
    """

    logits: Tensor
    values: Tensor

    def of(self, rows: Tensor) -> Beside:
        """The same for some of the queries."""
        return Beside(self.logits[rows], self.values)


@dataclass(frozen=True)
class Fitted:
    """One head, made cheaper. logits(queries) (m, k): scores of what is kept, with values (k, e); None where
    rows are no softmax, and `direct` gives outputs (m, e). spread: a law of what is kept, as one of the keys.
    faithful: whether exponentials of the logits stand for those of scores. numbers: how many numbers are kept
    in the dtype of the context; codes: bits of what is kept in fewer bits, in addition; work: multiplications
    for one query; value_error: upper bound on the distance of a kept value from the true one.
    """

    logits: Callable[[Tensor], Tensor] | None
    values: Tensor
    numbers: float
    work: float
    spread: Callable[[Tensor], Tensor] = lambda law: law
    direct: Callable[[Tensor], Tensor] | None = None
    faithful: bool = True
    value_error: Upper = field(default_factory=lambda: exact(0.0))
    codes: float = 0.0

    def memory(self, bits: int) -> float:
        """Bits that are kept, where a number of the context has `bits` of them."""
        return bits * self.numbers + self.codes

    def outputs(self, queries: Tensor, beside: Beside | None = None) -> Tensor:
        """(m, e)."""
        if self.direct is not None:
            if beside is not None:
                raise Refusal(
                    "its rows are not a softmax, and keys that only some queries see have no place in them"
                )
            return self.direct(queries)
        values = self.values if beside is None else torch.cat([self.values, beside.values])
        return self._law(queries, beside) @ values

    def rows(self, queries: Tensor, beside: Beside | None = None) -> Tensor | None:
        """The law on the keys, and on those beside them, that stands for softmax; None without one."""
        if self.logits is None:
            return None
        law = self._law(queries, beside)
        kept = len(self.values)
        return torch.cat([self.spread(law[:, :kept]), law[:, kept:]], -1)

    def _law(self, queries: Tensor, beside: Beside | None) -> Tensor:
        assert self.logits is not None
        logits = self.logits(queries)
        if beside is not None and not self.faithful:
            raise Refusal("its features replace exp: they cannot be summed with keys that stay as they are")
        return (logits if beside is None else torch.cat([logits, beside.logits], -1)).softmax(-1)


class Candidate(Object):
    """A cheaper attention. Abstract.

    Examples:
        >>> from regard.compression import Candidate, Recent, TopK, cheaper
        >>> isinstance(TopK(8), Candidate)
        True
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 2, dtype=torch.float64)
        >>> [choice.candidate for choice in cheaper(layer, tokens, candidates=(Recent(8), TopK(8))).choices]
        [Recent(size=8), TopK(size=8)]
    """

    @abstractmethod
    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        """What it keeps of the keys, for queries like these; a Refusal where it cannot."""


@dataclass(frozen=True, eq=False, repr=False)
class Recent(Candidate):
    """The last keys and no others: a window.

    Examples:
        >>> from regard.compression import Recent, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 2, dtype=torch.float64)
        >>> all_of_them, half = cheaper(layer, tokens, candidates=(Recent(60), Recent(30))).choices
        >>> all_of_them.error < 1e-12 < half.error
        True
    """

    size: int

    def __post_init__(self) -> None:
        _positive("size", self.size)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        mask = torch.arange(keys.size) < keys.size - self.size

        def logits(x: Tensor) -> Tensor:
            return _scores(head, x, keys).masked_fill(mask, -math.inf)

        kept = min(self.size, keys.size) * _width(head, keys)
        return Fitted(logits, _values(head, keys), kept, kept)


@dataclass(frozen=True, eq=False, repr=False)
class TopK(Candidate):
    """The keys with the largest scores of each query: all are kept, and few values are read.

    Examples:
        >>> from regard.compression import TopK, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot(scale=20.0)), torch.randn(60, 2, dtype=torch.float64)
        >>> (choice,) = cheaper(layer, tokens, candidates=(TopK(20),)).choices
        >>> choice.error < 0.01  # sharp rows need few keys
        True
    """

    size: int

    def __post_init__(self) -> None:
        _positive("size", self.size)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        count, size = keys.size, min(self.size, keys.size)
        narrow, wide = _widths(head, keys)

        def logits(x: Tensor) -> Tensor:
            return _largest(_scores(head, x, keys), size)

        return Fitted(logits, _values(head, keys), count * (narrow + wide), count * narrow + size * wide)


@dataclass(frozen=True, eq=False, repr=False)
class Merged(Candidate):
    """Atoms that are tangent to groups of keys, as `compress` makes them.

    Examples:
        >>> from regard.compression import Merged, Recent, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(90, 2, dtype=torch.float64)
        >>> merged, recent = cheaper(layer, tokens, candidates=(Merged(20), Recent(20))).choices
        >>> merged.error < recent.error
        True
    """

    size: int

    def __post_init__(self) -> None:
        _positive("size", self.size)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        form = key_form(head, keys.dimension, Ball(1.0))
        labels, anchors = clustered(head, form, keys, queries, min(self.size, keys.size))
        cells = Cells(head, form, keys, labels, anchors)

        atoms, logs = Measure(cells.means), cells.log_atoms  # a measure would forget their mass

        def logits(x: Tensor) -> Tensor:
            return _scores(head, x, atoms) + logs

        def spread(law: Tensor) -> Tensor:
            return law[:, labels] * cells.masses

        kept = cells.count * (_width(head, keys) + 1)
        return Fitted(logits, _values(head, atoms), kept, kept, spread)


@dataclass(frozen=True, eq=False, repr=False)
class Features(Candidate):
    """Linear attention: sums over keys of features and values, whatever their number.

    Examples:
        >>> from regard.compression import Features, cheaper
        >>> random = regard.normalizers.PositiveRandom.draw(2, 64, 0, torch.float64)
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 2, dtype=torch.float64)
        >>> (choice,) = cheaper(layer, tokens, candidates=(Features(random),)).choices
        >>> 0 < choice.error < 1
        True
    """

    feature_map: FeatureMap

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        cheap = FeatureKernel(head.potential, self.feature_map)
        count = self.feature_map.log_features(_key_features(head, keys)[:1]).shape[-1]
        kept = count * (_widths(head, keys)[1] + 1)

        def logits(x: Tensor) -> Tensor:
            found = cheap.scores(x, keys.points, torch.arange(len(x)), keys.positions())
            return (found if keys.log_weights is None else found + keys.log_weights).clamp_min(LOWEST)

        work = kept + count * _widths(head, keys)[0]
        faithful = isinstance(self.feature_map, PositiveRandom)
        return Fitted(logits, _values(head, keys), kept, work, faithful=faithful)


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Candidate):
    """Keys in the few directions in which scores of the queries vary most.

    Examples:
        >>> from regard.compression import LowRank, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 3, dtype=torch.float64)
        >>> whole, part = cheaper(layer, tokens, candidates=(LowRank(3), LowRank(1))).choices
        >>> whole.error < 1e-9 < part.error  # three directions are all there are
        True
    """

    rank: int

    def __post_init__(self) -> None:
        _positive("rank", self.rank)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        k, q = _key_features(head, keys), _query_features(head, queries, keys)
        squares, directions = torch.linalg.eigh(q.mT @ q / len(q))
        root = directions * squares.clamp_min(1e-12 * squares[-1]).sqrt()
        *_, right = torch.linalg.svd(k @ root, full_matrices=False)
        basis = right[: self.rank].mT
        back = torch.linalg.solve(root.mT, basis)
        lean = (k @ root @ basis) @ back.mT  # the nearest keys of this rank as the queries see them

        def logits(x: Tensor) -> Tensor:
            return _with_keys(head, x, keys, lean)

        kept = keys.size * (min(self.rank, k.shape[-1]) + _widths(head, keys)[1])
        return Fitted(logits, _values(head, keys), kept, kept)


@dataclass(frozen=True, eq=False, repr=False)
class Nystrom(Candidate):
    """Landmarks among the keys: softmax(q, L) softmax(L, L)⁺ softmax(L, k).

    Examples:
        >>> from regard.compression import Nystrom, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 2, dtype=torch.float64)
        >>> (choice,) = cheaper(layer, tokens, candidates=(Nystrom(20),)).choices
        >>> choice.error < 0.1
        True
    """

    size: int

    def __post_init__(self) -> None:
        _positive("size", self.size)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        chosen = _even(keys.size, self.size)
        landmarks, asking = Measure(keys.points[chosen]), keys.points[chosen]
        if queries.shape[-1] != keys.dimension:  # keys are no queries: some of these stand for all
            asking = queries[_even(len(queries), len(chosen))]
        middle = torch.linalg.pinv(head.attention.weights(asking, landmarks), rtol=1e-6)
        seen = middle @ head.attention(asking, keys)
        kept = len(chosen) * _width(head, keys)
        return Fitted(None, seen, kept, kept, direct=lambda x: head.attention.weights(x, landmarks) @ seen)


@dataclass(frozen=True, eq=False, repr=False)
class Quantized(Candidate):
    """Keys by channel in blocks and values by token, rounded to so many bits.

    Examples:
        >>> from regard.compression import Quantized, cheaper
        >>> layer, tokens = regard.Attention(regard.Dot()), torch.randn(60, 2, dtype=torch.float64)
        >>> eight, four = cheaper(layer, tokens, candidates=(Quantized(8), Quantized(4))).choices
        >>> eight.error < four.error
        True
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 6, 8):
            raise ArgumentError("bits", f"is {self.bits!r}", "give 2, 3, 4, 6 or 8")

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        k = torch.cat([quantize(part.mT, self.bits).mT for part in _key_features(head, keys).split(BLOCK)])
        values = quantize(_values(head, keys), self.bits)
        error = computed_lengths(values - _values(head, keys)).amax() + Upper(1e-15) * _longest(head, keys)

        def logits(x: Tensor) -> Tensor:
            return _with_keys(head, x, keys, k)

        narrow, wide = _widths(head, keys)
        steps = 2 * narrow * math.ceil(keys.size / BLOCK) + 2 * keys.size
        count = keys.size * (narrow + wide)
        return Fitted(logits, values, steps, count, value_error=error, codes=count * self.bits)


def quantize(rows: Tensor, bits: int) -> Tensor:
    """Each row on 2^bits even steps between its least and its largest number."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-300)
    return low + step * ((rows - low) / step).round()


# What they share


def everything(head: Head, keys: Measure) -> Fitted:
    """All keys, as they are."""
    whole = kept_exactly(head, keys)
    return Fitted(lambda x: _scores(head, x, keys), _values(head, keys), whole, whole)


def kept_exactly(head: Head, keys: Measure) -> float:
    """The numbers that the whole context takes."""
    return keys.size * _width(head, keys)


def _values(head: Head, keys: Measure) -> Tensor:
    return head.lookup.values(keys.points, keys.marks)


def _longest(head: Head, keys: Measure) -> Upper:
    return computed_lengths(_values(head, keys)).amax()


def _scores(head: Head, queries: Tensor, keys: Measure) -> Tensor:
    scores = head.potential.scores(queries, keys.points, torch.arange(len(queries)), keys.positions())
    return scores if keys.log_weights is None else scores + keys.log_weights


def _with_keys(head: Head, queries: Tensor, keys: Measure, features: Tensor) -> Tensor:
    """Scores with other features of the keys."""
    scores = head.potential.pair(_query_features(head, queries, keys), features)
    return scores if keys.log_weights is None else scores + keys.log_weights


def _query_features(head: Head, queries: Tensor, keys: Measure) -> Tensor:
    return _features(head, queries, keys.points)[0]


def _key_features(head: Head, keys: Measure) -> Tensor:
    width = head.form(keys.dimension)
    rows = keys.dimension if width is None else width.a.shape[0]
    return _features(head, keys.points.new_zeros(1, rows), keys.points)[1]


def _features(head: Head, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(head.potential, (Dot, Bilinear)):
        name = type(head.potential).__name__
        raise Refusal(f"{name} scores are not inner products of features of queries and keys; use Dot")
    marks = torch.arange(len(queries)), torch.arange(len(keys))
    return head.potential.features(queries, keys, *marks)


def _even(count: int, size: int) -> Tensor:
    """Places that are evenly apart."""
    return torch.linspace(0, count - 1, min(size, count)).long().unique()


def _largest(scores: Tensor, size: int) -> Tensor:
    kept = scores.topk(size, -1).indices
    return torch.full_like(scores, -math.inf).scatter(-1, kept, scores.gather(-1, kept))


def _widths(head: Head, keys: Measure) -> tuple[int, int]:
    """Numbers of a key, and of a value."""
    plain = isinstance(head.potential, (Dot, Bilinear))
    narrow = _key_features(head, Measure(keys.points[:1])).shape[-1] if plain else keys.dimension
    return int(narrow), int(_values(head, Measure(keys.points[:1])).shape[-1])


def _width(head: Head, keys: Measure) -> int:
    return sum(_widths(head, keys))


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(name, f"is {value!r}", "give a number of at least one")
