"""Influence: the norms of all blocks of a Jacobian, as a tensor that shows itself in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from regard.errors import ArgumentError, MissingExtraError

CELLS = 48
"""Tokens that a map shows in each direction; of more, the largest of several stands for them."""
SIDE = 360


class Influence(Tensor):
    """|J_ij|₂ (..., m, n). What is computed with it is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(norms: Tensor) -> Influence:
        """The same numbers."""
        return norms.as_subclass(Influence)

    def plain(self) -> Tensor:
        """The same numbers as an ordinary tensor."""
        return self.as_subclass(Tensor)

    def table(self, tokens: Sequence[str] | None = None) -> Any:
        """One map as a pandas DataFrame: a row for each token that is moved, a column for each that moves."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", "notebook") from None
        if self.ndim != 2:
            raise ArgumentError("influence", f"has shape {list(self.shape)}", "take one map, influence[0]")
        rows, columns = names(tokens, self.shape[-2]), names(tokens, self.shape[-1])
        return pandas.DataFrame(self.plain().cpu().numpy(), index=rows, columns=columns)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if not self.numel():
            return f"Influence of shape {list(self.shape)}, without numbers"
        numbers = self.plain()
        largest = int(numbers.nan_to_num(-1.0).argmax())
        *_, row, column = torch.unravel_index(torch.tensor(largest), self.shape)
        shape = " × ".join(str(size) for size in self.shape)
        most = f"{float(numbers.flatten()[largest]):.4g}, of token {int(column)} on token {int(row)}"
        return f"Influence({shape} tokens; the largest is {most}; .plain() has the numbers)"

    def _repr_html_(self) -> str:
        """A map of the first of the batch: darker moves more, rows are moved by columns."""
        if not self.numel():
            return f"<p>{escape(repr(self))}</p>"
        first = self.plain().detach().reshape(-1, *self.shape[-2:])[0].double().cpu()
        cells = _coarse(first)
        return f"<figure>{_svg(cells)}<figcaption>{escape(repr(self))}</figcaption></figure>"


def names(tokens: Sequence[str] | None, count: int) -> list[str]:
    """The names of tokens, their numbers where they have none."""
    if tokens is None:
        return [str(number) for number in range(count)]
    if len(tokens) != count:
        raise ArgumentError("tokens", f"has {len(tokens)} names for {count} tokens", "give one for each")
    return [str(token) for token in tokens]


def _coarse(matrix: Tensor) -> Tensor:
    """At most CELLS rows and columns, each the largest of those it stands for."""
    steps = [max(1, -(-size // CELLS)) for size in matrix.shape]
    return torch.nn.functional.max_pool2d(matrix[None, None], steps, steps, ceil_mode=True)[0, 0]


def _svg(cells: Tensor) -> str:
    rows, columns = cells.shape
    top = float(cells.nan_to_num(0.0).max()) or 1.0
    side = SIDE / max(rows, columns)
    shares = (cells / top).nan_to_num(0.0).clamp(0, 1).tolist()
    squares = "".join(
        f'<rect x="{column * side:.1f}" y="{row * side:.1f}" width="{side:.1f}" height="{side:.1f}" '
        f'fill="#a63c08" fill-opacity="{share:.2f}"/>'
        for row, line in enumerate(shares)
        for column, share in enumerate(line)
        if share >= 0.005
    )
    width, height = columns * side, rows * side
    frame = f'<rect width="{width:.1f}" height="{height:.1f}" fill="none" stroke="#888"/>'
    label = "how far each token (row) is moved by each token (column)"
    box = f'viewBox="-1 -1 {width + 2:.1f} {height + 2:.1f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {box} role="img" aria-label="{label}">{frame}{squares}</svg>'
