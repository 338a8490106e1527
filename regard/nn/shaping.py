"""Shaped attention: I + P - uniform, which is near the identity however deep the network is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._heads import repeat_groups
from regard._object import Object
from regard.compute.tensors import attend_tokens
from regard.errors import ArgumentError
from regard.nn.cache import marks_after
from regard.normalizers import Softmax
from regard.potentials import Dot
from regard.supports import Full, Support


@dataclass(frozen=True, eq=False, repr=False)
class Shaping(Object):
    """x' = λ x + γ A(x) W with A = I + softmax(Y/τ) - 11ᵀ/n, λ² + γ² = 1 and τ = temperature · √(width · head
    width) (noci2023, 3).

    With weights of variance 1/width this keeps the covariance of tokens of order one at depths in proportion
    to the width.

    Examples:
        >>> shaping = regard.nn.Shaping(branch=0.6)
        >>> round(shaping.kept, 6)  # λ² + γ² = 1
        0.8
    """

    temperature: float = 1.0
    branch: float = math.sqrt(0.5)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ArgumentError("temperature", f"is {self.temperature}", "give a positive number")
        if not 0 < self.branch < 1:
            raise ArgumentError("branch", f"is {self.branch}", "give γ between 0 and 1; λ is √(1 - γ²)")

    @property
    def kept(self) -> float:
        """λ = √(1 - γ²)."""
        return math.sqrt(1 - self.branch**2)

    def scale(self, width: int, head_width: int) -> float:
        """The factor of dot products of queries and keys: 1/(τ_0 √(n n_k))."""
        return 1 / (self.temperature * math.sqrt(width * head_width))


def center(mixed: Tensor, values: Tensor, support: Support, past: int = 0) -> Tensor:
    """P v + v - uniform v, where uniform is over what each token sees."""
    values = repeat_groups("values", values, mixed.shape[-3])
    own = values[..., past:, :]
    return mixed + own - _uniform(values, support, past, mixed.shape[-2])


def _uniform(values: Tensor, support: Support, past: int, count: int) -> Tensor:
    if isinstance(support, Full):
        return values.mean(-2, keepdim=True)
    blank = torch.zeros_like(values[..., past : past + count, :1]), torch.zeros_like(values[..., :1])
    marks = None if past == 0 else marks_after(past, count, values.device)
    return attend_tokens(Dot(scale=0.0), Softmax(), support, *blank, values, marks)
