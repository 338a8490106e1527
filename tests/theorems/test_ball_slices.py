"""Slices of a ball: no key of a given weight is nearer or farther than they say; one is as near, and far."""

import pytest
import torch

from regard._enclosed import Numbers, Vectors
from regard._upper import exact
from regard.attention import Attention
from regard.domains import Ball, NearbyLaws, Tube
from regard.measure import Measure
from regard.potentials import Bilinear
from regard.proofs.law_rows import LawRows
from regard.proofs.slices import Slices
from regard.proofs.subject import subject_of
from tests.theorems.exact import D, generator, normal
from tests.theorems.laws_nearby import ball_of, law


def _rows(attention: Attention, domain: NearbyLaws) -> LawRows:
    return LawRows(subject_of(attention).separate[0], domain)


def _seen(rows: LawRows, y: torch.Tensor) -> Slices:
    """One cell for each key: its log k."""
    logs = rows.rows.log_odds(rows.rows.seen(y)).center
    cells = logs.unsqueeze(1).expand(-1, rows.count, -1)
    return Slices(rows, rows.balls[0], cells - 1e-9, cells + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_no_key_of_that_weight_is_nearer_or_farther(seed):
    g = generator(seed)
    width, size = 2 + seed, 10.0 ** (seed - 1)
    attention = Attention(Bilinear(normal(g, width, width) / size**2))
    rows = _rows(attention, ball_of(law(g, 5, width, size, weighted=True), 0.1, 1.3 * size))
    y = normal(g, 400, width)
    y = 1.3 * size * y / y.norm(dim=-1, keepdim=True)
    y[200:] *= torch.rand(200, 1, generator=g, dtype=D)
    slices = _seen(rows, y)
    apart = torch.cdist(rows.points, y)
    means = rows.rows.means.center + rows.middle
    nearest, farthest = slices.nearest_atoms().bound, slices.farthest_from_means().bound
    assert bool((nearest <= apart.unsqueeze(0)).all())
    assert bool((farthest >= torch.cdist(means, y).unsqueeze(1)).all())
    beyond = slices.farthest_atoms().bound
    assert bool((beyond >= apart.unsqueeze(0)).all())
    assert float((apart / beyond).amax()) > 0.9
    assert float((nearest / apart).amax()) > 0.9  # and hardly less


@pytest.mark.parametrize("jump", [0, 1, 3])
def test_balls_of_a_tube(jump):
    """Keys around atom j, or around the atom that is `jump` before it."""
    g = generator(jump)
    attention, given = Attention(Bilinear(normal(g, 3, 3))), law(g, 4, 3, 1.0, weighted=True)
    rows = _rows(attention, NearbyLaws(given, 0.1, Tube(0.4)))
    balls = rows.balls[jump]
    torch.testing.assert_close(balls.centers, given.points[(torch.arange(4) - jump) % 4])
    away = normal(g, 300, 1, 3)
    y = balls.centers + 0.4 * away / away.norm(dim=-1, keepdim=True) * torch.rand(
        300, 4, 1, generator=g, dtype=D
    )
    logs = rows.rows.log_odds(rows.rows.seen(y.flatten(0, 1))).center.unflatten(1, (300, 4)).mT
    slices = Slices(rows, balls, logs - 1e-9, logs + 1e-9)
    apart = (y - given.points).norm(dim=-1).mT
    assert bool((slices.nearest_atoms().bound <= apart).all())
    assert bool((slices.farthest_atoms().bound >= apart).all())
    means = rows.rows.means.center + rows.middle
    apart = (y.unsqueeze(-2) - means).norm(dim=-1).permute(2, 1, 0)
    assert bool((slices.farthest_from_means().bound >= apart).all())


def test_they_are_attained_in_the_plane():
    """θ = (1, 0) for every query: at t along the axis a key on the circle is at √(R² - t²) across."""
    matrix = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=D)
    points = torch.tensor([[0.5, 1.0], [-0.5, 1.0]], dtype=D)
    rows = _rows(Attention(Bilinear(matrix)), NearbyLaws(Measure(points), 0.1, Ball(2.0)))
    t = torch.tensor([1.9, -1.9], dtype=D)
    q = (4 - t.square()).sqrt()
    y = torch.stack([t, q], -1)
    slices = _seen(rows, y)
    expected = torch.cdist(points, y)  # across, both are on the side of y
    torch.testing.assert_close(slices.nearest_atoms().bound[0], expected, rtol=1e-7, atol=0)
    means = rows.rows.means.center + rows.middle
    other = torch.stack([t, -q], -1)  # the far side
    found = slices.farthest_from_means().bound[:, 0]
    torch.testing.assert_close(found, torch.cdist(means, other), rtol=1e-7, atol=0)
    torch.testing.assert_close(
        slices.farthest_atoms().bound[0], torch.cdist(points, other), rtol=1e-7, atol=0
    )
    reach, rows.rows.reach = rows.rows.reach, exact(1e13)  # differences of vectors so long are off by 2e-3
    assert bool((_seen(rows, y).farthest_from_means().bound[:, 0] > torch.cdist(means, other) + 1e-3).all())
    rows.rows.reach = reach
    rows.rows.__dict__["means"] = Vectors(rows.rows.means.center, exact(0.1))  # known roughly
    higher, below = means + torch.tensor([0.0, 0.1], dtype=D), torch.tensor([[0.0, -2.0]], dtype=D)
    roughly = _seen(rows, below)
    assert bool((roughly.farthest_from_means().bound[:, 0] >= torch.cdist(higher, below)).all())
    assert float(roughly._log_means.error) >= 0.1  # |θ| = 1


def test_numbers_that_are_known_roughly():
    """A number at 3 ± 1/4, a center at 1 ± 1/8, a cell [0, 1/2]: the least and most of distances."""
    rows = _rows(
        Attention(Bilinear(torch.eye(2, dtype=D))), ball_of(law(generator(0), 1, 2, 1.0, False), 0.1, 2.0)
    )
    cells = torch.tensor([[[0.0]]], dtype=D)
    slices = Slices(rows, rows.balls[0], cells, cells + 0.5)
    slices.center = Numbers(torch.tensor([[[1.0]]], dtype=D), exact(0.125))
    number = Numbers(torch.tensor([[[3.0]]], dtype=D), exact(0.25))
    found = [slices._gap(number), slices._span(number), slices._at_most(number), slices._at_least(number)]
    for one, truth, above in zip(found, (2.25, 3.25, 2.375, 1.625), (False, True, True, False), strict=True):
        assert (float(one) >= truth) if above else (float(one) <= truth)
        assert abs(float(one) - truth) < 1e-12
