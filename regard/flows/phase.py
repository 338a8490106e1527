"""The phase diagram of long contexts: do tokens with a common cosine meet, or does each see itself alone?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.dynamics.equal_angles import equiangular_gaps
from regard.errors import ArgumentError

LARGEST_RHO = 0.95
LARGEST_GAMMA = 4.0


@dataclass(frozen=True)
class Phases:
    """For every γ (rows) and every ρ (columns), with β = γ log n, of n tokens with one common cosine ρ:

    share: how much of the way to one point they have gone at the time `until`, (ρ(t) - ρ)/(1 - ρ);
    own: the weight of a token on itself at the start, e^β/(e^β + (n-1) e^{βρ}).

    Predicted for n → ∞ (chen2026): they meet where γ < 1/(1-ρ), and rest where γ > 1/(1-ρ).

    Examples:
        >>> from regard.flows import phases
        >>> diagram = phases(particles=1000, until=2.0, size=4)  # a Phases
        >>> diagram.share.shape, bool((diagram.share[0] >= diagram.share[-1]).all())  # less moves as γ grows
        (torch.Size([4, 4]), True)
    """

    particles: int
    until: float
    gamma: Tensor
    rho: Tensor
    share: Tensor
    own: Tensor

    def crossings(self) -> list[float]:
        """γ(1 - ρ) where half of the way is gone, for each ρ with such a γ; predicted: 1 in the limit."""
        found = []
        for column, rho in zip(self.share.mT, self.rho.tolist(), strict=True):
            below = (column < 0.5).nonzero().flatten()
            if len(below) and int(below[0]) > 0:
                k = int(below[0])
                a, b = float(column[k - 1]), float(column[k])
                gamma = float(self.gamma[k - 1]) + (a - 0.5) / (a - b) * float(
                    self.gamma[k] - self.gamma[k - 1]
                )
                found.append(gamma * (1 - rho))
        return found

    def corrected(self) -> list[float]:
        """γ at which half of the way takes the time `until` to first order, for each ρ.

        ∫ e^{βg}/(2g((n-1)ρ+1)) dg up to 1 - ρ is e^{β(1-ρ)}/(2β(1-ρ)((n-1)ρ+1)) (1 + O(1/β)): the time in
        which tokens that are almost alone begin to fall, for ρ that is not small.
        """
        scale = math.log(self.particles)
        found = []
        for rho in self.rho.tolist():
            drawn, exponent = 2 * self.until * ((self.particles - 1) * rho + 1), scale
            for _ in range(100):
                exponent = math.log(max(drawn * exponent, math.e))
            found.append(exponent / scale / (1 - rho))
        return found

    def sentences(self) -> list[str]:
        """What is drawn, in words."""
        found = self.crossings()
        words = [
            f"{self.particles:,} tokens on the sphere with one common cosine ρ, softmax weights with "
            f"β = γ log n, until t = {self.until:g}: the exact equation of their cosine.",
            "Predicted as n grows: tokens meet where γ < 1/(1 − ρ), and each sees itself alone beyond.",
        ]
        if found:
            words.append(
                f"Seen: tokens have come half of the way at γ(1 − ρ) between {min(found):.2f} "
                f"and {max(found):.2f}, "
                "which tends to 1 like 1/log n. The dashed line is predicted for this n and t, to first "
                "order and for ρ that is not small."
            )
        return words

    def report(self, axis: str) -> dict[str, Any]:
        """Everything that was seen, as plain values. axis: what the page draws, "beta" or "gamma"."""
        return {
            "kind": "phase",
            "axis": axis,
            "particles": self.particles,
            "until": self.until,
            "gamma": self.gamma.tolist(),
            "beta": (self.gamma * math.log(self.particles)).tolist(),
            "rho": self.rho.tolist(),
            "share": self.share.tolist(),
            "own": self.own.tolist(),
            "crossings": self.crossings(),
            "corrected": self.corrected(),
            "words": self.sentences(),
        }


def phases(particles: int, until: float, size: int = 40) -> Phases:
    """The diagram on a grid of size × size cells.

    Examples:
        >>> from regard.flows import phases
        >>> diagram = phases(particles=10**6, until=10.0, size=8)
        >>> depth = diagram.gamma.unsqueeze(-1) * (1 - diagram.rho)
        >>> bool(diagram.share[depth < 1].min() > 0.5 > 0.1 > diagram.share[depth > 1.5].max())
        True
    """
    if particles < 3:
        raise ArgumentError("--particles", f"is {particles}", "give 3 or more: β is γ log n")
    gamma = LARGEST_GAMMA * (torch.arange(size, dtype=torch.float64) + 0.5) / size
    rho = LARGEST_RHO * (torch.arange(size, dtype=torch.float64) + 0.5) / size
    beta = (gamma * math.log(particles)).unsqueeze(-1)
    gaps = equiangular_gaps(beta, particles, rho, until)
    own = 1 / (1 + (particles - 1) * (-beta * (1 - rho)).exp())
    return Phases(particles, until, gamma, rho, 1 - gaps / (1 - rho), own)
