"""Deep networks: tokens that collapse within cubic bounds, and covariances beside wide random networks."""

import math

import pytest
import torch

import regard as r
from regard.dynamics import ShapedCovariance, collapse
from tests.dynamics.systems import D, normal


def test_tokens_collapse_within_both_bounds():
    x = 0.9 * normal(8, 3, seed=1) / 3
    map = r.Attention(r.Dot(scale=0.6), r.Linear(0.7 * normal(3, 3, seed=2)))
    found = collapse(map, x, 3)
    assert len(found.radii) == 4
    for radius, near, far in zip(found.radii[1:], found.next[1:], found.ahead[1:], strict=True):
        assert radius <= near.value * (1 + 1e-9) + 1e-15
        assert near.value <= far.value * (1 + 1e-9)
    assert found.radii[3] < 1e-3 * found.radii[0]
    assert "from the start" in str(found)
    w = float(torch.linalg.matrix_norm(map.lookup.w_v, 2))
    assert found.next[1].value == pytest.approx(0.6 * w * found.radii[0] ** 3, rel=1e-9)
    assert found.ahead[3].value == pytest.approx((0.6 * w) ** 13 * found.radii[0] ** 27, rel=1e-6)


def test_the_cubic_bound_is_nearly_attained_once():
    """Two tokens on a line, small scores: the ratio tends to one as |A|ρ² does to zero."""
    x = torch.tensor([[0.1], [-0.1]], dtype=D)
    found = collapse(r.Attention(r.Dot(scale=1.0)), x, 1)
    assert found.radii[1] <= found.next[1].value <= 1.001 * found.radii[1]


def test_heads_and_weights_collapse_too():
    w = 0.4 * normal(2, 3, 3, seed=5)
    attention = r.Attention(r.Dot(w, 0.5 * w), r.Linear(0.5 * normal(2, 3, 3, seed=6)))
    map = r.maps.Heads(attention, 0.5 * normal(2, 3, 3, seed=7))
    found = collapse(map, r.Measure(0.5 * normal(6, 3, seed=8), normal(6, seed=9)), 2)
    assert all(
        radius <= near.value + 1e-15 for radius, near in zip(found.radii[1:], found.next[1:], strict=True)
    )


def test_what_does_not_collapse_is_refused():
    x = normal(4, 2)
    with pytest.raises(r.errors.ArgumentError, match="skip connections"):
        collapse(r.maps.Residual(r.Attention(r.Dot())), x, 2)
    with pytest.raises(r.errors.RefusalError, match="first token"):
        collapse(r.Attention(r.Dot(), support=r.Causal()), x, 2)
    with pytest.raises(r.errors.ArgumentError, match="batch"):
        collapse(r.Attention(r.Dot()), normal(2, 4, 2), 1)


ROOT = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.9, 0.0], [-0.3, 0.2, 0.7]], dtype=D)
V = ROOT @ ROOT.mT
EQUATION = ShapedCovariance(0.8, 0.7)


def test_the_drift_is_that_of_one_layer():
    """n (E[V'] - V) at width 256, exactly averaged over values and over the sign of scores."""
    width, count = 256, 10000
    g = torch.Generator().manual_seed(1)
    factor = torch.linalg.cholesky(V * width)
    q, k = (factor @ torch.randn(count, 3, width, generator=g, dtype=D) for _ in range(2))
    scores = q @ k.mT / (0.8 * width**2)
    mean = torch.zeros(3, 3, dtype=D)
    for sign in (1, -1):
        a = torch.eye(3, dtype=D) + (sign * scores).softmax(-1) - 1 / 3
        mean += (a @ V @ a.mT).mean(0) / 2
    found = width * 0.7**2 * (mean - V)
    torch.testing.assert_close(found, EQUATION.drift(V), rtol=0.1, atol=0.004)


def test_the_noise_is_that_of_one_layer():
    width = 256
    moved = (EQUATION.network(V, width, 1, 3000, seed=3) - V) * math.sqrt(width)
    expected = EQUATION.diffusion(V)
    scale = float(expected.abs().max())
    torch.testing.assert_close(torch.cov(moved.flatten(1).mT), expected, rtol=0, atol=0.08 * scale)
    torch.testing.assert_close(expected, expected.mT, rtol=0, atol=1e-14)
    assert float(torch.linalg.eigvalsh(expected)[0]) > -1e-12


def test_a_wide_network_follows_the_equation():
    """A fifth of the width deep: means and variances of covariances, within the noise of 1500 samples."""
    width, until = 60, 0.2
    net = EQUATION.network(V, width, round(until * width), 1500, seed=4)
    sde = EQUATION.paths(V, until, 24, 1500, seed=5)
    error = (net.var(0) / 1500 + sde.var(0) / 1500).sqrt()
    assert ((net.mean(0) - sde.mean(0)).abs() <= 4 * error + 0.01).all()
    torch.testing.assert_close(net.std(0), sde.std(0), rtol=0.15, atol=0.02)


def test_equal_tokens_feel_no_attention():
    """T = 0: nothing is left of the drift, and the noise is that of the values alone."""
    same = torch.ones(3, 3, dtype=D)
    assert float(EQUATION.drift(same).abs().max()) < 1e-15
    square = 0.7**2
    torch.testing.assert_close(
        EQUATION.diffusion(same), torch.full((9, 9), 2 * square * (2 - square), dtype=D)
    )


def test_arguments_of_the_equation():
    with pytest.raises(r.errors.ArgumentError, match="branch"):
        ShapedCovariance(1.0, 1.5)
    with pytest.raises(r.errors.ArgumentError, match="temperature"):
        ShapedCovariance(0.0)
    with pytest.raises(r.errors.ArgumentError, match="width"):
        EQUATION.network(V, 2, 1, 1)
    with pytest.raises(r.errors.ArgumentError, match="covariance"):
        EQUATION.paths(ROOT, 0.1, 2, 1)
