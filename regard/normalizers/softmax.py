"""The Gibbs normalizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard import _check
from regard._types import Scalar, over_scores
from regard.normalizers.base import (
    Normalizer,
    Reference,
    entropy_term,
    expectation,
    without_empty_rows,
    zero_where,
)
from regard.parameters import number


@dataclass(frozen=True, eq=False, repr=False)
class Softmax(Normalizer):
    """p_j ∝ c_j exp(s_j / T): the law that maximizes ⟨p, s⟩ - T KL(p | c) (vuckovic2020, maximum entropy).

    Examples:
        >>> sharp = regard.Attention(regard.Dot(scale=1.0), normalizer=regard.Softmax(temperature=0.1))
        >>> bool(sharp.weights(torch.tensor([[1.0], [2.0]])).max() > 0.99)
        True
    """

    temperature: Scalar = number(default=1.0)
    laws: ClassVar[bool] = True
    variational: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check.positive("temperature", self.temperature)

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        tilted, empty = without_empty_rows(reference.counted(self.divide_by_temperature(scores)))
        return zero_where(tilted.softmax(-1), empty)

    def divide_by_temperature(self, scores: Tensor) -> Tensor:
        """s / T."""
        return (
            scores
            if isinstance(self.temperature, float) and self.temperature == 1.0
            else scores / over_scores(self.temperature)
        )

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        temperature = (
            self.temperature.unsqueeze(-1) if isinstance(self.temperature, Tensor) else self.temperature
        )
        return expectation(weights, scores) - temperature * entropy_term(weights, reference.log_counts).sum(
            -1
        )
