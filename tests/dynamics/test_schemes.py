"""Schemes have the order they declare, in every space, and steps end where layers change."""

import math

import pytest
import torch

import regard as r
from regard.dynamics import DormandPrince, Euler, Heun, Rescaled, RungeKutta, Sphere, equiangular
from regard.maps import Affine
from tests.dynamics.systems import D, normal, on_sphere, sa, usa, with_common_cosine

FIXED = [(Euler, 64), (Heun, 16), (RungeKutta, 4)]


@pytest.mark.parametrize(("kind", "count"), FIXED)
@pytest.mark.parametrize("map", [sa(1.0), usa(0.5)], ids=["SA", "USA"])
def test_the_measured_order_is_the_declared_one(kind, count, map):
    x, exact = with_common_cosine(3, 0.2), equiangular(map, 3, 0.2).at(0.5)
    errors = []
    for steps in (count, 2 * count):
        y = r.flow(map, x, kind(0.5 / steps), 0.5, space=Sphere()).at(0.5)
        errors.append(abs(float(y[0] @ y[1]) - exact))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(kind.order, abs=0.1)


@pytest.mark.parametrize("map", [sa(1.0), usa(0.5)], ids=["SA", "USA"])
def test_the_order_of_dormand_and_prince(map):
    """With steps that are given: a tolerance would choose them."""
    exact, scheme, errors = equiangular(map, 3, 0.2).at(0.5), DormandPrince(1e-6), []
    for steps in (4, 8):
        z = with_common_cosine(3, 0.2)
        for _ in range(steps):
            z = Sphere().retract(
                scheme.advance(lambda t, y: Sphere().velocity(map, t, y), 0.0, z, 0.5 / steps)
            )
        errors.append(abs(float(z[0] @ z[1]) - exact))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(scheme.order, abs=0.1)


def test_rescaling_is_a_change_of_coordinates():
    x, w = normal(5, 2), normal(2, 2, seed=3) / 2
    map = r.Attention(r.Dot(), r.Linear(w))
    v = w.mT
    plain = r.flow(map, x, RungeKutta(0.02), 1.0).at(0.7)
    moved = r.flow(map, x, RungeKutta(0.02), 1.0, space=Rescaled(v)).at(0.7)
    torch.testing.assert_close(moved @ torch.linalg.matrix_exp(0.7 * v).mT, plain, atol=1e-8, rtol=1e-8)


def test_tolerances_are_kept():
    x = with_common_cosine(3, 0.1)
    exact = equiangular(sa(2.0), 3, 0.1).at(2.0)
    counts = []
    for tolerance in (1e-4, 1e-8):
        trajectory = r.flow(sa(2.0), x, DormandPrince(tolerance), 2.0, space=Sphere())
        y = trajectory.at(2.0)
        assert abs(float(y[0] @ y[1]) - exact) < 10 * tolerance
        counts.append(len(trajectory.steps()))
    assert counts[0] < counts[1] < 60


def test_layers_act_one_after_the_other():
    """x' = a_k x: the end is exp of the mean of the a_k, whatever the step."""
    rates = (0.5, -1.0, 2.0)
    maps = [Affine(torch.tensor([[rate]], dtype=D)) for rate in rates]
    x = torch.ones(1, 1, dtype=D)
    for scheme in (RungeKutta(0.03), DormandPrince(1e-8)):
        trajectory = r.flow(maps, x, scheme, 1.5)
        assert float(trajectory.at(0.5)) == pytest.approx(math.exp(0.25), rel=1e-6)
        assert float(trajectory.at(1.0)) == pytest.approx(math.exp(-0.25), rel=1e-6)
        assert float(trajectory.at(1.5)) == pytest.approx(math.exp(0.75), rel=1e-6)
        assert {0.5, 1.0, 1.5} <= set(trajectory.steps())


def test_the_sphere_is_kept():
    x = on_sphere(8, 3)
    for scheme in (Euler(0.5), Heun(0.25), DormandPrince(1e-3)):
        trajectory = r.flow(usa(2.0), x, scheme, 3.0, space=Sphere())
        for t in (0.1, 1.7, 3.0):
            assert float((trajectory.at(t).norm(dim=-1) - 1).abs().max()) < 1e-14


def test_noise_is_drawn_from_its_seed():
    x = on_sphere(6, 3)

    def end(seed):
        return r.flow(sa(1.0), x, Euler(0.1), 1.0, space=Sphere(), noise=0.3, seed=seed).at(1.0)

    assert torch.equal(end(1), end(1))
    assert not torch.equal(end(1), end(2))
    assert float((end(1).norm(dim=-1) - 1).abs().max()) < 1e-14


def test_noise_has_its_variance():
    """Without a field, x(T) is normal with variance noise² T: 3000 numbers, five standard deviations."""
    still = Affine(torch.zeros(3, 3, dtype=D))
    x = torch.zeros(1000, 3, dtype=D)
    end = r.flow(still, x, Euler(0.25), 2.0, noise=0.5, seed=3).at(2.0)
    assert float(end.var()) == pytest.approx(0.5, abs=5 * 0.5 * math.sqrt(2 / 3000))
    half = r.flow(still, x, Euler(0.25), 2.0, space=Rescaled(1.0), noise=0.5, seed=3).at(2.0)
    assert float(half.var()) < 0.2  # dz = -z dt + e^{-t} noise dW


def test_noise_on_the_sphere_is_its_brownian_motion():
    """⟨x(t), x(0)⟩ falls like e^{-noise² (d-1) t/2}: 2000 particles, six standard deviations."""
    still, x = Affine(torch.zeros(3, 3, dtype=D)), on_sphere(2000, 3)
    end = r.flow(still, x, Euler(0.05), 1.0, space=Sphere(), noise=0.5, seed=2).at(1.0)
    assert float((x * end).sum(-1).mean()) == pytest.approx(math.exp(-0.25), abs=0.03)
