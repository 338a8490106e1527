"""The attack: it finds maxima that are known, exposes a certificate that is too small,
and never leaves the domain.
"""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Radii, Whole, one_token
from regard.maps import Affine, Compose, Pointwise, Residual, Tanh
from regard.nonexpansive import IntoBall
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, falsify, falsify_deviation
from tests.theorems.exact import D, frobenius_norm, generator, normal


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum()])
def test_the_norm_of_a_matrix_is_found(norm):
    w = normal(generator(0), 3, 4)
    size = float(torch.linalg.matrix_norm(w, 2))
    for domain in (
        Ball(1.0, normal(generator(1), 3), 4),
        Whole(4),
        Neighborhood(normal(generator(2), 4, 3), 0.1),
    ):
        assert falsify(Affine(w), domain, norm, steps=3, restarts=1).value == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_a_pair_shows_what_the_derivative_at_its_point_does(seed):
    """Also on the boundary, where a step leads some tokens out of the ball on either side:
    on the way back they would turn.
    """
    g = generator(seed)
    attention = r.Attention(r.Dot(2 * normal(g, 3, 3), normal(g, 3, 3)), r.Linear(normal(g, 3, 3)))
    domain = Ball(0.2, torch.zeros(3, dtype=D), 4)
    found = falsify(attention, domain, Frobenius(), steps=4, restarts=1)
    assert found.value >= (1 - 1e-3) * frobenius_norm(attention, found.point)
    assert float(torch.stack([found.point, found.other]).norm(dim=-1).max()) <= 0.2


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("norm", [TokenMax(), EntryMax()])
def test_every_token_is_looked_at(norm, seed):
    """Tokens of width one: the constant at a point is max_i Σ_j |J_ij|, and power steps from one direction
    end at one of the rows.
    """
    attention, x = r.Attention(r.Dot(scale=2.0)), normal(generator(seed), 6, 1)
    rows = torch.func.jacrev(attention)(x)[:, 0, :, 0].abs().sum(-1)
    seen = falsify(attention, Neighborhood(x, 1e-6, TokenMax()), norm, steps=1, restarts=1).value
    assert seen == pytest.approx(float(rows.max()), rel=1e-3)


def test_the_largest_column_is_found_entry_by_entry():
    w = normal(generator(3), 3, 4)
    found = falsify(Affine(w), Whole(2), EntryMax(), steps=3, restarts=3, width=3).value
    assert found == pytest.approx(float(w.abs().sum(0).max()), rel=1e-4)


@pytest.mark.parametrize(
    "norm", [Frobenius(), TokenMax(), TokenSum(), Wasserstein(1.0), Wasserstein(math.inf)]
)
def test_means_of_tokens_on_a_ball(norm):
    """Without scores every output is the mean, whose constant is one;
    a point on the boundary shows as much of it as one inside.
    """
    attention = r.Attention(r.Bilinear(torch.zeros(2, 2, dtype=D)))
    seen = falsify(attention, Ball(1.0, torch.zeros(2, dtype=D), 4), norm, steps=3, restarts=3).value
    assert seen == pytest.approx(1.0, rel=1e-6)


def test_the_hub_is_climbed():
    """Tokens (1, -1, …) about a hub at zero: the attack finds more than random points do."""
    attention, domain, g = r.Attention(r.Dot(scale=4.0)), Ball(1.0, torch.zeros(1, dtype=D), 6), generator(4)
    random = max(frobenius_norm(attention, torch.rand(6, 1, generator=g, dtype=D) * 2 - 1) for _ in range(30))
    assert falsify(attention, domain, Frobenius(), steps=15, restarts=6).value > random


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax()])
def test_a_certificate_that_is_too_small_is_exposed(norm):
    """A bound that takes slopes at the center, as if |A| R were all there is,
    is below what the attack finds.
    """
    attention, center = r.Attention(r.Bilinear(torch.tensor([[1.0]], dtype=D))), torch.tensor([20.0], dtype=D)
    domain = Ball(0.3, center, 6)
    claimed = (
        math.sqrt(1 + 0.09**2)
        * (math.sqrt(6 / (1 + 5 * math.exp(-0.18))) if isinstance(norm, Frobenius) else 1.0)
        + 0.09
    )
    seen = falsify(attention, domain, norm, steps=20, restarts=6).value
    assert claimed < seen <= certify(attention, domain, norm).value


def test_a_deviation_that_is_too_small_is_exposed():
    """The linear part alone, |J| r, is not a bound."""
    attention, x = r.Attention(r.Dot(scale=5.0)), torch.tensor([[1.0], [-0.2], [0.3]], dtype=D)
    domain = Neighborhood(x, 0.8)
    claimed = 0.8 * frobenius_norm(attention, x)
    seen = falsify_deviation(attention, domain, Frobenius(), steps=30).value
    assert claimed < seen <= deviation(attention, domain, Frobenius()).value


