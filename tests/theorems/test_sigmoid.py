"""Sigmoid attention: worked value, biases of every kind, masks, weights, attacks, refusals."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Whole
from regard.norms import TokenMax
from regard.proofs import certify
from regard.proofs.theorems.sigmoid import _dot_constant
from tests.theorems.exact import SUPPORTS, D, bilinear_attention, generator, in_ball, normal, token_max_norm


def sigmoid(t):
    return 1 / (1 + math.exp(-t))


def test_worked_example():
    attention = r.Attention(r.Bilinear(torch.tensor([[0.5]], dtype=D)), normalizer=r.Sigmoid(1.0))
    assert certify(attention, Ball(2.0, tokens=3), TokenMax()).value == pytest.approx(
        3 * (sigmoid(2 + 1) + 1), rel=1e-9
    )
    low = r.Attention(r.Bilinear(torch.tensor([[0.5]], dtype=D)), normalizer=r.Sigmoid(-4.0))
    p = sigmoid(-2)
    assert certify(low, Ball(2.0, tokens=3), TokenMax()).value == pytest.approx(
        3 * (p + 4 * p * (1 - p)), rel=1e-9
    )


@pytest.mark.parametrize("bias", [None, -3.0, 0.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_attacks_stay_below(seed, bias):
    g = generator(seed)
    attention = bilinear_attention(
        g, 3, 2, SUPPORTS[seed % 3], scale=0.3, bias=seed != 2, normalizer=r.Sigmoid(bias)
    )
    center = normal(g, 3, scale=[0.0, 0.5, 2.0, 5.0][seed])
    bound = certify(attention, Ball(0.8, center, tokens=5), TokenMax()).value
    for _ in range(6):
        assert (
            token_max_norm(attention, in_ball(g, 5, 3, 0.8 * float(torch.rand(1, generator=g)), center))
            <= bound
        )


def test_positions_and_rotary():
    g = generator(7)
    dot = r.Dot(normal(g, 4, 2), normal(g, 4, 2))
    for potential in (dot + r.Alibi(-0.5), r.Rotary(dot), dot + 2.0 * r.Alibi(0.3)):
        attention = r.Attention(potential, normalizer=r.Sigmoid())
        bound = certify(attention, Ball(1.0, tokens=5), TokenMax()).value
        assert max(token_max_norm(attention, in_ball(g, 5, 4, 1.0)) for _ in range(6)) <= bound < math.inf


def test_a_value_bias_of_one_entry_stands_for_all():
    wide = r.Attention(
        r.Bilinear(torch.eye(2, dtype=D)),
        r.Linear(1e-3 * torch.ones(2, 9, dtype=D), torch.ones(1, dtype=D)),
        r.Sigmoid(),
    )
    full = r.Attention(
        r.Bilinear(torch.eye(2, dtype=D)),
        r.Linear(1e-3 * torch.ones(2, 9, dtype=D), torch.ones(9, dtype=D)),
        r.Sigmoid(),
    )
    assert (
        certify(wide, Ball(1.0, tokens=2), TokenMax()).value
        == certify(full, Ball(1.0, tokens=2), TokenMax()).value
    )


def test_weights_of_tokens_count():
    g = generator(4)
    weights = torch.tensor([2.0, 0.0, -1.0, 1.0], dtype=D)
    attention = bilinear_attention(g, 3, 2, normalizer=r.Sigmoid())
    x = normal(g, 4, 3)
    bound = certify(attention, Neighborhood(r.Measure(x, weights), 0.5, TokenMax()), TokenMax()).value
    for _ in range(6):
        measure = r.Measure(x + in_ball(g, 4, 3, 0.5), weights)
        assert (
            token_max_norm(lambda y, m=measure: attention(m.replace(points=y)).points, measure.points)
            <= bound
        )


def test_tightness():
    attention = r.Attention(r.Bilinear(torch.tensor([[0.5]], dtype=D)), normalizer=r.Sigmoid(0.0))
    x = torch.tensor([[1.0], [1.0], [1.0], [1.0]], dtype=D)
    bound = certify(attention, Ball(1.0, tokens=4), TokenMax()).value
    assert 0.9 * bound < token_max_norm(attention, x) <= bound


def test_refusals():
    attention = bilinear_attention(generator(0), 3, 2, normalizer=r.Sigmoid())
    for domain, sentence in ((Ball(1.0), "say how many tokens"), (Whole(tokens=3), "not bounded")):
        found = certify(attention, domain, TokenMax())
        assert math.isinf(found.value)
        assert any("sigmoid" in why and sentence in why for why in found.refused), found.refused


def test_what_scores_are_where_tokens_are_zero():
    """Scores that are not written as products are asked, and thousands of their roundings are paid for."""
    found = _dot_constant(r.Gaussian(b_q=torch.tensor([3.0, 4.0], dtype=D), bandwidth=1.0), 2)
    assert float(found) == pytest.approx(12.5, rel=1e-11, abs=0)
    assert found.roundings >= 4096
    assert float(_dot_constant(r.Alibi(0.5), 2)) == 0
