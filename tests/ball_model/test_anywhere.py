"""Where an expansion says nothing: values of norm layers and means of values are somewhere all the same
(M10); and the short ways through wide layers, against the long ones.
"""

from dataclasses import replace

import pytest
import torch

import regard as r
from regard._enclosed import largest_roots, near_largest_roots
from regard.domains import Radii
from regard.proofs.ball_model import heads
from regard.proofs.ball_model.beginning import begin, second_order
from regard.proofs.ball_model.ellipsoids import pushed, roundest, widths
from regard.proofs.ball_model.groups import Groups
from regard.proofs.ball_model.network import through
from regard.proofs.ball_model.updates import Update
from regard.proofs.places import farthest as corner
from regard.proofs.question import question
from regard.proofs.theorems import ball_model as theorem
from tests.ball_model.networks import D, attention, drawn, farthest, network, norm, sequence


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def reaches(state, directions):
    """At least |a·(x_i - c_i)|."""
    return (state.first(directions) + state.rest(directions)).bound


def held(state, values, directions):
    """The largest share of what the state allows that values (samples, n, d) use."""
    moved = (values - state.center) @ directions[0]
    return float((moved.abs() / reaches(state, directions)).max())


def far_norm(centered, order):
    """A norm layer of two tokens, of which one may be anywhere."""
    x, layer = drawn(generator(3), 2, 6), norm(generator(4), 6, centered, 1e-9)
    state = begin.one(Radii(x, torch.tensor([0.0, 50.0], dtype=D)))
    return x, layer, through.one(layer, second_order(state) if order == 2 else state)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("centered", [False, True])
def test_a_norm_layer_of_a_token_that_may_be_anywhere(centered, order):
    """Every value is held, and along each direction one of them is at the border: √d |Γa|."""
    x, layer, after = far_norm(centered, order)
    a = drawn(generator(6), 1, 6, 9)
    steep = layer.weight.unsqueeze(-1) * a[0]
    steep = steep - steep.mean(0) if centered else steep
    worst = x.unsqueeze(0).repeat(9, 1, 1)
    worst[:, 1] = 10 * steep.mT / steep.norm(dim=0).unsqueeze(-1)
    assert 0.999 < held(after, layer(worst), a) <= 1
    some = worst + 10 * drawn(generator(8), 9, 2, 6) * torch.tensor([[0.0], [1.0]], dtype=D)
    assert held(after, layer(some), a) <= 1


def test_only_the_token_that_may_be_anywhere_loses_its_derivative():
    x, layer, after = far_norm(True, 1)
    both = begin.one(Radii(x, torch.tensor([0.01, 50.0], dtype=D)))
    after = through.one(layer, both)
    assert bool((after.linear[0] != 0).any())
    assert not bool((after.linear[1] != 0).any())
    assert bool((roundest(after.shape).bound < 100).all())


def far_attention(order, radius=40.0):
    head, x = attention(generator(1), 8), sequence(2, tokens=4)
    state = begin.one(Radii(x, torch.tensor([0.0, radius, 0.0, 0.0], dtype=D)))
    return x, head, through.one(head, second_order(state) if order == 2 else state)


@pytest.mark.parametrize("order", [1, 2])
def test_attention_with_scores_that_may_be_anything(order):
    """Ascent does not leave the set."""
    x, head, after = far_attention(order)
    a = drawn(generator(6), 1, x.shape[-1], 5)
    domain = Radii(x, torch.tensor([0.0, 40.0, 0.0, 0.0], dtype=D))
    for k in range(5):
        for i in range(4):
            at = corner.one(domain, drawn(generator(10 * k + i), *x.shape))
            for _ in range(6):
                leaf = at.detach().requires_grad_()
                (slope,) = torch.autograd.grad(((head(leaf) - after.center)[i] @ a[0, :, k]).abs(), leaf)
                at = corner.one(domain, slope)
            assert held(after, head(at).unsqueeze(0), a) <= 1


