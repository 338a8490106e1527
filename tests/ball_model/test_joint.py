"""One ellipsoid of all tokens together (M12): through maps of single tokens and through attention, against
the matrices that it stands for, against groups with the same set, and where it is attained.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize as of_length_one

import regard as r
from regard import maps
from regard._upper import exact
from regard.nonexpansive import MixTokens
from regard.proofs.ball_model import batches
from regard.proofs.ball_model import network as stack
from regard.proofs.ball_model.attention import attend
from regard.proofs.ball_model.batches import head_moves
from regard.proofs.ball_model.beginning import begin
from regard.proofs.ball_model.ellipsoids import widths
from regard.proofs.ball_model.groups import no_groups
from regard.proofs.ball_model.joint import Joint, full, joint_of
from regard.proofs.ball_model.network import through
from regard.proofs.ball_model.opening import one_ball
from regard.proofs.ball_model.updates import Update
from regard.proofs.subject import subject_of
from regard.proofs.theorems.ball_model import ball_model
from tests.ball_model.networks import D, attention, drawn, farthest, network, sequence
from tests.coarse import coarse, large_unit, representable

N, WIDE = 4, 8
KINDS = {
    "plain": {},
    "alone": {"heads": 1},
    "masked": {"support": r.Causal()},
    "rotary": {"turned": "rotary", "heads": 4, "keys": 2},
    "sharp": {"sharp": 4.0},
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def joint(g, size=1.0, n=N):
    root = size * drawn(g, n * WIDE, n * WIDE) / (n * WIDE) ** 0.5
    matrix = root @ root.mT
    return joint_from(0.5 * (matrix + matrix.mT), n), root


def joint_from(matrix, n=N):
    own = torch.stack([matrix[i : i + WIDE, i : i + WIDE] for i in range(0, n * WIDE, WIDE)])
    return Joint(matrix.clone(), own.clone())


def state_with(g, x, size, radius=1e-30):
    state = begin.one(r.one_token(x, 1, radius))
    groups, root = joint(g, size, len(x))
    return replace(state, groups=groups), root


def is_at_least(found, exactly, slack=1e-13):
    """As forms, up to the rounding of eigenvalues."""
    least = torch.linalg.eigvalsh(0.5 * (found + found.mT) - exactly).min()
    return float(least) >= -slack * float(exactly.abs().max())


def jacobian(map, x):
    """J of all tokens, (n d, n d)."""
    return torch.func.jacrev(map)(x).flatten(0, 1).flatten(1)


# Maps of single tokens, and sums


def dense(matrix):
    return matrix.dense if isinstance(matrix, Update) else matrix


@pytest.mark.parametrize("norm_first", [False, True])
def test_maps_of_single_tokens_are_put_off_and_made(norm_first):
    g = generator(1)
    one, _ = joint(g)
    update = Update(drawn(g, N, WIDE), drawn(g, N, WIDE, 1), drawn(g, N, WIDE, 1))
    matrices = [drawn(g, N, WIDE, WIDE), update, drawn(g, N, 3, WIDE)]
    matrices = [matrices[1], matrices[0], matrices[2]] if norm_first else matrices
    after, whole = one, torch.eye(N * WIDE, dtype=D)
    for matrix in matrices:
        after = after.through(matrix)
        whole = torch.block_diag(*dense(matrix)) @ whole
    exactly = whole @ one.matrix @ whole.mT
    made = after.made()
    assert after.turn is not None
    assert made.turn is None
    assert made.shape == (N, 3, 3 * N)
    assert made.matrix == pytest.approx(exactly, rel=1e-10, abs=1e-10 * float(exactly.abs().max()))
    assert is_at_least(made.matrix, exactly)
    for i in range(N):
        rows = slice(3 * i, 3 * i + 3)
        assert torch.equal(made.matrix[rows, rows], made.own[i])
        assert is_at_least(after.own[i], exactly[rows, rows])
    assert float(after.longest) == pytest.approx(float(torch.linalg.matrix_norm(exactly, 2)) ** 0.5, rel=1e-6)


def test_blocks_that_are_made_are_off_by_their_products():
    """2d + 16 units of max|T_i|_F² |G|_F in every direction, beyond what their own ellipsoids have."""
    g, unit = generator(13), 2.0**-30
    one, _ = joint(g)
    turn = drawn(g, N, WIDE, WIDE)
    with large_unit(unit):
        turned = one.through(turn)
        added = (turned.made().own - turned.own).diagonal(dim1=-2, dim2=-1)
    thick = float(turn.flatten(1).norm(dim=-1).max()) ** 2
    least = (2 * WIDE + 16) * unit * thick * float(one.matrix.norm())
    assert least <= float(added.min()) <= float(added.max()) < 2 * least


def test_ellipsoids_of_single_tokens_hold_what_rounding_makes_of_maps():
    """8d + 64 units of (|M_i|_F tr(Q_i)^{1/2})², and more for what is put off."""
    g, unit = generator(14), 2.0**-30
    one, _ = joint(g)
    turn = drawn(g, N, WIDE, WIDE)
    with large_unit(unit):
        found = one.through(turn).own
    added = (found - turn @ one.own @ turn.mT).diagonal(dim1=-2, dim2=-1)
    trace = one.own.diagonal(dim1=-2, dim2=-1).sum(-1)
    least = (8 * WIDE + 64) * unit * turn.flatten(1).square().sum(-1) * trace
    assert bool((added.amin(-1) >= least).all())
    assert bool((added.amax(-1) < 40 * least).all())


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-40])
@pytest.mark.parametrize("turned", [False, True])
def test_sums_with_ellipsoids_of_single_tokens(size, turned):
    """(aᵀGa)^{1/2} + Σ(a_iᵀQ_ia_i)^{1/2} ≤ (aᵀG'a)^{1/2}, and no more than (M1) costs."""
    g = generator(2)
    one, _ = joint(g)
    one = one.through(drawn(g, N, WIDE, WIDE)) if turned else one
    root = size * drawn(g, N, WIDE, WIDE)
    shape, before, after = root @ root.mT, one.made().matrix, one.joined(root @ root.mT)
    for _ in range(100):
        a = drawn(g, N, WIDE)
        alone = torch.einsum("nd,nde,ne->n", a, shape, a).sqrt().sum()
        far = (a.flatten() @ before @ a.flatten()).sqrt() + alone
        assert float(far) <= float((a.flatten() @ after.matrix @ a.flatten()).sqrt())
    lengths = before.diagonal().sum().sqrt(), shape.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt().sum()
    assert float(after.matrix.diagonal().sum()) == pytest.approx(float(sum(lengths) ** 2), rel=1e-9)
    assert torch.equal(after.matrix, after.matrix.mT)


def test_what_is_not_kept_is_nothing():
    g = generator(3)
    one, _ = joint(g)
    kept = torch.tensor([True, False, True, True])[:, None, None]
    after = one.where(kept)
    assert after.is_moving.tolist() == [True, False, True, True]
    assert one.is_moving.all()
    exactly = one.matrix.unflatten(0, (N, WIDE)).unflatten(-1, (N, WIDE)).clone()
    exactly[1], exactly[:, :, 1] = 0.0, 0.0
    assert torch.equal(after.matrix, exactly.flatten(0, 1).flatten(1))


def test_columns_again():
    """The same set as a group; and one ellipsoid for each token where there is no square root."""
    g = generator(4)
    x = drawn(g, N, WIDE)
    state, _ = state_with(g, x, 0.1)
    found = state.with_columns()
    flat = found.groups.columns.flatten(0, 1)
    assert flat @ flat.mT == pytest.approx(state.groups.matrix, rel=1e-9, abs=1e-12)
    assert is_at_least(flat @ flat.mT, state.groups.matrix)
    broken = replace(state, groups=joint_from(-state.groups.matrix))
    assert broken.groups.factored() is None
    apart = replace(broken, groups=Joint(-state.groups.matrix, state.groups.own)).with_columns()
    assert not apart.groups.shape[-1]
    assert all(is_at_least(*pair) for pair in zip(apart.shape, state.groups.own, strict=True))


# Attention


def after_attention(map, state):
    return attend(state, subject_of(map), residual=True)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_moves_it_by_its_derivative(kind):
    """JGJᵀ with J = 1 + the derivative, to ten digits, and no less."""
    g = generator(5)
    map, x = attention(g, WIDE, **KINDS[kind]), drawn(g, N, WIDE)
    state, _ = state_with(g, x, 1e-6)
    found = after_attention(map, state).groups.matrix
    whole = torch.eye(N * WIDE, dtype=D) + jacobian(map, x)
    exactly = whole @ state.groups.matrix @ whole.mT
    assert found == pytest.approx(exactly, rel=1e-9, abs=1e-9 * float(exactly.abs().max()))
    assert is_at_least(found, exactly)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_move_as_by_a_group_of_the_same_set(kind):
    """(αGαᵀ)^{1/2} is the length of αB for BBᵀ = G."""
    g = generator(6)
    map, x = attention(g, WIDE, **KINDS[kind]), drawn(g, N, WIDE)
    state, _ = state_with(g, x, 0.1)
    both = [head_moves(one, subject_of(map)) for one in (state, state.with_columns())]
    for one, other in zip(*both, strict=True):
        found, exactly = one.scores.by_remainders.bound, other.scores.by_remainders.bound
        far = float(one.scores.functionals.sizes.bound.max() * one.state.groups.size.bound.sqrt())
        assert bool((found >= exactly * (1 - 1e-9) - 1e-12 * far).all())
        assert found == pytest.approx(exactly, rel=1e-6, abs=1e-6 * far)  # of the root of a difference
        assert one.scores.by_groups.shape[-1] == N * WIDE


def test_moves_of_scores_are_off_by_their_products():
    """2nd + 4d + 4n + 64 units of |α|² |G|_F, in squares."""
    g, unit = generator(16), 2.0**-30
    map, x = attention(g, WIDE, heads=1), drawn(g, N, WIDE)
    state, _ = state_with(g, x, 0.1)
    (plain,) = head_moves(state, subject_of(map))
    before = plain.scores.by_remainders.bound.square()
    with large_unit(unit):
        (head,) = head_moves(state, subject_of(map))
        added = head.scores.by_remainders.bound.square() - before
    least = plain.scores.functionals.whole.flatten(-2).square().sum(-1) * float(state.groups.matrix.norm())
    least = (2 * N * WIDE + 4 * WIDE + 4 * N + 64) * unit * least
    assert bool((added >= least).all())
    assert bool((added < 100 * least).all())


@pytest.mark.parametrize("kind", KINDS)
def test_functionals_of_scores_are_their_derivatives(kind):
    g = generator(7)
    map, x = attention(g, WIDE, **KINDS[kind]), drawn(g, N, WIDE)
    state, _ = state_with(g, x, 0.1)
    for heads in head_moves(state, subject_of(map)):
        slopes = heads.scores.slopes[..., heads.first_width :]
        whole = heads.scores.functionals.whole.flatten(-2)
        exactly = whole @ state.groups.matrix
        assert torch.allclose(slopes, exactly, rtol=1e-10, atol=1e-10)
        assert bool((whole.norm(dim=-1) <= heads.scores.functionals.sizes.bound).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-4, 0.05, 0.3])
