"""What is known of a head in arithmetic with few digits (`coarse`), against the same in many: projections
that cancel, where one part of a state has a size, and sizes that are attained.
"""

import pytest
import torch

import regard as r
from regard._upper import exact, relative_error
from regard.proofs.ball_model import score_moves
from regard.proofs.ball_model.batches import head_moves
from regard.proofs.ball_model.beginning import at_rest
from regard.proofs.ball_model.groups import Groups, no_groups
from regard.proofs.ball_model.head_forms import shape_of_forms
from regard.proofs.ball_model.inputs import BallPart, Inputs
from regard.proofs.ball_model.network import shared, through
from regard.proofs.ball_model.rows import Row
from regard.proofs.ball_model.state import State
from regard.proofs.subject import subject_of
from tests.ball_model.networks import D, drawn
from tests.coarse import coarse, large_unit, representable

N, WIDE, MOVING = 2, 2, 2


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def near_equal(g, size, *shape):
    """Numbers of one size that differ in their last digits: weights (1, -1) leave next to nothing of them."""
    return representable(size * (1 + 1e-3 * drawn(g, *shape)))


def state_of(g, center=0.0, linear=0.0, groups=0.0, shape=0.0, first=1.0):
    """first: the size of the first token beside that of the other."""
    uneven = torch.tensor([[first], [1.0]], dtype=D)
    columns = near_equal(g, groups, N, WIDE, 2)
    root = near_equal(g, shape, N, WIDE, 1)
    return State(
        Inputs((BallPart(MOVING),), (1.0,)),
        near_equal(g, center, N, WIDE) * uneven,
        near_equal(g, linear, N, WIDE, MOVING) * uneven.unsqueeze(-1),
        None,
        Groups(columns, torch.arange(2) - 10, torch.tensor([-5, -6])) if groups else no_groups(N, WIDE),
        representable(root @ root.mT),
    )


def attention(g, size=1.0, bias=0.0, slope=0.0):
    """One head of width one whose weights are (1, -1) but for a little."""
    apart = torch.tensor([[1.0], [-1.0]], dtype=D)
    w_q, w_k, w_v = (representable(size * (apart + 1e-3 * drawn(g, 2, 1))) for _ in range(3))
    b_q, b_k, b_v = (near_equal(g, bias, 1) for _ in range(3))
    dot = r.Dot(w_q, w_k, b_q=b_q, b_k=b_k, scale=1.0)
    potential = dot + r.Alibi(slope) if slope else dot
    return r.Attention(potential, r.Linear(w_v, b_v))


CASES = {
    "center": ({"center": 1.0}, {}),
    "far": ({"center": 64.0}, {}),
    "large": ({"center": 8.0}, {"size": 8.0}),
    "bias": ({}, {"bias": 4.0}),
    "positions": ({"center": 1.0}, {"slope": 500.3}),
    "uneven": ({"center": 64.0, "first": 2.0**-12}, {}),
    "uneven the other way": ({"center": 2.0**-6, "first": 2.0**12}, {}),
    "uneven moves": ({"linear": 4.0, "first": 2.0**-12}, {"bias": 1.0}),
    "linear": ({"linear": 1.0}, {"bias": 1.0}),
    "linear alone": ({"linear": 1.0}, {}),
    "linear about a token": ({"center": 1.0, "linear": 1e-3}, {}),
    "groups": ({"groups": 1.0}, {"bias": 1.0}),
    "ellipsoid": ({"shape": 1.0}, {"bias": 1.0}),
}


def slopes_of(head, law):
    """How scores move with u and the groups, about their mean under a law."""
    query, key = head.scores.query, head.scores.key
    along = torch.einsum("jc,ick->ijk", key.value, query.moves)
    along = along + torch.einsum("ic,jck->ijk", query.value, key.moves)
    along = torch.cat([along, head.scores.by_groups], -1)
    return along - torch.einsum("ij,ijk->ik", law, along).unsqueeze(1)


def spans(side):
    return torch.linalg.matrix_norm(side.moves[..., :MOVING], 2)


