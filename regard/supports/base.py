"""Support: which keys a query may see.

A mask is the query's reference measure, not an option of an engine.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from regard._object import Object
from regard.parameters import part

Span = tuple[float, float]
"""A range of key marks [low, high] outside of which nothing is allowed."""

EVERYTHING: Span = (-math.inf, math.inf)


class Support(Object):
    """A relation between the marks of queries and the marks of keys; `&` intersects, `|` unites.

    Because a support only looks at marks, permuting tokens together with their marks permutes the mask with
    them.

    Examples:
        >>> marks = torch.arange(3)
        >>> seen = regard.Causal().allows(marks, marks)
        >>> isinstance(regard.Causal(), regard.supports.Support), seen.int().tolist()
        (True, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    """

    @abstractmethod
    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """True where a query may see a key: marks (..., m) and (..., n) -> (..., m, n), broadcastable."""

    def span(self, low: int, high: int) -> Span:
        """A range of key marks that holds all that queries with marks in [low, high] may see;
        never too small.
        """
        return EVERYTHING

    def seams(self) -> tuple[int, ...]:
        """Marks, in order, where tokens begin that see none before them; a hint for where to cut."""
        return ()

    def sees_all(self, low: int, high: int) -> bool:
        """Whether tokens with marks in [low, high] are known to see each other, without a look at pairs."""
        return False

    def __and__(self, other: Support) -> Support:
        if not isinstance(other, Support):
            return NotImplemented
        return And(conjuncts(self) + conjuncts(other))

    def __or__(self, other: Support) -> Support:
        if not isinstance(other, Support):
            return NotImplemented
        return Or((self, other))


@dataclass(frozen=True, eq=False, repr=False)
class Full(Support):
    """Every query sees every key.

    Examples:
        >>> regard.Attention(regard.Dot(), support=regard.Full()).weights(torch.zeros(2, 3)).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries.unsqueeze(-1) == queries.unsqueeze(-1)).expand(*queries.shape, keys.shape[-1])

    def sees_all(self, low: int, high: int) -> bool:
        return True


@dataclass(frozen=True, eq=False, repr=False)
class And(Support):
    """What every part allows.

    Examples:
        >>> both = regard.Causal() & regard.Window(1, 1)
        >>> type(both) is regard.supports.And, both.allows(torch.arange(3), torch.arange(3)).int().tolist()
        (True, [[1, 0, 0], [1, 1, 0], [0, 1, 1]])
    """

    parts: tuple[Support, ...] = part()

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        allowed = Full().allows(queries, keys)
        for inner in self.parts:
            allowed = allowed & inner.allows(queries, keys)
        return allowed

    def span(self, low: int, high: int) -> Span:
        spans = [part.span(low, high) for part in self.parts] or [EVERYTHING]
        return max(s[0] for s in spans), min(s[1] for s in spans)

    def sees_all(self, low: int, high: int) -> bool:
        return all(inner.sees_all(low, high) for inner in self.parts)

    def seams(self) -> tuple[int, ...]:
        return tuple(sorted({seam for inner in self.parts for seam in inner.seams()}))


@dataclass(frozen=True, eq=False, repr=False)
class Or(Support):
    """What some part allows.

    Examples:
        >>> either = regard.Window(0, 0) | regard.Where(torch.tensor([[True, False, False]]).expand(3, 3))
        >>> type(either) is regard.supports.Or
        True
        >>> either.allows(torch.arange(3), torch.arange(3)).int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """

    parts: tuple[Support, ...] = part()

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        allowed = ~Full().allows(queries, keys)
        for inner in self.parts:
            allowed = allowed | inner.allows(queries, keys)
        return allowed

    def span(self, low: int, high: int) -> Span:
        spans = [part.span(low, high) for part in self.parts]
        return min(s[0] for s in spans), max(s[1] for s in spans)


def conjuncts(support: Support) -> tuple[Support, ...]:
    """The parts whose intersection a support is; none for Full."""
    if isinstance(support, And):
        return tuple(inner for part in support.parts for inner in conjuncts(part))
    return () if isinstance(support, Full) else (support,)
