"""Doubly stochastic attention: worked value, attacks on balls and near a sequence,
convergence by its own settings, refusals.
"""

import math

import pytest
import torch

import regard as r
from regard._upper import exact
from regard.domains import Ball, Neighborhood, Radii
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify
from regard.proofs.scores import BallFacts
from regard.proofs.theorems.sinkhorn import _size, iterations
from tests.theorems.exact import D, bilinear_attention, frobenius_norm, generator, in_ball, normal

LAW = r.Sinkhorn(tolerance=1e-9, max_iterations=2000)


def test_worked_example():
    attention = r.Attention(r.Bilinear(torch.tensor([[0.5]], dtype=D)), normalizer=LAW)
    found = certify(attention, Ball(2.0, tokens=3), Frobenius())
    assert found.value == pytest.approx(1 + 3 * 0.5 * 4, rel=1e-9)
    assert [h.statement for h in found.hypotheses if not h.checked] == [
        "columns balanced to 1e-09 count as balanced"
    ]


def test_the_size_of_sequences_near_one():
    """|X_c|₂ and the move, and what rounding X - c may hide, which is relative to the ball."""
    x = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0], [0.0, 0.0]], dtype=D)
    center = torch.zeros(2, dtype=D)
    radii = Radii(x, torch.tensor([0.3, 0.0, 0.4, 0.0], dtype=D))
    for domain, moved in ((Neighborhood(x, 0.7), 0.7), (radii, 0.5)):
        small, huge = (BallFacts(center, exact(size), exact(size)) for size in (2.0, 1e12))
        assert float(_size(domain, 4, small)) == pytest.approx(4.0, rel=1e-12, abs=0)
        paid = float(_size(domain, 4, huge)) - 4.0 - moved
        assert 4 * 2.0**-53 * 2e12 <= paid <= 8 * 2.0**-53 * 2e12
    assert float(_size(Ball(1e12, tokens=4), 4, huge)) == pytest.approx(2e12)
    there = BallFacts(torch.tensor([0.0, 2.0], dtype=D), exact(10.0), exact(12.0))
    shifted = float(torch.linalg.matrix_norm(x - there.center, 2))
    assert float(_size(Neighborhood(x, 0.7), 4, there)) == pytest.approx(shifted + 0.7, rel=1e-12, abs=0)


@pytest.mark.parametrize("seed", range(4))
def test_attacks_stay_below(seed):
    g = generator(seed)
    attention = bilinear_attention(g, 3, 2, scale=0.3 * 2**seed / 4, normalizer=LAW)
    center = normal(g, 3, scale=float(seed))
    ball = certify(attention, Ball(0.7, center, tokens=4), Frobenius()).value
    x = in_ball(g, 4, 3, 0.7, center)
    exact = frobenius_norm(attention, x)
    assert exact <= certify(attention, Neighborhood(x, 0.0), Frobenius()).value <= ball * (1 + 1e-9)
    near = certify(attention, Radii(x, torch.tensor([0.5, 0.0, 0.0, 0.1], dtype=D)), Frobenius()).value
    moved = x.clone()
    moved[0] += in_ball(g, 1, 3, 0.5)[0]
    assert frobenius_norm(attention, moved) <= near


def test_other_scores_through_their_slopes():
    g = generator(1)
    attention = r.Attention(r.Gaussian(bandwidth=0.8), r.Linear(normal(g, 2, 2)), LAW)
    bound = certify(attention, Ball(1.0, tokens=4), Frobenius()).value
    assert math.isfinite(bound)
    assert max(frobenius_norm(attention, in_ball(g, 4, 2, 1.0)) for _ in range(2)) <= bound


def test_tightness():
    attention = r.Attention(r.Bilinear(torch.tensor([[0.2]], dtype=D)), normalizer=LAW)
    x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=D)
    bound = certify(attention, Neighborhood(x, 0.0), Frobenius()).value
    assert 0.5 * bound < frobenius_norm(attention, x) <= bound


@pytest.mark.parametrize(
    ("attention", "domain", "sentence"),
    [
        (
            bilinear_attention(generator(0), 3, 2, r.Causal(), normalizer=LAW),
            Ball(1.0, tokens=3),
            "under a mask",
        ),
        (bilinear_attention(generator(0), 3, 2, normalizer=LAW), Ball(1.0), "say how many there are"),
        (
            bilinear_attention(generator(0), 3, 2, normalizer=LAW),
            Neighborhood(r.Measure(torch.ones(2, 3, dtype=D), torch.tensor([0.0, 1.0], dtype=D)), 0.1),
            "with weights",
        ),
    ],
    ids=["mask", "tokens", "weights"],
)
def test_violated_hypotheses(attention, domain, sentence):
    found = certify(attention, domain, Frobenius())
    assert math.isinf(found.value)
    assert any(sentence in why for why in found.refused)


def test_other_norms_have_no_bound():
    assert math.isinf(
        certify(bilinear_attention(generator(0), 3, 2, normalizer=LAW), Ball(1.0, tokens=3), TokenMax()).value
    )


def test_a_fixed_number_of_iterations_is_another_map():
    """The theorem is about the balanced coupling, so nothing is claimed of it."""
    attention = r.Attention(
        r.Bilinear(torch.tensor([[0.5]], dtype=D)), normalizer=r.Sinkhorn(tolerance=0.0, max_iterations=50)
    )
    found = certify(attention, Ball(2.0, tokens=3), Frobenius())
    assert math.isinf(found.value)
    assert any("tolerance 0 runs exactly 50 iterations" in why for why in found.refused)


def test_too_few_iterations_are_refused_and_enough_are_not():
    scores = r.Bilinear(torch.tensor([[0.5]], dtype=D)) + r.Alibi(0.1)
    few, enough = (r.Attention(scores, normalizer=r.Sinkhorn(1e-9, count)) for count in (5, 2000))
    found = certify(few, Ball(2.0, tokens=3), Frobenius())
    assert math.isinf(found.value)
    assert any("max_iterations is 5; raise it" in why for why in found.refused)
    assert math.isfinite(certify(enough, Ball(2.0, tokens=3), Frobenius()).value)
    assert math.isinf(certify(enough, Ball(200.0, tokens=3), Frobenius()).value)
    assert math.isfinite(
        certify(enough, Neighborhood(200 + torch.zeros(3, 1, dtype=D), 0.1), Frobenius()).value
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_count_of_iterations_is_enough(seed):
    """An iteration that is allowed just as many never warns, and a warning is an error here."""
    g = generator(seed)
    scores = 0.4 * 1.3**seed * normal(g, 5, 5)
    crossed = (
        scores[:, None, :, None]
        - scores[:, None, None, :]
        - scores[None, :, :, None]
        + scores[None, :, None, :]
    )
    row = float((scores.amax(-1) - scores.amin(-1)).max())
    count = int(iterations(exact(row), exact(float(crossed.abs().max())), 1e-8))
    weights = r.Sinkhorn(1e-8, count).weights(scores, r.normalizers.Reference())
    torch.testing.assert_close(weights.sum(-2), torch.ones(5, dtype=D), rtol=2e-8, atol=0.0)


def test_the_rounding_of_scores_hides_small_tolerances():
    assert math.isinf(iterations(exact(1.0), exact(2.0), 1e-14))
    assert math.isinf(iterations(exact(1.0), exact(1e4), 1e-6))
    assert iterations(exact(1e-9), exact(2e-9), 1e-6) == 1
    assert iterations(exact(1.0), exact(0.0), 1e-6) <= 3
