"""Ellipsoids of single tokens: through attention by its derivative, and in one ball with columns that tokens
share (M11); against points, support functions and equality cases.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize as of_length_one

import regard as r
from regard import maps
from regard.nonexpansive import Pool
from regard.proofs.ball_model import network as stack
from regard.proofs.ball_model import opening
from regard.proofs.ball_model.batches import head_moves
from regard.proofs.ball_model.beginning import at_rest, begin
from regard.proofs.ball_model.ellipsoids import no_shape, widths
from regard.proofs.ball_model.groups import Groups, no_groups
from regard.proofs.ball_model.network import shared, through
from regard.proofs.ball_model.opening import closed, gathered, one_ball
from regard.proofs.ball_model.passage import Passage, parts_of
from regard.proofs.ball_model.state import added
from regard.proofs.subject import subject_of
from regard.proofs.theorems.ball_model import ball_model
from tests.ball_model.networks import D, attention, drawn, farthest, hidden, network, norm, sequence
from tests.coarse import UNIT, coarse, large_unit, representable

N, WIDE = 4, 8
KINDS = {
    "plain": {},
    "masked": {"support": r.Causal()},
    "rotary": {"turned": "rotary", "heads": 4, "keys": 2},
    "sharp": {"sharp": 4.0},
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def roots(g, size=1.0, n=N):
    return size * drawn(g, n, WIDE, WIDE)


def passage_of(map, x, radius=0.0):
    state = begin.one(r.Radii(x, torch.full((len(x),), radius, dtype=D))) if radius else at_rest(x)
    heads = head_moves(state, subject_of(map))
    assert all(head.row is not None for head in heads)
    parts = [part for head in heads for part in parts_of(head)]
    return Passage(parts, torch.cat([head.mixer.flatten(0, -2) for head in heads])), heads


def jacobian(map, x):
    """J_ij as (i, j, d, d)."""
    return torch.func.jacrev(map)(x).transpose(1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_derivative_is_that_of_attention(kind):
    g = generator(1)
    map, x = attention(g, WIDE, **KINDS[kind]), drawn(g, N, WIDE)
    passage, _ = passage_of(map, x)
    exactly = jacobian(map, x)
    for residual in (False, True):
        own, off = passage._own(residual)
        wanted = exactly[range(N), range(N)] + (torch.eye(WIDE, dtype=D) if residual else 0.0)
        assert own == pytest.approx(wanted, abs=1e-12)
        assert float(off.bound.max()) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_what_other_tokens_do_is_the_sum_of_their_sets(kind):
    """(Σ s)(Σ J Q Jᵀ/s) of all that J is for every other token."""
    g = generator(2)
    map, x, root = attention(g, WIDE, **KINDS[kind]), drawn(g, N, WIDE), roots(g)
    shape, exactly = root @ root.mT, jacobian(map, x)
    passage, _ = passage_of(map, x)
    found = passage._from_others(shape)
    square, cross = passage._products(shape)
    weights = passage._weights(square, cross, passage.law.permute(1, 2, 0)[..., passage.head] * passage.apart)
    assert bool((weights.diagonal() == 0).all())
    for i in range(N):
        others = [j for j in range(N) if j != i and float(weights[i, j]) > 1e-100]
        sets = [exactly[i, j] @ shape[j] @ exactly[i, j].mT / weights[i, j] for j in others]
        wanted = sum(sets, torch.zeros(WIDE, WIDE, dtype=D)) * weights[i].sum()
        assert found[i] == pytest.approx(wanted, rel=1e-9, abs=1e-10)
        assert float(torch.linalg.eigvalsh(found[i] - wanted).min()) >= -1e-15 * float(wanted.abs().max())


def test_a_token_alone_is_moved_by_itself():
    """One ellipsoid, one token that sees it: the image of the ellipsoid, and nothing more."""
    g = generator(3)
    map, x = attention(g, WIDE), drawn(g, N, WIDE)
    root = roots(g)
    root[torch.arange(N) != 2] = 0.0
    passage, _ = passage_of(map, x)
    found = passage.moves(root @ root.mT, residual=True).done()
    whole = jacobian(map, x)[:, 2] + torch.eye(N, dtype=D)[2][:, None, None] * torch.eye(WIDE, dtype=D)
    images = whole @ root[2]
    assert found == pytest.approx(images @ images.mT, rel=1e-9, abs=1e-9)


def test_rows_of_which_nothing_is_known_pass_nothing_on():
    g = generator(4)
    map, x, root = attention(g, WIDE, sharp=4.0), drawn(g, N, WIDE), roots(g)
    passage, heads = passage_of(map, x, radius=30.0)
    assert all(bool(head.astray.all()) for head in heads)
    found = passage.moves(root @ root.mT, residual=True).done()
    assert found == pytest.approx(root @ root.mT, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_derivative_in_few_digits(seed):
    g = generator(seed)
    map = attention(g, WIDE, heads=1)
    x, root = representable(drawn(g, N, WIDE)), representable(roots(g))
    shape = representable(root @ root.mT)
    passage, _ = passage_of(map, x)
    exactly = passage.moves(shape, residual=True).done()
    own, others = passage._own(True)[0], passage._from_others(shape)
    with coarse(seed):
        few, off = passage._own(True)
        rest = passage._from_others(shape)
        found = passage.moves(shape, residual=True).done()
    away = torch.linalg.matrix_norm(few - own, 2)
    assert bool((away <= off.bound).all())
    assert float((away / off.bound).max()) > 1e-4
    assert float(torch.linalg.eigvalsh(rest - others * (1 - 1e-3)).min()) > 0
    assert float(torch.linalg.eigvalsh(found - exactly * (1 - 1e-3)).min()) > 0


# One ball


def groups_of(g, owner, beside=None):
    owner = torch.tensor(owner, dtype=torch.long)
    return Groups(drawn(g, N, WIDE, len(owner)), torch.arange(len(owner)) - 100, owner - 50, beside=beside)


def farthest_of(groups, shape, a):
    """How far the sum of all sets goes along a (n, d): |w|² + ν_i² ≤ 1 for a single group."""
    along = torch.einsum("nd,ndk->k", a, groups.columns)
    far = torch.stack(
        [along[groups.owner == one].norm() for one in groups.owner.unique()] or [a.new_zeros(())]
    )
    if groups.beside is not None:
        alone = torch.einsum("nd,nde,ne->n", a, groups.beside, a).clamp_min(0.0).sqrt().sum()
        far = (far.square() + alone.square()).sqrt()
    own = torch.einsum("nd,nde,ne->n", a, shape, a).clamp_min(0.0).sqrt()
    return float(far.sum() + own.sum())


@pytest.mark.parametrize("opened", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["nothing", "several", "one", "one and beside"])
def test_one_ball_holds_all_of_them(monkeypatch, kind, opened):
    monkeypatch.setattr(opening, "OPENED", opened)
    g = generator(5)
    root, more = roots(g) * drawn(g, N, 1, 1), roots(g, 0.3)
    beside = more @ more.mT if kind == "one and beside" else None
    owners = {"nothing": [], "several": [0, 0, 1, 1, 1]}.get(kind, [0] * 5)
    groups, shape = groups_of(g, owners, beside), root @ root.mT
    one = gathered(groups, shape)
    assert one is not None
    assert one.is_single
    ratios = []
    for _ in range(200):
        a = drawn(g, N, WIDE) * drawn(g, N, 1)
        ratios.append(farthest_of(one, no_shape(N, WIDE), a) / farthest_of(groups, shape, a))
    assert min(ratios) >= 1
    assert min(ratios) < 1.3


def test_a_ball_alone_is_what_it_was():
    """Where nothing is added, nothing is lost; what is not a number is refused."""
    g = generator(6)
    root = roots(g)
    groups = groups_of(g, [0] * 5, root @ root.mT)
    one = gathered(groups, no_shape(N, WIDE))
    for _ in range(20):
        a = drawn(g, N, WIDE)
        before = farthest_of(groups, no_shape(N, WIDE), a)
        assert before <= farthest_of(one, no_shape(N, WIDE), a) <= before * (1 + 1e-6)
    assert gathered(groups, no_shape(N, WIDE) * torch.nan) is None


def test_new_sets_cost_the_sum_of_lengths():
    """Columns of length one and an ellipsoid of one token of length two: nine times as much, of both."""
    columns = torch.zeros(N, WIDE, 1, dtype=D)
    columns[0, 0, 0] = 1.0
    shape = no_shape(N, WIDE)
    shape[1, 1, 1] = 4.0
    one = gathered(one_ball(columns, no_shape(N, WIDE)), shape)
    a, b = torch.zeros(N, WIDE, dtype=D), torch.zeros(N, WIDE, dtype=D)
    a[0, 0], b[1, 1] = 1.0, 1.0
    assert farthest_of(one, no_shape(N, WIDE), a) == pytest.approx(3**0.5, rel=1e-6)
    assert farthest_of(one, no_shape(N, WIDE), b) == pytest.approx(6**0.5, rel=1e-6)
    assert farthest_of(one, no_shape(N, WIDE), a + b) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_one_ball_in_few_digits(seed):
    g = generator(seed)
    root, more = representable(roots(g)), representable(roots(g, 0.3))
    shape, beside = representable(root @ root.mT), representable(more @ more.mT)
    groups = groups_of(g, [0] * 5, beside)
    groups = replace(groups, base=representable(groups.base))
    with coarse(seed):
        one = gathered(groups, shape)
        few, left = closed(one, no_shape(N, WIDE), 7)
    for _ in range(50):
        a = drawn(g, N, WIDE)
        exactly = farthest_of(groups, shape, a)
        assert exactly <= farthest_of(one, no_shape(N, WIDE), a)
        alone = torch.zeros(N, WIDE, dtype=D)
        alone[int(torch.randint(0, N, (), generator=g))] = a[0]
        assert farthest_of(one, no_shape(N, WIDE), alone) <= farthest_of(few, left, alone)


def test_what_rounding_changes_in_columns_is_beside_them():
    """Columns are multiplied and rounded: three units of each entry at least, in every direction."""
    groups = groups_of(generator(13), [0] * 5, no_shape(N, WIDE))
    with large_unit():
        one = gathered(groups, no_shape(N, WIDE))
    size = one.columns.flatten(1).norm(dim=-1)
    assert bool((torch.linalg.eigvalsh(one.beside)[:, 0] > (3 * UNIT * size) ** 2).all())


def test_the_length_of_all_moves_together():
    """Columns of length three, and two tokens beside them that move by two and one: (9 + 4 + 1)^{1/2}."""
    columns, beside = torch.zeros(N, WIDE, 1, dtype=D), no_shape(N, WIDE)
    columns[0, 0, 0], beside[1, 1, 1], beside[2, 0, 0] = 3.0, 4.0, 1.0
    state = begin.one(r.one_token(torch.ones(N, WIDE, dtype=D), 1, 1e-30))
    state = replace(state, groups=one_ball(columns, beside))
    assert float(state.joint_rest()) == pytest.approx(14**0.5, rel=1e-9)
    assert state.longest_rest.bound[:3] == pytest.approx(torch.tensor([3.0, 2.0, 1.0], dtype=D), rel=1e-9)


def test_columns_that_are_cut_from_a_ball_cost_nothing():
    """Of one token nothing changes; of all tokens together no less is left."""
    g = generator(7)
    root = roots(g, 0.2)
    groups = groups_of(g, [0] * 9, root @ root.mT)
    few, left = closed(groups, no_shape(N, WIDE), 4)
    assert few.columns.shape[-1] == 4
    assert float(left.abs().max()) == 0
    assert few.columns.square().sum((0, 1)).min() >= groups.columns.square().sum((0, 1)).sort().values[4]
    for _ in range(20):
        a = drawn(g, N, WIDE)
        assert farthest_of(groups, left, a) <= farthest_of(few, left, a)
        a[1:] = 0.0
        before = farthest_of(groups, left, a)
        assert before <= farthest_of(few, left, a) <= before * (1 + 1e-9)
        assert few.reach(a.unsqueeze(-1)).bound[0, 0] == pytest.approx(before, rel=1e-9)


# Maps


def state_with(g, x, size, linear=0.0):
    """Columns, what is beside them, and an ellipsoid of each token."""
    state = begin.one(r.one_token(x, 1, linear)) if linear else begin.one(r.one_token(x, 1, 1e-30))
    beside, shape = (size * roots(g, n=len(x)) / WIDE for _ in range(2))
    groups = replace(groups_of(g, [0] * 5), base=size * drawn(g, len(x), WIDE, 5) / WIDE**0.5)
    groups = replace(groups, beside=beside @ beside.mT)
    return replace(state, groups=groups, shape=0.25 * shape @ shape.mT), beside, 0.5 * shape


def points_of(g, state, beside, shape, count):
    """u, w and the tokens of points of a state, by how much of the ball is in columns."""
    n = len(beside)
    for k in range(count):
        share = torch.tensor(k / (count - 1), dtype=D)
        w = share * of_length_one(drawn(g, 5), dim=0)
        t = (1 - share.square()).clamp_min(0).sqrt() * of_length_one(drawn(g, n, WIDE, 1), dim=1)
        e = of_length_one(drawn(g, n, WIDE, 1), dim=1)
        u = of_length_one(drawn(g, state.inputs.width), dim=0)
        away = (beside @ t + shape @ e).squeeze(-1)
        yield share, u, w, state.center + state.linear @ u + state.groups.columns @ w + away


MAPS = {
    "attention": lambda g: attention(g, WIDE),
    "masked": lambda g: attention(g, WIDE, support=r.Causal()),
    "residual": lambda g: maps.Residual(attention(g, WIDE)),
    "layer": lambda g: hidden(g, WIDE, maps.Gelu()),
    "residual layer": lambda g: maps.Residual(hidden(g, WIDE, maps.Gelu())),
    "norm": lambda g: norm(g, WIDE),
    "pool": lambda g: Pool(),
    "sum": lambda g: maps.Added((attention(g, WIDE), hidden(g, WIDE, maps.Gelu()))),
}


def over(state, away, share, a):
    """By how much a point is beyond what a state says of it, along directions (n, d, m): at most one."""
    known = widths(state.shape, a).bound
    if state.groups.beside is not None:
        known = known + (1 - share.square()).clamp_min(0).sqrt() * widths(state.groups.beside, a).bound
    return float(((away.unsqueeze(-2) @ a).squeeze(-2).abs() / known.clamp_min(1e-300)).max())


@pytest.mark.parametrize("size", [1e-4, 0.05, 0.3])
@pytest.mark.parametrize("kind", MAPS)
def test_points_of_a_ball_stay_in_it(monkeypatch, kind, size):
    """Through every map, with the columns that they had: what is left is beside them, or remainder. Of small
    moves nearly all is used, since maps are linear there.
    """
    monkeypatch.setattr(stack, "shared", lambda state, together=False: state)
    used = []
    for seed in range(3):
        g = generator(40 + seed)
        map, x = MAPS[kind](g), drawn(g, N, WIDE)
        state, beside, shape = state_with(g, x, size, linear=size)
        after = through.one(map, state)
        assert after.groups.beside is not None
        for share, u, w, point in points_of(g, state, beside, shape, 9):
            away = map(point) - (after.center + after.linear @ u + after.groups.columns @ w)
            a = torch.cat([drawn(g, len(away), WIDE, 40), away.unsqueeze(-1)], -1)
            used.append(over(after, away, share, a))
    assert max(used) <= 1
    assert size > 1e-3 or max(used) > 0.25


@pytest.mark.parametrize("kind", ["attention", "residual", "layer", "norm", "pool"])
def test_what_is_beside_columns_is_needed(monkeypatch, kind):
    """A fault of a half in what is beside them is seen: along its image, with nothing in columns."""
    monkeypatch.setattr(stack, "shared", lambda state, together=False: state)
    g = generator(50)
    map, x, root = MAPS[kind](g), drawn(g, N, WIDE), torch.zeros(N, WIDE, WIDE, dtype=D)
    root[2, :, 0] = 1e-4 * drawn(g, WIDE)
    state = begin.one(r.one_token(x, 1, 1e-30))
    state = replace(state, groups=one_ball(torch.zeros(N, WIDE, 1, dtype=D), root @ root.mT))
    after = through.one(map, state)
    away = map(x + root[..., 0]) - after.center
    found = over(after, away, torch.zeros((), dtype=D), away.unsqueeze(-1))
    assert 0.9 < found <= 1


# Networks


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("support", [r.Full(), r.Causal()])
def test_networks_in_one_ball(monkeypatch, pre, support):
    """Above attacks, and about what groups apart give."""
    net, x = network(8, layers=3, pre=pre, support=support), sequence(8)
    domain = r.one_token(x, 1, 0.02)
    apart = float(ball_model(net, domain, r.Frobenius())[0].value)
    monkeypatch.setattr(stack, "APART", 0)
    monkeypatch.setattr(stack, "WIDEST", 0)
    for kept in (stack.KEPT, 6 * x.numel()):
        monkeypatch.setattr(stack, "KEPT", kept)
        found = float(ball_model(net, domain, r.Frobenius())[0].value)
        assert farthest(net, domain) < found < 1.5 * apart


def test_sums_of_balls_with_different_names_forget_nothing():
    """A residual connection inside another gathers anew: what was beside columns is a move of its own."""
    g = generator(14)
    first, _, _ = state_with(g, drawn(g, N, WIDE), 0.1)
    second, _, _ = state_with(g, drawn(g, N, WIDE), 0.1)
    renamed = replace(second.groups, labels=second.groups.labels + 1000, owner=second.groups.owner + 1000)
    both = added(first, replace(second, groups=renamed))
    for _ in range(20):
        a = drawn(g, N, WIDE)
        far = farthest_of(first.groups, first.shape, a) + farthest_of(renamed, second.shape, a)
        assert far <= farthest_of(both.groups, both.shape, a)


@pytest.mark.parametrize("norm_of", [r.Frobenius(), r.TokenMax()])
def test_one_ball_is_exact_to_first_order(monkeypatch, norm_of):
    monkeypatch.setattr(stack, "APART", 0)
    monkeypatch.setattr(stack, "WIDEST", 0)
    net, x = network(9, layers=3), sequence(9)
    ratios = []
    for radius in (1e-2, 1e-3, 1e-4):
        domain = r.one_token(x, 1, radius)
        ratios.append(float(ball_model(net, domain, norm_of)[0].value) / radius)
    assert ratios[0] > ratios[1] > ratios[2]
    assert ratios[1] - ratios[2] < 0.15 * (ratios[0] - ratios[2])


def test_states_in_one_ball_are_not_opened_again():
    """What a norm layer adds before attention stays where it is; nothing is forgotten of it."""
    g = generator(12)
    state, _, _ = state_with(g, drawn(g, N, WIDE), 0.1)
    assert shared(state) is state
    assert stack.shared(replace(state, groups=no_groups(N, WIDE))).groups.columns.shape[-1] > 0
