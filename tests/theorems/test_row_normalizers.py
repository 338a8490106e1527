"""Entmax and sparsemax: the counterexample to the softmax form, attacks on balls and at points, ties,
refusals.
"""

import math

import pytest
import torch

import regard as r
from regard._upper import Lower, Upper
from regard.domains import Ball, Neighborhood, Radii
from regard.errors import ArgumentError
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify
from regard.proofs.theorems.row_normalizers import _above, entmax_constant
from tests.theorems.exact import (
    SUPPORTS,
    D,
    bilinear_attention,
    frobenius_norm,
    generator,
    in_ball,
    normal,
    token_max_norm,
)

LAWS = [r.Sparsemax(), r.Entmax(1.5), r.Entmax(1.1), r.Entmax(1.9), r.Entmax(2.0)]
NORMS = ((TokenMax(), token_max_norm), (Frobenius(), frobenius_norm))


def counterexample():
    x = torch.tensor([[50.0, 0.0], [50.0, -0.0196]] + 6 * [[50.0, -10.0]], dtype=D)
    a, w = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=D), torch.diag(torch.tensor([0.0, 1.0], dtype=D))
    return r.Attention(r.Bilinear(a), r.Linear(w), r.Sparsemax()), x


def softmax_form(attention, x):
    """√(max_j Σ_i P_ij (w² + σ_i² a_i²)) + max_i σ_i ζ_i with the derivative of sparsemax in σ and ζ:
    what does not hold.
    """
    a, w = attention.potential.a, attention.lookup.w_v
    p = attention.weights(x)
    sigma, zeta = [], []
    for row in (p > 0).double():
        j = torch.diag(row) - torch.outer(row, row) / row.sum()
        cov = x.mT @ j @ x
        sigma.append(torch.linalg.matrix_norm(w.mT @ cov @ w, 2).sqrt())
        zeta.append(torch.linalg.matrix_norm(a @ cov @ a.mT, 2).sqrt())
    sigma, zeta = torch.stack(sigma), torch.stack(zeta)
    spread = 1 + (sigma * (x @ a).norm(dim=-1)).square()
    return float((p * spread.unsqueeze(-1)).sum(0).max().sqrt() + (sigma * zeta).max())


def test_the_softmax_form_does_not_carry_over():
    attention, x = counterexample()
    exact, found = frobenius_norm(attention, x), certify(attention, Neighborhood(x, 0.0), Frobenius()).value
    assert exact == pytest.approx(4.40, abs=0.01)
    assert softmax_form(attention, x) == pytest.approx(3.42, abs=0.01)
    assert exact <= found == pytest.approx(4.77, abs=0.01)
    assert token_max_norm(attention, x) <= certify(attention, Neighborhood(x, 0.0), TokenMax()).value


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_attacks_stay_below(seed, law):
    g = generator(seed)
    attention = bilinear_attention(g, 3, 2, SUPPORTS[seed], normalizer=law)
    center = normal(g, 3, scale=float(seed))
    for norm, exact in NORMS:
        ball = certify(attention, Ball(1.0, center, tokens=5), norm).value
        for _ in range(4):
            x = in_ball(g, 5, 3, float(torch.rand(1, generator=g)), center)
            found = exact(attention, x)
            assert found <= ball
            assert found <= certify(attention, Radii(x, torch.zeros(5, dtype=D)), norm).value


def test_ties_are_taken_at_their_largest():
    """At the edge of the support the derivative jumps; the bound at the point covers what is next to it."""
    x = torch.tensor([[1.0], [0.0], [0.0]], dtype=D)  # row 0 has scores 1, 0, 0: the others are just outside
    attention = r.Attention(r.Bilinear(torch.ones(1, 1, dtype=D)), normalizer=r.Sparsemax())
    bound = certify(attention, Neighborhood(x, 0.0), Frobenius()).value
    for seed in range(20):
        assert frobenius_norm(attention, x + normal(generator(seed), 3, 1, scale=1e-9)) <= bound


def test_weights_of_tokens_count():
    g = generator(4)
    weights = torch.tensor([2.0, 0.0, -1.0, 1.0], dtype=D)
    attention = bilinear_attention(g, 3, 2, normalizer=r.Entmax(1.5))
    x = normal(g, 4, 3)
    bounds = [certify(attention, Neighborhood(r.Measure(x, weights), 1.0), norm).value for norm, _ in NORMS]
    for _ in range(10):
        measure = r.Measure(x + in_ball(g, 4, 3, 0.5), weights)
        for bound, (_, exact) in zip(bounds, NORMS, strict=True):
            assert exact(lambda y, m=measure: attention(m.replace(points=y)).points, measure.points) <= bound


def test_growth_with_the_number_of_tokens_is_real():
    """In TokenMax norm, unlike softmax: half of the tokens at each end."""
    found, bounds = [], []
    attention = r.Attention(r.Bilinear(3e-4 * torch.ones(1, 1, dtype=D)), normalizer=r.Sparsemax())
    for n in (8, 32):
        x = 10.0 * torch.tensor([1.0, -1.0] * (n // 2), dtype=D).unsqueeze(-1)
        found.append(token_max_norm(attention, x))
        bounds.append(certify(attention, Ball(10.0, tokens=n), TokenMax()).value)
    assert found[1] > 1.5 * found[0]
    assert all(0.5 * bound < value <= bound for value, bound in zip(found, bounds, strict=True))


def test_refusals():
    g = generator(0)
    for alpha, sentence in ((1.0, "write Softmax"), (2.5, "infinite slope")):
        found = certify(
            bilinear_attention(g, 3, 2, normalizer=r.Entmax(alpha)), Ball(1.0, tokens=3), TokenMax()
        )
        assert math.isinf(found.value)
        assert any(sentence in why for why in found.refused)
    uncounted = certify(bilinear_attention(g, 3, 2, normalizer=r.Sparsemax()), Ball(1.0), TokenMax())
    assert any("say how many tokens" in why for why in uncounted.refused)


@pytest.mark.parametrize(
    ("alpha", "n", "value"), [(1.5, 50, 0.7102155132), (1.75, 50, 0.9091045898), (1.25, 10, 0.5946035575)]
)
def test_the_constant_of_the_law_is_a_conjecture(alpha, n, value):
    found = entmax_constant(alpha, n)
    assert float(found) == pytest.approx(value, abs=1e-9)
    assert found.value <= found.proved == 1
    assert not isinstance(found, r.Certificate)
    for wrong in ((2.5, 3), (1.0, 3), (0.75, 3), (1.5, 1)):
        with pytest.raises(ArgumentError, match="alpha and n"):
            entmax_constant(*wrong)
    assert float(entmax_constant(1.5, 2)) == pytest.approx(2**-0.5, abs=1e-12)


def test_what_is_above_a_threshold_is_a_difference_that_is_rounded():
    scores, threshold = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), torch.tensor(0.25).double()
    for side in (Upper, Lower):
        found = _above(scores, threshold, side)
        assert found.roundings == 1
        assert found.value.tolist() == [0.25, 0.0, 1.75]
