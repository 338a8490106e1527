"""At a point, by the largest weights: worked values, one-hot rows, exact Jacobians, refusals."""

import pytest
import torch

import regard as r
from regard._upper import exact as upper
from regard.domains import Neighborhood
from regard.norms import Frobenius
from regard.proofs import certify
from regard.proofs.theorems.point_jasmin import indecision
from tests.theorems.exact import SUPPORTS, D, bilinear_attention, frobenius_norm, generator, normal, worked
from tests.theorems.test_castin_general import rung

WORDS = "by the largest weights"


def test_worked_example():
    x, a, w = worked()
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    found = certify(attention, Neighborhood(x, 0.0), Frobenius())
    assert rung(found, WORDS).value == pytest.approx(8.975282813712226, rel=1e-9)
    rows = attention.weights(x)
    for row, value in zip(rows, (0.2705313688, 0.2677829279, 0.2650230857, 0.2626308644), strict=True):
        assert float(indecision(upper(row.unsqueeze(0)))) == pytest.approx(value, abs=1e-9)


def test_the_row_bound_holds_and_is_attained():
    for seed in range(50):
        p = torch.softmax(normal(generator(seed), 5, scale=3.0), -1)
        exact = float(torch.linalg.matrix_norm(torch.diag(p) - torch.outer(p, p), 2))
        assert exact <= float(indecision(upper(p.unsqueeze(0))))
    p = torch.tensor([0.6, 0.2, 0.2], dtype=D)
    assert float(torch.linalg.matrix_norm(torch.diag(p) - torch.outer(p, p), 2)) == pytest.approx(
        float(indecision(upper(p.unsqueeze(0)))), rel=1e-10
    )


def test_one_hot_rows_are_not_zero():
    tiny = 1e-20
    p = torch.tensor([[1.0, tiny, tiny / 2]], dtype=D)
    assert float(indecision(upper(p))) == pytest.approx(2.5 * tiny, rel=1e-9)
    assert float(indecision(upper(torch.ones(3, 1, dtype=D)))) == 0


@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_above_exact_jacobians(n, support):
    g = generator(n)
    for scale in (0.1, 1.0, 5.0):
        attention, x = bilinear_attention(g, 3, 2, support, scale), normal(g, n, 3) + normal(g, 3)
        bound = rung(certify(attention, Neighborhood(x, 0.0), Frobenius()), WORDS).value
        exact = frobenius_norm(attention, x)
        assert exact <= bound * (1 + 1e-13)
        assert exact > 1e-3 * bound


def test_refusals():
    found = certify(
        r.Attention(r.Gaussian(bandwidth=1.0)), Neighborhood(normal(generator(0), 4, 3), 0.0), Frobenius()
    )
    assert any(WORDS in why and "one bilinear form" in why for why in found.refused)
