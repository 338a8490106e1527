"""Affine maps of tokens."""

import math

import pytest
import torch

from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.maps import Affine
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, falsify

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def test_worked_example():
    w = torch.sin(3 + 2 * (3 * torch.arange(3.0, dtype=D)[:, None] + torch.arange(3.0, dtype=D)))
    assert certify(Affine(w), Whole(), Frobenius()).value == pytest.approx(1.9567468577185798, rel=1e-10)
    assert certify(Affine(w), Whole(), Frobenius()).value >= 1.9567468577185797
    assert certify(Affine(w), Whole(), EntryMax()).value == pytest.approx(
        float(w.abs().sum(0).max()), rel=1e-11
    )


@pytest.mark.parametrize(
    "norm",
    [
        Frobenius(),
        TokenMax(),
        TokenSum(),
        EntryMax(),
        Wasserstein(1.0),
        Wasserstein(2.0),
        Wasserstein(math.inf),
    ],
)
@pytest.mark.parametrize("seed", [1])
def test_attained_and_never_exceeded(norm, seed):
    map = Affine(_t(4, 3, seed=seed), _t(3, seed=seed + 10))
    bound = certify(map, Ball(2.0, _t(4, seed=seed + 20), tokens=3), norm).value
    found = falsify(map, Ball(2.0, _t(4, seed=seed + 20), tokens=3), norm, steps=4, restarts=1).value
    assert 0.9 * bound <= found <= bound * (1 + 1e-9)


def test_deviations():
    map, points = Affine(_t(4, 3)), _t(5, 4, seed=1)
    top = float(torch.linalg.matrix_norm(map.w, 2))
    radii = torch.tensor([0.0, 0.3, 0.1, 0.0, 0.2], dtype=D)
    assert deviation(map, Radii(points, radii), TokenMax()).value == pytest.approx(0.3 * top, rel=1e-9)
    assert deviation(map, Radii(points, radii), TokenSum()).value == pytest.approx(0.6 * top, rel=1e-9)
    assert deviation(map, Radii(points, radii), Frobenius()).value == pytest.approx(
        float(radii.norm()) * top, rel=1e-9
    )
    assert deviation(map, Neighborhood(points, 0.3), Frobenius()).value == pytest.approx(0.3 * top, rel=1e-9)
    assert deviation(map, Neighborhood(points, 0.3), TokenSum()).value == pytest.approx(
        0.3 * math.sqrt(5) * top, rel=1e-9
    )


def test_single_entries_have_a_bound_too():
    """r times the longest column of W, and a token that moves along it attains it."""
    map, x = Affine(_t(4, 3)), _t(2, 4)
    entry = deviation(map, Radii(x, torch.tensor([0.1, 0.2], dtype=D)), EntryMax())
    column = map.w[:, int(map.w.norm(dim=0).argmax())]
    moved = x + torch.stack([torch.zeros_like(column), 0.2 * column / column.norm()])
    assert entry.value == pytest.approx(float((map(moved) - map(x)).abs().max()), rel=1e-9)
    assert any("constant times radius" in other.theorem for other in entry.others)