def test_points_of_it_stay_in_what_is_said(kind, size):
    """A point e of the ellipsoid and a move u: beyond Je and the derivative by u all is in the ellipsoids of
    single tokens.
    """
    for seed in range(3):
        g = generator(20 + seed)
        map, x = attention(g, WIDE, **KINDS[kind]), drawn(g, N, WIDE)
        state, root = state_with(g, x, size, radius=size)
        after = after_attention(map, state)
        whole = torch.eye(N * WIDE, dtype=D) + jacobian(map, x)
        for _ in range(20):
            u = of_length_one(drawn(g, state.inputs.width), dim=0)
            e = root @ of_length_one(drawn(g, N * WIDE), dim=0)
            point = x + state.linear @ u + e.unflatten(0, (N, WIDE))
            value = point + map(point)
            away = value - after.center - after.linear @ u - (whole @ e).unflatten(0, (N, WIDE))
            a = torch.cat([drawn(g, N, WIDE, 30), away.unsqueeze(-1)], -1)
            far = (away.unsqueeze(-2) @ a).squeeze(-2).abs()
            assert bool((far <= widths(after.shape, a).bound).all())


def test_rows_of_which_nothing_is_known_keep_their_own():
    g = generator(8)
    map, x = attention(g, WIDE, sharp=4.0), drawn(g, N, WIDE)
    state, _ = state_with(g, x, 200.0)
    after = after_attention(map, state)
    before = state.groups.matrix
    assert after.groups.matrix == pytest.approx(before, abs=1e-6 * float(before.abs().max()))
    assert is_at_least(after.groups.matrix, before)
    assert float(after.shape.abs().max()) > 0


