"""What is observed of a flow, with the words that a page says of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from regard.dynamics import Clusters, EffectiveRank, Energy, MeanCosine, Observable
from regard.flows.cells import DenseRegions

COSINE = 0.99
"""Particles whose cosine is at least this are of one cluster, and so are chains of them."""


@dataclass(frozen=True)
class Column:
    """A number of each frame. logarithmic: how its axis is drawn."""

    name: str
    meaning: str
    logarithmic: bool = False

    def written(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def column_of(observable: Observable) -> Column:
    """The column of an observable; a page has one energy, so its name is without β."""
    if isinstance(observable, Clusters):
        return Column(
            observable.name,
            f"Groups of particles that chains with a cosine of at least {observable.cosine:.7g} connect.",
            True,
        )
    if isinstance(observable, Energy):
        return Column("energy", MEANINGS[Energy])
    if isinstance(observable, DenseRegions):
        return Column(
            observable.name,
            f"Connected regions with at least twice the mean density, over {observable.cells} equal cells.",
        )
    return Column(observable.name, MEANINGS[type(observable)])


MEANINGS: dict[type[Observable], str] = {
    Energy: "(1/2β) ∬ exp(β⟨x, y⟩) dμ dμ. Without noise the flow never lowers it.",
    MeanCosine: "The mean cosine of two particles. One: all point the same way.",
    EffectiveRank: "In how many directions they spread: exp of the entropy of the squared singular values.",
}
ATOMS = Column("atoms", "How many weighted particles are left of all.", True)
