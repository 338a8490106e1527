"""Neurons moved by u and by what is left of tokens: pairs of them beside explicit tensors, and where they are
attained.
"""

import math

import pytest
import torch

import regard as r
from regard import maps
from regard.proofs.ball_model import neurons as neurons_room
from regard.proofs.ball_model import squares as squares_room
from regard.proofs.ball_model.batches import head_moves
from regard.proofs.ball_model.beginning import begin
from regard.proofs.ball_model.ellipsoids import Sum, no_diagonal, widths
from regard.proofs.ball_model.groups import Groups
from regard.proofs.ball_model.network import through
from regard.proofs.ball_model.squares import Squares
from regard.proofs.ball_model.state import State
from regard.proofs.question import question
from regard.proofs.subject import subject_of
from regard.proofs.theorems import ball_model as theorem
from tests.ball_model.networks import D, drawn, network, sequence

WIDE, NEURONS, MOVING = 4, 7, 3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def squares_of(along, weights=None):
    """Of one token, whose neurons count one each."""
    weights = torch.ones(1, along.shape[1], dtype=D) if weights is None else weights
    return Squares(along, torch.ones(along.shape[:2], dtype=D), weights, 0.0)


def unit(g, *shape):
    return torch.nn.functional.normalize(drawn(g, *shape), dim=-1)


@pytest.mark.parametrize("most", [3, NEURONS])
def test_pairs_of_neurons_with_a_rest_hold_their_moves(most):
    """|a·Σ E_k[2(b_k·u)(w_k·ε) + (w_k·ε)²]| ≤ (aᵀGa)^{1/2} over the neurons that were kept."""
    for seed in range(20):
        g = generator(seed)
        along, w, weights = drawn(g, NEURONS, MOVING), drawn(g, WIDE, NEURONS), drawn(g, WIDE, NEURONS)
        root = 10.0 ** (seed % 3 - 1) * drawn(g, WIDE, WIDE)
        shape, kept = squares_of(along.unsqueeze(0), weights).crossed(0, w, root @ root.mT, most)
        assert len(kept) == most
        u, epsilon = unit(g, 500, MOVING), unit(g, 500, WIDE) @ root.mT
        first, rest = u @ along.mT, epsilon @ w
        moves = (2 * first * rest + rest.square())[:, kept] @ weights[:, kept].mT
        a = drawn(g, WIDE, 50)
        assert bool(((moves @ a).abs().amax(0) <= widths(shape.unsqueeze(0), a.unsqueeze(0)).bound[0]).all())


def test_the_gram_matrix_of_pairs_is_that_of_the_forms():
    """(4 b_kb_l w_kQw_l)(s+t)/s + (w_kQw_l)²(s+t)/t between the weights, to twelve digits."""
    g = generator(1)
    along, w, weights = drawn(g, NEURONS, MOVING), drawn(g, WIDE, NEURONS), drawn(g, WIDE, NEURONS)
    root = drawn(g, WIDE, WIDE)
    around = root @ root.mT
    shape, _ = squares_of(along.unsqueeze(0), weights).crossed(0, w, around, NEURONS)
    turned = root.mT @ w
    forms = torch.einsum("ek,kp,ck->epc", weights, 2 * along, turned).flatten(1)
    pure = torch.einsum("ek,ck,dk->ecd", weights, turned, turned).flatten(1)
    size = around.norm().sqrt() * w.norm(dim=0)
    s, t = 2 * (along.norm(dim=-1) * size).norm(), size.square().norm()
    exactly = (s + t) * (forms @ forms.mT / s + pure @ pure.mT / t)
    assert torch.allclose(shape, exactly, rtol=1e-11, atol=1e-11 * float(exactly.norm()))


def test_one_neuron_attains_its_move():
    """b·u = |b| and w·ε = ρ at once: 2|b|ρ + ρ²."""
    along, w = torch.tensor([[[3.0, 0.0]]], dtype=D), torch.tensor([[2.0], [0.0]], dtype=D)
    around = torch.tensor([[0.25, 0.0], [0.0, 0.0]], dtype=D)
    weights = torch.tensor([[0.5], [0.0]], dtype=D)
    shape, _ = squares_of(along, weights).crossed(0, w, around, 1)
    assert float(shape[0, 0].sqrt()) == pytest.approx(0.5 * (2 * 3.0 * 1.0 + 1.0), rel=1e-9)


