"""Gated feed-forward layers."""

import math

import pytest
import torch

from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.maps import Gated, Gelu, Relu, Silu
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, falsify
from regard.proofs.falsification import falsify_deviation

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _layer(activation, seed=0):
    return Gated(
        activation,
        _t(3, 5, seed=seed),
        _t(3, 5, seed=seed + 1),
        _t(5, 2, seed=seed + 2),
        _t(5, seed=seed + 3),
        _t(5, seed=seed + 4),
    )


def test_worked_example():
    """relu(x) · x has slope 2x, and the bound is 2R: attained."""
    one = torch.ones(1, 1, dtype=D)
    layer = Gated(Relu(), one, one, one)
    bound = certify(layer, Ball(3.0), TokenMax()).value
    assert bound == pytest.approx(6.0)
    assert falsify(layer, Ball(3.0, tokens=1), TokenMax(), width=1).value >= 0.95 * bound


@pytest.mark.parametrize("activation", [Gelu()], ids=repr)
@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum(), Wasserstein(2.0)])
def test_never_exceeded(activation, norm):
    layer, x = _layer(activation), _t(3, 3, seed=9)
    for domain in (
        Ball(1.5, _t(3, seed=8), tokens=3),
        Neighborhood(x, 0.3, TokenMax()),
        Radii(x, torch.tensor([0.0, 0.5, 1.0], dtype=D)),
    ):
        bound = certify(layer, domain, norm).value
        found = falsify(layer, domain, norm, steps=10, restarts=2).value
        assert 0.05 * bound <= found <= bound * (1 + 1e-9)


def test_measures_pair_tokens_that_are_far_apart():
    """A constant near each token does not hold between two of them,
    so Wasserstein distances take one ball for all.
    """
    layer, x = _layer(Silu()), torch.tensor([[2.0, 0.0, 0.0], [-2.0, 0.0, 0.0]], dtype=D)
    domain = Neighborhood(x, 0.01, TokenMax())
    assert certify(layer, domain, Wasserstein(1.0)).value > certify(layer, domain, TokenMax()).value


def test_deviation():
    layer, domain = _layer(Gelu()), Neighborhood(_t(3, 3, seed=5), 0.1, TokenMax())
    bound = deviation(layer, domain, TokenMax()).value
    assert 0.2 * bound <= falsify_deviation(layer, domain, TokenMax(), restarts=2, steps=30).value <= bound


def test_refusals():
    assert "tokens must be bounded" in str(certify(_layer(Silu()), Whole(), TokenMax()))
    assert math.isinf(certify(_layer(Silu()), Whole(), TokenMax()).value)
    assert "not entry by entry" in str(certify(_layer(Silu()), Ball(1.0), EntryMax()))
