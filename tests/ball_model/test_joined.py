"""Groups that become one, moves along given columns, and pairs of neurons by blocks: against what they stand
for, in all directions, and where they are equal.
"""

import pytest
import torch

import regard as r
from regard._upper import exact
from regard.proofs.ball_model import network as stack
from regard.proofs.ball_model import squares
from regard.proofs.ball_model.ellipsoids import Sum, no_diagonal
from regard.proofs.ball_model.groups import Groups, no_groups
from regard.proofs.ball_model.joint import joint_of
from regard.proofs.ball_model.squares import pairs_of
from regard.proofs.ball_model.updates import half_products, symmetric_products
from regard.proofs.theorems.ball_model import ball_model
from tests.ball_model.networks import D, drawn, farthest, network, sequence
from tests.coarse import large_unit

N, WIDE = 3, 4


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def groups_of(g, owner):
    owner = torch.tensor(owner)
    return Groups(drawn(g, N, WIDE, len(owner)), torch.arange(len(owner)) - 100, owner - 50)


def joined(groups, shape):
    """All of them as one group."""
    return joint_of(groups, shape).factored()


def shapes(g, size=1.0):
    root = size * drawn(g, N, WIDE, WIDE)
    return root @ root.mT


def widths_of(groups, shape, a):
    """How far the sum of all sets goes in a direction (n, d)."""
    along = torch.einsum("nd,ndk->k", a, groups.columns)
    far = [float(along[groups.owner == one].norm()) for one in groups.owner.unique()]
    own = torch.einsum("nd,nde,ne->n", a, shape, a).clamp_min(0.0).sqrt()
    return sum(far) + float(own.sum())


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-60])
def test_one_group_holds_all_of_them(size):
    g = generator(1)
    groups, shape = groups_of(g, [0, 0, 1, 1, 1, 2]), shapes(g, size)
    one = joined(groups, shape)
    assert one is not None
    assert len(one.owner.unique()) == 1
    for _ in range(200):
        a = drawn(g, N, WIDE)
        assert widths_of(groups, shape, a) <= float(torch.einsum("nd,ndk->k", a, one.columns).norm())
    squares_of = one.columns @ one.columns.mT
    assert float(torch.linalg.eigvalsh(one.ellipsoid - squares_of).min()) >= 0
    assert torch.allclose(one.ellipsoid, squares_of, rtol=1e-9, atol=1e-11 * float(squares_of.max()))


def test_one_group_alone_is_what_it_was():
    """A sum of one set is that set: nothing is lost."""
    g = generator(2)
    groups = groups_of(g, [0] * 12)
    one = joined(groups, torch.zeros(N, WIDE, WIDE, dtype=D))
    for _ in range(20):
        a = drawn(g, N, WIDE)
        before = float(torch.einsum("nd,ndk->k", a, groups.columns).norm())
        after = float(torch.einsum("nd,ndk->k", a, one.columns).norm())
        assert before <= after <= before * (1 + 1e-6)


def test_an_ellipsoid_that_is_known_stands_for_products():
    """Of one group, the products of a token with itself are its ellipsoid: the same set."""
    g = generator(12)
    shape = shapes(g, 0.3)
    groups = groups_of(g, [0] * 12)
    plain = joined(groups, shape)
    assert groups.known_ellipsoid is None
    turned = groups.with_ellipsoid(groups.ellipsoid)
    assert turned.known_ellipsoid is not None
    assert joined(turned, shape).columns == pytest.approx(plain.columns, rel=1e-6, abs=1e-9)
    more = groups.with_ellipsoid(groups.ellipsoid + torch.eye(WIDE, dtype=D))
    assert float(joined(more, shape).columns.square().sum()) > 1.05 * float(plain.columns.square().sum())
    apart = groups_of(g, [0] * 6 + [1] * 6)
    assert apart.with_ellipsoid(apart.ellipsoid).known_ellipsoid is None


def test_products_by_blocks_are_the_products():
    """Symmetric products of many columns, from half of the blocks."""
    x = drawn(generator(13), 2, 300, 1100)
    weights = 1 + torch.rand(1100, generator=generator(14), dtype=D)
    found = symmetric_products(x * weights, x)
    assert found == pytest.approx((x * weights) @ x.mT, rel=1e-12, abs=1e-12)
    assert torch.equal(found[:, :128, 128:], found[:, 128:, :128].mT)


def test_ellipsoids_alone_become_a_group_and_what_is_no_number_does_not():
    g = generator(3)
    shape = shapes(g)
    one = joined(no_groups(N, WIDE), shape)
    a = drawn(g, N, WIDE)
    assert widths_of(no_groups(N, WIDE), shape, a) <= float(torch.einsum("nd,ndk->k", a, one.columns).norm())
    assert joined(no_groups(N, WIDE), shape * torch.nan) is None


