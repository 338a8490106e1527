"""Certified numbers: never below the truth, seldom far above."""

import math
from fractions import Fraction

import mpmath
import pytest
import torch

from regard._round import (
    EPS,
    frobenius_bound,
    gamma,
    product_norm_bound,
    spectral_norm_bound,
    up,
    vector_norm_bound,
)
from tests.nouns import D

UNIT = Fraction(1, 2**53)
"""The unit roundoff."""


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (40, 7), (7, 40), (120, 120)])
@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1.0, 1e150])
def test_spectral_norm(shape, scale):
    for seed in range(5):
        matrix = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)
        exact = float(torch.linalg.matrix_norm(matrix / scale, 2))
        bound = spectral_norm_bound(matrix) / scale
        assert exact * (1 - 1e-14) <= bound <= exact * (1 + 1e-9)


def test_spectral_norm_exactly():
    """Matrices whose norm is known without rounding: orthogonal times an integer, rank one,
    repeated values.
    """
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
        gram = [
            [(square if i == j else 0) - sum(row[i] * row[j] for row in rows) for j in range(3)]
            for i in range(3)
        ]
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


def exact_gamma(count):
    """k u / (1 - k u)."""
    return count * UNIT / (1 - count * UNIT)


def exact_square(vector):
    """The sum of squares, without rounding."""
    return sum(Fraction(v) ** 2 for v in vector.flatten().tolist())


def test_up_is_the_next_number():
    assert up(1.0) == 1 + EPS
    assert up(-1.0) == -1 + EPS / 2
    assert up(0.0) == 5e-324


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 9, 11, 4000, 10**9, 2**40, 2**50])
def test_gamma_is_attained(count):
    """At least k u/(1 - k u), and as much as k u/(1 - 2 k u)."""
    found, most = Fraction(gamma(count)), count * UNIT / (1 - 2 * count * UNIT)
    assert max(exact_gamma(count), most * (1 - 2 * UNIT)) <= found <= most * (1 + 2 * UNIT)
    assert gamma(0) == 0


def test_gamma_is_infinite_where_its_formula_is_negative():
    assert [gamma(count) for count in (2**52, 2**52 + 2**51, 2**53, 2**60)] == [math.inf] * 4


@pytest.mark.parametrize("scale", [1.0, 2.0**-400, 2.0**400, 2.0**-1000, 2.0**1000])
@pytest.mark.parametrize("count", [1, 2, 5, 1000])
def test_lengths_of_vectors_against_rationals(scale, count):
    for seed in range(6):
        vector = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=D) * scale
        for given in (vector, torch.cat([vector, torch.zeros(3, dtype=D)])):
            bound = Fraction(vector_norm_bound(given)) ** 2
            exact = exact_square(given)
            most = (1 + exact_gamma(len(given) + 4)) ** 2 * (1 + 24 * UNIT)
            assert exact <= bound <= exact * most


def test_lengths_count_every_rounding_of_a_long_sum():
    """The bound is γ(n + 4) above the length, no less: sums in any order stay below."""
    vector = torch.rand(10**5, generator=torch.Generator().manual_seed(0), dtype=D)
    ratio = float(Fraction(vector_norm_bound(vector)) ** 2 / exact_square(vector) - 1) / 2
    assert 0.99 * gamma(10**5) <= ratio <= 1.01 * gamma(10**5)


def test_squares_that_vanish_are_counted():
    """Entries of 1e-170 beside one of 1e-90: their squares are zero in float64,
    and a thousand of them count.
    """
    vector = torch.tensor([1e-170], dtype=D).expand(1000)
    assert Fraction(frobenius_bound(vector)) ** 2 >= 1000 * Fraction(1e-170) ** 2
    assert frobenius_bound(vector) <= 1e-148


def test_lengths_below_the_range_of_full_digits():
    """Numbers with a few digits, or one: √2 of the least number is not one."""
    least = 5e-324
    for parts in ((1, 1), (3, 4), (1, 2, 7), (2**30, 1)):
        vector = torch.tensor([part * least for part in parts], dtype=D)
        exact = exact_square(vector)
        for bound in (vector_norm_bound(vector), spectral_norm_bound(vector.unsqueeze(0))):
            assert exact <= Fraction(bound) ** 2
            assert bound / least <= math.sqrt(sum(part**2 for part in parts)) * (1 + 1e-9) + 2
    for exponent in (-1073, -600, 600, 1022):
        vector = (
            torch.tensor([1.5, 0.5], dtype=D) * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
        )
        assert exact_square(vector) <= Fraction(vector_norm_bound(vector)) ** 2


def test_lengths_of_what_has_none():
    assert vector_norm_bound(torch.zeros(4, dtype=D)) == vector_norm_bound(torch.zeros(0, dtype=D)) == 0
    assert vector_norm_bound(torch.tensor([1.0, math.inf], dtype=D)) == math.inf
    assert vector_norm_bound(torch.tensor([math.nan, 1.0], dtype=D)) == math.inf


def test_the_gram_matrix_rounds_down_and_the_bound_does_not():
    """A column of ones and of numbers whose squares are below half a unit:
    float64 adds none of them to a sum of ones.
    """
    small = 0.97 * 2.0**-27
    column = torch.full((10**6, 1), small, dtype=D)
    column[:64] = 1.0
    exact = 64 + (10**6 - 64) * Fraction(small) ** 2
    assert Fraction(float(column.mT @ column)) < exact * (1 - Fraction(3e-13)), "this machine adds them all"
    assert Fraction(spectral_norm_bound(column)) ** 2 >= exact


