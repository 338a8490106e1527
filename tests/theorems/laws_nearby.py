"""Laws near a given one, drawn: some mass of each atom goes elsewhere, at a cost that is known."""

import torch

from regard.domains import Ball, NearbyLaws, Tube, Vocabulary
from regard.measure import Measure
from tests.theorems.exact import D, normal


def law(generator: torch.Generator, count: int, width: int, radius: float, weighted: bool) -> Measure:
    points = normal(generator, count, width)
    points = radius * points / points.norm(dim=-1, keepdim=True)
    points = points * torch.rand(count, 1, generator=generator, dtype=D)
    return Measure(points, normal(generator, count) if weighted else None)


def another(generator: torch.Generator, domain: NearbyLaws) -> Measure:
    """A law of the domain, as far away as it allows: a share of each atom goes to a place of its own."""
    given = domain.measure
    count, width = given.points.shape
    if isinstance(domain.within, Vocabulary):
        words = domain.within.points
        places = words[torch.randint(len(words), (count,), generator=generator)]
    elif isinstance(domain.within, Tube):
        to = torch.randperm(count, generator=generator) if domain.within.jumps else torch.arange(count)
        away = normal(generator, count, width)
        places = given.points[to] + domain.within.radius * (1 - 1e-9) * away / away.norm(dim=-1, keepdim=True)
    else:
        away = normal(generator, count, width)
        places = domain.within.radius * (1 - 1e-9) * away / away.norm(dim=-1, keepdim=True)
    shares = torch.rand(count, generator=generator, dtype=D).pow(3)
    shares = shares * (torch.rand(count, generator=generator, dtype=D) < 0.5)
    cost = (given.masses() * shares * (places - given.points).norm(dim=-1)).sum()
    shares = shares * (domain.radius / cost.clamp_min(1e-300)).clamp(max=1.0)
    masses = torch.cat([given.masses() * (1 - shares), given.masses() * shares])
    kept = masses > 0
    points = torch.cat([given.points, places])
    return Measure(points[kept], masses[kept].log())


def ball_of(measure: Measure, radius: float, size: float) -> NearbyLaws:
    return NearbyLaws(measure, radius, Ball(size))
