"""Tilt: the Boltzmann–Gibbs transformation as a map of measures, what one query does to its context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard.attention import as_measure
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.parameters import Tokens, part, shared
from regard.potentials import Potential


@dataclass(frozen=True, eq=False, repr=False)
class Tilt(Object):
    """μ ↦ Ψ_G(μ)(dy) = G(y) μ(dy) / μ(G), G = exp a(query, ·), at one query point (d,) (vuckovic2020,
    Definition 3).

    Examples:
        >>> tilt = regard.tilt.Tilt(regard.Dot(scale=1.0), torch.tensor([1.0]))  # G(y) = e^y
        >>> found = tilt(torch.tensor([[0.0], [1.0]])).masses()
        >>> torch.allclose(found[1] / found[0], torch.tensor(1.0).exp())
        True
    """

    potential: Potential = part(moving=Tokens.KEYS)
    query: Tensor = shared()

    def __post_init__(self) -> None:
        if not isinstance(self.potential, Potential):
            raise ArgumentError(
                "potential", f"is a {type(self.potential).__name__}", "give a Potential value, e.g. Dot()"
            )
        _check.parameter("query", self.query, 1, "(d,)")
        if self.query.ndim != 1:
            raise ArgumentError("query", f"has shape {list(self.query.shape)}", "give one point (d,)")

    def __call__(self, measure: Measure | Tensor) -> Measure:
        """The tilted measure; its atoms and marks stay where they are, its weights change."""
        found = as_measure("measure", measure)
        here = torch.zeros(1, dtype=torch.long, device=found.points.device)
        scores = self.potential.scores(self.query.unsqueeze(-2), found.points, here, found.positions())
        return found.reweight(scores.squeeze(-2))
