"""The move on a Frobenius ball."""

import math

import pytest
import torch

import regard as r
from regard.domains import Neighborhood
from regard.maps import Heads
from regard.norms import Frobenius
from regard.proofs import deviation, falsify_deviation
from regard.proofs.theorems.ball_deviation import THEOREM
from tests.theorems.exact import SUPPORTS, D, bilinear_attention, generator, normal


def rung(map, domain):
    found = deviation(map, domain, Frobenius())
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_moves_stay_below(seed, support):
    g = generator(seed)
    attention, x = bilinear_attention(g, 2, 3, support), normal(g, 5, 2)
    here = attention(x)
    for radius in (1e-4, 0.1, 1.0, 10.0, 1e3):
        bound = rung(attention, Neighborhood(x, radius))
        for sparse in (0.0, 0.6):
            for _ in range(6):
                step = normal(g, 5, 2) * (torch.rand(5, 1, generator=g, dtype=D) >= sparse)
                y = x + radius * (1 - 1e-12) * step / step.norm().clamp_min(1e-300)
                assert float((attention(y) - here).norm()) <= bound


@pytest.mark.parametrize(("radius", "share"), [(1e-4, 0.95), (0.01, 0.6), (0.1, 0.2), (3.0, 0.05)])
def test_ascended_moves_stay_below_and_close(radius, share):
    g = generator(5)
    attention = r.Attention(r.Dot(normal(g, 2, 3, 2), normal(g, 2, 3, 2)), r.Linear(normal(g, 2, 3, 2)))
    mixed, x = Heads(attention, normal(g, 2, 2, 3, scale=0.5)), normal(g, 4, 3)
    bound = rung(mixed, Neighborhood(x, radius))
    seen = falsify_deviation(
        mixed, Neighborhood(x, radius), Frobenius(), steps=10, restarts=2, generator=g
    ).value
    assert share * bound < seen <= bound


def test_a_weight_that_underflows_comes_back():
    attention = r.Attention(r.Bilinear(torch.tensor([[1000.0]], dtype=D)))
    x = torch.tensor([[1.0], [-1.0]], dtype=D)
    for y, radius in (([[-0.5], [-1.0]], 1.5), ([[1.0], [1.5]], 2.5)):
        seen = float((attention(torch.tensor(y, dtype=D)) - attention(x)).norm())
        assert rung(attention, Neighborhood(x, radius)) >= seen


@pytest.mark.parametrize("radius", [0.0, 1e-300, 1e-12, 1e8, 1e100, 1e200])
def test_radii_of_every_size(radius):
    x = normal(generator(6), 3, 2)
    bound = deviation(r.Attention(r.Dot()), Neighborhood(x, radius), Frobenius()).value
    assert not math.isnan(bound)
    assert bound >= 0.3 * radius  # all tokens may move alike, and then every mean moves with them


def test_what_is_not_bilinear_is_refused():
    found = deviation(r.Attention(r.Laplace()), Neighborhood(torch.ones(2, 2, dtype=D), 0.1), Frobenius())
    assert any(
        why.startswith(THEOREM.title) and "scores of Laplace are not bilinear" in why for why in found.refused
    )
