"""Supports that are given token by token: documents packed in one sequence, padding, any mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._gather import gather_rows
from regard.errors import ArgumentError
from regard.parameters import number, parameter
from regard.supports.base import EVERYTHING, Span, Support


@dataclass(frozen=True, eq=False, repr=False)
class Document(Support):
    """A query sees the keys of its own document; the token with mark t belongs to document ids[..., t].

    ids (..., N) broadcast against the batch: (batch, 1, N) where there are heads.

    Examples:
        >>> two = regard.Document(torch.tensor([0, 0, 1]))
        >>> regard.Attention(regard.Dot(), support=two).weights(torch.zeros(3, 2)).tolist()
        [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """

    ids: Tensor = parameter(rank=1)

    def __post_init__(self) -> None:
        if not isinstance(self.ids, Tensor) or self.ids.dtype.is_floating_point or self.ids.ndim < 1:
            raise ArgumentError(
                "ids",
                f"is {_check.describe(self.ids)}",
                "give an integer tensor (..., N): the document of each token",
            )

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        column = self.ids.unsqueeze(-1)
        return gather_rows("ids", column, queries) == gather_rows("ids", column, keys).mT

    def span(self, low: int, high: int) -> Span:
        """From the first to the last token of the documents that are met; all where ids cannot be read."""
        own = self.ids[..., max(low, 0) : high + 1]
        if own.numel() == 0 or _check.holds(own.amax() >= own.amin()) is None:
            return EVERYTHING
        least, most = own.amin(-1, keepdim=True), own.amax(-1, keepdim=True)
        near = ((self.ids >= least) & (self.ids <= most)).reshape(-1, self.ids.shape[-1]).any(0).nonzero()
        return float(near[0]), float(near[-1])

    def sees_all(self, low: int, high: int) -> bool:
        """Whether all of them are of one document, in each sequence of the batch."""
        own = self.ids[..., max(low, 0) : high + 1]
        return own.numel() > 0 and _check.holds((own == own[..., :1]).all()) is True

    def seams(self) -> tuple[int, ...]:
        """Where one document ends and the next begins, if that is so in the whole batch and can be read."""
        ids = self.ids.flatten()
        changes = ids[1:] != ids[:-1]
        if ids.shape[-1] != self.ids.shape[-1] or not _check.holds(changes.any()):
            return ()
        return tuple((1 + changes.nonzero().flatten()).tolist())


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Support):
    """Every query sees the keys with marks below the length of their sequence. lengths (...): (batch,
    1) where there are heads.

    Examples:
        >>> short = regard.Attention(regard.Dot(), support=regard.Padding(torch.tensor(2)))
        >>> short.weights(torch.zeros(3, 2))[0].tolist()
        [0.5, 0.5, 0.0]
    """

    lengths: Tensor = number()

    def __post_init__(self) -> None:
        if (
            not isinstance(self.lengths, Tensor)
            or self.lengths.dtype.is_floating_point
            or self.lengths.dtype == torch.bool
        ):
            raise ArgumentError(
                "lengths",
                f"is {_check.describe(self.lengths)}",
                "give an integer tensor (...): the number of real tokens",
            )
        if _check.holds((self.lengths < 0).any()):
            raise ArgumentError(
                "lengths", "has negative entries", "give the number of real tokens, zero or more"
            )

    def allows_keys(self, keys: Tensor) -> Tensor:
        """True for the keys that are not padding, (..., n)."""
        return keys < self.lengths.unsqueeze(-1)

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.allows_keys(keys).unsqueeze(-2)


@dataclass(frozen=True, eq=False, repr=False)
class Where(Support):
    """A query with mark s sees the key with mark t where mask[..., s, t] is true.

    Examples:
        >>> mask = torch.tensor([[True, False], [True, True]])
        >>> regard.Attention(regard.Dot(), support=regard.Where(mask)).weights(torch.zeros(2, 1)).tolist()
        [[1.0, 0.0], [0.5, 0.5]]
    """

    mask: Tensor = parameter(rank=2)

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Tensor) or self.mask.dtype != torch.bool or self.mask.ndim < 2:
            raise ArgumentError(
                "mask",
                f"is {_check.describe(self.mask)}",
                "give a boolean tensor (..., m, n): True where a query may see a key",
            )

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        rows = self.mask if self.mask.shape[-2] == 1 else gather_rows("mask", self.mask, queries)
        return rows if rows.shape[-1] == 1 else gather_rows("mask", rows.mT, keys).mT
