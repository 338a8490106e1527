"""Exact answers: two tokens, one common cosine, energies, hulls, metastable pairs, causal order."""

import math

import pytest
import torch

import regard as r
from regard.dynamics import (
    Displacement,
    DormandPrince,
    Energy,
    Euler,
    Hull,
    Rescaled,
    RungeKutta,
    Sphere,
    drift,
    equiangular,
)
from regard.measure import Measure
from tests.dynamics.systems import D, normal, on_sphere, sa, usa, with_common_cosine


def simpson(function, low, high, count=2000):
    points = torch.linspace(low, high, count + 1, dtype=D)
    weights = torch.ones(count + 1, dtype=D)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return float((weights * function(points)).sum()) * (high - low) / count / 3


@pytest.mark.parametrize("beta", [0.5, 3.0])
def test_two_tokens(beta):
    """The time from ρ to ρ' is the integral of one over the speed."""
    x = with_common_cosine(2, 0.1)
    y = r.flow(sa(beta), x, RungeKutta(0.02), 1.0, space=Sphere()).at(1.0)
    rho = float(y[0] @ y[1])
    time = simpson(
        lambda c: (math.exp(beta) + (beta * c).exp()) / (2 * (1 - c * c) * (beta * c).exp()), 0.1, rho
    )
    assert time == pytest.approx(1.0, abs=1e-6)
    y = r.flow(usa(beta), x, RungeKutta(0.01), 0.2, space=Sphere()).at(0.2)
    time = simpson(lambda c: 1 / ((1 - c * c) * (beta * c).exp()), 0.1, float(y[0] @ y[1]))
    assert time == pytest.approx(0.2, abs=1e-6)


def test_two_tokens_without_temperature():
    x = with_common_cosine(2, 0.3)
    y = r.flow(sa(0.0), x, RungeKutta(0.02), 1.0, space=Sphere()).at(1.0)
    assert float(y[0] @ y[1]) == pytest.approx(math.tanh(1 + math.atanh(0.3)), abs=1e-8)


@pytest.mark.parametrize("n", [5, 20])
@pytest.mark.parametrize("map", [sa(1.5), usa(1.5)], ids=["SA", "USA"])
@pytest.mark.parametrize("rho", [0.3, -0.04])
def test_one_common_cosine_stays(n, map, rho):
    y = r.flow(map, with_common_cosine(n, rho), DormandPrince(1e-11), 1.0, space=Sphere()).at(1.0)
    gram = y @ y.mT
    expected = torch.full((n, n), equiangular(map, n, rho).at(1.0), dtype=D).fill_diagonal_(1.0)
    torch.testing.assert_close(gram, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("map", "rate"), [(sa(1.0), 2.0), (usa(1.0), 2 * math.e)])
def test_late_rates(map, rate):
    equation = equiangular(map, 6, 0.2)
    assert math.log(equation.gap(8.0) / equation.gap(9.0)) == pytest.approx(rate, abs=1e-5)
    assert equation.at(0.0) == pytest.approx(0.2, abs=1e-15)
    step = 1e-5
    assert (equation.at(0.3 + step) - equation.at(0.3 - step)) / (2 * step) == pytest.approx(
        equation.rate(equation.at(0.3)), rel=1e-6
    )


