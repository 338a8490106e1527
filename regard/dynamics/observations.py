"""Observations: numbers over time, as a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ArgumentError


@dataclass(frozen=True)
class Observations:
    """A table: a row for each time, a column for each observable, and why it ended early, if it did.

    Examples:
        >>> from regard.dynamics import Euler, Radius
        >>> path = regard.flow(regard.Attention(regard.Dot()), torch.eye(2), Euler(0.5), 1.0)
        >>> table = path.observe(Radius(), times=2)  # Observations
        >>> table.names, table.times.tolist(), table["radius"].shape
        (('radius',), [0.0, 0.5, 1.0], torch.Size([3]))
    """

    names: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    note: str = ""

    @property
    def times(self) -> Tensor:
        """The times of the rows."""
        return torch.tensor([row[0] for row in self.rows], dtype=torch.float64)

    def __getitem__(self, name: str) -> Tensor:
        """A column by its name."""
        if name not in self.names:
            raise ArgumentError("name", f"is {name!r}", f"give one of {', '.join(self.names)}")
        place = 1 + self.names.index(name)
        return torch.tensor([row[place] for row in self.rows], dtype=torch.float64)

    def __str__(self) -> str:
        head = ("t", *self.names)
        body = [tuple(f"{value:.5g}" for value in row) for row in self.rows]
        widths = [max(len(row[c]) for row in (head, *body)) for c in range(len(head))]
        lines = [
            "  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in (head, *body)
        ]
        return "\n".join([*lines, self.note] if self.note else lines)

    __repr__ = __str__
