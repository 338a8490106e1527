"""The own token: one token moves, and its own row is looked at."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.errors import ArgumentError
from regard.maps import Added, Affine, Compose, Gelu, Heads, Normalize, Pointwise, Residual
from regard.measure import Measure
from regard.nonexpansive import Center, GroupSort, IntoBall, MixTokens, Pool, Reflected, Split
from regard.norms import OwnToken, TokenMax
from regard.proofs import certify, deviation, falsify
from regard.proofs.causality import causal
from tests.theorems.exact import generator, normal

D = torch.float64


def _ball(width, tokens, radius=1.0):
    return Ball(radius, torch.zeros(width, dtype=D), tokens)


def _worst(function, points):
    """max over i of |∂f_i/∂x_i| at sequences (b, n, d), by torch."""
    blocks = torch.func.vmap(torch.func.jacrev(function))(points)  # (b, n, e, n, d)
    own = torch.diagonal(blocks, dim1=1, dim2=3)  # (b, e, d, n)
    return float(torch.linalg.matrix_norm(own.permute(0, 3, 1, 2), 2).max())


def _clouds(seed, count, tokens, width):
    g = generator(seed)
    x = normal(g, count, tokens, width)
    x[1::3, 1:] = -x[1::3, :1] + 0.3 * x[1::3, 1:]
    x = x / x.norm(dim=-1, keepdim=True)
    x[2::3] *= torch.rand(len(x[2::3]), tokens, 1, generator=g, dtype=D)
    return x


def _attend(a, w, mask):
    def run(x):
        scores = (x @ a @ x.mT).masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ x @ w

    return run


@pytest.mark.parametrize("g", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("causal_mask", [False, True])
def test_no_derivative_is_larger(g, causal_mask):
    """240 sequences each, w(½(1 + √(1 + g²)) + g) about zero."""
    for tokens, width, seed in ((2, 1, 0), (3, 2, 1), (6, 3, 2)):
        w = normal(generator(seed + 5), width, width)
        a = g * torch.eye(width, dtype=D)
        attention = r.Attention(r.Dot(scale=g), r.Linear(w), support=r.Causal() if causal_mask else r.Full())
        bound = certify(attention, _ball(width, tokens), OwnToken()).value
        top = float(torch.linalg.matrix_norm(w, 2))
        assert bound == pytest.approx(top * ((1 + math.sqrt(1 + g * g)) / 2 + g), rel=1e-9)
        half = certify(attention.replace(potential=r.Dot(scale=4 * g)), _ball(width, tokens, 0.5), OwnToken())
        assert half.value == pytest.approx(bound, rel=1e-9)
        mask = torch.ones(tokens, tokens, dtype=torch.bool)
        mask = mask.tril() if causal_mask else mask
        assert _worst(_attend(a, w, mask), _clouds(seed, 80, tokens, width)) <= bound


def test_biases_and_shifted_balls():
    """Any bias and any center, with the slopes of the scores there."""
    for seed in range(4):
        g = generator(seed)
        w_q, w_k, b_q, b_k, center = (
            normal(g, 3, 2),
            normal(g, 3, 2),
            normal(g, 2),
            normal(g, 2),
            normal(g, 3),
        )
        attention = r.Attention(r.Dot(w_q, w_k, 0.5, b_q, b_k))
        bound = certify(attention, Ball(0.6, center, 4), OwnToken()).value

        def run(x, parts=(w_q, w_k, b_q, b_k)):
            w_q, w_k, b_q, b_k = parts
            return (0.5 * (x @ w_q + b_q) @ (x @ w_k + b_k).mT).softmax(-1) @ x

        assert _worst(run, center + 0.6 * _clouds(seed, 80, 4, 3)) <= bound


def test_the_own_weight_alone_is_attained():
    """One token sees itself: the value is the token. Where scores do not count, that is all there is."""
    attention = r.Attention(r.Dot(scale=0.0))
    assert certify(attention, _ball(2, 1), OwnToken()).value == pytest.approx(1.0, rel=1e-12)
    found = falsify(attention, _ball(2, 1), OwnToken(), steps=3, restarts=1).value
    assert found == pytest.approx(1.0, rel=1e-6)


def test_attacks_come_near_and_never_above():
    attention = r.Attention(r.Dot(scale=1.0), support=r.Causal())
    bound = certify(attention, _ball(1, 3), OwnToken()).value
    found = falsify(attention, _ball(1, 3), OwnToken(), steps=40, restarts=6)
    assert 0.6 * bound <= found.value <= bound
    moved = ((found.point - found.other).norm(dim=-1) > 0).nonzero()
    assert moved.numel() == 1  # one token alone
    row = int(moved)
    apart = (attention(found.point) - attention(found.other))[row].norm() / (found.point - found.other).norm()
    assert found.value <= float(apart)
    near = Radii(0.3 * normal(generator(0), 3, 1), torch.tensor([0.0, 0.2, 0.1], dtype=D))
    assert (
        0 < falsify(attention, near, OwnToken(), steps=10).value <= certify(attention, near, OwnToken()).value
    )
    with pytest.raises(ArgumentError, match="tokens share"):
        falsify(attention, Neighborhood(normal(generator(0), 3, 1), 0.1), OwnToken())


def test_maps_of_each_token_alone():
    w = normal(generator(1), 3, 3)
    for map in (Affine(w), Pointwise(Gelu()), Normalize(1.0, torch.ones(3, dtype=D)), IntoBall(), Center()):
        assert certify(map, _ball(3, 4), OwnToken()).value == certify(map, _ball(3, 4), TokenMax()).value


def test_algebra():
    attention, domain = r.Attention(r.Dot(scale=0.3)), _ball(2, 4)
    one = certify(attention, domain, OwnToken()).value
    assert certify(Residual(attention), domain, OwnToken()).value == pytest.approx(1 + one, rel=1e-9)
    assert certify(Reflected(attention, 2.0), domain, OwnToken()).value == pytest.approx(
        1 + 2 * one, rel=1e-9
    )
    assert certify(Added((attention, Pointwise(Gelu()))), domain, OwnToken()).value == pytest.approx(
        one + certify(Pointwise(Gelu()), domain, OwnToken()).value, rel=1e-9
    )
    assert certify(Split((attention, attention)), _ball(4, 4), OwnToken()).value == pytest.approx(
        one, rel=1e-9
    )
    w = normal(generator(2), 2, 2)
    around = Compose((IntoBall(1.0), attention, Affine(w)))  # one map alone looks at others
    top = float(torch.linalg.matrix_norm(w, 2))
    assert certify(around, domain, OwnToken()).value == pytest.approx(one * top, rel=1e-9)


def test_heads_add_in_squares():
    g = generator(3)
    w, w_o = normal(g, 2, 3, 3), normal(g, 2, 3, 3)
    map = Heads(r.Attention(r.Dot(w, w, 0.1), r.Linear(w)), w_o)
    domain = _ball(3, 4)
    each = [
        certify(r.Attention(r.Dot(w[h], w[h], 0.1), r.Linear(w[h])), domain, OwnToken()).value for h in (0, 1)
    ]
    mixing = float(torch.linalg.matrix_norm(w_o.flatten(0, 1), 2))
    assert certify(map, domain, OwnToken()).value <= mixing * math.hypot(*each) * (1 + 1e-9)
    assert (
        _worst(lambda x: map(x), _clouds(4, 60, 4, 3).unsqueeze(1)[:1].squeeze(1))
        <= certify(map, domain, OwnToken()).value
    )


def test_a_token_that_comes_back_through_others_is_refused():
    """Two averages: the constants of both are small, and their composition is not bounded by the product."""
    swap = MixTokens(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=D))
    assert certify(swap, Whole(tokens=2), OwnToken()).value == 0.0
    x = normal(generator(5), 2, 2)
    torch.testing.assert_close(swap(swap(x)), x)  # the own token moves as far as it moved
    refused = certify(Compose((swap, swap)), Whole(tokens=2), OwnToken())
    assert math.isinf(refused.value)
    assert any("comes back to itself" in sentence for sentence in refused.refused)
    again = certify(Compose((swap, Pool())), Whole(tokens=2), OwnToken())
    assert any("no token is its own" in sentence for sentence in again.refused)


def test_causal_maps_compose():
    attention = r.Attention(r.Dot(scale=0.3), support=r.Causal())
    domain, map = _ball(2, 4), Compose((IntoBall(1.0), attention, attention))
    one = certify(attention, domain, OwnToken()).value
    assert certify(map, domain, OwnToken()).value == pytest.approx(one * one, rel=1e-9)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    step = _attend(0.3 * torch.eye(2, dtype=D), torch.eye(2, dtype=D), mask)
    assert _worst(lambda x: step(step(x)), _clouds(6, 200, 4, 2)) <= one * one
    marked = Neighborhood(Measure(normal(generator(7), 3, 2), marks=torch.tensor([0, 1, 1])), 0.1)
    refused = certify(map, marked, OwnToken())
    assert any("equal marks see each other" in sentence for sentence in refused.refused)
    assert math.isinf(refused.value)


def test_what_is_causal():
    full, masked = r.Attention(r.Dot()), r.Attention(r.Dot(), support=r.Causal() & r.Window(2, 0))
    w = torch.eye(2, dtype=D).unsqueeze(0)
    assert causal(masked)
    assert causal(Heads(masked, w))
    assert causal(Residual(masked))
    assert causal(Reflected(masked))
    assert causal(Split((masked, GroupSort(2))))
    assert causal(Added((masked, Pointwise(Gelu()))))
    assert causal(MixTokens(torch.ones(3, 3, dtype=D).tril()))
    assert not causal(full)
    assert not causal(Heads(full, w))
    assert not causal(Residual(full))
    assert not causal(Reflected(full))
    assert not causal(Split((masked, full)))
    assert not causal(Compose((masked, full)))
    assert not causal(MixTokens(torch.ones(3, 3, dtype=D)))
    assert not causal(MixTokens(torch.ones(2, 3, dtype=D).tril()))
    assert not causal(r.Attention(r.Dot(), support=r.Causal() | r.Full()))
    assert not causal(r.Attention(r.Dot(), normalizer=r.Sinkhorn(), support=r.Causal()))


def test_the_determinant_of_a_causal_map_is_a_product():
    """And with a constant below one x + f(x) has no other preimage."""
    attention = r.Attention(r.Dot(scale=0.2), r.Linear(0.5 * torch.eye(2, dtype=D)), support=r.Causal())
    assert certify(attention, _ball(2, 5), OwnToken()).value < 1
    x = _clouds(8, 1, 5, 2)[0]
    jacobian = torch.func.jacrev(lambda x: x + attention(x))(x)
    own = torch.stack([jacobian[i, :, i] for i in range(5)])
    whole = torch.linalg.slogdet(jacobian.reshape(10, 10))
    assert float(torch.linalg.slogdet(own).logabsdet.sum()) == pytest.approx(
        float(whole.logabsdet), abs=1e-12
    )


def test_it_is_no_distance():
    with pytest.raises(ArgumentError, match="not a distance between sequences"):
        deviation(r.Attention(r.Dot()), Neighborhood(normal(generator(9), 3, 2), 0.1), OwnToken())


def test_other_rows_are_refused():
    refused = certify(r.Attention(r.Dot(), normalizer=r.Sparsemax()), _ball(2, 3), OwnToken())
    assert math.isinf(refused.value)
    sink = certify(
        r.Attention(r.Dot(scale=0.5), normalizer=r.SinkSoftmax(0.0)), _ball(2, 3), OwnToken()
    ).value

    def run(x):
        scores = torch.cat([0.5 * x @ x.mT, torch.zeros(len(x), 1, dtype=D)], -1)
        return scores.softmax(-1)[:, :-1] @ x

    assert _worst(run, _clouds(10, 100, 3, 2)) <= sink < math.inf
