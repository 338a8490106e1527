"""Attacks in Wasserstein distances that move mass: laws of a few atoms whose masses are as free as their
places.

For laws μ = Σ m_i δ_{x_i} and a velocity d_i of each atom the map stretches W_p by

    (Σ_i m_i |(DT d)_i|^p)^{1/p} / (Σ_i m_i |d_i|^p)^{1/p},          T(x_i) the value at atom i,

to first order, as long as atoms of the image stay apart. For p = 1 the quotient is largest where one atom
moves and the mass of this probe is as good as nothing: then the first term is |DT_μ(y) d| of the probe and
Σ_i m_i K(x_i, y) |…| of all that see it, which no sequence of equal masses shows. Places, masses (in
logarithms) and velocities climb together; the witness is a pair of laws, compared by exact transport.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._object import rebuild
from regard.compute import ReferenceEngine
from regard.domains import Ball, TokenSet
from regard.measure import Measure
from regard.proofs.places import project, unit
from regard.transport import wasserstein

Values = Callable[[Tensor, Tensor], Tensor]
LOOKS = 256
"""Laws that are looked at before the best ones climb."""
LIGHTEST = math.log(1e-8)
"""The logarithm of the smallest mass."""
STEPS = (1e-1, 1e-2, 1e-3, 1e-4)
"""How far a witness moves, in parts of the size of the domain."""
ROUNDING = 1e-9
"""What a witness gives away, so that it does not rest on the rounding of transport."""
BLUR = 2.0**-47
"""How far values may be from those that are computed, relative to the largest: laws whose images are no
farther apart show nothing.
"""


@dataclass(frozen=True)
class Laws:
    """Several laws with velocities: points (b, n, d), logits of masses (b, n), velocities (b, n, d)."""

    points: Tensor
    logits: Tensor
    velocities: Tensor

    def __getitem__(self, index: Any) -> Laws:
        return Laws(self.points[index], self.logits[index], self.velocities[index])

    @property
    def log_masses(self) -> Tensor:
        return torch.log_softmax(self.logits, -1)


@dataclass(frozen=True)
class MassAttack:
    """A climb over laws of `atoms` points of the domain, in Wasserstein(p) with a finite p.

    values(points (n, d), log_masses (n,)) -> (n, e): the map at weighted tokens.
    size: how far points of the domain are from its center, about; width: of a token.
    """

    values: Values
    domain: TokenSet
    p: float
    size: float
    width: int
    atoms: int
    generator: torch.Generator

    @property
    def center(self) -> Tensor | None:
        center = self.domain.center if isinstance(self.domain, Ball) else None
        return None if center is None else center.double()

    def climb(self, restarts: int, steps: int) -> tuple[float, Measure, Measure]:
        """The best pair of laws: how many times farther apart their images are, and the two."""
        laws = self._starts()
        laws = self._ascend(laws[self._stretch(laws).topk(min(restarts, LOOKS)).indices], steps)
        order = self._stretch(laws).argsort(descending=True)
        found = [self._pair(laws[int(k)]) for k in order[:3]]
        return max(found, key=lambda pair: pair[0])

    def _starts(self) -> Laws:
        """Half of them a crowd in one place and a probe elsewhere, half of them anywhere; the first atom is
        the probe.
        """
        shape = (LOOKS, self.atoms, self.width)
        points = self._random(*shape)
        points = self.size * points / points.norm(dim=-1, keepdim=True)
        points = points * torch.rand(LOOKS, self.atoms, 1, generator=self.generator, dtype=torch.float64)
        crowd = points[::2, 1:2] + 0.02 * self.size * self._random(*points[::2, 1:].shape)
        points[::2, 1:] = crowd
        ahead = points[:, :1] / points[:, :1].norm(dim=-1, keepdim=True).clamp_min(1e-300)
        points[::2, :1] = self.size * ahead[::2]
        velocities = self._random(*shape)
        velocities[::2, :1] = ahead[::2]
        if self.p == 1:
            velocities[:, 1:] = 0.0
        points = points if self.center is None else points + self.center
        logits = torch.zeros(LOOKS, self.atoms, dtype=torch.float64)
        logits[1::4] = -8 * torch.rand(logits[1::4].shape, generator=self.generator, dtype=torch.float64)
        logits[:, 0] = LIGHTEST if self.p == 1 else logits[:, 0]
        return Laws(project.one(self.domain, points), logits, velocities)

    def _stretch(self, laws: Laws) -> Tensor:
        """The quotient of the module's first line for each law."""
        masses = laws.log_masses
        moved = torch.func.vmap(self._push)(laws.points, masses, laws.velocities)
        far = (masses.exp() * moved.norm(dim=-1).clamp_min(1e-300).pow(self.p)).sum(-1)
        near = (masses.exp() * laws.velocities.norm(dim=-1).clamp_min(1e-300).pow(self.p)).sum(-1)
        found = (far / near).pow(1 / self.p)
        return torch.nan_to_num(found, nan=0.0, posinf=0.0)

    def _push(self, points: Tensor, masses: Tensor, velocity: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: self.values(x, masses), (points,), (velocity,))[1]

    def _ascend(self, laws: Laws, steps: int) -> Laws:
        """Adam on the logarithm, all laws side by side, each kept at its best."""
        climbing = [t.clone().requires_grad_() for t in (laws.points, laws.logits, laws.velocities)]
        rates = (0.05 * self.size, 0.2, 0.05)
        optimizer = torch.optim.Adam([{"params": [t]} for t in climbing])
        best, kept = self._stretch(laws), laws
        for step in range(steps):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - step / steps) ** 1.2
            height = self._stretch(Laws(*climbing)).clamp_min(1e-300).log().sum()
            for tensor, slope in zip(climbing, self._slopes(height, climbing), strict=True):
                tensor.grad = -torch.nan_to_num(slope, nan=0.0, posinf=0.0, neginf=0.0)
            optimizer.step()
            self._return(*climbing)
            here = Laws(*(t.detach() for t in climbing))
            value = self._stretch(here)
            kept, best = _choose(value > best, here, kept), torch.maximum(value, best)
        return kept

    def _slopes(self, height: Tensor, climbing: list[Tensor]) -> list[Tensor]:
        """Which way is up; for p = 1 the probe alone moves, and stays light."""
        places, logits, velocities = torch.autograd.grad(height, climbing)
        if self.p == 1:
            velocities[:, 1:] = 0.0
            logits[:, 0] = 0.0
        return [places, logits, velocities]

    @torch.no_grad()
    def _return(self, points: Tensor, logits: Tensor, velocities: Tensor) -> None:
        """Into the domain, to masses that are not too light, to velocities of length one."""
        points.copy_(project.one(self.domain, points))
        logits.sub_(logits.amax(-1, keepdim=True)).clamp_(min=LIGHTEST)
        velocities.div_(velocities.flatten(1).norm(dim=-1)[:, None, None].clamp_min(1e-300))

    def _pair(self, law: Laws) -> tuple[float, Measure, Measure]:
        """Two laws: a velocity seen as a step, from the law and from inside of the border."""
        masses = law.log_masses
        best = (0.0, Measure(law.points, masses), Measure(law.points, masses))
        for part in STEPS:
            step = part * self.size * unit(law.velocities)
            for start in (law.points, project.one(self.domain, law.points - step)):
                other = project.one(self.domain, start + step)
                if float((other - start).abs().max()) > 0.01 * part * self.size:  # not back at the border
                    best = max(best, self._seen(start, other, masses), key=lambda pair: pair[0])
        return best

    def _seen(self, start: Tensor, other: Tensor, masses: Tensor) -> tuple[float, Measure, Measure]:
        """How many times farther apart the images are, by exact transport."""
        image, moved = (Measure(self.values(x, masses).detach(), masses) for x in (start, other))
        blur = BLUR * float(max(image.points.abs().max(), moved.points.abs().max()))
        apart = max(0.0, float(wasserstein(image, moved, self.p)) - blur)
        stretched = apart / _carried(masses, start - other, self.p)
        return stretched * (1 - ROUNDING), Measure(start, masses), Measure(other, masses)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)


def weighted_values(map: Any) -> Values:
    """The map at weighted tokens, heads side by side; an ArgumentError where it says nothing of weights."""
    from regard.dynamics.drifts import drift

    def values(points: Tensor, log_masses: Tensor) -> Tensor:
        law = rebuild(Measure, ("points", "log_weights", "marks"), (points, log_masses, None))
        found = drift(map, law, ReferenceEngine())
        return found if found.ndim == 2 else found.flatten(0, -3).transpose(0, 1).flatten(1)

    return values


def _choose(better: Tensor, new: Laws, old: Laws) -> Laws:
    pick = better[:, None, None]
    return Laws(
        torch.where(pick, new.points, old.points),
        torch.where(better[:, None], new.logits, old.logits),
        torch.where(pick, new.velocities, old.velocities),
    )


def _carried(log_masses: Tensor, moves: Tensor, p: float) -> float:
    """(Σ m |move|^p)^{1/p}: at least the distance of the two laws."""
    return float((log_masses.exp() * moves.norm(dim=-1).pow(p)).sum().pow(1 / p))