@pytest.mark.parametrize("seed", range(4))
def test_in_few_digits(seed):
    """No less than the true one, whatever is rounded."""
    g = generator(30 + seed)
    map = attention(g, WIDE, heads=1 + seed % 2)
    x = representable(drawn(g, N, WIDE))
    matrix = representable(joint(g, 1e-3)[0].matrix)
    state = replace(begin.one(r.one_token(x, 1, 1e-30)), groups=joint_from(0.5 * (matrix + matrix.mT)))
    turn = representable(drawn(g, N, WIDE, WIDE))
    shape = representable(1e-6 * torch.eye(WIDE, dtype=D).expand(N, -1, -1))
    whole = torch.eye(N * WIDE, dtype=D) + jacobian(map, x)
    exactly = whole @ state.groups.matrix @ whole.mT
    turned = torch.block_diag(*turn)
    with coarse(seed):
        found = after_attention(map, state).groups
        through_maps = state.groups.through(turn)
        made, sums = through_maps.made(), through_maps.joined(shape)
    assert is_at_least(found.matrix, exactly)
    away = (found.matrix - exactly).fill_diagonal_(0.0)
    assert 1e-9 < float(away.abs().max()) / float(exactly.abs().max()) < 1e-2
    assert is_at_least(made.matrix, turned @ state.groups.matrix @ turned.mT)
    assert is_at_least(sums.matrix, turned @ state.groups.matrix @ turned.mT)


