"""Scores that cannot leave an interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._types import Features, Scalar, over_scores
from regard.parameters import number, part
from regard.potentials.base import Potential


@dataclass(frozen=True, eq=False, repr=False)
class SoftCap(Potential):
    """a = cap · tanh(a_0 / cap): scores that cannot leave (-cap, cap) (gemma2024).

    Examples:
        >>> capped = regard.SoftCap(regard.Dot(scale=1.0), 5.0)
        >>> float(capped.scores(torch.full((1, 1), 100.0), torch.full((1, 1), 100.0)))
        5.0
    """

    potential: Potential = part()
    cap: Scalar = number()
    positional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check.positive("cap", self.cap)

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        return self.potential.features(x, y, x_marks, y_marks)

    def projections(
        self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor
    ) -> tuple[Features, Features]:
        return self.potential.projections(x, y, x_marks, y_marks)

    def pair(self, queries: Features, keys: Features) -> Tensor:
        cap = over_scores(self.cap)
        return cap * torch.tanh(self.potential.pair(queries, keys) / cap)

    def width(self, queries: Features, keys: Features) -> int:
        return 1 + self.potential.width(queries, keys)