@pytest.mark.parametrize("beta", [1.0, 4.0])
def test_energies_rise_as_the_theory_says(beta):
    """dE/dt = n⁻¹ Σ |x_i'|² without normalization, n⁻² Σ Z_i |x_i'|² with it."""
    x, energy = on_sphere(7, 3).requires_grad_(), Energy(beta)
    value = (beta * x @ x.mT).exp().mean() / (2 * beta)
    assert float(value.detach()) == pytest.approx(energy.number(Measure(x.detach()), None), rel=1e-14)
    (slope,) = torch.autograd.grad(value, x)
    sums = (beta * x @ x.mT).exp().sum(-1)
    for map, weights in ((usa(beta), torch.full((7,), 1 / 7, dtype=D)), (sa(beta), sums / 49)):
        speed = Sphere().velocity(lambda y, map=map: drift(map, Measure(y), None), 0.0, x)
        expected = (weights * speed.square().sum(-1)).sum()
        torch.testing.assert_close((slope * speed).sum(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("map", [sa(3.0), usa(3.0)], ids=["SA", "USA"])
def test_energies_never_fall(map):
    trajectory = r.flow(map, on_sphere(10, 3), RungeKutta(0.02), 1.0, space=Sphere())
    energies = trajectory.observe(Energy(3.0), times=20)["energy(3)"]
    assert float(torch.diff(energies).min()) > 0


@pytest.mark.parametrize("step", [0.3, 1.0])
@pytest.mark.parametrize(
    ("map", "space"),
    [
        (Displacement(r.Attention(r.Gaussian(bandwidth=1.0))), r.dynamics.Euclidean()),
        (r.Attention(r.Dot(scale=2.0)), Rescaled(1.0)),
        (Displacement(r.Attention(r.Dot(), normalizer=r.Sparsemax())), r.dynamics.Euclidean()),
    ],
    ids=["mean shift", "rescaled", "sparsemax"],
)
def test_euler_keeps_the_hull(map, space, step):
    trajectory = r.flow(map, normal(9, 2), Euler(step), 3.0, space=space)
    hull = Hull(normal(50, 2, seed=1))
    supports = torch.stack([hull.support(trajectory.measure(t)) for t in trajectory.steps()])
    assert float(torch.diff(supports, dim=0).max()) < 1e-14
    assert float(supports[-1].mean()) < 0.9 * float(supports[0].mean())


def test_longer_steps_break_the_hull_and_say_so():
    map = Displacement(sa(0.0))
    x = torch.tensor([[0.0], [1.0]], dtype=D)
    with pytest.warns(r.dynamics.HullWarning, match="step: is 3, and Euler steps longer than 1"):
        trajectory = r.flow(map, x, Euler(3.0), 3.0)
    assert float(trajectory.at(3.0).max()) == 1.5
    r.flow(map, x, RungeKutta(3.0), 3.0)  # no law to break
    r.flow(sa(0.0), x, Euler(3.0), 3.0)


@pytest.mark.parametrize(("beta", "ratio"), [(4.0, 1.23), (8.0, 1.04), (12.0, 1.015)])
def test_metastable_pairs(beta, ratio):
    """Two equal clusters at right angles meet after e^β/(2β) (1 + O(1/β)): two tokens, each many times."""
    equation = equiangular(sa(beta), 2, 0.0)
    time = simpson(lambda c: 1 / _rates(equation, c), 0.0, 0.9)
    assert time * 2 * beta / math.exp(beta) == pytest.approx(ratio, abs=0.02)


def _rates(equation, cosines):
    return torch.tensor([equation.rate(float(c)) for c in cosines], dtype=D)


def test_clusters_are_weighted_particles():
    x = with_common_cosine(2, 0.0)
    many = r.flow(sa(3.0), x.repeat_interleave(4, 0), RungeKutta(0.1), 2.0, space=Sphere()).at(2.0)
    few = r.flow(sa(3.0), x, RungeKutta(0.1), 2.0, space=Sphere()).at(2.0)
    torch.testing.assert_close(many[::4], few, atol=1e-13, rtol=0)


def test_the_first_of_causal_tokens_rests_and_all_join_it():
    x = on_sphere(5, 3)
    trajectory = r.flow(sa(1.0).replace(support=r.Causal()), x, RungeKutta(0.2), 40.0, space=Sphere())
    start = trajectory.at(0.0)
    for t in (0.2, 10.0, 40.0):
        assert torch.equal(trajectory.at(t)[0], start[0])
    torch.testing.assert_close(trajectory.at(40.0), start[:1].expand(5, 3), atol=1e-6, rtol=0)
    apart = [float((trajectory.at(t)[1] - start[0]).norm()) for t in (30.0, 40.0)]
    assert math.log(apart[0] / apart[1]) == pytest.approx(5.0, abs=0.01)  # the second token: e^{-t/2}
    shifted = r.flow(Displacement(sa(1.0).replace(support=r.Causal())), normal(4, 2), Euler(0.5), 5.0)
    assert torch.equal(shifted.at(5.0)[0], normal(4, 2)[0])


def test_two_causal_tokens():
    """ρ' = w(1 - ρ²) with w = e^{βρ}/(e^{βρ} + e^β): the first rests, the second follows."""
    beta, x = 2.0, with_common_cosine(2, -0.3)
    map = sa(beta).replace(support=r.Causal())
    y = r.flow(map, x, RungeKutta(0.02), 2.0, space=Sphere()).at(2.0)
    time = simpson(lambda c: (1 + (beta * (1 - c)).exp()) / (1 - c * c), -0.3, float(y[0] @ y[1]))
    assert time == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize(("beta", "k"), [(1.0, 1), (4.0, 2), (4.0, 3), (4.0, 4), (9.0, 4)])
def test_waves_of_an_even_density_grow_at_their_rate(beta, k):
    """Particles spread evenly on the circle: a wave of k periods grows at k² I_k(β)/(β I_0(β)); with USA the
    rate is k² I_k(β)/β.
    """
    turns = 2 * math.pi * torch.arange(120, dtype=D) / 120
    i_0, i_k = ((beta * turns.cos()).exp() @ (j * turns).cos() / 120 for j in (0, k))
    start = turns + 1e-5 * (k * turns).sin()
    x = torch.stack([start.cos(), start.sin()], -1)
    for map, rate in ((sa(beta), k * k * i_k / (beta * i_0)), (usa(beta), k * k * i_k / beta)):
        until = 0.2 / float(rate)
        end = r.flow(map, x, RungeKutta(until / 8), until, space=Sphere()).at(until)
        waves = [torch.atan2(y[:, 1], y[:, 0]).mul(1j * k).exp().mean().abs() for y in (x, end)]
        assert float((waves[1] / waves[0]).log()) == pytest.approx(0.2, abs=1e-5)