@pytest.mark.parametrize("kind", CASES)
def test_facts_of_a_head_in_few_digits(kind):
    parts, sizes = CASES[kind]
    for seed in range(4):
        g = generator(seed)
        state, map = state_of(g, **parts), attention(g, **sizes)
        (many,) = head_moves(state, subject_of(map))
        with coarse(seed):
            (few,) = head_moves(state, subject_of(map))
            law, scores = few.law, few.scores.at_center[0]
            error, apart_error = few.scores.score_error.bound, few.apart_error.bound
            apart, apart_sizes, slopes = few.apart, few.apart_sizes.bound, few.scores.slopes
            unit = relative_error(WIDE + 1 + 2 * N + slopes.shape[-1] + 64)
            lost = (unit * few.scores.slope_sizes).bound
            firsts = [side.first.bound for side in few.sides]
            rests = [side.rest.bound for side in few.sides]
            values, wholes = few.value_sizes.bound, [side.whole.bound for side in few.sides]
        assert bool(((scores - many.scores.at_center[0]).abs() <= error.unsqueeze(-1)).all())
        assert bool(((law.log() - many.law.log()).abs() <= 2 * error.unsqueeze(-1)).all())
        exactly = many.values.value.unsqueeze(0) - (law @ many.values.value).unsqueeze(1)
        assert bool(((apart - exactly).norm(dim=-1) <= apart_error).all())
        assert bool((exactly.norm(dim=-1) <= apart_sizes).all())
        assert bool(((slopes - slopes_of(many, law)).norm(dim=-1) <= lost).all())
        for side, first, rest, whole in zip(many.sides, firsts, rests, wholes, strict=True):
            assert bool((spans(side) <= first).all())
            beside = (side.w.mT @ state.shape @ side.w).squeeze(-1).squeeze(-1).clamp_min(0.0).sqrt()
            columns = side.w.mT @ state.groups.columns
            beside = beside + columns.abs().sum((-2, -1))
            assert bool((beside * (1 - 1e-9) <= rest).all())
            assert bool((side.value.norm(dim=-1) + spans(side) + beside * (1 - 1e-9) <= whole).all())
        assert bool((many.values.value.norm(dim=-1) <= values).all())


@pytest.mark.parametrize("explicit", [score_moves.EXPLICIT, 0])
@pytest.mark.parametrize("kind", CASES)
def test_an_attention_of_width_one_holds_its_values_in_few_digits(kind, explicit, monkeypatch):
    """Along u and what groups share; fresh groups and ellipsoids are at rest. With and without the second
    order written out.
    """
    monkeypatch.setattr(score_moves, "EXPLICIT", explicit)
    parts, sizes = CASES[kind]
    for seed in range(3):
        g = generator(seed)
        state, map = state_of(g, **parts), attention(g, **sizes)
        with coarse(seed):
            after = through.one(map, state)
        for _ in range(4):
            u = torch.nn.functional.normalize(drawn(g, MOVING), dim=0)
            w = drawn(g, 2).sign()[: len(state.groups.labels)]
            value = map(state.center + state.linear @ u + state.groups.columns @ w)
            found = after.center + after.linear @ u + after.groups.columns[..., : len(w)] @ w
            fresh = after.groups.of(torch.arange(len(after.groups.labels)) >= len(w))
            one = torch.ones(1, 1, 1, dtype=D)
            most = (after.shape.squeeze(-1).clamp_min(0.0).sqrt() + fresh.reach(one).bound).squeeze(-1)
            assert bool(((value - found).squeeze(-1).abs() <= most).all())


@pytest.mark.parametrize("explicit", [score_moves.EXPLICIT, 0])
def test_what_rounding_hides_is_there_however_the_second_order_is_bounded(explicit, monkeypatch):
    """Tokens that do not move: with a large unit of rounding nothing else is in the ellipsoids."""
    monkeypatch.setattr(score_moves, "EXPLICIT", explicit)
    g = generator(4)
    state, map = state_of(g, center=1.0), attention(g)
    with large_unit(2.0**-30):
        found = through.one(map, state).shape[:, 0, 0]
        (head,) = head_moves(state, subject_of(map))
        least = head.lost.bound.square()
    assert bool((found >= least).all())
    assert bool((found < 4 * least).all())