def any_law(monkeypatch, steep):
    """How far outputs may be from those at the center, by any law on two keys with values 1 and -1."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=D)
    w = torch.eye(2, dtype=D)
    head = r.Attention(r.Dot(steep * w, steep * w, scale=1.0), r.Linear(w))
    monkeypatch.setattr(heads, "STEEPEST", 0.0)
    after = through.one(head, begin.one(Radii(x, torch.tensor([1e-9, 1e-9], dtype=D))))
    assert not bool((after.linear != 0).any())
    return reaches(after, torch.tensor([[[1.0], [0.0]]], dtype=D))[:, 0]


def test_means_by_any_law_have_an_equality_case(monkeypatch):
    """A row that looks at one key alone: the law on the other is two away, and at the border."""
    most = any_law(monkeypatch, 6.0)  # weights of e^{-72}
    assert bool((most >= 2.0).all())
    assert bool((most <= 2.0 + 1e-6).all())


def test_means_by_any_law_lose_at_most_the_root_of_their_number(monkeypatch):
    """A row that looks at both: each is one away, and what is said of them is √2."""
    most = any_law(monkeypatch, 1e-3)
    assert bool((most >= 1.0).all())
    assert bool((most <= 2**0.5 + 1e-5).all())


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("radius", [0.5, 3.0, 30.0, 1e4])
def test_networks_have_a_bound_at_every_radius(pre, radius):
    """Where it was refused before; an attack does not go beyond."""
    net, x = network(3, pre=pre), sequence(3, tokens=3)
    domain = Radii(x, torch.tensor([0.0, radius, 0.0], dtype=D))
    with question():
        bound = min(float(found.value) for found in theorem.ball_model(net, domain, r.Frobenius()))
    assert 0 < farthest(net, domain) <= bound < 1e9


def test_what_is_said_of_tokens_anywhere_is_needed():
    """Half of the set is too little: a fault that the equality case sees."""
    x, layer, after = far_norm(False, 1)
    half = replace(after, shape=0.5 * after.shape)
    a = drawn(generator(6), 1, 6, 9)
    worst = x.unsqueeze(0).repeat(9, 1, 1)
    steep = layer.weight.unsqueeze(-1) * a[0]
    worst[:, 1] = 10 * steep.mT / steep.norm(dim=0).unsqueeze(-1)
    assert held(half, layer(worst), a) > 1


def update(seed, n=3, width=7):
    g = generator(seed)
    return Update(drawn(g, n, width), drawn(g, n, width, 2), drawn(g, n, width, 2))


def test_products_with_diagonals_but_for_a_few_directions():
    found, x = update(1), drawn(generator(2), 3, 7, 5)
    whole = torch.diag_embed(found.scale) @ (torch.eye(7, dtype=D) - found.left @ found.right.mT)
    assert found @ x == pytest.approx(whole @ x, abs=1e-12)
    assert found.dense == pytest.approx(whole, abs=1e-13)
    root = drawn(generator(3), 3, 7, 7)
    shape = root @ root.mT
    assert found.push(shape) == pytest.approx(whole @ shape @ whole.mT, abs=1e-10)
    assert bool((found.size.bound >= torch.linalg.matrix_norm(whole, 2)).all())
    a = drawn(generator(4), 3, 7, 9)
    assert bool((widths(pushed(found, shape), a).bound >= (root.mT @ whole.mT @ a).norm(dim=1)).all())


def test_a_guessed_eigenvalue_is_proved(monkeypatch):
    """At least the largest, at most a percent more; a guess that is a little too small gives a larger one,
    and one that is much too small is not believed.
    """
    root = drawn(generator(5), 3, 200, 20)
    gram = root @ root.mT
    true, found = largest_roots(gram, 20).bound, near_largest_roots(gram, 20).bound
    top = torch.linalg.matrix_norm(root, 2)
    assert bool((found >= top).all())
    assert bool((found <= 1.01 * true).all())
    assert float(near_largest_roots(torch.zeros(1, 200, 200, dtype=D)).bound) < 1e-120
    slightly = torch.tensor([1.0, 0.99, 1.0], dtype=D)
    monkeypatch.setattr("regard._enclosed._guessed", lambda gram: slightly * top.square())
    found = near_largest_roots(gram, 20).bound
    assert bool((found >= top).all())
    more = torch.tensor([1.001, 0.99 * 1.02, 1.001], dtype=D)
    assert found.square() == pytest.approx(top.square() * more, rel=1e-9)
    monkeypatch.setattr("regard._enclosed._guessed", lambda gram: 0.9 * top.square())
    assert near_largest_roots(gram, 20).bound == pytest.approx(true, rel=1e-12)


def test_groups_whose_products_are_put_off_are_what_they_are():
    """Many columns: maps are multiplied with each other, and the images and their sizes are the same."""
    columns = drawn(generator(1), 3, 4, 20)
    groups = Groups(columns, torch.arange(20) - 50, torch.arange(20) // 10 - 9)
    first, second = update(2, width=4), drawn(generator(3), 3, 4, 4)
    before = groups.ellipsoid
    after = groups.through(first).through(second)
    assert after.is_put_off
    assert after.shape == (3, 4, 20)
    exactly = second @ (first.dense @ columns)
    apart = Groups(exactly, groups.labels, groups.owner)
    assert bool((after.sizes.bound >= apart.sizes.bound).all())
    assert after.columns == pytest.approx(exactly, abs=1e-12)
    assert not after.is_put_off
    assert after.sizes.bound == pytest.approx(apart.sizes.bound, rel=1e-9)
    a = drawn(generator(4), 3, 4, 9)
    assert bool(
        (
            widths(after.ellipsoid, a).bound
            >= widths(before, first.dense.mT @ second.mT @ a).bound * (1 - 1e-9)
        ).all()
    )


def test_the_given_sequence_is_in_the_state_itself():
    """A value at rest of which little is known costs no more than the remainders of the state do."""
    net, x = network(3), sequence(3, tokens=3)
    domain = Radii(x, torch.tensor([0.0, 1e-6, 0.0], dtype=D))
    state, still = (theorem.run(net, one) for one in (theorem.start(domain), theorem.at_rest(x)))
    blurred = replace(still, shape=still.shape + torch.eye(still.width, dtype=D))
    for kind in (r.Frobenius(), r.TokenMax()):
        known = float(theorem._deviation(state, blurred, kind, True))
        assert known < 1.001 * float(theorem._deviation(state, still, kind, True)) + 1e-9
        assert float(theorem._deviation(state, blurred, kind, False)) > 1


def test_a_hull_does_not_begin_at_the_given_sequence():
    """Its center is the mean of the corners, so that the value at rest is asked for."""
    net, x = network(3), sequence(3, tokens=3)
    corners = torch.cat([x[1:2] + 1e-3, x[1:2] + 2e-3])
    domain = r.Hull(x, 1, corners)
    with question():
        bound = float(theorem.ball_model(net, domain, r.Frobenius())[0].value)
    moved = x.clone()
    moved[1] = domain.corners[-1]
    assert float((net(moved) - net(x)).norm()) <= bound
