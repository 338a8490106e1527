"""Points of domains, for attacks: the nearest one, and the farthest along a slope."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._verb import Verb
from regard.domains import Ball, Box, Hull, Neighborhood, Radii, Shell, Whole
from regard.norms import Frobenius


def unit(z: Tensor) -> Tensor:
    """z over its length; scaled first, since squares of very small numbers vanish. Zero stays zero."""
    z = z / z.abs().amax().clamp_min(5e-324)
    return z / z.norm().clamp_min(0.5)


def units(z: Tensor) -> Tensor:
    """The same for each token."""
    z = z / z.abs().amax(-1, keepdim=True).clamp_min(5e-324)
    return z / z.norm(dim=-1, keepdim=True).clamp_min(0.5)


farthest = Verb("farthest")
"""farthest.one(domain, slope): the point of a neighborhood that is farthest along a slope."""


@farthest.rule(Ball)
def _farthest_ball(domain: Ball, slope: Tensor) -> Tensor:
    out = domain.radius * (1 - 1e-12) * units(slope)
    return out if domain.center is None else out + domain.center.to(out.dtype)


@farthest.rule(Neighborhood)
def _farthest_near(domain: Neighborhood, slope: Tensor) -> Tensor:
    along = unit(slope) if isinstance(domain.norm, Frobenius) else units(slope)
    return domain.measure.points + domain.radius * (1 - 1e-12) * along


@farthest.rule(Radii)
def _farthest_radii(domain: Radii, slope: Tensor) -> Tensor:
    return domain.measure.points + (1 - 1e-12) * domain.radii.double().unsqueeze(-1) * units(slope)


@farthest.rule(Box)
def _farthest_box(domain: Box, slope: Tensor) -> Tensor:
    return domain.measure.points + (1 - 1e-12) * domain.radii.double().unsqueeze(-1) * slope.sign()


@farthest.rule(Hull)
def _farthest_hull(domain: Hull, slope: Tensor) -> Tensor:
    corners, found = domain.corners, domain.measure.points.clone()
    found[domain.token] = corners[(corners @ slope[domain.token]).argmax()]
    return found


project = Verb("project")
"""project.one(domain, x): a point of the domain near x."""


@project.rule(Whole)
def _anywhere(domain: Whole, x: Tensor) -> Tensor:
    return x


@project.rule(Ball)
def _ball(domain: Ball, x: Tensor) -> Tensor:
    center = torch.zeros(x.shape[-1], dtype=x.dtype) if domain.center is None else domain.center.to(x.dtype)
    away = x - center
    length = away.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return center + away * (domain.radius * (1 - 1e-12) / length).clamp(max=1.0)


@project.rule(Shell)
def _shell(domain: Shell, x: Tensor) -> Tensor:
    """Each token away from its center, scaled; one that is its center goes out along ±1, ∓1, ..."""
    mean = x.mean(-1, keepdim=True) if domain.centered else torch.zeros_like(x[..., :1])
    away = x - mean
    aside = torch.ones_like(x) - 2 * (torch.arange(x.shape[-1]) % 2).to(x.dtype)
    aside = aside - aside.mean(-1, keepdim=True) if domain.centered else aside
    away = torch.where((away == 0).all(-1, keepdim=True), aside, away)
    size = away.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-300)
    return mean + away * (size.clamp(domain.inner * (1 + 1e-12), domain.outer * (1 - 1e-12)) / size)


@project.rule(Neighborhood)
def _near(domain: Neighborhood, x: Tensor) -> Tensor:
    center = domain.measure.points
    away = x - center
    length = away.norm() if isinstance(domain.norm, Frobenius) else away.norm(dim=-1, keepdim=True)
    return center + away * (domain.radius * (1 - 1e-12) / length.clamp_min(1e-300)).clamp(max=1.0)


@project.rule(Radii)
def _radii(domain: Radii, x: Tensor) -> Tensor:
    center = domain.measure.points
    away = x - center
    length = away.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return center + away * (domain.radii.double().unsqueeze(-1) * (1 - 1e-12) / length).clamp(max=1.0)


@project.rule(Box)
def _box(domain: Box, x: Tensor) -> Tensor:
    center, radii = domain.measure.points, domain.radii.double().unsqueeze(-1) * (1 - 1e-12)
    return center + (x - center).clamp(-radii, radii)


@project.rule(Hull)
def _hull(domain: Hull, x: Tensor) -> Tensor:
    """A mixture of corners that is near, by a few steps toward the corner that is best (Frank and Wolfe)."""
    corners, found = domain.corners, domain.measure.points.clone()
    goal, at = x[domain.token], corners.mean(0)
    for step in range(64):
        corner = corners[(corners @ (goal - at)).argmax()]
        at = at + (corner - at) * (2.0 / (step + 2.0))
    found[domain.token] = at
    return found
