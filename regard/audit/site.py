"""Site: one attention layer of a trained model, as a declaration, on one input, with the proof that it is the same layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention import Attention
from regard.compute import apply

TOLERANCE = 1e-4
"""How far a declaration's output may be from the module's own, relative to its norm."""


@dataclass(frozen=True)
class Site:
    """attention: heads in dimension -3; points (batch, 1, n, d): the layer's input; w_o (heads, e, d): each head's output projection;
    own: the module's own output before that projection, (batch, heads, n, e)."""

    name: str
    layer: int
    attention: Attention
    points: Tensor
    w_o: Tensor
    own: Tensor

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.own.shape[-3]

    def disagreement(self) -> float:
        """|declaration - module| / |module| in the Frobenius norm, on this input."""
        found = apply(self.attention, self.points).double()
        own = self.own.double()
        scale = float(own.norm())
        gap = float((found - own).norm())
        return gap / scale if scale > 0 else gap

    def scores(self) -> Tensor:
        """The scores (batch, heads, n, n) of this input, in float64."""
        exact = self.points.double()
        potential = torch.utils._pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) else t, self.attention.potential)
        return potential.scores(exact, exact)
