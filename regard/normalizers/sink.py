"""Softmax with a sink: a slot that takes part of the mass and contributes the value zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
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
class SinkSoftmax(Normalizer):
    """p_j = c_j exp(s_j / T) / (exp(sink) + Σ_k c_k exp(s_k / T)): a slot with a fixed logit and the value
    zero takes part (gptoss2025).

    Rows have mass at most one, so they are not laws. With q = 1 - Σ p they maximize ⟨p, s⟩ + T sink q - T (Σ
    p log(p/c) + q log q).

    Examples:
        >>> quiet = regard.Attention(regard.Dot(), normalizer=regard.SinkSoftmax(0.0))
        >>> quiet.weights(torch.zeros(1, 2)).tolist()  # half of the mass goes to the sink
        [[0.5]]
    """

    sink: Scalar = number(default=0.0)
    temperature: Scalar = number(default=1.0)
    laws: ClassVar[bool] = False
    variational: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check.number("sink", self.sink)
        _check.positive("temperature", self.temperature)

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        tilted, empty = without_empty_rows(reference.counted(scores / over_scores(self.temperature)))
        mass = tilted.logsumexp(-1, keepdim=True)
        share = torch.sigmoid(mass - over_scores(self.sink))
        return zero_where(tilted.softmax(-1) * share, empty)

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        temperature, sink = (
            t.unsqueeze(-1) if isinstance(t, Tensor) else t for t in (self.temperature, self.sink)
        )
        left = 1 - weights.sum(-1)
        inside = left.clamp_min(0.0)
        entropy = torch.special.entr(inside) - entropy_term(weights, reference.log_counts).sum(-1)
        value = expectation(weights, scores) + temperature * (sink * inside + entropy)
        return value.masked_fill(left < -1e-9, -torch.inf)  # there is no more than all of the mass
