"""Sigmoid weights: each key is weighed by itself, and rows need not sum to one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._types import Scalar
from regard.normalizers.base import Normalizer, Reference, expectation, log_total
from regard.parameters import number


@dataclass(frozen=True, eq=False, repr=False)
class Sigmoid(Normalizer):
    """p_j = c_j σ(s_j + bias); bias None is -log of the number of keys. Rows are not laws (ramapuram2024).

    It maximizes ⟨p, s + bias⟩ - Σ c (ρ log ρ + (1-ρ) log(1-ρ)) over densities ρ = p/c in [0, 1].

    Examples:
        >>> gates = regard.Attention(regard.Dot(), normalizer=regard.Sigmoid())
        >>> gates.weights(torch.zeros(2, 3)).sum(-1).shape  # rows need not sum to one
        torch.Size([2])
    """

    bias: Scalar | None = number(default=None)
    laws: ClassVar[bool] = False
    variational: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check.number("bias", self.bias)

    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        weights = torch.sigmoid(reference.supported(scores) + self.shift(scores, reference))
        if reference.log_counts is not None:
            weights = weights * reference.log_counts.exp().unsqueeze(-2)
        return weights

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
        counts = (
            torch.ones_like(weights)
            if reference.log_counts is None
            else reference.log_counts.exp().unsqueeze(-2)
        )
        density = torch.where(
            counts > 0, weights / counts.clamp_min(torch.finfo(weights.dtype).tiny), torch.zeros_like(weights)
        )
        inside = (density > 0) & (density < 1)  # at the ends the entropy is zero and its slope infinite
        safe = torch.where(inside, density, torch.full_like(density, 0.5))
        entropy = torch.where(
            inside, torch.special.entr(safe) + torch.special.entr(1 - safe), torch.zeros_like(density)
        )
        return expectation(weights, scores + self.shift(scores, reference)) + (counts * entropy).sum(-1)