def test_laws_of_many_tokens_in_few_digits():
    """Scores that are next to nothing: the sum of exponentials is all that is rounded."""
    g = generator(3)
    x, map = representable(1e-3 * drawn(g, 512, WIDE)), attention(g)
    (many,) = head_moves(at_rest(x), subject_of(map))
    with coarse(3):
        (few,) = head_moves(at_rest(x), subject_of(map))
        law, error = few.law, few.scores.score_error.bound
    off = (law.log() - many.law.log()).abs()
    assert bool((off <= 2 * error.unsqueeze(-1)).all())
    assert float((off / error.unsqueeze(-1)).max()) > 0.2


def test_sizes_of_projected_tokens_are_attained():
    """A weight of rank one along the token and its moves: |w|(|c| + reach) + |b|."""
    c = torch.tensor([[3.0, 4.0]], dtype=D)
    linear = 0.5 * torch.tensor([[[0.6], [0.8]]], dtype=D)
    state = State(
        Inputs((BallPart(1),), (1.0,)), c, linear, None, no_groups(1, 2), torch.zeros(1, 2, 2, dtype=D)
    )
    weights = torch.tensor([[0.6], [0.8]], dtype=D)
    map = r.Attention(r.Dot(weights, weights, b_q=torch.tensor([2.0], dtype=D)), r.Linear(2 * weights))
    (head,) = head_moves(shared(state), subject_of(map))
    for side, exactly in zip(head.sides, (5.5 + 2.0, 5.5, 2 * 5.5), strict=True):
        assert exactly <= float(side.whole) < exactly * (1 + 1e-12)
        assert float(side.first) < float(side.size) * (1 + 1e-9)
    assert float(head.value_sizes) == pytest.approx(11.0, rel=1e-12)


def test_no_weight_grows_by_more_than_its_inverse():
    """A key of weight one tenth that takes all: e^a/Z - 1 is nine, however far its score goes."""
    law, none = torch.tensor([[0.1, 0.9]], dtype=D).expand(2, -1), torch.zeros(2, 2, dtype=D)
    rest = torch.tensor([[27.0, 3.0]], dtype=D).expand(2, -1)  # about their mean under the law
    row = Row(law, exact(none), exact(rest), exact(none), exact(none[0]))
    moves = rest[0] * torch.tensor([1.0, -1.0], dtype=D)
    grown = float(moves[0].exp() / (law[0] @ moves.exp())) - 1
    assert float(law[0] @ moves) == pytest.approx(0.0, abs=1e-14)
    assert 8.99 < grown <= float(row.factor.bound[0, 0]) <= 11 * (1 + 1e-9)


def test_the_second_order_along_a_line_is_a_segment():
    """One token moves along a line by a little: its own row moves by h u² with 0 ≤ u² ≤ 1, a segment whose
    middle is h/2 and which is |h|/2 long to either side; what is beyond the second order is far smaller.
    Where forms are not written out its middle is zero, and it is |h| long.
    """
    g = generator(3)
    x, tangent = drawn(g, 3, 2), torch.zeros(3, 2, 1, dtype=D)
    tangent[1, :, 0] = 1e-3 * torch.tensor([0.6, 0.8], dtype=D)
    still = torch.zeros(3, 2, 2, dtype=D)
    state = State(Inputs((BallPart(1),), (1.0,)), x, tangent, None, no_groups(3, 2), still)
    map = r.Attention(r.Dot(drawn(g, 2, 2), drawn(g, 2, 2), scale=1.0), r.Linear(drawn(g, 2, 2)))
    ahead, here, behind = (map(x + u * tangent[..., 0])[1] for u in (1.0, 0.0, -1.0))
    h = (ahead + behind) / 2 - here
    after = through.one(map, state)
    assert (after.center[1] - here) == pytest.approx(h / 2, rel=1e-3)
    (head,) = head_moves(state, subject_of(map))
    for found, length in ((after.shape[1], 0.5), (head.rest.shape(shape_of_forms(head)).done()[1], 1.0)):
        along = float((h / h.norm()) @ found @ (h / h.norm())) ** 0.5
        assert float(h.norm()) * length * (1 - 1e-4) <= along <= float(h.norm()) * length * 1.02
