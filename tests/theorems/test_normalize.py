"""Norm layers."""

import math

import pytest
import torch

from regard.certify import certify, deviation, falsify
from regard.certify.falsification import falsify_deviation
from regard.domains import Ball, Neighborhood, Radii, Shell, Whole
from regard.maps import Normalize
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _layer(centered: bool, eps: float = 1e-2) -> Normalize:
    return Normalize(eps, torch.tensor([0.5, -2.0, 1.0, 1.5], dtype=D), _t(4), centered)


@pytest.mark.parametrize("centered", [True, False])
def test_worked_example(centered):
    layer = _layer(centered)
    assert certify(layer, Whole(), TokenMax()).value == pytest.approx(2 / 0.1)
    assert certify(layer, Shell(0.3), TokenMax()).value == pytest.approx(2 / math.sqrt(0.09 + 0.01))
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=D)
    near = certify(layer, Neighborhood(x, 0.5, TokenMax()), TokenMax()).value
    assert near == pytest.approx(2 / math.sqrt(0.75**2 + 0.01))


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum(), Wasserstein(2.0)])
def test_never_exceeded(centered, norm):
    layer, x = _layer(centered), _t(3, 4, seed=1) + 2
    for domain in (Whole(3), Shell(0.2, 3.0, tokens=3), Ball(0.7, x[0], tokens=3), Neighborhood(x, 0.3, TokenMax()), Neighborhood(x, 0.4)):
        bound = certify(layer, domain, norm).value
        assert falsify(layer, domain, norm, steps=4, restarts=1, width=4).value <= bound * (1 + 1e-9)


def test_attained_at_constant_tokens():
    layer = Normalize(1e-2)
    assert falsify(layer, Ball(0.01, tokens=2), TokenMax(), width=4).value >= 0.98 * certify(layer, Ball(0.01, tokens=2), TokenMax()).value


def test_pairs_on_both_sides_of_a_shell():
    """The set is not convex: opposite points of the inner sphere are stretched most, and attain the constant."""
    layer = Normalize(1e-3, centered=False)
    x = torch.tensor([[0.2, 0.2]], dtype=D)
    ratio = float((layer(x) - layer(-x)).norm() / (2 * x).norm())
    assert certify(layer, Shell(0.2), TokenMax()).value == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("radius", [1e-3, 0.3, 30.0])
def test_deviations(centered, radius):
    layer, x = _layer(centered), _t(4, 4, seed=3) + 1
    radii = radius * torch.tensor([1.0, 0.0, 0.5, 0.1], dtype=D)
    for domain in (Neighborhood(x, radius), Neighborhood(x, radius, TokenMax()), Radii(x, radii)):
        for norm in (Frobenius(), TokenMax(), TokenSum()):
            bound = deviation(layer, domain, norm).value
            assert falsify_deviation(layer, domain, norm, restarts=1, steps=8).value <= bound * (1 + 1e-9)
            assert bound <= 4 * (2 * 2.0 * math.sqrt(4))


def test_refusals():
    assert "jumps at constant tokens" in str(certify(Normalize(0.0), Whole(), TokenMax()))
    assert math.isfinite(certify(Normalize(0.0), Shell(0.1), TokenMax()).value)
    assert "not entry by entry" in str(certify(Normalize(), Whole(), EntryMax()))
