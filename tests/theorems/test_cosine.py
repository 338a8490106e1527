"""Cosine scores on balls: near the origin and far from it, against attacks; on the whole space a sentence."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Whole
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify, falsify
from tests.theorems.exact import SUPPORTS, D, frobenius_norm, generator, in_ball, normal, token_max_norm
from tests.theorems.test_castin_general import rung


def cosine_attention(g, d, eps, support=None, bias=True):
    b = [normal(g, 2) if bias else None for _ in range(2)]
    potential = r.Cosine(normal(g, d, 2), normal(g, d, 2), 1.5, eps, *b)
    return r.Attention(
        2.0 * potential, r.Linear(normal(g, d, 3), normal(g, 3)), r.Softmax(0.5), support or r.Full()
    )


def test_worked_example():
    """One dimension about 0, no projections: α = τρ̂/√ε, κ = τ min(ρ̂, R/√ε)/√ε, ρ̂ = R/√(R² + ε)."""
    tau, eps, radius = 2.0, 0.25, 1.0
    size = radius / math.sqrt(radius**2 + eps)
    found = rung(
        certify(r.Attention(r.Cosine(scale=tau, eps=eps)), Ball(radius, torch.zeros(1, dtype=D)), TokenMax()),
        "cosine attention on a ball",
    )
    assert found.value == pytest.approx(1 + 2 * radius * tau * size / math.sqrt(eps), rel=1e-9)


@pytest.mark.parametrize(("seed", "support"), list(enumerate([*SUPPORTS, r.Full()])), ids=repr)
def test_attacks_stay_below(seed, support):
    g = generator(seed)
    attention = cosine_attention(g, 3, [1e-2, 0.3][seed % 2], support, bias=seed < 2)
    center = normal(g, 3, scale=[0.0, 1.0, 5.0, 20.0][seed])
    domain = Ball(1.0, center, tokens=5)
    for norm, exact in ((TokenMax(), token_max_norm), (Frobenius(), frobenius_norm)):
        bound = rung(certify(attention, domain, norm), "cosine attention on a ball").value
        for _ in range(5):
            assert exact(attention, in_ball(g, 5, 3, float(torch.rand(1, generator=g)), center)) <= bound


def test_an_ascent_stays_below_and_comes_near():
    attention = r.Attention(r.Cosine(eps=1.0))
    domain = Ball(0.5, torch.zeros(1, dtype=D), tokens=4)
    found = certify(attention, domain, TokenMax())
    witness = falsify(attention, domain, TokenMax(), restarts=2, steps=8)
    assert 0.6 * found.value < witness.value <= found.value


def test_far_from_the_origin_it_is_much_smaller():
    domain = Ball(1.0, torch.tensor([30.0, 0.0], dtype=D), tokens=4)
    found = certify(r.Attention(r.Cosine(eps=1e-6)), domain, TokenMax())
    assert "cosine attention" in found.theorem
    assert found.value < 1.2
    assert rung(found, "softmax attention in TokenMax norm").value > 1000


def test_the_whole_space_is_refused():
    found = certify(cosine_attention(generator(0), 3, 1e-2), Whole(tokens=3), TokenMax())
    assert math.isinf(found.value)
    assert any("linear values are not" in why for why in found.refused)