def test_the_farthest_move_of_a_linear_map_is_found():
    w, x = normal(generator(5), 3, 3), normal(generator(6), 4, 3)
    size = float(torch.linalg.matrix_norm(w, 2))
    assert falsify_deviation(Affine(w), Neighborhood(x, 0.5), Frobenius()).value == pytest.approx(
        0.5 * size, rel=1e-6
    )
    assert falsify_deviation(Affine(w), one_token(x, 2, 0.5), Frobenius()).value == pytest.approx(
        0.5 * size, rel=1e-6
    )
    assert falsify_deviation(Affine(w), Neighborhood(x, 0.5, TokenMax()), TokenMax()).value == pytest.approx(
        0.5 * size, rel=1e-6
    )


def test_witnesses_can_be_checked():
    attention, domain = r.Attention(r.Dot()), Ball(1.0, torch.zeros(2, dtype=D), 4)
    found = falsify(attention, domain, Frobenius(), steps=3, restarts=2)
    for point in (found.point, found.other):
        assert float(point.norm(dim=-1).max()) <= 1
    ratio = float(
        (attention(found.point) - attention(found.other)).norm() / (found.point - found.other).norm()
    )
    assert ratio == pytest.approx(found.value, rel=1e-9)
    assert "seen at a pair of points [4, 2]" in str(found)


def test_tokens_that_stay_are_not_moved():
    x = normal(generator(7), 3, 2)
    domain = Radii(x, torch.tensor([0.0, 0.5, 0.0], dtype=D))
    for found in (
        falsify(r.Attention(r.Dot()), domain, TokenMax(), steps=3, restarts=2),
        falsify_deviation(r.Attention(r.Dot()), domain, TokenMax(), steps=3, restarts=2),
    ):
        assert torch.equal(found.point[[0, 2]], x[[0, 2]])
        assert torch.equal(found.other[[0, 2]], x[[0, 2]])


def test_attacks_are_reproducible():
    attention, domain = r.Attention(r.Dot()), Ball(1.0, torch.zeros(2, dtype=D), 3)
    one, other = (
        falsify(attention, domain, TokenMax(), steps=2, restarts=2, generator=generator(8)).value
        for _ in range(2)
    )
    assert one == other


def test_what_is_missing_is_said():
    with pytest.raises(r.errors.ArgumentError, match="say how wide a token is"):
        falsify(Pointwise(Tanh()), Whole(3), Frobenius())
    with pytest.raises(r.errors.ArgumentError, match="a deviation is from a given sequence"):
        falsify_deviation(r.Attention(r.Dot()), Ball(1.0), Frobenius())
    weighted = Neighborhood(r.Measure(torch.ones(2, 2, dtype=D), torch.tensor([0.0, 1.0], dtype=D)), 0.1)
    with pytest.raises(r.errors.ArgumentError, match="give bare points"):
        falsify(Residual(r.Attention(r.Dot())), weighted, Frobenius())


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
def test_masses_move_too(p):
    """A = -I is where the constant is attained, by laws that are nearly one point; equal masses see 25."""
    attention = r.Attention(r.Bilinear(-3 * torch.eye(3, dtype=torch.float64)))
    norm = Wasserstein(p)
    bound = certify(attention, Ball(1.0), norm).value
    witness = falsify(attention, Ball(1.0), norm, width=3, restarts=4, steps=24)
    assert (0.98 if p == 1 else 0.6) * bound <= witness.value <= bound
    images = (attention(witness.point), attention(witness.other))
    apart = float(r.wasserstein(witness.point, witness.other, p))
    assert float(r.wasserstein(*images, p)) / apart >= witness.value * (1 - 1e-6)
    for law in (witness.point, witness.other):
        assert float(law.points.norm(dim=-1).max()) <= 1.0
    assert "laws of 6 atoms" in str(witness)


def test_masses_stay_where_the_number_of_tokens_is_given():
    attention = r.Attention(r.Bilinear(-3 * torch.eye(3, dtype=torch.float64)))
    witness = falsify(attention, Ball(1.0, tokens=3), Wasserstein(1.0), width=3, restarts=2, steps=6)
    assert isinstance(witness.point, torch.Tensor)
    assert witness.point.shape == (3, 3)


def test_a_map_without_weights_is_attacked_with_equal_masses():
    map = Compose((IntoBall(1.0), r.Attention(r.Dot(scale=2.0))))
    witness = falsify(map, Ball(2.0), Wasserstein(1.0), width=3, restarts=2, steps=6)
    assert isinstance(witness.point, torch.Tensor)
    assert 0 < witness.value <= certify(map, Ball(2.0), Wasserstein(1.0)).value
