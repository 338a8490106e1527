"""Modules as tests want them, and every kind of positions."""

import torch

from regard.nn import (
    AlibiPositions,
    LearnedPositions,
    NoPositions,
    RelativePositions,
    RotaryPositions,
    Sinusoidal,
)

INSIDE = [RotaryPositions(), AlibiPositions(), RelativePositions(8, 16)]
"""Positions that scores see."""


def added(tokens):
    """Positions that are added to up to so many tokens."""
    return [Sinusoidal(), LearnedPositions(tokens)]


def every_position(tokens):
    """None, those that are added, and those that scores see."""
    return [NoPositions(), *added(tokens), *INSIDE]


def alive(module, dtype=torch.float64, size=0.3, seed=0):
    """In evaluation mode, with numbers that are not what they begin as: biases, norms and gains count."""
    module = module.to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return module