def test_what_rounding_may_change_is_added():
    """With a large unit of rounding, in which nothing is rounded: as much as products of sizes are off."""
    g = generator(9)
    map, x = attention(g, WIDE), drawn(g, N, WIDE)
    state, _ = state_with(g, x, 1e-3)
    plain = after_attention(map, state).groups.matrix
    with large_unit(2.0**-30):
        found = after_attention(map, state).groups.matrix
    added = (found - plain).diagonal()
    assert float(added.min()) == pytest.approx(float(added.max()), rel=1e-4)
    steep = float(torch.linalg.matrix_norm(torch.cat(list(subject_of(map).w_o)), 2))
    (heads,) = head_moves(state, subject_of(map))
    made_of = float(heads.passing_sizes.bound.norm())
    once = steep * (WIDE + 4 * N + 32) * 2.0**-30 * made_of * float(state.groups.matrix.norm())
    least = 2 * (1 + steep * made_of) * once  # JG is off, and J of that
    assert least < float(added.min()) < 4 * least


def test_errors_are_in_every_direction():
    g = generator(10)
    one, _ = joint(g)
    found = full(one.matrix.clone(), one.own, exact(0.25))
    assert float(torch.linalg.eigvalsh(found.matrix - one.matrix).min()) == pytest.approx(0.25, rel=1e-9)
    before, after = (each.own.diagonal(dim1=-2, dim2=-1) for each in (one, found))
    assert after == pytest.approx(before + 0.25, rel=1e-12)


