"""The numbers that layers with a promise compute with, and the room that they leave for rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROOM = 128
"""Layers stay below their promise by so many units in the last place of their numbers, for rounding in their
parametrization: 1.5e-5 in float32, 2.8e-14 in float64.
"""


def working(x: Tensor) -> torch.dtype:
    """The numbers that a layer computes with: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def below_one(dtype: torch.dtype) -> float:
    """One, less the room for rounding."""
    return 1 - ROOM * torch.finfo(dtype).eps


def blank(module: nn.Module) -> bool:
    """Whether a module holds no numbers yet, so that nothing can be proved of it."""
    tensors = (*module.parameters(), *module.buffers())
    return torch.get_default_device().type == "meta" or any(tensor.is_meta for tensor in tensors)
