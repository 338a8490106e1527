"""LipschitzNorm: the map, its constant on the whole space, attacks at all scales, and bad input."""

import math

import pytest
import torch

from regard.domains import Ball, Whole
from regard.errors import ArgumentError
from regard.lipschitz_norm import LipschitzNorm
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify
from tests.theorems.exact import D, frobenius_norm, generator, normal
from tests.theorems.test_castin_general import rung


def test_the_map_is_the_definition():
    g = generator(0)
    x, q, k, v = normal(g, 5, 3), normal(g, 3, 2), normal(g, 3, 2), normal(g, 3, 4)
    queries, keys, values = x @ q, x @ k, x @ v
    sizes = queries.norm(), keys.norm(dim=-1).max(), values.norm(dim=-1).max()
    scale = max(sizes[0] * sizes[1], sizes[0] * sizes[2], sizes[1] * sizes[2])
    expected = torch.softmax(queries @ keys.mT / scale, -1) @ values
    assert torch.allclose(LipschitzNorm(q, k, v)(x), expected, atol=1e-14)
    assert torch.equal(LipschitzNorm(q, k, v)(torch.zeros(2, 5, 3, dtype=D)), torch.zeros(2, 5, 4, dtype=D))


def test_worked_example():
    eye = torch.eye(2, dtype=D)
    found = certify(LipschitzNorm(eye, eye, eye), Whole(), Frobenius())
    assert found.value == pytest.approx((math.e + 2 * math.sqrt(2)) * math.sqrt(3), rel=1e-9)
    counted = certify(LipschitzNorm(eye, eye, eye), Whole(tokens=3), Frobenius())
    assert counted.value == pytest.approx(
        (math.sqrt(3 / (1 + 2 * math.exp(-2))) + 2 * math.sqrt(2)) * math.sqrt(3), rel=1e-9
    )


@pytest.mark.parametrize("seed", range(12))
def test_attacks_stay_below(seed):
    g = generator(seed)
    n, d = 2 + seed % 5, 1 + seed % 3
    sizes = [10 ** float(normal(g, 1)) for _ in range(3)]
    map = LipschitzNorm(*(normal(g, d, 2, scale=size) for size in sizes))
    bound = certify(map, Whole(tokens=n), Frobenius()).value
    for _ in range(6):
        x = normal(g, n, d, scale=10 ** float(normal(g, 1)))
        x[0] *= 10 ** float(normal(g, 1))
        assert frobenius_norm(map, x) <= bound


def test_tightness():
    eye = torch.eye(1, dtype=D)
    map = LipschitzNorm(0.01 * eye, 0.01 * eye, eye)
    bound = certify(map, Whole(tokens=8), Frobenius()).value
    found = max(frobenius_norm(map, normal(generator(seed), 8, 1)) for seed in range(10))
    assert 0.15 * bound < found <= bound


def test_other_norms_and_bad_input():
    eye = torch.eye(2, dtype=D)
    assert math.isinf(certify(LipschitzNorm(eye, eye, eye), Ball(1.0, tokens=3), TokenMax()).value)
    with pytest.raises(ArgumentError, match="w_q, w_k and w_v"):
        LipschitzNorm(eye, torch.ones(3, 2, dtype=D), eye)
    assert rung(certify(LipschitzNorm(eye, eye, eye), Whole(), Frobenius()), "as published").value > 0
