"""Scores of attention whose constant is known in closed form, so that a layer can divide by it while it
learns.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard.errors import ArgumentError
from regard.potentials import Cosine, Dot, Gaussian, Potential


class Scores(Object):
    """How tokens of one slice are compared, queries and keys alike. Abstract.

    `strength` g is the size of scores on the ball of radius R, a tensor with one number a head.

    Examples:
        >>> from regard.nn import DistanceScores, DotScores, Scores
        >>> isinstance(DotScores(), Scores), DotScores().on_ball, DistanceScores().on_ball
        (True, True, False)
    """

    on_ball = True
    """Whether tokens are projected on a ball first."""

    @abstractmethod
    def setting(self, g: Tensor, radius: Tensor) -> Tensor:
        """The number of the potential that makes scores as strong: a scale or a bandwidth."""

    @abstractmethod
    def compare(self, z: Tensor, setting: Tensor) -> Tensor:
        """Scores (..., n, n) of tokens (..., n, d), up to a constant in each row."""

    @abstractmethod
    def potential(self, setting: float) -> Potential:
        """The same as a declaration."""

    @abstractmethod
    def constant(self, g: Tensor, radius: Tensor, tokens: int | None) -> Tensor:
        """At least the constant of the average in Frobenius norm, for so many tokens or, where that is
        None, for any number.
        """


@dataclass(frozen=True, eq=False, repr=False)
class DotScores(Scores):
    """t z·z' on a ball, g = tR²: e^{g/8} √(1 + g²) + g.

    Examples:
        >>> g, radius = torch.tensor([0.5]), torch.tensor([1.0])
        >>> regard.nn.Averaging(8, 2, regard.nn.DotScores()).certificate(tokens=4).value <= 1.000001
        True
        >>> bool(regard.nn.DotScores().constant(g, radius, None) > 1)  # what scores cost
        True
    """

    def setting(self, g: Tensor, radius: Tensor) -> Tensor:
        return g / radius.square()

    def compare(self, z: Tensor, setting: Tensor) -> Tensor:
        return (setting * z) @ z.mT

    def potential(self, setting: float) -> Potential:
        return Dot(scale=setting)

    def constant(self, g: Tensor, radius: Tensor, tokens: int | None) -> Tensor:
        return (g / 8).exp() * (1 + g.square()).sqrt() + g


@dataclass(frozen=True, eq=False, repr=False)
class GaussianScores(Scores):
    """-|z - z'|²/(2b²) on a ball, g = R²/b²: e^{g/4} √(1 + 4g²) + g.

    Examples:
        >>> regard.nn.Averaging(8, 2, regard.nn.GaussianScores()).certificate(tokens=4).value <= 1.000001
        True
    """

    def setting(self, g: Tensor, radius: Tensor) -> Tensor:
        return radius / g.sqrt()

    def compare(self, z: Tensor, setting: Tensor) -> Tensor:
        w = z / setting
        return w @ w.mT - w.square().sum(-1).unsqueeze(-2) / 2

    def potential(self, setting: float) -> Potential:
        return Gaussian(bandwidth=setting)

    def constant(self, g: Tensor, radius: Tensor, tokens: int | None) -> Tensor:
        return (g / 4).exp() * (1 + 4 * g.square()).sqrt() + g


@dataclass(frozen=True, eq=False, repr=False)
class CosineScores(Scores):
    """g ẑ·ẑ', ẑ = z/√(|z|² + eps), on a ball: e^c (1 + h) + h, h = gR/√eps, c = min(g/8, h); or, for n,
    √N (1 + ρh) + ρh, ρ = R/√(R² + eps), N = n/(1 + (n-1) e^{-2gρ²}) (qi2023).

    Examples:
        >>> regard.nn.Averaging(8, 2, regard.nn.CosineScores()).certificate(tokens=4).value <= 1.000001
        True
    """

    eps: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.eps, (int, float)) or not 0 < self.eps < math.inf:
            raise ArgumentError("eps", f"is {self.eps!r}", "give a number above zero")

    def setting(self, g: Tensor, radius: Tensor) -> Tensor:
        return g

    def compare(self, z: Tensor, setting: Tensor) -> Tensor:
        unit = z * (z.square().sum(-1, keepdim=True) + self.eps).rsqrt()
        return (setting * unit) @ unit.mT

    def potential(self, setting: float) -> Potential:
        return Cosine(scale=setting, eps=self.eps)

    def constant(self, g: Tensor, radius: Tensor, tokens: int | None) -> Tensor:
        steep = radius * g / math.sqrt(self.eps)
        found = torch.minimum(g / 8, steep).exp() * (1 + steep) + steep
        if tokens is None:
            return found
        size = radius * (radius.square() + self.eps).rsqrt()
        crowd = tokens / (1 + (tokens - 1) * (-2 * g * size.square()).exp())
        return torch.minimum(found, crowd.sqrt() * (1 + size * steep) + size * steep)


@dataclass(frozen=True, eq=False, repr=False)
class DistanceScores(Scores):
    """-|z - z'|²/(2b²) for all tokens, without a ball: √n (1 + 2ω) + 2ω or √n (1 + 2√2 ω), ω = W₀((n-1)/e),
    for every bandwidth (kim2021, Theorem 3.2). The number of tokens must be given.

    Examples:
        >>> layer = regard.nn.Averaging(8, 2, regard.nn.DistanceScores(), tokens=4)
        >>> layer.certificate(tokens=4).value <= 1.000001
        True
    """

    on_ball = False

    def setting(self, g: Tensor, radius: Tensor) -> Tensor:
        return radius / g.sqrt()

    def compare(self, z: Tensor, setting: Tensor) -> Tensor:
        return GaussianScores().compare(z - z.mean(-2, keepdim=True), setting)

    def potential(self, setting: float) -> Potential:
        return Gaussian(bandwidth=setting)

    def constant(self, g: Tensor, radius: Tensor, tokens: int | None) -> Tensor:
        if tokens is None:
            raise ArgumentError(
                "tokens", "is None", "say the largest number: the constant grows with √n log n"
            )
        far = 0.0 if tokens == 1 else _lambert(math.log(tokens - 1) - 1)
        many = math.sqrt(tokens)
        return g.new_full(g.shape, min(many * (1 + 2 * far) + 2 * far, many * (1 + 2 * math.sqrt(2) * far)))


def _lambert(level: float) -> float:
    """The root w of w + log w = level, a little above it; the certificate has a proof of its own."""
    w = math.log1p(math.exp(level))
    for _ in range(60):
        w -= (w + math.log(w) - level) / (1 + 1 / w)
    return w * (1 + 1e-12)
