"""Each map alone, climbed: what is beyond its derivatives, where a gradient finds the most of it."""

import itertools

import pytest
import torch

from regard import maps
from regard._upper import exact
from regard.domains import Radii
from regard.proofs.ball_model.beginning import begin, second_order
from regard.proofs.ball_model.ellipsoids import Sum
from regard.proofs.ball_model.network import through
from tests.ball_model.networks import D, attention, drawn, hidden, norm

STAGES = {
    "norm": (lambda g: norm(g, 6), (0.3, 0.5)),
    "norm with a large eps": (lambda g: norm(g, 6, eps=0.5), (0.02, 0.1)),
    "rms": (lambda g: norm(g, 6, centered=False, eps=1e-2), (0.3, 0.5)),
    "gelu": (lambda g: hidden(g, 6, maps.Gelu()), (0.3, 0.5)),
    "relu": (lambda g: hidden(g, 6, maps.Relu()), (0.8, 0.7)),
    "gated": (lambda g: hidden(g, 6, maps.Silu(), gated=True), (0.25, 0.3)),
    "attention": (lambda g: attention(g, 6, sharp=2.0), (0.35, 0.25)),
}
"""A map, and which share of what is proved an ascent finds at least, without and with an ellipsoid."""
RADIUS, STEPS = 0.15, 15


def climbed(map, x, state, direction, ball):
    """The most of |a·(map(x + r u + e) - c - A u)| over |u| ≤ 1, |e| ≤ ε at the token that moves, by the
    gradient, to both sides; u and e go to their spheres.
    """
    best, middle = torch.zeros(len(x), dtype=D), torch.tensor([1])
    moving = state.linear.abs().sum((1, 2)).nonzero().flatten().tolist()
    for token, sign in itertools.product(moving, (-1.0, 1.0)):
        move = sign * torch.stack([direction, direction])
        for _ in range(STEPS):
            leaf = unit(move).requires_grad_()
            u, e = unit(leaf)
            moved = x.index_add(0, middle, (RADIUS * u + ball * e).unsqueeze(0))
            beyond = (map(moved) - state.center - state.linear @ u)[token] @ direction
            best[token] = torch.maximum(best[token], beyond.abs().detach())
            (slope,) = torch.autograd.grad(sign * beyond, leaf)
            move = leaf.detach() + 3 * slope / slope.norm().clamp_min(1e-300)
    return best


def unit(vectors):
    return torch.nn.functional.normalize(vectors, dim=-1)


@pytest.mark.parametrize("ball", [0.0, 0.05])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("kind", STAGES)
def test_no_ascent_leaves_the_remainder_and_some_come_near(kind, order, ball):
    make, shares = STAGES[kind]
    g = torch.Generator().manual_seed(23)
    map, x = make(g), drawn(g, 3, 6)
    begun = begin.one(Radii(x, torch.tensor([0.0, RADIUS, 0.0], dtype=D)))
    begun = second_order(begun) if order == 2 else begun
    around = exact(torch.tensor([0.0, ball, 0.0], dtype=D))
    state = through.one(map, begun.with_rest(Sum(3, 6).ball(around)) if ball else begun)
    a = unit(drawn(g, 2, 6))
    proved = state.rest(a.mT.unsqueeze(0)).bound
    found = torch.stack([climbed(map, x, state, one, ball) for one in a], -1)
    assert bool((found <= proved).all())
    assert float((found / proved)[1].max()) > shares[ball > 0]
