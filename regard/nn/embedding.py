"""Tokens as points, and points as scores of tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard import _check
from regard._kinds import names_wrong_kinds
from regard.errors import ArgumentError
from regard.nn.design import Design


class Embedding(nn.Module):
    """id ↦ √width · E[id] + position, and back: logits(x) = E x with the same table (vaswani2017, 3.4).

    Examples:
        >>> from regard.nn import Design, Embedding
        >>> table = Embedding(5, Design(8, 2))
        >>> table.logits(table(torch.tensor([[0, 3]]))).shape  # back to the vocabulary with the same table
        torch.Size([1, 2, 5])
    """

    @names_wrong_kinds
    def __init__(self, vocabulary: int, design: Design) -> None:
        super().__init__()
        if not isinstance(vocabulary, int) or isinstance(vocabulary, bool) or vocabulary < 1:
            raise ArgumentError("vocabulary", f"is {vocabulary!r}", "give the number of tokens, one or more")
        self.weight = nn.Parameter(torch.empty(vocabulary, design.width))
        std = design.width**-0.5 if design.promise is None else 1 / design.width  # √width · E of length one
        nn.init.normal_(self.weight, std=std)
        self.positions = design.positions.added(design.width)
        self.dropout = nn.Dropout(design.dropout)

    def forward(self, ids: Tensor, start: int | Tensor = 0) -> Tensor:
        """Points (..., n, width) of tokens (..., n) that stand at positions start, start + 1, ...; a tensor
        start (batch, 1) has one for each sequence, and tokens before position zero count as there.
        """
        ids = check_ids(ids, len(self.weight))
        points = nn.functional.embedding(ids, self.weight) * math.sqrt(self.weight.shape[-1])
        if self.positions is not None:
            places = torch.arange(ids.shape[-1], device=ids.device) + start
            places = places.clamp_min(0) if isinstance(start, Tensor) else places
            points = points + self.positions(places).to(points.dtype)
        return self.dropout(points) if self.training else points

    def logits(self, x: Tensor) -> Tensor:
        """Scores (..., n, vocabulary) of all tokens at points (..., n, width)."""
        return nn.functional.linear(x, self.weight)


def check_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Ids of tokens, whole numbers from 0 up to below the vocabulary, as a table is indexed."""
    if (
        not isinstance(ids, Tensor)
        or ids.dtype.is_floating_point
        or ids.dtype.is_complex
        or ids.dtype == torch.bool
        or ids.ndim < 1
    ):
        raise ArgumentError("ids", f"is {_check.describe(ids)}", "give an integer tensor (..., n)")
    ids = (
        ids if ids.dtype in (torch.int32, torch.int64) else ids.long()
    )  # before comparing: small numbers wrap around
    if ids.numel() and _check.holds((ids.clamp(0, vocabulary - 1) != ids).any()):
        wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
        raise ArgumentError(
            "ids",
            f"holds {int(wrong)} and the vocabulary has {vocabulary} tokens",
            f"give ids from 0 to {vocabulary - 1}",
        )
    return ids