def test_ellipsoids_of_groups_go_through_maps_with_them():
    g = generator(4)
    groups, matrix = groups_of(g, [0, 0, 1, 1]), drawn(g, N, WIDE, WIDE)
    _ = groups.ellipsoid
    after = groups.through(matrix)
    fresh = Groups(after.columns, after.labels, after.owner)
    assert "ellipsoid" in after.__dict__
    assert "ellipsoid" not in groups.replaced(groups.columns).__dict__
    for _ in range(50):
        a = drawn(g, N, WIDE, 1)
        far = fresh.reach(a).bound
        assert bool((far**2 * (1 - 1e-9) <= (a.mT @ after.ellipsoid @ a).squeeze(-1)).all())


def test_moves_along_columns_are_segments_and_grams():
    """One product for all of them, and the same sum."""
    g = generator(5)
    mixing, halves = drawn(g, WIDE, 7), exact(drawn(g, N, 7).abs())
    factors, radius = exact(drawn(g, N, 7).abs()), exact(drawn(g, N).abs())
    found = Sum(N, WIDE).diagonal(mixing, no_diagonal(N, mixing).segments(halves).gram(factors, radius))
    plain = Sum(N, WIDE).segments(mixing * halves.value.unsqueeze(-2))
    plain.gram(mixing * factors.value.unsqueeze(-2), radius)
    assert torch.allclose(found.done(), plain.done(), rtol=1e-7, atol=1e-7)
    none = no_diagonal(N, mixing).segments(exact(torch.zeros(N, 7, dtype=D)))
    assert float(Sum(N, WIDE).diagonal(mixing, none).done().abs().max()) < 1e-150


def test_the_better_of_two_ways_is_taken_for_each_token():
    g = generator(6)
    mixing = drawn(g, WIDE, 5)
    first, second = (exact(drawn(g, N, 5).abs()) for _ in range(2))
    one, other = (no_diagonal(N, mixing).segments(part) for part in (first, second))
    both = Sum(N, WIDE).diagonal(mixing, one.better(other)).done()
    traces = [
        Sum(N, WIDE).diagonal(mixing, part).done().diagonal(dim1=-2, dim2=-1).sum(-1) for part in (one, other)
    ]
    least = torch.minimum(*traces)
    assert torch.allclose(both.diagonal(dim1=-2, dim2=-1).sum(-1), least, rtol=1e-9)


def test_pairs_of_neurons_by_blocks(monkeypatch):
    monkeypatch.setattr(squares, "SMALL", 3)
    g = generator(7)
    along, weights = drawn(g, 13, 5), drawn(g, 4, 13)
    whole, pairs = (along @ along.mT).square(), pairs_of(along, along.mT).map(torch.square)
    assert len(pairs.panels) == squares.BLOCKS
    assert torch.allclose(pairs.mixed(weights), weights @ whole @ weights.mT, rtol=1e-12)
    assert torch.allclose(pairs.times(along[:, 0]), whole @ along[:, 0], rtol=1e-12)
    top = float(torch.linalg.eigvalsh(whole)[-1])
    assert top <= float(pairs.largest()) <= 1.2 * top


@pytest.mark.parametrize("pre", [False, True])
def test_networks_whose_groups_are_one(monkeypatch, pre):
    """Above attacks, and about what groups apart give."""
    net, x = network(8, layers=3, pre=pre), sequence(8)
    domain = r.one_token(x, 1, 0.02)
    apart = float(ball_model(net, domain, r.Frobenius())[0].value)
    monkeypatch.setattr(stack, "APART", 0)
    found = float(ball_model(net, domain, r.Frobenius())[0].value)
    assert farthest(net, domain) < found < 1.5 * apart


def factor_of(columns, unit):
    """One group of them in arithmetic with so large a unit, in which nothing is rounded."""
    g = generator(9)
    groups = groups_of(g, [0] * columns)
    with large_unit(unit):
        return joined(groups, torch.zeros(N, WIDE, WIDE, dtype=D))


@pytest.mark.parametrize("columns", [4, 40])
def test_a_factor_that_rounding_may_have_made_too_small_is_not_taken(columns):
    """A factor may lose (4 · 12 + 16) units of its square, and a rounded sum 4 of the trace; both together
    have to be less than the (8 · 12 + 128) units that were added before.
    """
    assert factor_of(columns, 6.0e-4) is not None
    assert factor_of(columns, 9.5e-4) is None
    assert factor_of(columns, 0.1) is None


@pytest.mark.parametrize("columns", [4, 40])
def test_the_ellipsoid_of_one_group_holds_what_rounding_may_have_made_of_its_factor(columns):
    unit = 2.0**-20
    one = factor_of(columns, unit)
    root = one.columns.flatten(0, 1)
    lost = (4 * N * WIDE + 16) * unit * float(root.square().sum())
    square = one.columns @ one.columns.mT
    assert float(torch.linalg.eigvalsh(one.ellipsoid - square).min()) > lost
    assert one.ellipsoid == pytest.approx(square, abs=8 * lost + 400 * unit * float(square.abs().max()))


def test_half_of_a_symmetric_matrix():
    """Blocks below its diagonal and half of those on it: L + Lᵀ is the matrix."""
    root = drawn(generator(16), 300, 300)
    square, columns = root + root.mT, torch.eye(300, dtype=D)
    half = half_products(square, columns)
    assert half + half.mT == pytest.approx(square, rel=1e-12, abs=1e-12)
    assert float(half[:128, 128:].abs().max()) == 0