@pytest.mark.parametrize("shape", [(60, 60), (7, 5), (3000, 3), (40, 90)])
def test_the_norm_is_the_formula_of_its_proof(shape):
    """λ + c + |A|_F² γ(n + 2) with the λ that was factored, to a few units in the last place."""
    matrix = torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=D) - 0.5
    matrix = matrix / matrix.abs().max() * 0.75  # no scaling by a power of two
    tall = matrix if shape[0] >= shape[1] else matrix.mT
    rows, size = tall.shape
    gram = tall.mT @ tall
    near = Fraction(float(torch.linalg.eigvalsh(0.5 * (gram + gram.mT))[-1]))
    level = near * (1 + Fraction(1e-13)) + size * size * Fraction(EPS) * near
    trace = size * level - sum(Fraction(v) for v in gram.diagonal().tolist())
    bend = exact_gamma(size + 2)
    expected = (
        level + bend / (1 - bend) * trace + 4 * UNIT * level + exact_square(tall) * exact_gamma(rows + 2)
    )
    assert expected <= Fraction(spectral_norm_bound(matrix)) ** 2 <= expected * (1 + 64 * UNIT)


@pytest.mark.parametrize(("failures", "slack"), [(0, 1e-13), (1, 1e-11), (2, 1e-9), (3, 1e-6), (4, 1e-3)])
def test_a_factorization_that_fails_is_tried_a_little_farther_out(failures, slack, monkeypatch):
    left = [failures]
    factor = torch.linalg.cholesky_ex

    def stubborn(matrix):
        left[0] -= 1
        return (matrix, torch.tensor(1)) if left[0] >= 0 else factor(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", stubborn)
    found = spectral_norm_bound(torch.diag(torch.tensor([0.75, 0.25], dtype=D)))
    assert (found / 0.75) ** 2 == pytest.approx(1 + slack, rel=1e-14 + slack * 1e-3)


def test_without_any_factorization_it_is_the_frobenius_norm(monkeypatch):
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: (matrix, torch.tensor(1)))
    found = Fraction(spectral_norm_bound(torch.tensor([[0.6, 0.0], [0.0, 0.8]], dtype=D)))
    exact = Fraction(0.6) ** 2 + Fraction(0.8) ** 2
    assert exact <= found**2 <= exact * (1 + 64 * UNIT)


def test_products_against_sixty_digits():
    with mpmath.workdps(60):
        for seed in range(6):
            g = torch.Generator().manual_seed(seed)
            factors = [torch.randn(*shape, generator=g, dtype=D) for shape in ((70, 3), (3, 4), (4, 2))]
            exact = mpmath.matrix(factors[0].tolist())
            for factor in factors[1:]:
                exact = exact * mpmath.matrix(factor.tolist())
            gram = exact.T * exact
            largest = mpmath.sqrt(max(mpmath.eigsy(gram, eigvals_only=True)))
            sizes = math.prod(float(factor.norm()) for factor in factors)
            assert largest <= product_norm_bound(*factors) <= largest * (1 + 1e-12) + 2e-12 * sizes
            assert (
                largest <= product_norm_bound(None, *factors, None) <= largest * (1 + 1e-12) + 2e-12 * sizes
            )


def test_one_factor_is_not_turned():
    """Only the rounding of a product pays for the factorization of a tall factor."""
    for seed in range(6):
        factor = torch.randn(150, 3, generator=torch.Generator().manual_seed(seed), dtype=D)
        assert product_norm_bound(factor) == product_norm_bound(None, factor) == spectral_norm_bound(factor)


def test_a_product_of_nothing_is_the_identity():
    assert product_norm_bound() == product_norm_bound(None, None) == 1.0


@pytest.mark.parametrize(
    ("rows", "columns", "turned"),
    [(4, 2, False), (63, 2, False), (64, 2, True), (64, 32, True), (64, 34, False)],
)
def test_a_product_that_cancels_leaves_its_rounding(rows, columns, turned):
    """A (1, -1, 1, ...) = 0 where the columns of A are alike:
    the bound is |A|_F |B|_F (γ + 16 m n ε of a tall factor).
    """
    first = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0), dtype=D).expand(rows, columns)
    second = torch.tensor([1.0, -1.0], dtype=D).repeat(columns // 2).unsqueeze(-1)
    sizes = float(first.norm() * second.norm())
    expected = sizes * (float(exact_gamma(columns + 3)) + 16 * rows * columns * EPS * turned)
    assert (
        expected * (1 - 1e-9)
        <= product_norm_bound(first, second)
        <= expected * (1 + 1e-9) + 4 * sizes * EPS * turned
    )


def test_a_product_whose_digits_are_lost():
    """2⁵³ + 1 - 2⁵³ is one, and zero or two in float64."""
    first, second = torch.tensor([[2.0**53, 1.0, -(2.0**53)]], dtype=D), torch.ones(3, 1, dtype=D)
    assert 1.0 <= product_norm_bound(first, second) <= 20.0


def test_half_of_a_number_may_be_rounded_away_and_no_more():
    """With k u = 3/8 the relative error is at least (3/8)/(5/8); from a half on nothing is left."""
    assert 0.6 <= gamma(3 * 2**50) == pytest.approx(0.375 / 0.25)
    assert math.isfinite(gamma(2**52 - 1))
    assert gamma(2**52) == math.inf