def test_sixth_powers_of_neurons():
    """Above Σ(b_k·u)⁶, and attained by one neuron and by two that are orthogonal."""
    g = generator(4)
    along = drawn(g, 1, NEURONS, MOVING)
    found = float(squares_of(along).sixth)
    seen = (unit(g, 20_000, MOVING) @ along[0].mT).pow(6).sum(-1).max()
    assert float(seen) <= found < 3 * float(seen)
    alone = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]], dtype=D)
    assert float(squares_of(alone).sixth) == pytest.approx(64.0, rel=1e-6)


def shape_without_pairs(along, factors, mixing):
    """The ellipsoid of moves of one token for which no pairs are looked at, however long they are."""
    squares = Squares(along, factors, mixing, math.inf)
    assert not len(squares.chosen)
    return Sum(1, len(mixing)).diagonal(mixing, squares.coarse(no_diagonal(1, mixing))).done()


def test_moves_without_pairs_hold():
    for seed in range(20):
        g = generator(seed)
        along, factors, mixing = drawn(g, 1, NEURONS, MOVING), drawn(g, 1, NEURONS), drawn(g, WIDE, NEURONS)
        shape = shape_without_pairs(along, factors, mixing)
        u = unit(g, 2000, MOVING)
        moves = (u @ along[0].mT).square() * factors @ mixing.mT
        a = drawn(g, WIDE, 50)
        assert bool(((moves @ a).abs().amax(0) <= widths(shape, a.unsqueeze(0)).bound[0]).all())


def test_one_neuron_without_pairs_attains_its_move():
    """f |b|² along its column; and of two that are orthogonal, each."""
    along = torch.tensor([[[3.0, 0.0], [0.0, 3.0]]], dtype=D)
    factors, mixing = torch.tensor([[0.5, 0.0]], dtype=D), torch.eye(2, dtype=D)
    found = shape_without_pairs(along, factors, mixing)[0]
    assert float(found[0, 0].sqrt()) == pytest.approx(0.5 * 9.0, rel=1e-6)
    both = shape_without_pairs(along, torch.full((1, 2), 0.5, dtype=D), mixing)[0]
    assert both.diagonal().sqrt().tolist() == pytest.approx([0.5 * 9.0, 0.5 * 9.0], rel=1e-6)


def test_tokens_with_long_moves_are_chosen(monkeypatch):
    """By how long they would be without pairs, beside all other remainders; as many as there is room for."""
    along = torch.tensor([1.0, 3.0, 0.1], dtype=D)[:, None, None] * drawn(generator(6), 1, NEURONS, MOVING)
    factors, mixing = torch.ones(3, NEURONS, dtype=D), drawn(generator(7), WIDE, NEURONS)
    lengths = Squares(along, factors, mixing, 0.0).without_pairs(no_diagonal(3, mixing)).weight
    assert lengths.argsort().tolist() == [2, 0, 1]
    for far, wanted in ((0.0, [0, 1, 2]), (float(lengths[0]) / 2, [0, 1]), (2 * float(lengths[0]), [1])):
        few = squares_room.LITTLE[0]
        assert Squares(along, factors, mixing, far / few).chosen.tolist() == wanted
    monkeypatch.setattr(squares_room, "FINE", NEURONS**2)
    assert Squares(along, factors, mixing, 0.0).chosen.tolist() == [1]


def layer(g, far, groups=0.0):
    """Neurons of a token that moves, beside a rest in a group."""
    x = sequence(2, 1, WIDE)
    state = begin.one(r.one_token(x, 0, far))
    columns = groups * drawn(g, 1, WIDE, WIDE)
    labels = torch.arange(WIDE) - 100
    state = State(
        state.inputs, state.center, state.linear, None, Groups(columns, labels, labels * 0), state.shape
    )
    wide = maps.feed_forward(maps.Gelu(), 2 * drawn(g, WIDE, 16), drawn(g, 16, WIDE))
    return wide, state, columns[0]


