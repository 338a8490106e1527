"""Attention as diffusion: closed forms of two states, bounds that are attained, small bandwidths."""

import math

import pytest
import torch

import regard as r
from regard.dynamics import GaussianMeasure, Heat, heat, score, score_slope
from tests.dynamics.systems import D, normal, quantiles


def two_states(a, b):
    return Heat(torch.tensor([[1 - a, a], [b, 1 - b]], dtype=D))


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.1), (1.0, 1.0), (0.0, 0.5), (1e-3, 2e-3)])
@pytest.mark.parametrize("t", [0.0, 0.4, 1.0, 7.3])
def test_two_states(a, b, t):
    """e^{-tL} = Π + e^{-(a+b)t}(1 - Π) with the stationary law (b, a)/(a + b) in every row of Π."""
    law = torch.tensor([[b, a], [b, a]], dtype=D) / (a + b)
    expected = law + math.exp(-(a + b) * t) * (torch.eye(2, dtype=D) - law)
    torch.testing.assert_close(two_states(a, b).kernel(t), expected, rtol=0, atol=1e-14)


def test_kernels_compose_and_keep_laws():
    found = heat(r.Attention(r.Gaussian(bandwidth=1.0)), normal(9, 2))
    torch.testing.assert_close(found.kernel(0.7) @ found.kernel(1.6), found.kernel(2.3), rtol=0, atol=1e-14)
    torch.testing.assert_close(found.kernel(50.0).sum(-1), torch.ones(9, dtype=D), rtol=0, atol=1e-12)
    assert bool((found.kernel(3.0) >= 0).all())
    exact = torch.linalg.matrix_exp(-1.3 * found.laplacian)
    torch.testing.assert_close(found.kernel(1.3), exact, rtol=0, atol=1e-13)
    u = normal(9, 3, seed=1)
    torch.testing.assert_close(found.flow(u, 1.3), exact @ u, rtol=0, atol=1e-13)


def test_attention_is_one_euler_step():
    x = normal(12, 2, seed=3)
    attention = r.Attention(r.Gaussian(bandwidth=0.7))
    found = heat(attention, x)
    torch.testing.assert_close(found.step(x), attention(x), rtol=0, atol=1e-13)
    torch.testing.assert_close(found.step(x, 0.25), x - 0.25 * found.laplacian @ x, rtol=0, atol=1e-13)
    many = x
    for _ in range(4096):
        many = found.step(many, 1 / 4096)
    torch.testing.assert_close(many, found.flow(x), rtol=0, atol=1e-3)
    weighted = r.Measure(x, normal(12, seed=5))
    torch.testing.assert_close(
        heat(attention, weighted).step(x), attention(weighted).points, rtol=0, atol=1e-12
    )


def test_a_lazy_walk_attains_the_first_bound():
    """a = b → 0: the difference is L²/2 to first order, and ‖L²‖ = ‖L‖² = 4a²."""
    found = two_states(1e-3, 1e-3)
    assert found.found() <= found.gap().value <= found.found() * (1 + 1e-3)
    assert found.gap().value == pytest.approx(2e-6, rel=1e-6)


