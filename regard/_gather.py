"""Looking things up by mark: tables, documents and masks are indexed by the positions that travel with the
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard import _check
from regard.errors import ArgumentError


def gather_rows(name: str, table: Tensor, marks: Tensor) -> Tensor:
    """The rows (..., n, e) of a table (..., N, e) at integer marks (..., n)."""
    if marks.dtype.is_floating_point:
        raise ArgumentError(
            "marks", f"have dtype {marks.dtype}", f"{name} is looked up by position; give integer marks"
        )
    if marks.numel() and _check.holds((marks.amin() < 0) | (marks.amax() >= table.shape[-2])):
        raise ArgumentError(
            name,
            f"covers the marks 0..{table.shape[-2] - 1} but some token has a mark outside that range",
            f"give {name} an entry for every token",
        )
    if marks.ndim == 1:
        return table.index_select(-2, marks)
    batch = _check.broadcast(f"{name} and marks", table.shape[:-2], marks.shape[:-1])
    index = marks.expand(*batch, -1).unsqueeze(-1).expand(*batch, -1, table.shape[-1])
    return torch.gather(table.expand(*batch, -1, -1), -2, index)
