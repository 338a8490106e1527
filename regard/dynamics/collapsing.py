"""collapse: tokens that attention brings together, layer after layer, beside the bounds of rank collapse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard.attention import Attention
from regard.certificate import Certificate
from regard.domains import Ball
from regard.dynamics.fields import read_source
from regard.dynamics.flowing import iterate
from regard.errors import ArgumentError, RefusalError
from regard.maps import Heads
from regard.measure import Measure
from regard.proofs.theorems.rank_collapse import collapse_after, consensus, rank_collapse


@dataclass(frozen=True, eq=False, repr=False)
class Collapse(Object):
    """Radii of tokens around one point that they tend to, after 0, 1, ... layers.

    radii: found. next: what is proved of each from the tokens one layer before, κ ρ³. ahead: what is proved
    of each from the tokens of the start alone, κ^{(3^k - 1)/2} ρ^{3^k}. Nothing is to prove of the start.

    Examples:
        >>> layer = regard.Attention(regard.Dot(scale=0.5))
        >>> found = regard.dynamics.collapse(layer, 0.5 * torch.eye(3, dtype=torch.float64), 2)  # a Collapse
        >>> found.radii[2] < found.radii[1] < found.radii[0]
        True
        >>> all(found.radii[k] <= found.next[k].value for k in (1, 2))
        True
    """

    radii: tuple[float, ...]
    next: tuple[Certificate | None, ...]
    ahead: tuple[Certificate | None, ...]

    def __str__(self) -> str:
        lines = ["layer       radius    from the last layer    from the start"]
        for k, (radius, near, far) in enumerate(zip(self.radii, self.next, self.ahead, strict=True)):
            shown = "" if near is None or far is None else f"{near.value:22.3e}{far.value:18.3e}"
            lines.append(f"{k:5}{radius:13.3e}{shown}")
        return "\n".join(lines)

    __repr__ = __str__


def collapse(map: Attention | Heads, x: Measure | Tensor, steps: int) -> Collapse:
    """Iterate attention without skip connections and follow the radius of its tokens (dong2021): at most
    κρ³ after a layer, κ = Σ_h |W_h||A_h|, so that tokens meet doubly exponentially fast where κρ² < 1.

    Examples:
        >>> eye = torch.eye(3, dtype=torch.float64)
        >>> found = regard.dynamics.collapse(regard.Attention(regard.Dot(eye, eye)), 0.5 * eye, 2)
        >>> found.radii[1] <= found.ahead[1].value < found.radii[0]  # proved from the start alone
        True
    """
    if not isinstance(map, (Attention, Heads)):
        found = f"is a {type(map).__name__}"
        raise ArgumentError("map", found, "give attention alone: skip connections keep tokens apart")
    source = read_source(x)
    if source.batch_shape:
        raise ArgumentError("x", f"has batch shape {list(source.batch_shape)}", "give one sequence")
    run = iterate(map, source, steps)
    center = source.points.double().mean(0)
    radii, near, far = [_radius(source, center)], [], []
    for k in range(steps):
        now = run.measure(float(k))
        bound = rank_collapse(map, now, center)
        if not bound.value < float("inf"):
            raise RefusalError("collapse", list(bound.refused))
        center = consensus(map, now, center)
        near.append(bound)
        far.append(collapse_after([map] * (k + 1), Ball(_outward(radii[0]), tokens=source.size)))
        radii.append(_radius(run.measure(float(k + 1)), center))
    return Collapse(tuple(radii), (None, *near), (None, *far))


def _radius(measure: Measure, center: Tensor) -> float:
    return float(torch.linalg.vector_norm(measure.points.double() - center, dim=-1).amax())


def _outward(radius: float) -> float:
    """The radius with its rounding: a length of a few hundred numbers."""
    return radius * (1 + 1e-12)