def test_a_turning_wheel_attains_the_second_bound():
    """Powers of a long cycle have nothing in common: 2(1 - 1/e), whatever its length."""
    found = Heat(torch.roll(torch.eye(30, dtype=D), 1, 1))
    assert found.found() == pytest.approx(2 * (1 - math.exp(-1)), rel=1e-12)
    assert found.found() <= found.gap().value <= found.found() * (1 + 1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_no_walk_breaks_the_bound(seed):
    g = torch.Generator().manual_seed(seed)
    sharpness = 10.0 ** (seed % 5 - 1)
    p = (sharpness * torch.randn(6, 6, generator=g, dtype=D) + (seed % 4) * torch.eye(6, dtype=D)).softmax(-1)
    found = Heat(p)
    norm = float(found.laplacian.abs().sum(-1).max())
    assert found.found() <= found.gap().value <= min(norm**2 / 2, 2 * (1 - math.exp(-1))) * (1 + 1e-6)


def test_weights_are_no_heat_kernel_of_the_graph():
    """Points of a circle: P damps a wave by e^{-h²/2}, as heat on the line does in time h²/2; the heat of the
    graph by exp(e^{-h²/2} - 1), which is another number.
    """
    n, h = 200, 0.3
    angles = 2 * math.pi * torch.arange(n, dtype=D) / n
    apart = (angles[:, None] - angles + math.pi).remainder(2 * math.pi) - math.pi
    found = Heat((-apart.square() / (2 * h * h)).softmax(-1))
    wave, line = angles.cos().unsqueeze(-1), math.exp(-h * h / 2)
    torch.testing.assert_close(found.step(wave), line * wave, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.flow(wave), math.exp(line - 1) * wave, rtol=0, atol=1e-12)
    assert found.gap().value >= abs(math.exp(line - 1) - line) > 9e-4


def test_the_score_is_that_of_the_smoothed_density():
    """(P x - x)/h² = ∇log Σ_j exp(-|x - x_j|²/2h²), at every bandwidth and with weights."""
    x, h = normal(20, 2, seed=2), 0.6
    weights = normal(20, seed=3)
    y = x.clone().requires_grad_()
    density = (-(y.unsqueeze(1) - x).square().sum(-1) / (2 * h * h) + weights).logsumexp(-1)
    (slope,) = torch.autograd.grad(density.sum(), y)
    for field in (r.Gaussian(bandwidth=h), r.Gaussian(bandwidth=h / 2)):
        normalizer = r.Softmax((h / field.bandwidth) ** 2)
        found = score(r.Attention(field, normalizer=normalizer), r.Measure(x, weights))
        torch.testing.assert_close(found, slope, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("h2", [0.2, 0.05, 1e-4])
def test_slopes_at_every_bandwidth(h2):
    """softmax -1/(h²+s), Sinkhorn (k-1)/h²; their ratio is two only in the limit."""
    s = 0.8
    t = s / h2
    law = GaussianMeasure(torch.zeros(1, dtype=D), torch.tensor([[s]], dtype=D))
    soft = r.Attention(r.Gaussian(bandwidth=h2**0.5))
    slopes = [float(score_slope(soft.replace(normalizer=n), law)) for n in (r.Softmax(), r.Sinkhorn())]
    k = (math.sqrt(1 + 4 * t * t) - 1) / (2 * t)
    assert slopes[0] == pytest.approx(-1 / (h2 + s), rel=1e-9)
    assert slopes[1] == pytest.approx((k - 1) / h2, rel=1e-9)
    assert abs(slopes[0] / slopes[1] - 2) <= 4 * h2 / s
    if h2 == 1e-4:
        assert slopes == pytest.approx([-1 / s, -1 / (2 * s)], rel=1e-3)
    else:
        assert abs(slopes[0] / slopes[1] - 2) > 0.01


@pytest.mark.parametrize(("normalizer", "factor"), [(r.Softmax(), 1.0), (r.Sinkhorn(1e-10, 3000), 0.5)])
def test_particles_of_a_law_have_its_score(normalizer, factor):
    """Quantiles of a normal law, a small bandwidth: ∇log ρ = -x with softmax, half of it with Sinkhorn."""
    x = quantiles(161)
    found = score(r.Attention(r.Gaussian(bandwidth=0.2), normalizer=normalizer), x)
    middle = slice(40, 121)
    slope = float((x[middle] * found[middle]).sum() / x[middle].square().sum())
    assert slope == pytest.approx(-factor, rel=0.06)


def test_refusals():
    x = normal(4, 2)
    with pytest.raises(r.errors.RefusalError, match="not laws"):
        heat(r.Attention(r.Dot(), normalizer=r.Sigmoid()), x)
    with pytest.raises(r.errors.ArgumentError, match="one head"):
        heat(r.Attention(r.Dot()), normal(2, 4, 2))
    with pytest.raises(r.errors.RefusalError, match="Gaussian"):
        score(r.Attention(r.Dot()), x)
    with pytest.raises(r.errors.ArgumentError, match="not laws"):
        Heat(torch.ones(2, 2, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="square"):
        Heat(torch.ones(1, 2, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="not negative"):
        two_states(0.1, 0.1).kernel(-1.0)
    with pytest.raises(r.errors.ArgumentError, match="attention"):
        heat(x, x)
