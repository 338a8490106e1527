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
from regard.normalizers import FeatureMap, LinearKernel
from regard.potentials import Bilinear, Dot
from regard.proofs.cells import Cells
from regard.proofs.key_form import key_form
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal

BLOCK = 64
"""Keys that share the steps of their quantized channels."""


@dataclass(frozen=True)
class Fitted:
    """One head, made cheaper. rows(queries) (m, n): the law on the keys that stands for softmax, None where
    there is none; outputs(queries) (m, e). numbers: what is kept, in numbers of 32 bits; work:
    multiplications for one query; value_error: at least how far any kept value is from the true one.
    """

    rows: Callable[[Tensor], Tensor] | None
    outputs: Callable[[Tensor], Tensor]
    numbers: float
    work: float
    value_error: Upper = field(default_factory=lambda: exact(0.0))


class Candidate(Object):
    """A cheaper attention. Abstract."""

    @abstractmethod
    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        """What it keeps of the keys, for queries like these; a Refusal where it cannot."""


@dataclass(frozen=True, eq=False, repr=False)
class Recent(Candidate):
    """The last keys and no others: a window."""

    size: int

    def __post_init__(self) -> None:
        _positive("size", self.size)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        mask = torch.arange(keys.size) < keys.size - self.size

        def rows(x: Tensor) -> Tensor:
            return _scores(head, x, keys).masked_fill(mask, -math.inf).softmax(-1)

        kept = min(self.size, keys.size)
        return _of_rows(head, keys, rows, kept * _width(head, keys), kept * _width(head, keys))


@dataclass(frozen=True, eq=False, repr=False)
class TopK(Candidate):
    """The keys with the largest scores of each query: all are kept, and few values are read."""

    size: int

    def __post_init__(self) -> None:
        _positive("size", self.size)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        count, size = keys.size, min(self.size, keys.size)
        narrow, wide = _widths(head, keys)

        def rows(x: Tensor) -> Tensor:
            return _largest(_scores(head, x, keys), size).softmax(-1)

        return _of_rows(head, keys, rows, count * (narrow + wide), count * narrow + size * wide)


@dataclass(frozen=True, eq=False, repr=False)
class Merged(Candidate):
    """Atoms that are tangent to groups of keys, as `compress` makes them."""

    size: int

    def __post_init__(self) -> None:
        _positive("size", self.size)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        form = key_form(head, keys.dimension, Ball(1.0))
        labels, anchors = clustered(head, form, keys, queries, min(self.size, keys.size))
        cells = Cells(head, form, keys, labels, anchors)

        def rows(x: Tensor) -> Tensor:
            return head.attention.weights(x, cells.measure)[:, labels] * cells.masses

        kept = cells.count * (_width(head, keys) + 1)
        return Fitted(rows, lambda x: head.attention(x, cells.measure), kept, kept)


@dataclass(frozen=True, eq=False, repr=False)
class Features(Candidate):
    """Linear attention: sums over keys of features and values, whatever their number."""

    feature_map: FeatureMap

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        cheap = head.attention.replace(normalizer=LinearKernel(self.feature_map))
        count = self.feature_map.log_features(_key_features(head, keys)[:1]).shape[-1]
        kept = count * (_widths(head, keys)[1] + 1)
        return _of_rows(
            head, keys, lambda x: cheap.weights(x, keys), kept, kept + count * _widths(head, keys)[0]
        )


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Candidate):
    """Keys in the few directions in which scores of the queries vary most."""

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

        def rows(x: Tensor) -> Tensor:
            return _with_keys(head, x, keys, lean).softmax(-1)

        kept = keys.size * (min(self.rank, k.shape[-1]) + _widths(head, keys)[1])
        return _of_rows(head, keys, rows, kept, kept)


@dataclass(frozen=True, eq=False, repr=False)
class Nystrom(Candidate):
    """Landmarks among the keys: softmax(q, L) softmax(L, L)⁺ softmax(L, k)."""

    size: int

    def __post_init__(self) -> None:
        _positive("size", self.size)

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        if queries.shape[-1] != keys.dimension:
            raise Refusal("landmarks are queries and keys at once; queries and keys have different widths")
        chosen = torch.linspace(0, keys.size - 1, min(self.size, keys.size)).long().unique()
        landmarks = Measure(keys.points[chosen])
        middle = torch.linalg.pinv(head.attention.weights(landmarks.points, landmarks), rtol=1e-6)
        seen = middle @ head.attention(landmarks.points, keys)
        kept = len(chosen) * _width(head, keys)
        return Fitted(None, lambda x: head.attention.weights(x, landmarks) @ seen, kept, kept)


@dataclass(frozen=True, eq=False, repr=False)
class Quantized(Candidate):
    """Keys by channel in blocks and values by token, rounded to so many bits."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 6, 8):
            raise ArgumentError("bits", f"is {self.bits!r}", "give 2, 3, 4, 6 or 8")

    def fit(self, head: Head, keys: Measure, queries: Tensor) -> Fitted:
        k = torch.cat([quantize(part.mT, self.bits).mT for part in _key_features(head, keys).split(BLOCK)])
        values = quantize(_values(head, keys), self.bits)
        error = computed_lengths(values - _values(head, keys)).amax() + Upper(1e-15) * _longest(head, keys)

        def rows(x: Tensor) -> Tensor:
            return _with_keys(head, x, keys, k).softmax(-1)

        narrow, wide = _widths(head, keys)
        steps = 2 * narrow * math.ceil(keys.size / BLOCK) + 2 * keys.size
        kept = keys.size * (narrow + wide) * self.bits / 32 + steps
        return Fitted(rows, lambda x: rows(x) @ values, kept, keys.size * (narrow + wide), error)


def quantize(rows: Tensor, bits: int) -> Tensor:
    """Each row on 2^bits even steps between its least and its largest number."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-300)
    return low + step * ((rows - low) / step).round()


# What they share


def exact_rows(head: Head, keys: Measure, queries: Tensor) -> Tensor:
    """Softmax, (m, n)."""
    return _scores(head, queries, keys).softmax(-1)


def kept_exactly(head: Head, keys: Measure) -> float:
    """The numbers that the whole context takes."""
    return keys.size * _width(head, keys)


def _of_rows(
    head: Head, keys: Measure, rows: Callable[[Tensor], Tensor], numbers: float, work: float
) -> Fitted:
    values = _values(head, keys)
    return Fitted(rows, lambda x: rows(x) @ values, numbers, work)


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
        raise Refusal(f"{name} scores are no inner products of features of queries and keys; use Dot")
    marks = torch.arange(len(queries)), torch.arange(len(keys))
    return head.potential.features(queries, keys, *marks)


def _largest(scores: Tensor, size: int) -> Tensor:
    kept = scores.topk(size, -1).indices
    return torch.full_like(scores, -math.inf).scatter(-1, kept, scores.gather(-1, kept))


def _widths(head: Head, keys: Measure) -> tuple[int, int]:
    """Numbers of a key, and of a value."""
    narrow = _key_features(head, Measure(keys.points[:1])).shape[-1]
    return int(narrow), int(_values(head, Measure(keys.points[:1])).shape[-1])


def _width(head: Head, keys: Measure) -> int:
    return sum(_widths(head, keys))


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(name, f"is {value!r}", "give a number of at least one")
