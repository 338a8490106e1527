"""Supports that compare positions: the past, and a window around a position."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from regard.errors import ArgumentError
from regard.supports.base import Span, Support


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Support):
    """A query sees the keys whose mark is not larger than its own.

    Examples:
        >>> regard.Attention(regard.Dot(), support=regard.Causal()).weights(torch.zeros(3, 2))[1].tolist()
        [0.5, 0.5, 0.0]
    """

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys.unsqueeze(-2) <= queries.unsqueeze(-1)

    def span(self, low: int, high: int) -> Span:
        return -math.inf, high


@dataclass(frozen=True, eq=False, repr=False)
class Window(Support):
    """A query at mark t sees the keys with marks in [t - left, t + right]; None leaves that side open.

    Examples:
        >>> local = regard.Causal() & regard.Window(1, 0)
        >>> regard.Attention(regard.Dot(), support=local).weights(torch.zeros(3, 2))[2].tolist()
        [0.0, 0.5, 0.5]
    """

    left: float | None
    right: float | None

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None and not reach >= 0:
                raise ArgumentError(
                    name, f"is {reach}", "give how far the window reaches, zero or more, or None for no limit"
                )

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        offset = keys.unsqueeze(-2) - queries.unsqueeze(-1)
        allowed = offset == offset
        if self.left is not None:
            allowed = allowed & (offset >= -self.left)
        if self.right is not None:
            allowed = allowed & (offset <= self.right)
        return allowed

    def span(self, low: int, high: int) -> Span:
        return (
            -math.inf if self.left is None else low - self.left,
            math.inf if self.right is None else high + self.right,
        )