# Heads together


@pytest.mark.parametrize("kind", ["plain", "masked", "rotary", "sharp"])
@pytest.mark.parametrize("with_joint", [False, True])
@pytest.mark.parametrize("unit", [2.0**-53, 2.0**-30])
def test_heads_together_are_heads_apart(monkeypatch, kind, with_joint, unit):
    """All of a state after attention, with what rounding may hide, however many heads are taken at once."""
    g = generator(17)
    map, x = attention(g, WIDE, **KINDS[kind]), drawn(g, N, WIDE)
    state, root = state_with(g, x, 0.1, radius=0.1)
    if not with_joint:
        shape = 1e-3 * torch.eye(WIDE, dtype=D).expand(N, -1, -1)
        state = replace(state, groups=one_ball(root[:, :5].unflatten(0, (N, WIDE))), shape=shape)
    with large_unit(unit):
        together = after_attention(map, state)
        monkeypatch.setattr(batches, "TOGETHER", 1)
        assert len(head_moves(state, subject_of(map))) > 1
        apart = after_attention(map, state)
    for name in ("center", "linear", "shape"):
        one, other = getattr(together, name), getattr(apart, name)
        assert one == pytest.approx(other, rel=1e-9, abs=1e-11 * float(other.abs().max()))
    one, other = (after.groups.columns for after in (together, apart))
    assert one == pytest.approx(other, rel=1e-9, abs=1e-11 * float(other.abs().max()))


# Networks


@pytest.mark.parametrize("kind", [{}, {"support": r.Causal()}, {"gated": True}, {"turned": "rotary"}])
def test_networks_with_and_without_columns(monkeypatch, kind):
    """The same bound to many digits as with a group that has the same set, above attacks."""
    net, x = network(8, layers=3, **kind), sequence(8)
    domain = r.one_token(x, 1, 0.02)
    monkeypatch.setattr(stack, "APART", 0)
    found = float(ball_model(net, domain, r.Frobenius())[0].value)
    monkeypatch.setattr(stack, "_jointly", lambda state: None)
    columns = float(ball_model(net, domain, r.Frobenius())[0].value)
    assert farthest(net, domain) < found
    assert found == pytest.approx(columns, rel=1e-5)


def test_it_is_taken_where_there_is_much_to_hold(monkeypatch):
    g = generator(11)
    x, map = drawn(g, N, WIDE), maps.Residual(attention(g, WIDE))
    state = begin.one(r.one_token(x, 1, 0.1))
    some = replace(state, shape=1e-6 * torch.eye(WIDE, dtype=D).expand(N, -1, -1))
    assert not isinstance(through.one(map, some).groups, Joint)
    monkeypatch.setattr(stack, "APART", 0)
    assert isinstance(through.one(map, some).groups, Joint)
    assert not isinstance(through.one(map, state).groups, Joint)  # nothing is left of any token yet
    monkeypatch.setattr(stack, "WIDEST", 0)
    assert not isinstance(through.one(map, some).groups, Joint)


def test_it_has_columns_again_where_these_are_not_too_many(monkeypatch):
    """2(nd)²d products are those of its own columns, and of ellipsoids that are left of tokens."""
    g = generator(11)
    x, map = drawn(g, N, WIDE), maps.Residual(attention(g, WIDE))
    state, _ = state_with(g, x, 0.1, radius=0.1)
    for apart, joint in ((2 * (N * WIDE) ** 2 * WIDE, False), (2 * (N * WIDE) ** 2 * WIDE - 1, True)):
        monkeypatch.setattr(stack, "APART", apart)
        assert isinstance(through.one(map, state).groups, Joint) is joint


