"""Gaussian laws that stay Gaussian: closed forms, blow-up, particles beside them, refusals."""

import math

import pytest
import torch

import regard as r
from regard.dynamics import (
    BlowUpError,
    Displacement,
    Euler,
    GaussianMeasure,
    RungeKutta,
    closure,
    drift,
    equiangular,
)
from regard.measure import Measure
from tests.dynamics.systems import D, normal, quantiles, sa

EYE = torch.eye(2, dtype=D)
WIDE = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=D)
LAW = GaussianMeasure(torch.tensor([0.5, -1.0], dtype=D), WIDE)


def line(mean, variance):
    return GaussianMeasure(torch.tensor([mean], dtype=D), torch.tensor([[variance]], dtype=D))


def test_softmax_with_a_symmetric_form():
    """S(t) = (S⁻¹ - 2tA)⁻¹ until 1/(2 λ_max(SA))."""
    a = torch.tensor([[0.6, 0.2], [0.2, -0.3]], dtype=D)
    found = closure(r.Attention(r.Bilinear(a)), LAW)
    end = found.blow_up()
    assert end == pytest.approx(1 / (2 * float(torch.linalg.eigvals(WIDE @ a).real.max())), rel=1e-12)
    for t in (0.0, 0.3 * end, 0.9 * end):
        expected = torch.linalg.inv(torch.linalg.inv(WIDE) - 2 * t * a)
        torch.testing.assert_close(found.at(t).covariance, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(BlowUpError) as caught:
        found.at(1.1 * end)
    assert caught.value.last == pytest.approx(end, rel=1e-3)
    assert closure(r.Attention(r.Bilinear(-EYE)), LAW).blow_up() == math.inf


def test_the_mean_on_a_line():
    """m(t) = m_0 e^t (1 - 2 a s t)^{-1/2}."""
    found = closure(r.Attention(r.Dot(scale=0.5)), line(2.0, 1.0)).at(0.6)
    assert float(found.mean) == pytest.approx(2 * math.exp(0.6) / math.sqrt(1 - 0.6), rel=1e-10)
    assert float(found.covariance) == pytest.approx(1 / (1 - 0.6), rel=1e-10)


def test_mean_shift():
    """Each eigenvalue: s + h² log s + 2h² t is constant."""
    h = 0.7
    found = closure(Displacement(r.Attention(r.Gaussian(bandwidth=h))), LAW)
    begin, end = torch.linalg.eigvalsh(WIDE), torch.linalg.eigvalsh(found.at(0.8).covariance)
    constant = [s + h * h * s.log() + 2 * h * h * t for s, t in ((begin, 0.0), (end, 0.8))]
    torch.testing.assert_close(constant[1], constant[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(found.at(0.8).mean, LAW.mean, rtol=1e-10, atol=0)
    assert found.blow_up() == math.inf


def test_slopes_of_a_law_on_a_line():
    """softmax: -1/(h²+s); Sinkhorn: (k(s/h²) - 1)/h², half as fast only as h → 0."""
    h2, s = 0.05, 1.0
    t = s / h2
    k = (math.sqrt(1 + 4 * t * t) - 1) / (2 * t)
    soft = Displacement(r.Attention(r.Gaussian(bandwidth=h2**0.5)))
    balanced = Displacement(r.Attention(r.Gaussian(bandwidth=h2**0.5), normalizer=r.Sinkhorn(1e-9, 2000)))
    law = line(0.0, s)
    assert float(closure(soft, law).velocity(law).m) / h2 == pytest.approx(-1 / (h2 + s), rel=1e-12)
    assert float(closure(balanced, law).velocity(law).m) / h2 == pytest.approx((k - 1) / h2, rel=1e-12)
    assert (k - 1) / h2 == pytest.approx(-0.494, abs=1e-3)
    particles = quantiles(61)
    for map, slope in ((soft, -1 / (h2 + s)), (balanced, (k - 1) / h2)):
        speed = drift(map, Measure(particles), None)
        found = float((particles * speed).sum() / particles.square().sum()) / h2
        assert found == pytest.approx(slope, rel=0.1)


def test_sinkhorn_couples_the_law_with_itself():
    """The coupling that velocities come from has both marginals: K S Kᵀ is at most S, and A is what joins."""
    a = normal(2, 2, seed=4)
    found = closure(r.Attention(r.Bilinear(a), normalizer=r.Sinkhorn()), LAW)
    velocity = found.velocity(LAW)
    cross = (velocity.m @ WIDE).mT  # Cov(x, y)
    joint = torch.cat([torch.cat([WIDE, cross], 1), torch.cat([cross.mT, WIDE], 1)])
    torch.testing.assert_close(torch.linalg.inv(joint)[:2, 2:], -a, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(velocity.b + velocity.m @ LAW.mean, LAW.mean, rtol=1e-12, atol=0)
    assert found.blow_up() == math.inf


@pytest.mark.parametrize(
    "potential",
    [
        r.Dot(normal(2, 2), normal(2, 2, seed=1), 0.4, normal(2, seed=2), normal(2, seed=3)),
        r.Gaussian(normal(2, 2), normal(2, 2, seed=1), 1.5, normal(2, seed=2), normal(2, seed=3)),
        0.3 * r.Dot(scale=1.0) + r.Gaussian(bandwidth=2.0),
    ],
    ids=["dot", "gaussian", "sum"],
)
def test_velocities_are_those_of_many_particles(potential):
    map = r.Attention(potential, r.Linear(normal(2, 2, seed=5), normal(2, seed=6)), r.Softmax(1.3))
    root = torch.linalg.cholesky(WIDE)
    one = quantiles(121).squeeze(-1)
    grid = torch.cartesian_prod(one, one) @ root.mT + LAW.mean
    velocity = closure(map, LAW).velocity(LAW)
    x = normal(3, 2, seed=8)
    torch.testing.assert_close(map(x, grid), x @ velocity.m.mT + velocity.b, rtol=0.03, atol=0.03)


def test_particles_follow_the_closure():
    map = Displacement(r.Attention(r.Gaussian(bandwidth=0.7)))
    end = r.flow(map, quantiles(41), RungeKutta(0.25), 1.0).measure(1.0)
    assert float(end.covariance()) == pytest.approx(
        float(closure(map, line(0.0, float(Measure(quantiles(41)).covariance()))).at(1.0).covariance),
        rel=0.03,
    )


def test_one_euler_step_of_the_law_is_the_push_forward():
    """A small step: the covariance moves by M S + S Mᵀ."""
    found = closure(sa(0.5), LAW)
    step = 1e-6
    velocity = found.velocity(LAW)
    slope = (found.at(step).covariance - WIDE) / step
    torch.testing.assert_close(slope, velocity.m @ WIDE + WIDE @ velocity.m.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        (r.Attention(r.Dot(), normalizer=r.Sigmoid()), "give Sigmoid\\(bias\\) a number"),
        (r.Attention(r.Gaussian(bandwidth=1.0), normalizer=r.Sigmoid(0.0)), "must be xᵀAy"),
        (r.Attention(r.Dot(), normalizer=r.Sparsemax()), "Sparsemax weights of a Gaussian law"),
        (r.Attention(r.Laplace()), "Laplace scores of one head are not a quadratic form"),
        (r.Attention(r.Dot(normal(3, 2, 2), normal(3, 2, 2))), "Dot scores of one head"),
        (r.Attention(r.Dot(), r.Linear(normal(2, 3))), "values must be affine"),
        (r.Attention(r.Dot(), support=r.Causal()), "a law has no positions"),
    ],
)
def test_what_does_not_stay_gaussian_is_refused(attention, match):
    with pytest.raises(r.errors.RefusalError, match=match):
        closure(attention, LAW)


def test_blow_up_is_refused_without_a_closed_form():
    for attention in (
        r.Attention(r.Bilinear(normal(2, 2))),
        r.Attention(r.Gaussian(normal(2, 1), normal(2, 1), bandwidth=1.0)),
        Displacement(sa(1.0)),
    ):
        with pytest.raises(r.errors.RefusalError, match="blow_up refuses"):
            closure(attention, LAW).blow_up()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: closure(3, LAW), "attention: is a int"),
        (lambda: closure(sa(1.0), EYE), "gaussian: is a Tensor"),
        (lambda: closure(sa(1.0), GaussianMeasure(LAW.mean, -EYE)), "gaussian: has a covariance that is not"),
        (lambda: closure(sa(1.0), GaussianMeasure(LAW.mean * math.nan, EYE)), "gaussian: has a mean with"),
        (lambda: closure(sa(1.0), LAW).at(-1.0), "t: is -1.0"),
        (lambda: equiangular(sa(1.0), 1, 0.0), "n: is 1"),
        (lambda: equiangular(sa(1.0), 3, -0.6), "rho: is -0.6"),
        (lambda: equiangular(sa(1.0), 3, 0.2).gap(-1.0), "t: is -1.0"),
        (lambda: equiangular(Euler(1.0), 3, 0.2), "attention: is a Euler"),
    ],
)
def test_bad_arguments(call, match):
    with pytest.raises(r.errors.ArgumentError, match=match):
        call()


@pytest.mark.parametrize(
    "attention",
    [
        r.Attention(r.Dot()),
        r.Attention(r.Gaussian(bandwidth=1.0)),
        sa(1.0).replace(normalizer=r.Sigmoid()),
        sa(1.0).replace(support=r.Causal()),
        sa(1.0).replace(lookup=r.Linear(EYE)),
    ],
)
def test_equiangular_refuses_what_it_does_not_describe(attention):
    with pytest.raises(r.errors.RefusalError, match="equiangular refuses"):
        equiangular(attention, 3, 0.1)
