"""Attention that a module computes by hand: a softmax of scores, and a product of its rows with values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.audits.adapters.base import NotCovered
from regard.audits.adapters.masks import closing
from regard.audits.watching.seen import Seen, Sight, four
from regard.normalizers import Reference, Softmax
from regard.potentials import Dot, PairBias, Potential
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
    torch.masked_fill,
    Tensor.mul,
    Tensor.__mul__,
    torch.mul,
    torch.where,
    torch.nan_to_num,
    Tensor.nan_to_num,
}
"""After these a tensor of weights still is one, as long as it has as many numbers; the product compares."""


ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm}
REMEMBERED = 6
"""How many products are kept: those of queries and keys are made shortly before their softmax."""
NOTHING = 1e-4
"""What is added to scores and is less than this is rounding."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The scores of a softmax over the last dimension, and its rows."""

    scores: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Compared:
    """A product of queries (..., n, c) and keys (..., m, c) that scores may be made of."""

    queries: Tensor
    keys: Tensor
    result: Tensor


class Weights:
    """The tensors of weights that are about in one pass of a module, and the last products of others; they
    are kept, so that no other can take their place.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Rows]] = {}
        self._compared: deque[Compared] = deque(maxlen=REMEMBERED)

    def follow(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Look at a call that was made, and keep what is needed of it."""
        if function in PRODUCTS or function in ADDED_PRODUCTS:
            self._compare(function, arguments, options, result)
        if function in SOFTMAXES:
            self._start(arguments, options, result)
        elif self._known and function in CARRIED and isinstance(result, Tensor):
            rows = next((self.rows(part) for part in arguments if self.rows(part) is not None), None)
            if rows is not None and result.numel() == rows.weights.numel():
                self._known[id(result)] = (result, rows)

    def _compare(
        self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        named = [options[name] for name in ("batch1", "batch2") if name in options]
        pair = (*arguments, *named)[-2:]
        if len(pair) == 2 and all(isinstance(part, Tensor) and part.ndim >= 3 for part in (*pair, result)):
            self._compared.append(Compared(pair[0], pair[1].mT, result))

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
        compared = tuple(one for one in self._compared if one.result.numel() == rows.scores.numel())

        def readings() -> Iterator[Seen]:
            plain = _reading(rows, known, weights, values, result, turn)
            yield from _with_queries(plain, compared if turn is None else ())
            yield plain

        return Sight(NAME, four(result), readings)


def _reading(
    rows: Rows, known: Tensor, weights: Tensor, values: Tensor, result: Tensor, turn: str | None
) -> Seen:
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
    return Seen((query, key, values), PairBias(scores), Softmax(), Where(allowed), four(result))


def _with_queries(plain: Seen, compared: tuple[Compared, ...]) -> Iterator[Seen]:
    """The same with the queries and keys whose products the scores are, up to a factor and what is added:
    nothing, or a function of the offset of key and query, up to a constant in each row.
    """
    bias: Any = plain.potential
    scores, (batch, heads, n, m) = bias.bias.double(), plain.sizes
    allowed = plain.support.allows(torch.arange(n), torch.arange(m)).expand_as(scores)
    for one in reversed(compared):
        if not _fits(one, plain.sizes):
            continue
        queries, keys = (
            part.expand(*one.result.shape[:-2], -1, -1).reshape(batch, heads, size, -1)
            for part, size in ((one.queries, n), (one.keys, m))
        )
        tensors, products = (queries, keys, plain.tensors[2]), (queries.double() @ keys.double().mT).detach()
        for scale in _scales(scores, products, allowed, queries.shape[-1]):
            added = _by_offset(scores - scale * products, allowed)
            if added is not None:
                potential: Potential = Dot(scale=scale)
                potential = potential if not bool(added.any()) else potential + PairBias(added)
                yield replace(plain, tensors=tensors, potential=potential)


def _fits(one: Compared, sizes: tuple[int, int, int, int]) -> bool:
    """Whether queries and keys can be those of scores (b, h, n, m): not where keys and queries changed sides,
    or where windows lie in another order.
    """
    batch, heads, *lengths = sizes
    lead = one.result.shape[:-2]
    return lead.numel() == batch * heads and lengths == [one.queries.shape[-2], one.keys.shape[-2]]


def _scales(scores: Tensor, products: Tensor, allowed: Tensor, width: int) -> Iterator[float]:
    """Factors that scores may have: the one that fits best where nothing is added, and the usual ones."""
    size = float((products.square() * allowed).sum())
    if size > 0:
        yield float((scores * products * allowed).sum()) / size
    yield from (width**-0.5, 1.0)


def _by_offset(added: Tensor, allowed: Tensor) -> Tensor | None:
    """What was added to scores as a function of the offset alone, zero on the diagonal, without what rounding
    left; None where it is no such function.
    """
    n, m = added.shape[-2:]
    if n == m and bool(torch.diagonal(allowed, dim1=-2, dim2=-1).all()):
        added = added - torch.diagonal(added, dim1=-2, dim2=-1).unsqueeze(-1)
    offset = (torch.arange(m) - torch.arange(n).unsqueeze(-1) + n - 1).expand_as(added)
    count = added.new_zeros(*added.shape[:-2], n + m - 1)
    total = count.scatter_add(-1, offset.flatten(-2), (added * allowed).flatten(-2))
    count = count.scatter_add(-1, offset.flatten(-2), allowed.to(added.dtype).flatten(-2))
    table = total / count.clamp_min(1.0)
    table = torch.where(table.abs() < NOTHING, torch.zeros_like(table), table)
    found = table.gather(-1, offset.flatten(-2)).unflatten(-1, (n, m))
    gap = ((found - added) * allowed).abs().amax()
    return found if float(gap) <= NOTHING * (1 + float(added.abs().mul(allowed).amax())) else None
