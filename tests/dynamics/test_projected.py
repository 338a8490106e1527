"""Sigmoid attention to a Gaussian law: its velocity, and the closest affine field."""

import math

import pytest
import torch

import regard as r
from regard.dynamics import Displacement, Euler, GaussianMeasure, RungeKutta, closure
from regard.dynamics.projected import _rule, project
from regard.measure import Measure
from tests.dynamics.systems import D, normal, quantiles


def law_of(dimension, seed=0):
    root = 0.6 * normal(dimension, dimension, seed=seed) + 0.3 * torch.eye(dimension, dtype=D)
    return GaussianMeasure(normal(dimension, seed=seed + 1), root @ root.mT), root


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_a_rule_integrates_polynomials(count):
    nodes, weights = _rule(count)
    for power in range(0, min(2 * count, 30), 2):
        exact = math.prod(range(1, power, 2))  # E z^{2k} = (2k-1)!!
        assert float(weights @ nodes**power) == pytest.approx(exact, rel=1e-9)


def test_small_scores_give_the_linear_closure():
    """σ(s + b) = σ(b) + σ'(b) s + …: Γ(x) = σ(b) m + σ'(b)(S + m mᵀ)Aᵀx."""
    law, root = law_of(3)
    a, bias = 1e-4 * normal(3, 3, seed=5), 0.4
    p = 1 / (1 + math.exp(-bias))
    field = project(a, bias, law.mean, root)
    matrix = p * (1 - p) * (law.covariance + torch.outer(law.mean, law.mean)) @ a.mT
    torch.testing.assert_close(field.slope, matrix, rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(field.value, p * law.mean + matrix @ law.mean, rtol=1e-6, atol=1e-8)
    still = project(0 * a, bias, law.mean, root)
    torch.testing.assert_close(still.value, p * law.mean, rtol=1e-12, atol=0)
    assert not still.slope.any()


def test_weights_that_are_one():
    """A large bias: every key counts one, so the velocity is the mean of keys."""
    law, root = law_of(2)
    field = project(0.3 * normal(2, 2), 60.0, law.mean, root)
    torch.testing.assert_close(field.value, law.mean, rtol=1e-9, atol=1e-9)
    assert float(field.slope.abs().max()) < 1e-9


@pytest.mark.parametrize("dimension", [1, 2])
def test_the_field_is_the_regression_of_velocities(dimension):
    """Velocities of many tokens, regressed on where they are: the same mean and slope."""
    law, root = law_of(dimension, seed=3)
    map = r.Attention(r.Bilinear(0.8 * normal(dimension, dimension, seed=4)), normalizer=r.Sigmoid(-0.5))
    one = quantiles(601 if dimension == 1 else 41).squeeze(-1)
    one = one / one.square().mean().sqrt()
    grid = one.unsqueeze(-1) if dimension == 1 else torch.cartesian_prod(one, one)
    x = grid @ root.mT + law.mean
    velocities = map(x) / len(x)
    slope = (velocities.mT @ (x - law.mean) / len(x)) @ torch.linalg.inv(law.covariance)
    found = closure(map, law).velocity(law)
    torch.testing.assert_close(found.b + found.m @ law.mean, velocities.mean(0), rtol=0.02, atol=0.01)
    torch.testing.assert_close(found.m, slope, rtol=0.03, atol=0.01)


def test_slopes_are_means_of_derivatives():
    """E[DΓ] by Stein's lemma is E[Γ(x)(x - m)ᵀ]S⁻¹, over nodes that integrate both."""
    law, root = law_of(1, seed=6)
    a, bias = torch.tensor([[0.9]], dtype=D), -0.3
    nodes, weights = _rule(80)
    x = float(law.mean) + float(root) * nodes
    z, w = _rule(100)
    m, s = float(law.mean), float(law.covariance)
    p = torch.sigmoid((0.9 * x * m + bias).unsqueeze(-1) + (0.9 * x.abs() * s**0.5).unsqueeze(-1) * z)
    gamma = (p @ w) * m + ((p * (1 - p)) @ w) * s * 0.9 * x
    field = project(a, bias, law.mean, root)
    assert float(field.value) == pytest.approx(float(weights @ gamma), rel=1e-6)
    assert float(field.slope) == pytest.approx(float(weights @ (gamma * (x - m))) / s, rel=1e-5)


def test_particles_stay_near_the_projection():
    """Tokens of a normal law under sigmoid attention, each key by its share: mean and variance."""
    x = quantiles(61) + 0.5
    map = r.Attention(r.Dot(scale=0.6), r.Linear(torch.eye(1, dtype=D) / 61), r.Sigmoid(-0.5))
    end = r.flow(map, x, RungeKutta(0.25), 1.0).measure(1.0)
    begin = GaussianMeasure(x.mean(0), Measure(x).covariance())
    found = closure(map.replace(lookup=r.Identity()), begin).at(1.0)
    assert float(end.mean()) == pytest.approx(float(found.mean), rel=0.01)
    assert float(end.covariance()) == pytest.approx(float(found.covariance), rel=0.03)


def test_a_projection_says_so_and_never_blows_up():
    law, _ = law_of(2)
    map = r.Attention(r.Dot(scale=1.0), normalizer=r.Sigmoid(0.0))
    found = closure(map, law)
    assert not found.exact
    assert closure(r.Attention(r.Dot()), law).exact
    assert found.blow_up() == math.inf
    assert torch.isfinite(found.at(0.5).covariance).all()
    less = closure(Displacement(map), law).velocity(law)
    torch.testing.assert_close(less.m, found.velocity(law).m - torch.eye(2, dtype=D))
    with pytest.raises(r.errors.RefusalError, match="in 4 dimensions"):
        closure(map, GaussianMeasure(torch.zeros(4, dtype=D), torch.eye(4, dtype=D)))
    with pytest.raises(r.errors.RefusalError, match="without biases"):
        closure(r.Attention(r.Dot(b_q=torch.ones(2, dtype=D)), normalizer=r.Sigmoid(0.0)), law)
    assert r.flow(map, normal(3, 2), Euler(0.1), 0.1).at(0.1).shape == (3, 2)
