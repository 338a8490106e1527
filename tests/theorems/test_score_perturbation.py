"""Laws of perturbed scores: the bound is attained, and no search gets past it."""

import math

import pytest
import torch

import regard as r
from regard._upper import exact
from regard.proofs.theorems.score_perturbation import perturbation, score_perturbation
from regard.transport import wasserstein


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("oscillation", [1e-6, 0.1, 1.0, 4.0, 30.0])
def test_two_atoms_attain_it(oscillation):
    """Masses 1/(1 + e^{o/2}) and the rest: the total variation is tanh(o/4) exactly."""
    share = 1 / (1 + math.exp(oscillation / 2))
    mu = r.Measure(
        torch.tensor([[0.0], [1.0]], dtype=torch.float64),
        torch.tensor([1 - share, share], dtype=torch.float64).log(),
    )
    moved = mu.reweight(torch.tensor([0.0, oscillation], dtype=torch.float64))
    reached = float(moved.masses()[1] - mu.masses()[1])
    certificate = score_perturbation(oscillation)
    assert reached == pytest.approx(math.tanh(oscillation / 4), rel=1e-9)
    assert reached * (1 - 1e-9) <= certificate.value <= reached * (1 + 1e-9)
    assert float(wasserstein(mu, moved)) <= certificate.value * (1 + 1e-9)


def test_random_laws_stay_below():
    generator = torch.Generator().manual_seed(0)
    best = 0.0
    for _ in range(300):
        mu = r.Measure(draw(generator, 6, 2), 2 * draw(generator, 6))
        error = draw(generator, 6) * 2
        oscillation = float(error.max() - error.min())
        scores = draw(generator, 6)
        first, second = mu.reweight(scores), mu.reweight(scores + error)
        bound = float(perturbation(exact(oscillation)))
        variation = 0.5 * float((first.masses() - second.masses()).abs().sum())
        assert variation <= bound
        best = max(best, variation / bound)
    assert best > 0.9


def test_gradient_ascent_stays_below():
    """The search moves the law and the errors within an oscillation of one."""
    generator = torch.Generator().manual_seed(1)
    weights, errors = draw(generator, 5).requires_grad_(), draw(generator, 5).requires_grad_()
    step = torch.optim.Adam([weights, errors], lr=0.1)
    for _ in range(200):
        step.zero_grad()
        error = errors.sigmoid()
        variation = 0.5 * (weights.softmax(0) - (weights + error).softmax(0)).abs().sum()
        (-variation).backward()
        step.step()
    assert 0.99 * math.tanh(0.25) < float(variation.detach()) <= score_perturbation(1.0).value


def test_in_transport_distance():
    generator = torch.Generator().manual_seed(2)
    for _ in range(30):
        mu = r.Measure(draw(generator, 5, 2))
        error = draw(generator, 5)
        diameter = float(torch.cdist(mu.points, mu.points).max())
        certificate = score_perturbation(float(error.max() - error.min()), diameter)
        assert float(wasserstein(mu, mu.reweight(error))) <= certificate.value


def test_what_it_says():
    certificate = score_perturbation(0.5, 3.0)
    assert certificate.quantity == "distance of the laws"
    assert "assumed: points are at most 3.0 apart" in str(certificate)
    assert score_perturbation(0.0).value == 0.0
    assert score_perturbation(math.inf, 2.0).value >= 2.0
    with pytest.raises(r.errors.ArgumentError, match="oscillation: is -1"):
        score_perturbation(-1.0)
    with pytest.raises(r.errors.ArgumentError, match="diameter: is nan"):
        score_perturbation(1.0, math.nan)
