"""At a point, with softmax 1/2-Lipschitz: worked value, exact Jacobians, where it is attained, refusals."""

import pytest
import torch

import regard as r
from regard.domains import Neighborhood
from regard.norms import Frobenius
from regard.proofs import certify
from tests.theorems.exact import SUPPORTS, D, bilinear_attention, frobenius_norm, generator, normal, worked
from tests.theorems.test_castin_general import rung

WORDS = "softmax 1/2-Lipschitz"


def at(attention, x):
    return rung(certify(attention, Neighborhood(x, 0.0), Frobenius()), WORDS).value


def test_worked_example():
    x, a, w = worked()
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    p, size = attention.weights(x), torch.linalg.matrix_norm(x, 2) ** 2
    expected = torch.linalg.matrix_norm(w, 2) * (
        torch.linalg.matrix_norm(p, 2) + torch.linalg.matrix_norm(a, 2) * size
    )
    assert at(attention, x) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_above_exact_jacobians(n, support):
    g = generator(n)
    for scale in (0.1, 1.0, 5.0):
        attention, x = bilinear_attention(g, 3, 2, support, scale), normal(g, n, 3) + normal(g, 3)
        assert frobenius_norm(attention, x) <= at(attention, x) * (1 + 1e-13)


def test_tightness():
    """Two tokens that face each other, with small scores: rows are half and half."""
    x = torch.tensor([[1.0], [-1.0]], dtype=D)
    attention = r.Attention(r.Bilinear(torch.tensor([[1e-3]], dtype=D)))
    assert 0.99 * at(attention, x) < frobenius_norm(attention, x) <= at(attention, x)


def test_refusals():
    found = certify(
        r.Attention(r.Gaussian(bandwidth=1.0)), Neighborhood(normal(generator(0), 4, 3), 0.0), Frobenius()
    )
    assert any(WORDS in why and "one bilinear form" in why for why in found.refused)
