"""Sorted groups of coordinates."""

import math

import pytest
import torch

from regard.domains import Ball, Radii, Whole
from regard.errors import ArgumentError
from regard.nonexpansive import GroupSort
from regard.norms import EntryMax, Frobenius, OwnToken, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, image
from tests.theorems.exact import generator, normal

D = torch.float64


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum(), EntryMax()], ids=repr)
def test_never_more_and_attained(size, norm):
    """1,000 pairs, near and far; where the order stays every move keeps its length."""
    map, g = GroupSort(size), generator(0)
    x = normal(g, 1000, 2, 6)
    y = x + normal(g, 1000, 2, 6) * torch.logspace(-4, 1, 1000, dtype=D)[:, None, None]
    ratio = norm.of(map(x) - map(y)) / norm.of(x - y)
    assert float(ratio.max()) <= 1 + 1e-9
    assert float(ratio[:50].max()) >= 1 - 1e-9
    assert certify(map, Whole(), norm).value == 1.0


def test_values():
    x = torch.tensor([[1.0, 3.0, 2.0, 0.0, 5.0, 4.0]], dtype=D)
    assert GroupSort(2)(x).tolist() == [[3.0, 1.0, 2.0, 0.0, 5.0, 4.0]]
    assert GroupSort(3)(x).tolist() == [[3.0, 2.0, 1.0, 5.0, 4.0, 0.0]]


def test_laws_images_and_deviations():
    map, points = GroupSort(2), normal(generator(1), 3, 4)
    for norm in (Wasserstein(1.0), Wasserstein(math.inf), OwnToken()):
        assert certify(map, Whole(), norm).value == 1.0
    radii = torch.tensor([0.1, 0.0, 0.3], dtype=D)
    assert deviation(map, Radii(points, radii), TokenSum()).value == pytest.approx(0.4, rel=1e-9)
    assert deviation(map, Radii(points, radii), EntryMax()).value == pytest.approx(0.3, rel=1e-9)
    ball = image(map, Ball(0.5, points[0], 3))
    torch.testing.assert_close(ball.center, map(points[0]))
    assert ball.radius == pytest.approx(0.5, rel=1e-9)
    assert image(map, Ball(0.5, tokens=3)).radius == 0.5
    assert image(map, Whole(tokens=3)) == Whole(tokens=3)
    assert torch.equal(image(map, Radii(points, radii)).points, map(points))


def test_a_width_that_has_no_such_groups_is_an_error():
    with pytest.raises(ArgumentError, match="divisor of the width"):
        certify(GroupSort(3), Ball(1.0, torch.zeros(4, dtype=D)), Frobenius())
