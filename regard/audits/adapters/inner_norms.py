"""Norm layers inside attention modules, read by what they do: numbers from their attributes, and the formula
compared with the module itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.normed import Normed
from regard.proofs.modules import eps_of

CLOSE = 1e-4
"""How far the formula may be from the module, relative."""
NUMBERS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
"""What the small number under the root is called."""
PROBED = 8
"""How wide a norm without weights is tried."""


@dataclass(frozen=True)
class InnerNorm:
    """x ↦ gain · x̂ + shift, x̂ = x/√(mean x² + eps) of x or of what is left without its mean; gain and shift
    (r,), (h, r) where each head has its own, or None.
    """

    name: str
    eps: float
    gain: Tensor | None
    shift: Tensor | None
    centered: bool

    def fits(self, groups: int, width: int) -> bool:
        """Whether it takes points of this width in so many heads."""
        return self.gain is None or tuple(self.gain.shape) in ((width,), (groups, width), (1, width))

    def __call__(self, z: Tensor) -> Tensor:
        """Points (h, n, r) or (n, r)."""
        return self.normed()(z - z.mean(-1, keepdim=True) if self.centered else z)

    def centering(self, weight: Tensor | None) -> Tensor | None:
        """A projection (..., r) or a bias with the mean taken away, where the norm does that."""
        return weight if weight is None or not self.centered else weight - weight.mean(-1, keepdim=True)

    def normed(self) -> Normed:
        """What is done after that."""
        return Normed(self.eps, self.gain, None, self.shift)


def inner_norms(module: nn.Module) -> list[InnerNorm]:
    """Every norm layer inside a module that is one of these."""
    found = [
        read_norm(name, child)
        for name, child in module.named_modules()
        if name and ("norm" in name.lower() or "norm" in type(child).__name__.lower())
    ]
    return [norm for norm in found if norm is not None]


def read_norm(name: str, module: nn.Module) -> InnerNorm | None:
    """A module as a norm layer; None where it is something else."""
    weight, bias = _own(module, "weight"), _own(module, "bias")
    eps = _eps(module)
    if list(module.children()) or not eps > 0 or (weight is not None and weight.ndim > 2):
        return None
    probes = _probes((PROBED,) if weight is None else tuple(weight.shape), eps)
    try:
        with torch.no_grad():
            wanted = type(module).forward(module, probes.to(_kind(module)))
    except Exception:  # a module that takes something else is none of these
        return None
    if not isinstance(wanted, Tensor) or wanted.shape != probes.shape:
        return None
    return next((own for own in _candidates(name, eps, weight, bias) if _same(own, probes, wanted)), None)


def _candidates(name: str, eps: float, weight: Tensor | None, bias: Tensor | None) -> Iterator[InnerNorm]:
    """Gains as they are written, or what is added to one."""
    gains = [None] if weight is None else [weight, 1 + weight]
    for gain in gains:
        for centered in (False, True):
            yield InnerNorm(name, eps, gain, bias, centered)


def _probes(shape: tuple[int, ...], eps: float) -> Tensor:
    """Points of ordinary length, and some that are as short as eps matters."""
    g = torch.Generator().manual_seed(0)
    drawn = torch.randn(6, *shape, generator=g, dtype=torch.float64) + 0.5
    size = torch.tensor([1.0, 1.0, 1.0, 8.0, eps**0.5, eps**0.5], dtype=torch.float64)
    return drawn * size.reshape(-1, *(1,) * len(shape))


def _same(norm: InnerNorm, probes: Tensor, wanted: Tensor) -> bool:
    """Whether the formula gives what the module gave, point by point."""
    points = probes if probes.ndim == 2 else probes.transpose(0, 1)
    found = norm(points) if probes.ndim == 2 else norm(points).transpose(0, 1)
    gap, size = (found - wanted.double()).flatten(1).norm(dim=1), wanted.double().flatten(1).norm(dim=1)
    return bool((gap <= CLOSE * size).all())


def _eps(module: nn.Module) -> float:
    """The small number under the root; zero where none is found."""
    if isinstance(module, nn.RMSNorm):
        return eps_of(module)
    numbers = (getattr(module, key, None) for key in NUMBERS)
    return next((float(number) for number in numbers if isinstance(number, (int, float))), 0.0)


def _own(module: nn.Module, name: str) -> Tensor | None:
    found: Any = getattr(module, name, None)
    return found.detach().double().cpu() if isinstance(found, Tensor) else None


def _kind(module: nn.Module) -> torch.dtype:
    return next((part.dtype for part in module.parameters()), torch.float32)
