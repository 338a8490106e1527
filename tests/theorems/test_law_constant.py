"""Laws near a given one, compared with each other: attained without scores, and under attack."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import Ball, NearbyLaws, Tube, Vocabulary
from regard.dynamics.drifts import drift
from regard.lookups import Linear
from regard.maps import Affine, Compose, Heads, Residual
from regard.measure import Measure
from regard.norms import Wasserstein
from regard.potentials import Bilinear, Dot, Gaussian
from regard.proofs import certify
from regard.proofs.law_rows import ball_around
from regard.transport import wasserstein
from tests.theorems.exact import D, generator, normal
from tests.theorems.laws_nearby import another, law


def _heads(seed: int) -> Heads:
    g = generator(seed)
    return Heads(Attention(Dot(normal(g, 2, 2, 2), normal(g, 2, 2, 2))), normal(g, 2, 2, 2))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_attained_without_scores(p):
    """Every row is the mean of the values: laws that are moved by one vector go w times as far."""
    attention = Attention(Bilinear(torch.zeros(2, 2, dtype=D)), Linear(3 * torch.eye(2, dtype=D)))
    domain = NearbyLaws(normal(generator(0), 3, 2), 0.1, Tube(0.2, jumps=False), p)
    assert certify(attention, domain, Wasserstein(p)).value == pytest.approx(3.0, rel=1e-9)
    assert certify(Residual(attention), domain, Wasserstein(p)).value == pytest.approx(4.0, rel=1e-9)


def test_by_its_formula():
    """One atom at 1/2 on a line, scores 2xy, values 3y: k_max = e^{αr}, D = e^{-αρ}, R = r."""
    attention = Attention(Bilinear(torch.tensor([[2.0]], dtype=D)), Linear(torch.tensor([[3.0]], dtype=D)))
    domain = NearbyLaws(torch.tensor([[0.5]], dtype=D), 0.05, Tube(0.2, jumps=False))
    rows = math.exp(0.2 + 0.05) * math.exp(2 * 2 * 0.2 * 0.2) * 3 * (1 + 2 * 0.2 * (1 + 2 * 0.2))
    found = certify(attention, domain, Wasserstein(1.0))
    rungs = [found.value, *(rung.value for rung in found.others)]
    assert any(rung == pytest.approx(rows + 3 * 2 * 0.2**2, rel=1e-9) for rung in rungs)


@pytest.mark.parametrize("jumps", [False, True])
def test_two_atoms_by_the_formula(jumps):
    """Atoms at ±1, scores 0.7xy, r = 0.1: rows are mirror images, and queries go from one to the other."""
    attention = Attention(Bilinear(torch.tensor([[0.7]], dtype=D)))
    domain = NearbyLaws(torch.tensor([[1.0], [-1.0]], dtype=D), 0.05, Tube(0.1, jumps))
    heaviest, reach = math.exp(0.7) / math.cosh(0.7), 1.1
    floors = [math.exp(-0.7 * 0.05 * heaviest), math.exp(-0.77) / math.cosh(0.7)]
    floor = max(*floors, 0.0 if jumps else math.exp(-0.07))
    rows = heaviest * math.exp(0.07) / floor * math.exp(2 * 0.7 * 0.1 * reach) * (1 + 2 * reach * 0.77)
    found = certify(attention, domain, Wasserstein(1.0))
    rungs = [found.value, *(rung.value for rung in found.others)]
    assert any(rung == pytest.approx(rows + 0.7 * reach**2, rel=1e-9) for rung in rungs)


@pytest.mark.parametrize("jumps", [False, True])
def test_never_below_two_laws(jumps):
    map, g = _heads(1), generator(2)
    domain = NearbyLaws(law(g, 3, 2, 0.7, weighted=True), 0.1, Tube(0.1, jumps))
    bounds = [certify(whole, domain, Wasserstein(1.0)).value for whole in (map, Residual(map))]
    seen = []
    for _ in range(25):
        laws = [another(g, domain) for _ in range(2)]
        apart = float(wasserstein(*laws, 1.0))
        for whole, bound in zip((map, Residual(map)), bounds, strict=True):
            images = [Measure(drift(whole, one, None), one.log_weights) for one in laws]
            moved = float(wasserstein(*images, 1.0))
            assert moved <= bound * apart + 1e-12
            seen.append(moved / (bound * apart + 1e-12))
    assert max(seen) > 0.05


def test_other_places_take_the_ball():
    """Where laws may be anywhere in a ball, the constant is that of the ball, for every map."""
    g = generator(3)
    map, x = _heads(1), 0.3 * normal(g, 3, 2)
    for within in (Ball(1.0), Vocabulary(0.3 * normal(g, 4, 2)), Tube(0.5)):
        domain = NearbyLaws(x, 0.1, within)
        for whole in (map, Compose((Residual(map), Affine(normal(g, 2, 2))))):
            held = certify(whole, ball_around(domain), Wasserstein(1.0))
            assert certify(whole, domain, Wasserstein(1.0)).value <= held.value < math.inf
    gaussian = certify(Attention(Gaussian(bandwidth=1.0)), domain, Wasserstein(1.0))
    assert 0 < gaussian.value < math.inf  # that of the ball; rows of this theorem are bilinear
    assert any("bilinear" in why for why in gaussian.refused)
