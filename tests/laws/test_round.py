"""Certified numbers: never below the truth, seldom far above."""

from fractions import Fraction

import pytest
import torch

from regard._round import frobenius_bound, gamma, spectral_norm_bound, up
from tests.nouns import D


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (40, 7), (7, 40), (120, 120)])
@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1.0, 1e150])
def test_spectral_norm(shape, scale):
    for seed in range(5):
        matrix = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)
        exact = float(torch.linalg.matrix_norm(matrix / scale, 2))
        bound = spectral_norm_bound(matrix) / scale
        assert exact * (1 - 1e-14) <= bound <= exact * (1 + 1e-9)


def test_spectral_norm_exactly():
    """Matrices whose norm is known without rounding: orthogonal times an integer, rank one, repeated values."""
    hadamard = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=D)
    for _ in range(5):
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=D))
    assert 8.0 <= spectral_norm_bound(hadamard) <= 8.0 * (1 + 1e-11)
    assert 5.0 <= spectral_norm_bound(torch.tensor([[3.0], [4.0]], dtype=D)) <= 5.0 * (1 + 1e-12)
    assert 3.0 <= spectral_norm_bound(3 * torch.eye(50, dtype=D)) <= 3.0 * (1 + 1e-10)
    assert spectral_norm_bound(torch.zeros(3, 4, dtype=D)) == 0
    assert spectral_norm_bound(torch.zeros(0, 4, dtype=D)) == 0
    assert spectral_norm_bound(torch.tensor([[torch.nan]], dtype=D)) == torch.inf


def test_against_rationals():
    """A proof by exact arithmetic: x = bound² makes x·I - AᵀA positive definite, by its leading minors."""
    for seed in range(20):
        matrix = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=D)
        rows = [[Fraction(v) for v in row] for row in matrix.tolist()]
        square = Fraction(spectral_norm_bound(matrix)) ** 2
        gram = [[(square if i == j else 0) - sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
        one = gram[0][0]
        two = one * gram[1][1] - gram[0][1] ** 2
        three = (
            gram[0][0] * (gram[1][1] * gram[2][2] - gram[1][2] ** 2)
            - gram[0][1] * (gram[0][1] * gram[2][2] - gram[1][2] * gram[0][2])
            + gram[0][2] * (gram[0][1] * gram[1][2] - gram[1][1] * gram[0][2])
        )
        assert one >= 0
        assert two >= 0
        assert three >= 0


def test_directions():
    assert up(1.0) > 1.0
    assert gamma(10) >= 10 * 2.0**-53
    assert gamma(1 << 60) == float("inf")
    matrix = torch.rand(300, 300, dtype=D)
    exact = sum(Fraction(v) ** 2 for v in matrix.flatten().tolist())
    assert Fraction(frobenius_bound(matrix)) ** 2 >= exact
