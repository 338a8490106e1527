"""At a point, by covariances: worked value, exact Jacobians of every kind, tokens far from the origin,
one-hot rows, refusals.
"""

import pytest
import torch

import regard as r
from regard.domains import Neighborhood, Radii
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify
from tests.theorems.exact import (
    SUPPORTS,
    D,
    bilinear_attention,
    frobenius_norm,
    generator,
    normal,
    token_max_norm,
    worked,
)
from tests.theorems.test_castin_general import rung

NORMS = ((TokenMax(), token_max_norm), (Frobenius(), frobenius_norm))
WORDS = "by covariances"


def at(attention, x, norm):
    return rung(certify(attention, Neighborhood(x, 0.0), norm), WORDS).value


def test_worked_example():
    x, a, w = worked()
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    assert frobenius_norm(attention, x) == pytest.approx(2.8106266806294307, rel=1e-9)
    assert at(attention, x, Frobenius()) == pytest.approx(4.691244324717485, rel=1e-9)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_above_exact_jacobians(n, support, scale):
    g = generator(n)
    for attention in (
        bilinear_attention(g, 3, 2, support, scale),
        r.Attention(r.Gaussian(bandwidth=1.0) + r.Alibi(0.2), r.Linear(normal(g, 3, 4)), support=support),
    ):
        x = normal(g, n, 3, scale=scale) + normal(g, 3)
        for norm, exact in NORMS:
            assert exact(attention, x) <= at(attention, x, norm) * (1 + 1e-13)


def test_weights_of_tokens():
    g = generator(2)
    attention = bilinear_attention(g, 3, 2)
    measure = r.Measure(normal(g, 4, 3), torch.tensor([0.0, 2.0, -3.0, 1.0], dtype=D))
    for norm, exact in NORMS:
        bound = rung(certify(attention, Radii(measure, torch.zeros(4, dtype=D)), norm), WORDS).value
        assert exact(lambda y: attention(measure.replace(points=y)).points, measure.points) <= bound


def test_far_from_the_origin():
    """Tokens r + c and bilinear scores are tokens r with a query bias Aᵀc,
    exactly where nothing is rounded.
    """
    g = generator(3)
    small = (normal(g, 5, 2) * 2**10).round() / 2**10
    center = torch.tensor([2.0**20, -(2.0**18)], dtype=D)
    a = torch.tensor([[1.0, 0.5], [2.0, 4.0]], dtype=D) / 2**18
    near = r.Attention(r.Dot(a, torch.eye(2, dtype=D), 1.0, b_q=a.mT @ center))
    gaussian = r.Attention(r.Gaussian(bandwidth=1.0))
    for norm, exact in NORMS:
        value = exact(near, small)
        assert value <= at(r.Attention(r.Bilinear(a)), small + center, norm) <= 20 * value
        assert exact(gaussian, small) <= at(gaussian, small + center, norm) <= 20 * exact(gaussian, small)


def test_one_hot_rows_keep_their_constant():
    """Rows that have decided: the derivative is that of the values."""
    x = 20 * torch.eye(3, dtype=D)
    attention = r.Attention(r.Dot(scale=1.0), r.Linear(torch.eye(3, dtype=D)))
    assert frobenius_norm(attention, x) <= at(attention, x, Frobenius()) <= 1 + 1e-6


def test_tightness():
    ratios = []
    for seed in range(6):
        g = generator(seed)
        attention, x = bilinear_attention(g, 3, 3, scale=0.5), normal(g, 6, 3)
        ratios.append(frobenius_norm(attention, x) / at(attention, x, Frobenius()))
    assert 0.4 < sum(ratios) / len(ratios) <= 1


def test_refusals():
    g = generator(0)
    w = normal(g, 3, 2)
    found = certify(
        r.Attention(r.Gaussian(w, w, bandwidth=1.0), r.Linear(normal(g, 3, 2))),
        Neighborhood(normal(g, 4, 3), 0.0),
        Frobenius(),
    )
    assert any(WORDS in why and "without projections" in why for why in found.refused)
    moving = certify(bilinear_attention(g, 3, 2), Neighborhood(normal(g, 4, 3), 0.1), Frobenius())
    assert all(WORDS not in c.theorem for c in (moving, *moving.others))
