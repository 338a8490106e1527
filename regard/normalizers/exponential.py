"""Exponential weights: the kernel itself, without a sum to divide by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard import _check
from regard._types import Scalar
from regard.normalizers.base import Normalizer, Reference, entropy_term, expectation, log_total
from regard.parameters import number


@dataclass(frozen=True, eq=False, repr=False)
class Exponential(Normalizer):
    """p_j = c_j exp(s_j + bias); bias None is -log of the number of keys, so that rows are averages of the
    kernel: the unnormalized model of self-attention (geshkovski2023, USA).

    Rows are not laws. They maximize ⟨p, s + bias⟩ - Σ (p log(p/c) - p) over all p that are not negative.

    Examples:
        >>> rows = regard.Attention(regard.Dot(), normalizer=regard.normalizers.Exponential())
        >>> rows.weights(torch.zeros(4, 2)).sum(-1).tolist()  # exp(0)/4 for each of four keys
        [1.0, 1.0, 1.0, 1.0]
        >>> bool(rows.weights(torch.ones(4, 2)).sum(-1)[0] > 1)  # no law
        True
    """

    bias: Scalar | None = number(default=None)
    laws: ClassVar[bool] = False
    variational: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check.number("bias", self.bias)

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        return (reference.counted(scores) + self.shift(scores, reference)).exp()

    def shift(self, scores: Tensor, reference: Reference) -> Scalar:
        """The bias, shaped to act on scores."""
        if isinstance(self.bias, Tensor):
            return self.bias[..., None, None]
        if self.bias is not None:
            return self.bias
        if reference.log_counts is None:
            return -math.log(max(scores.shape[-1], 1))
        return -log_total(reference.log_counts)[..., None, None]

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        gain = expectation(weights, scores + self.shift(scores, reference))
        return gain + (weights - entropy_term(weights, reference.log_counts)).sum(-1)