@pytest.mark.parametrize("far", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("few", [0, 4, 768])
def test_layers_hold_what_u_and_groups_move(monkeypatch, far, few):
    """All of a layer at moves of both kinds, whichever neurons are paired, and without pairs."""
    if not few:
        monkeypatch.setattr(squares_room, "LITTLE", (math.inf, math.inf))
    monkeypatch.setattr(neurons_room, "FEW", few)
    monkeypatch.setattr(neurons_room, "STRONG", math.inf)
    for seed in range(6):
        g = generator(seed)
        map, state, columns = layer(g, far, groups=far * (0.1, 0.5, 1.0)[seed % 3])
        after = through.one(map, state)
        u, v = unit(g, 4000, WIDE), unit(g, 4000, WIDE)
        points = state.center + u @ state.linear[0].mT + v @ columns.mT
        values = map(points.unsqueeze(1)).squeeze(1)
        a = drawn(g, 1, WIDE, 40)
        moves = (values - after.center) @ a[0]
        linear = (u @ after.linear[0].mT + v @ after.groups.columns[0].mT) @ a[0]
        assert bool(((moves - linear).abs().amax(0) <= widths(after.shape, a).bound[0]).all())


def test_pairs_of_neurons_are_worth_it(monkeypatch):
    """Less than a third of what neurons one by one, and together without pairs, give."""
    traces = []
    for worth in ((0.02, 0.05), (math.inf, math.inf)):
        monkeypatch.setattr(neurons_room, "WORTH", worth)
        g = generator(3)
        x = sequence(2, 1, 32)
        state = begin.one(r.one_token(x, 0, 0.1))
        columns, labels = 0.1 * drawn(g, 1, 32, 32), torch.arange(32) - 100
        state = State(
            state.inputs, state.center, state.linear, None, Groups(columns, labels, labels * 0), state.shape
        )
        wide = maps.feed_forward(maps.Gelu(), drawn(g, 32, 128) / 6, drawn(g, 128, 32) / 11)
        traces.append(float(through.one(wide, state).shape[0].trace().sqrt()))
    assert traces[0] < 0.75 * traces[1]


def test_slopes_of_scores_by_groups():
    """(w_q k_j)ᵀB_i + (w_k q_i)ᵀB_j is how projected columns meet, also turned by positions."""
    g = generator(5)
    x = sequence(3, 3, WIDE)
    labels = torch.arange(5) - 100
    state = begin.one(r.one_token(x, 1, 0.1))
    state = State(
        state.inputs,
        state.center,
        state.linear,
        None,
        Groups(drawn(g, 3, WIDE, 5), labels, labels * 0),
        state.shape,
    )
    dot = r.Dot(drawn(g, 2, WIDE, 2), drawn(g, 2, WIDE, 2))
    for potential in (dot, r.Rotary(dot)):
        map = maps.Heads(r.Attention(potential, r.Linear(drawn(g, 2, WIDE, 2))), drawn(g, 2, 2, WIDE))
        (heads,) = head_moves(state, subject_of(map))
        by_query = torch.einsum(
            "hicp,ick->hipk", heads.scores.query.w.expand(-1, 3, -1, -1), state.groups.columns
        )
        by_key = torch.einsum(
            "hicp,ick->hipk", heads.scores.key.w.expand(-1, 3, -1, -1), state.groups.columns
        )
        exactly = torch.einsum("hjp,hipk->hijk", heads.scores.key.value, by_query)
        exactly = exactly + torch.einsum("hip,hjpk->hijk", heads.scores.query.value, by_key)
        assert torch.allclose(heads.scores.by_groups, exactly, rtol=1e-12, atol=1e-12)


def test_the_value_at_rest_is_asked_once_for_each_sequence(monkeypatch):
    """Kept for another radius of one question, and not for another sequence or network."""
    asked = []
    real = theorem.run
    monkeypatch.setattr(
        theorem, "run", lambda net, state: asked.append(state.inputs.width) or real(net, state)
    )
    net, x, y = network(8, layers=1), sequence(8), sequence(9)
    with question():
        first = theorem.ball_model(net, r.one_token(x, 1, 0.01), r.Frobenius())[0].value
        theorem.ball_model(net, r.one_token(x, 1, 0.02), r.Frobenius())
        assert asked.count(0) == 1
        theorem.ball_model(net, r.one_token(y, 1, 0.01), r.Frobenius())
        assert asked.count(0) == 2
        theorem.ball_model(network(7, layers=1), r.one_token(x, 1, 0.01), r.Frobenius())
        assert asked.count(0) == 3
    again = theorem.ball_model(net, r.one_token(x, 1, 0.01), r.Frobenius())[0].value
    assert float(first) == float(again)
