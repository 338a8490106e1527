"""Attention that a module computes by hand: a softmax of scores, and a product of its rows with values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.audits.adapters.base import NotCovered
from regard.audits.adapters.masks import closing
from regard.audits.watching.seen import Seen, Sight, four
from regard.normalizers import Reference, Softmax
from regard.potentials import PairBias
from regard.supports import Where

NAME = "a softmax and a product with values"
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
CARRIED: set[Callable[..., Any]] = {
    F.dropout,
    torch.dropout,
    Tensor.to,
    Tensor.type,
    Tensor.type_as,
    Tensor.float,
    Tensor.half,
    Tensor.double,
    Tensor.bfloat16,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.flatten,
    Tensor.unflatten,
    Tensor.squeeze,
    Tensor.unsqueeze,
    Tensor.masked_fill,
    Tensor.mul,
    Tensor.__mul__,
    torch.mul,
    torch.where,
    torch.nan_to_num,
    Tensor.nan_to_num,
}
"""After these a tensor of weights still is one, as long as it has as many numbers; the product compares."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The scores of a softmax over the last dimension, and its rows."""

    scores: Tensor
    weights: Tensor


class Weights:
    """The tensors of weights that are about in one pass of a module; they are kept, so that no other can take
    their place.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Rows]] = {}

    def follow(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Look at a call that was made, and keep what is needed of it."""
        if function in SOFTMAXES:
            self._start(arguments, options, result)
        elif self._known and function in CARRIED and isinstance(result, Tensor):
            rows = next((self.rows(part) for part in arguments if self.rows(part) is not None), None)
            if rows is not None and result.numel() == rows.weights.numel():
                self._known[id(result)] = (result, rows)

    def _start(self, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        scores = options.get("input", arguments[0] if arguments else None)
        dimension = options.get("dim", arguments[1] if len(arguments) > 1 else None)
        if not isinstance(scores, Tensor) or not isinstance(result, Tensor) or scores.ndim < 2:
            return
        if dimension in (-1, scores.ndim - 1):
            self._known[id(result)] = (result, Rows(scores, result))

    def rows(self, part: Any) -> Rows | None:
        """The softmax that a tensor of weights came from."""
        found = self._known.get(id(part)) if isinstance(part, Tensor) else None
        return None if found is None else found[1]

    def product(self, function: Any, arguments: tuple[Any, ...], result: Any) -> Sight | None:
        """The attention that a product with values finishes, where one does."""
        if not self._known or not isinstance(result, Tensor):
            return None
        if function in PRODUCTS and len(arguments) == 2 and self.rows(arguments[0]) is not None:
            return self._sight(arguments[0], arguments[0], arguments[1], result)
        if function is torch.einsum and isinstance(arguments[0], str):
            return self._of_einsum(arguments[0], arguments[1:], result)
        return None

    def _of_einsum(self, equation: str, operands: tuple[Any, ...], result: Tensor) -> Sight | None:
        operands = tuple(operands[0]) if operands and isinstance(operands[0], (tuple, list)) else operands
        known = [place for place, part in enumerate(operands) if self.rows(part) is not None]
        if len(operands) != 2 or len(known) != 1 or "->" not in equation or "." in equation:
            return None
        left, out = equation.replace(" ", "").split("->")
        labels = left.split(",")
        weights, values = labels[known[0]], labels[1 - known[0]]
        key = [c for c in weights if c in values and c not in out]
        query = [c for c in weights if c not in values]
        width = [c for c in values if c not in weights]
        if len(key) != 1 or len(query) != 1 or len(width) != 1 or weights[-1] != key[0]:
            return None
        lead = "".join(c for c in weights if c in values and c in out)
        own, other = operands[known[0]], operands[1 - known[0]]
        return self._sight(
            own,
            torch.einsum(f"{weights}->{lead}{query[0]}{key[0]}", own),
            torch.einsum(f"{values}->{lead}{key[0]}{width[0]}", other),
            torch.einsum(f"{out}->{lead}{query[0]}{width[0]}", result),
            f"{weights}->{lead}{query[0]}{key[0]}",
        )

    def _sight(
        self, known: Tensor, weights: Tensor, values: Tensor, result: Tensor, turn: str | None = None
    ) -> Sight | None:
        rows = self.rows(known)
        if rows is None or result.ndim < 2 or values.ndim < 2 or weights.shape[-1] != values.shape[-2]:
            return None
        return Sight(NAME, four(result), lambda: _readings(rows, known, weights, values, result, turn))


def _readings(
    rows: Rows, known: Tensor, weights: Tensor, values: Tensor, result: Tensor, turn: str | None
) -> Iterator[Seen]:
    """Scores are the potential: queries and keys are not known, and not needed."""
    scores = rows.scores.detach().reshape(known.shape)
    scores = scores if turn is None else torch.einsum(turn, scores)
    scores, weights = four(scores), four(weights.detach())
    blind = ~(weights != 0).any(-1, keepdim=True)
    allowed = ~closing(scores)
    closed = ~allowed.any(-1, keepdim=True)  # a softmax of very negative numbers is one of their differences
    scores = torch.where(closed, scores - scores.amax(-1, keepdim=True), scores)
    allowed = (allowed | closed) & ~blind
    scores = scores.masked_fill(~allowed, 0.0)
    law = Softmax().weights(scores.double(), Reference(allowed=allowed))
    if float((law - weights.double()).abs().max()) > 1e-3:
        raise NotCovered("its weights are changed after the softmax")
    values = four(values).expand(*weights.shape[:2], -1, -1)
    query, key = (scores.new_zeros(*weights.shape[:2], size, 1) for size in weights.shape[2:])
    yield Seen((query, key, values), PairBias(scores), Softmax(), Where(allowed), four(result))
