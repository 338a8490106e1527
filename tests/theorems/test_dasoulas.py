"""The published constant of LipschitzNorm: √3 times ours for many tokens, never below it."""

import math

import pytest

from regard.domains import Whole
from regard.lipschitz_norm import LipschitzNorm
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify
from tests.theorems.exact import frobenius_norm, generator, normal
from tests.theorems.test_castin_general import rung


@pytest.mark.parametrize("tokens", [None, 1, 2, 50])
def test_never_below_ours_nor_an_attack(tokens):
    g = generator(0)
    map = LipschitzNorm(normal(g, 3, 2), normal(g, 3, 2), normal(g, 3, 2))
    found = certify(map, Whole(tokens=tokens), Frobenius())
    published = rung(found, "as published").value
    assert found.value < published
    assert frobenius_norm(map, normal(g, tokens or 4, 3)) <= published
    if tokens is None:
        assert published / found.value == pytest.approx(math.sqrt(3), rel=1e-9)


def test_other_norms_have_no_bound():
    g = generator(0)
    map = LipschitzNorm(normal(g, 3, 2), normal(g, 3, 2), normal(g, 3, 2))
    assert math.isinf(certify(map, Whole(tokens=3), TokenMax()).value)
