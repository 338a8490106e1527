"""A bias that is given pair by pair: a mask that is added to scores, as torch takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._gather import gather_rows
from regard._types import Features
from regard.errors import ArgumentError
from regard.parameters import parameter
from regard.potentials.positions import PositionPotential


@dataclass(frozen=True, eq=False, repr=False)
class PairBias(PositionPotential):
    """a = bias[..., s, t] for the query with mark s and the key with mark t; bias (..., m, n), one row or one
    column of it serving every query or every key. An entry -inf hides the key from the query.

    This is torch's attn_mask of floating numbers; a boolean one is the support Where(mask).

    Examples:
        >>> added = regard.PairBias(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        >>> added.scores(torch.zeros(2, 1), torch.zeros(2, 1)).tolist()
        [[0.0, 1.0], [2.0, 3.0]]
    """

    bias: Tensor = parameter(rank=2)

    def __post_init__(self) -> None:
        if isinstance(self.bias, Tensor) and self.bias.dtype == torch.bool:
            found, remedy = (
                "is boolean, which cannot be added to scores",
                "write it as a support: regard.Where(mask)",
            )
            raise ArgumentError("bias", found, remedy)
        _check.floating("bias", self.bias)
        if self.bias.ndim < 2:
            raise ArgumentError(
                "bias",
                f"has shape {list(self.bias.shape)}",
                "give (..., queries, keys); a bias on keys alone is bias[None, :]",
            )

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        for marks in (x_marks, y_marks):
            if marks.dtype.is_floating_point:
                found = f"have dtype {marks.dtype}"
                raise ArgumentError("marks", found, "bias is looked up by position; give integer marks")
        kind = torch.promote_types(x.dtype, torch.float32)  # holds every position below 2²⁴
        return x_marks.unsqueeze(-1).to(kind), y_marks.unsqueeze(-1).to(kind)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        rows, columns = queries.squeeze(-1).long(), keys.squeeze(-1).long()
        bias = self.bias.to(torch.promote_types(self.bias.dtype, queries.dtype))
        found = bias if bias.shape[-2] == 1 else gather_rows("bias", bias, rows)
        found = found if found.shape[-1] == 1 else gather_rows("bias", found.mT, columns).mT
        return found.expand(*found.shape[:-2], rows.shape[-1], columns.shape[-1])