def test_products_of_columns_are_off_by_their_rounding():
    """2k + 32 units of |B|_F² in every direction, for k columns of one group."""
    g, unit, count = generator(15), 2.0**-30, 5
    groups = one_ball(drawn(g, N, WIDE, count))
    with large_unit(unit):
        found = joint_of(groups, torch.zeros(N, WIDE, WIDE, dtype=D)).own
    added = (found - groups.columns @ groups.columns.mT).diagonal(dim1=-2, dim2=-1)
    least = (2 * count + 32) * unit * float(groups.columns.square().sum())
    assert least <= float(added.min()) <= float(added.max()) < 2 * least


def test_groups_become_one():
    g = generator(12)
    root = drawn(g, N, WIDE, WIDE)
    one = joint_of(no_groups(N, WIDE), root @ root.mT)
    assert one.matrix[:WIDE, WIDE:].abs().max() == 0
    assert all(is_at_least(*pair) for pair in zip(one.own, root @ root.mT, strict=True))


# Sums of maps, in which an ellipsoid of all tokens is one of two summands


def even(width):
    """A layer whose derivative at zero is zero: all that moves is a remainder."""
    eye = torch.eye(width, dtype=D)
    return maps.feed_forward(maps.Gelu(), torch.cat([eye, -eye], 1), torch.cat([eye, eye]))


def summed():
    """Networks in which groups of one origin are added to what attention made of them."""
    g = generator(40)
    around, another = (maps.Residual(attention(g, WIDE)) for _ in range(2))
    wide = maps.Affine(10 * torch.eye(WIDE, dtype=D))
    return {
        "before": maps.Added((wide, around)),
        "after": maps.Added((around, wide)),
        "both": maps.Added((around, another)),
        "twice": maps.Residual(around),
        "inside": maps.Residual(maps.Compose((around, wide))),
        "within": maps.Residual(maps.Added((attention(g, WIDE), around))),
    }


@pytest.mark.parametrize("apart", [0, stack.APART])
@pytest.mark.parametrize("kind", summed())
def test_sums_hold_what_both_summands_move(kind, apart, monkeypatch):
    monkeypatch.setattr(stack, "APART", apart)
    net = maps.Compose((even(WIDE), summed()[kind]))
    x = drawn(generator(41), N, WIDE)
    x[0] = 0.0
    domain = r.one_token(x, 0, 0.3)
    far, still = 0.0, net(x)
    for direction in torch.eye(WIDE, dtype=D):
        moved = x.clone()
        moved[0] += 0.3 * (1 - 1e-9) * direction
        far = max(far, float((net(moved) - still).norm()))
    bounds = [float(one.value) for one in ball_model(net, domain, r.Frobenius())]
    assert far <= min(bounds)
    assert min(bounds) < 3 * far


def test_a_decision_is_not_made_of_half_a_sum(monkeypatch):
    """A gradient that vanishes at the input finds nothing; the proof must not say more than that."""
    monkeypatch.setattr(stack, "APART", 0)
    net = maps.Compose((even(WIDE), summed()["before"]))
    x = drawn(generator(41), N, WIDE)
    x[0] = 0.0
    moved = x.clone()
    moved[0, 0] = 0.3 * (1 - 1e-9)
    first = torch.eye(N, dtype=D)[:1]
    gap = float((net(moved) - net(x))[0].sum())
    weights = torch.tensor([[-1.0, 0.0]], dtype=D).expand(WIDE, -1)
    readout = maps.Affine(weights, torch.tensor([float(net(x)[0].sum()) + 0.9 * gap, 0.0], dtype=D))
    whole = maps.Compose((net, MixTokens(first), readout))
    assert float(whole(x)[0, 0]) > 0 > float(whole(moved)[0, 0])
    assert r.decide(whole, x, r.one_token(x, 0, 0.3)).holds is not True
