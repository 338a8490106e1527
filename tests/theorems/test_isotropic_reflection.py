"""Reflective attention with scores t x·y."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball
from regard.nonexpansive import Reflected
from regard.norms import Frobenius
from regard.proofs import THEOREMS, certify
from regard.proofs.theorems.isotropic_reflection import isotropic
from tests.theorems.exact import generator, normal

D = torch.float64


def _ball(radius, width, tokens, center=None):
    return Ball(radius, torch.zeros(width, dtype=D) if center is None else center, tokens)


def _rung(map, domain, name, norm=Frobenius()):
    """The bound by one theorem."""
    found = certify(map, domain, norm)
    return next(one.value for one in (found, *found.others) if one.theorem == THEOREMS[name].cited)


def _clouds(seed, count, tokens, width):
    """Sequences of unit balls: spread, one against the rest, far from zero, all lengths."""
    g = generator(seed)
    x = normal(g, count, tokens, width)
    x[1::4, 1:] = -x[1::4, :1] + 0.3 * x[1::4, 1:]
    x[2::4] += 3 * normal(g, len(x[2::4]), 1, width)
    x = x / x.norm(dim=-1, keepdim=True)
    x[3::4] *= torch.rand(len(x[3::4]), tokens, 1, generator=g, dtype=D)
    return x


def _norms(map, x):
    """Spectral norms of the derivatives at sequences (b, n, d), by torch."""
    jacobians = torch.func.vmap(torch.func.jacrev(map))(x)
    return torch.linalg.matrix_norm(jacobians.flatten(3).flatten(1, 2), 2)


@pytest.mark.parametrize(("g", "c"), [(0.02, 2.0), (0.1, 1.5), (0.4, 1.0), (1.5, 2.0)])
def test_no_derivative_is_larger(g, c):
    """320 sequences each."""
    for tokens, width, seed in ((2, 1, 0), (3, 2, 1), (8, 3, 2), (12, 1, 3)):
        map, points = Reflected(r.Attention(r.Dot(scale=g)), c), _clouds(seed, 80, tokens, width)
        worst = float(_norms(lambda x: x - c * (g * x @ x.mT).softmax(-1) @ x, points).max())
        assert worst <= _rung(map, _ball(1.0, width, tokens), "isotropic_reflection")


def _supremum(g, c, steps=20000):
    """The statement of the theorem as it stands, on a fine grid, from below."""
    best = 0.0
    for k in range(steps + 1):
        sigma, spread = k / steps, 1.0
        for _ in range(3):
            spread = min(spread, 1 - max(0.0, sigma - spread * g) ** 2)
        mean = min(1.0, sigma + spread * g)
        bend = min(2 * spread, spread + spread**1.5 * g + 0.5 * spread * g * (1 + mean) ** 2)
        inner = max(1.0, c * (1 + g * bend) - 1) + c * g * math.sqrt(spread) * mean
        best = max(best, math.exp(g * min(1.0, sigma + spread * g / 4)) * inner)
    return best


@pytest.mark.parametrize(("g", "c"), [(0.05, 2.0), (0.15, 2.0), (0.2, 1.0), (0.7, 1.7)])
def test_formula_of_isotropic_scores(g, c):
    found = _rung(Reflected(r.Attention(r.Dot(scale=g)), c), _ball(1.0, 2, 5), "isotropic_reflection")
    half = _rung(Reflected(r.Attention(r.Dot(scale=4 * g)), c), _ball(0.5, 2, 5), "isotropic_reflection")
    assert half == pytest.approx(found, rel=1e-9)
    expected = _supremum(g, c)
    assert expected <= found <= expected * 1.002


def test_isotropic_bound_reads_the_reach_of_a_shifted_ball():
    map = Reflected(r.Attention(r.Dot(scale=0.05)), 2.0)
    center = torch.tensor([1.0, 0.0], dtype=D)
    shifted = _rung(map, _ball(1.0, 2, 5, center), "isotropic_reflection")
    assert shifted == pytest.approx(_rung(map, _ball(2.0, 2, 5), "isotropic_reflection"), rel=1e-9)


def test_nearly_attained_for_small_scores():
    """1 + 2g is seen where half of the tokens are against the other half, and 1 + 3g certified."""
    g = 0.02
    x = torch.ones(1, 8, 1, dtype=D)
    x[:, 4:] = -1.0
    seen = float(_norms(lambda x: x - 2 * (g * x @ x.mT).softmax(-1) @ x, x))
    bound = certify(Reflected(r.Attention(r.Dot(scale=g)), 2.0), _ball(1.0, 1, 8), Frobenius()).value
    assert 1 + 1.9 * g <= seen <= bound <= 1 + 3.2 * g


@pytest.mark.parametrize(
    ("potential", "known"),
    [
        (r.Bilinear(0.3 * torch.eye(2, dtype=D)), True),
        (r.Bilinear(torch.diag(torch.tensor([0.3, 0.2], dtype=D))), False),
        (2.0 * r.Dot(), True),
        (-2.0 * r.Dot(), False),
        (r.Dot() + r.Dot(scale=0.5), True),
        (r.Dot(torch.eye(2, dtype=D), None), False),
        (r.Dot(None, torch.eye(2, dtype=D)), False),
        (r.Gaussian(bandwidth=1.0), False),
    ],
)
def test_multiples_of_the_dot_product(potential, known):
    assert isotropic(potential) is known
