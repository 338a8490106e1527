"""A step down the energy of a memory."""

import math

import pytest
import torch

from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.errors import ArgumentError
from regard.nonexpansive import MemoryStep
from regard.norms import EntryMax, Frobenius, OwnToken, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, image
from tests.theorems.exact import generator, normal

D = torch.float64


def _worst(map, x):
    """Spectral norms of the derivative at tokens (b, d)."""
    return float(torch.linalg.matrix_norm(torch.func.vmap(torch.func.jacrev(map))(x), 2).max())


@pytest.mark.parametrize("step", [0.0, 0.4, 3.0, 12.0, -2.0])
def test_no_derivative_is_larger(step):
    """300 tokens for each of four memories; Δ from torch's distances."""
    for seed in range(4):
        g = generator(seed)
        map = MemoryStep(normal(g, 3, 5), normal(g, 5), 1.3, step)
        bent = 1.3 * float(torch.cdist(map.memory.mT, map.memory.mT).max()) ** 2 / 4
        expected = 1 + abs(step) * bent if step < 0 else max(1.0, step * bent - 1)
        assert certify(map, Whole(), Frobenius()).value == pytest.approx(expected, rel=1e-9)
        assert _worst(map, 2 * normal(g, 300, 3)) <= expected * (1 + 1e-9)


@pytest.mark.parametrize(("step", "value"), [(1.0, 1.0), (2.0, 1.0), (2.5, 1.5), (-1.0, 2.0)])
def test_attained_between_two_columns(step, value):
    """M = (1, -1): at zero the weights are equal, and H = 1."""
    map = MemoryStep(torch.tensor([[1.0, -1.0]], dtype=D), None, 1.0, step)
    assert certify(map, Whole(), TokenMax()).value == pytest.approx(value, rel=1e-12)
    far = torch.tensor([[40.0], [0.0]], dtype=D)
    assert _worst(map, far) == pytest.approx(value, rel=1e-9)


def test_a_common_part_of_all_columns_does_not_count():
    g = generator(5)
    memory, shift = normal(g, 3, 5), 100 * normal(g, 3, 1)
    plain, moved = (
        certify(MemoryStep(m, None, 1.0, 4.0), Whole(), Frobenius()).value for m in (memory, memory + shift)
    )
    assert moved == pytest.approx(plain, rel=1e-9)
    assert certify(MemoryStep(memory[:, :1], None, 9.0, 4.0), Whole(), Frobenius()).value == 1.0


def test_all_norms_but_single_entries():
    map = MemoryStep(normal(generator(6), 3, 5), None, 1.0, 4.0)
    value = certify(map, Whole(), Frobenius()).value
    for norm in (TokenMax(), TokenSum(), Wasserstein(1.0), Wasserstein(math.inf), OwnToken()):
        assert certify(map, Whole(), norm).value == value
    refused = certify(map, Whole(), EntryMax())
    assert math.isinf(refused.value)
    assert any("not entry by entry" in sentence for sentence in refused.refused)


def test_deviations_and_images_hold_what_moves():
    g = generator(7)
    map, points = MemoryStep(normal(g, 3, 5), normal(g, 5), 2.0, 1.5), normal(g, 4, 3)
    slope = certify(map, Whole(), Frobenius()).value
    radii = torch.tensor([0.1, 0.0, 0.2, 0.3], dtype=D)
    assert deviation(map, Radii(points, radii), TokenSum()).value == pytest.approx(0.6 * slope, rel=1e-9)
    moved = points + 0.1 * torch.nn.functional.normalize(normal(g, 200, 4, 3), dim=-1)
    near = image(map, Neighborhood(points, 0.1, TokenMax()))
    assert float((map(moved) - near.points).norm(dim=-1).max()) <= near.radius
    ball = image(map, Ball(0.1, points[0], 4))
    assert float((map(moved[:, 0]) - ball.center).norm(dim=-1).max()) <= ball.radius
    zero = image(map, Ball(0.01, tokens=4))
    torch.testing.assert_close(zero.center, map(torch.zeros(1, 3, dtype=D))[0])
    assert zero.radius == pytest.approx(0.01 * slope, rel=1e-9)
    wide = image(map, Ball(50.0, tokens=4))  # an average of columns is among them
    middle = map.memory.mean(1)
    torch.testing.assert_close(wide.center, -1.5 * middle)
    spread = float((map.memory.mT - middle).norm(dim=-1).max())
    assert wide.radius == pytest.approx(50 + 1.5 * spread, rel=1e-9)
    assert image(map, Whole(tokens=4)) == Whole(tokens=4)


def test_scores_beyond_all_digits_are_not_located():
    map = MemoryStep(torch.tensor([[1e9, -1e9]], dtype=D), None, 1e9, 1.0)
    held = image(map, Neighborhood(torch.ones(2, 1, dtype=D), 0.1))
    assert isinstance(held, Ball)
    assert held.radius == pytest.approx(1e9 + 0.1, rel=1e-9)
    assert held.center.tolist() == [1.0]


def test_a_width_that_does_not_fit_is_an_error():
    with pytest.raises(ArgumentError, match="memory"):
        certify(MemoryStep(normal(generator(8), 3, 5)), Ball(1.0, torch.zeros(4, dtype=D)), Frobenius())
