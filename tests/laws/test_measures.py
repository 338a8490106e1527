"""Measures and kernels: duality, Boltzmann-Gibbs, mixtures, merging, divergences, composition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as r
from tests.nouns import MOMENTS, D

sizes = st.integers(1, 6)


def measure(n, d, seed, weighted=True):
    g = torch.Generator().manual_seed(seed)
    return r.Measure(
        torch.randn(n, d, generator=g, dtype=D), torch.randn(n, generator=g, dtype=D) if weighted else None
    )


@given(n=sizes, d=sizes, seed=st.integers(0, 10**6), weighted=st.booleans())
@settings(max_examples=60, deadline=None)
def test_push_and_integrate_are_dual(n, d, seed, weighted):
    mu = measure(n, d, seed, weighted)
    assert torch.allclose(
        mu.push(torch.sin).integrate(torch.exp), mu.integrate(lambda x: torch.exp(torch.sin(x))), atol=1e-12
    )
    assert math.isclose(float(mu.masses().sum()), 1.0, abs_tol=1e-12)
    assert torch.allclose(mu.mean(), (mu.masses().unsqueeze(-1) * mu.points).sum(0), atol=1e-12)
    centered = mu.points - mu.mean()
    assert torch.allclose(
        mu.covariance(), torch.einsum("n,ni,nj->ij", mu.masses(), centered, centered), atol=1e-12
    )


@given(n=sizes, d=sizes, seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_boltzmann_gibbs(n, d, seed):
    """Ψ_G(μ)(f) = μ(Gf)/μ(G); reweighting twice is reweighting by the product; a constant does nothing."""
    mu = measure(n, d, seed)
    g, h = (lambda x: x.sum(-1)), (lambda x: -x.square().sum(-1))
    f = torch.cos
    weighted = mu.integrate(lambda x: g(x).exp().unsqueeze(-1) * f(x)) / mu.integrate(lambda x: g(x).exp())
    assert torch.allclose(mu.reweight(g).integrate(f), weighted, atol=1e-12)
    assert torch.allclose(
        mu.reweight(g).reweight(h).masses(), mu.reweight(lambda x: g(x) + h(x)).masses(), atol=1e-12
    )
    assert torch.allclose(mu.reweight(lambda x: 0 * x[..., 0] + 7).masses(), mu.masses(), atol=1e-12)


@given(n=sizes, seed=st.integers(0, 10**6), weight=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_mixture_is_linear(n, seed, weight):
    mu, nu = measure(n, 3, seed), measure(4, 3, seed + 1)
    mixed = mu.mix(nu, weight).integrate(torch.sin)
    assert torch.allclose(
        mixed, (1 - weight) * mu.integrate(torch.sin) + weight * nu.integrate(torch.sin), atol=1e-12
    )


@given(n=sizes, copies=st.lists(st.integers(0, 5), min_size=1, max_size=8), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_merge_keeps_the_measure_and_attention(n, copies, seed):
    """Equal atoms united: every integral stays, and so does attention to the measure,
    exactly (token merging).
    """
    base = measure(n, 3, seed)
    mu = r.Measure(base.points[[c % n for c in copies]], torch.randn(len(copies), dtype=D))
    merged = mu.merge()
    assert merged.size == len({c % n for c in copies})
    assert torch.allclose(merged.integrate(torch.sin), mu.integrate(torch.sin), atol=1e-12)
    q = torch.randn(5, 3, dtype=D)
    for potential in (r.Dot(), r.Gaussian(bandwidth=1.0), r.Laplace()):
        attention = r.Attention(potential)
        assert torch.allclose(attention(q, merged), attention(q, mu), atol=1e-12)
        assert torch.allclose(attention.free_energy(q, merged), attention.free_energy(q, mu), atol=1e-12)


def test_merge_in_a_batch_and_with_marks():
    points = torch.tensor([[[0.0], [1.0], [0.0]], [[2.0], [2.0], [2.0]]], dtype=D)
    merged = r.Measure(points).merge()
    assert merged.points.shape == points.shape
    assert torch.allclose(merged.masses(), torch.tensor([[2 / 3, 1 / 3, 0], [1, 0, 0]], dtype=D))
    marked = r.Measure(points[0], marks=torch.tensor([0, 1, 2])).merge()
    assert marked.size == 3  # equal points at different positions are different atoms
    log_weights = torch.tensor([0.1, 0.2, 0.3], dtype=D, requires_grad=True)
    total = r.Measure(points[0], log_weights).merge().masses()[0]
    assert torch.isfinite(torch.autograd.grad(total, log_weights)[0]).all()


def test_entropy_and_divergence():
    mu = r.Measure(torch.tensor([[0.0], [1.0]], dtype=D), torch.tensor([0.25, 0.75], dtype=D).log())
    nu = r.Measure(
        torch.tensor([[1.0], [0.0], [5.0]], dtype=D), torch.tensor([0.5, 0.25, 0.25], dtype=D).log()
    )
    assert math.isclose(float(mu.entropy()), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), rel_tol=1e-12)
    assert math.isclose(float(mu.kl(nu)), 0.25 * math.log(1) + 0.75 * math.log(1.5), rel_tol=1e-12)
    assert float(nu.kl(mu)) == math.inf
    assert float(mu.kl(mu)) == 0.0
    twice = r.Measure(
        torch.tensor([[0.0], [1.0], [1.0]], dtype=D), torch.tensor([0.25, 0.25, 0.5], dtype=D).log()
    )
    assert math.isclose(float(mu.kl(twice)), 0.0, abs_tol=1e-15)


def test_sampling():
    mu = r.Measure(torch.tensor([[0.0], [1.0], [9.0]], dtype=D), torch.tensor([0.3, 0.7, 0.0], dtype=D).log())
    drawn = mu.sample(20000, torch.Generator().manual_seed(0))
    assert drawn.shape == (20000, 1)
    assert abs(float(drawn.mean()) - 0.7) < 0.02
    assert float(drawn.max()) == 1.0
    gaussian = r.measure.GaussianMeasure(
        torch.zeros(2, dtype=D), torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=D)
    )
    cloud = gaussian.sample(20000, torch.Generator().manual_seed(0))
    assert torch.allclose(cloud[:, 0], cloud[:, 1], atol=1e-7)  # a singular covariance is allowed
    assert abs(float(cloud.var(0)[0]) - 1) < 0.05


def kernels():
    mu = r.Measure(torch.randn(5, 3, dtype=D), torch.randn(5, dtype=D))
    a = r.Attention(r.Dot())
    return (
        a.softmatch(mu),
        r.Linear(torch.randn(3, 3, dtype=D)),
        r.Attention(r.Gaussian(bandwidth=1.0)).softmatch(torch.randn(4, 3, dtype=D)),
    )


def test_kernels_compose_and_act():
    """(KL)M = K(LM); μ(Kf) = (μK)f; the right action of a composition is the composition of right actions."""
    k, l, m = kernels()
    mu = r.Measure(torch.randn(6, 3, dtype=D), torch.randn(6, dtype=D))
    f = torch.sin
    left, right = mu @ ((k @ l) @ m), mu @ (k @ (l @ m))
    assert torch.allclose(left.integrate(f), right.integrate(f), atol=1e-12)
    assert torch.allclose((mu @ k).integrate(f), mu.integrate(k.right(f)), atol=1e-12)
    assert torch.allclose((k @ l).right(f)(mu.points), k.right(l.right(f))(mu.points), atol=1e-12)
    assert torch.allclose((mu @ (k @ m)).integrate(f), ((mu @ k) @ m).integrate(f), atol=1e-12)


@pytest.mark.parametrize("name", [m for m in MOMENTS if m != "sample"])
def test_projection_is_idempotent(name):
    """Π = embed ∘ encode, and Π ∘ Π = Π where Π ends in measures."""
    moment = MOMENTS[name]
    law = r.Measure(torch.randn(2, 5, 3, dtype=D), torch.randn(2, 5, dtype=D))
    once = moment.after(law)
    if isinstance(once, r.measure.GaussianMeasure):
        assert torch.allclose(once.mean, law.mean())
        assert torch.allclose(once.covariance, law.covariance())
    else:
        assert torch.allclose(moment.after(once).mean(), once.mean(), atol=1e-12)
    at_point = moment(torch.randn(4, 3, dtype=D))
    assert (at_point.mean if isinstance(at_point, r.measure.GaussianMeasure) else at_point.mean()).shape == (
        4,
        3,
    )
