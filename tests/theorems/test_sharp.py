"""Scores that are far apart: what is small beside the largest number of a row is not lost."""

import pytest
import torch

import regard as r
from regard._upper import exact
from regard.proofs.near import facts
from regard.proofs.near.frobenius import FrobeniusScores
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.radii import TokenRadii
from regard.proofs.subject import subject_of
from tests.theorems.exact import D, generator, normal


def test_sums_without_one():
    values = torch.tensor([[1e30, 1.0, 2.0], [1.0, 1e-30, 1e-30]], dtype=D)
    assert torch.equal(
        exact(values).sums_of_others().value, torch.tensor([[3.0, 1e30, 1e30], [2e-30, 1.0, 1.0]], dtype=D)
    )


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("norm", [r.Frobenius(), r.TokenMax()], ids=repr)
@pytest.mark.parametrize("scale", [4.0, 8.0])
def test_a_sharp_row_whose_token_moves_far(scale, norm, large, monkeypatch):
    """The weight of the token that moves can grow by e^40 and more,
    and that of the other can fall to nothing.
    """
    monkeypatch.setattr(facts, "LARGE", 0 if large else facts.LARGE)
    attention = r.Attention(r.Dot(scale=scale), support=r.Causal())
    for radius in (2.0, 5.0, 10.0):
        domain = r.one_token(torch.eye(2, dtype=D), 1, radius)
        assert (
            r.falsify_deviation(attention, domain, norm, restarts=8).value
            <= r.deviation(attention, domain, norm).value
        )


@pytest.mark.parametrize("seed", range(6))
def test_weights_stay_between_their_bounds(seed):
    """On the way to far and near tokens, for moves of one and of all."""
    g = generator(seed)
    n, d = 4, 3
    x, w_q, w_k = normal(g, n, d), 3 * normal(g, d, d), 3 * normal(g, d, d)
    attention = r.Attention(r.Dot(w_q, w_k), support=r.Causal())
    (local,) = LocalHeads(subject_of(attention), r.Neighborhood(x, 1.0)).heads
    for radius in (1e-3, 0.3, 3.0, 30.0):
        one = torch.zeros(n, dtype=D)
        one[seed % n] = radius
        for moves in (one, torch.full((n,), radius, dtype=D)):
            scores, ball = TokenRadii(local, moves).laws, FrobeniusScores(local, radius).laws
            for _ in range(60):
                step = normal(g, n, d)
                y = x + moves.unsqueeze(-1) * step / step.norm(dim=-1, keepdim=True)
                weights = attention.weights(y)
                assert bool((scores.low.bound <= weights + 1e-15).all())
                assert bool((weights <= scores.high.bound + 1e-15).all())
                weights = attention.weights(x + radius * step / step.norm())
                assert bool((ball.low.bound <= weights + 1e-15).all())
                assert bool((weights <= ball.high.bound + 1e-15).all())
