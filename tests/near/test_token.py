"""One token moves: closed forms of the other rows on grids, the exact second derivative of its own row,
and what is beyond both.
"""

import math

import pytest
import torch

import regard as r
from regard._upper import UNIT, exact, relative_error
from regard.proofs.near.exponential import tail
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.moves import cubic_part
from regard.proofs.near.own_row import OwnRow
from regard.proofs.near.radii import TokenRadii
from regard.proofs.near.token import (
    CURVE,
    QUARTER,
    OtherRows,
    TokenMove,
    _root_of_squares,
    column_norms,
    interval_bound,
)
from regard.proofs.subject import subject_of
from tests.near.sequence import D, is_close, plain, two
from tests.theorems.exact import generator, normal

TOKEN = 1


def test_the_bend_of_the_logistic_function_is_attained():
    """max |σ''|/2 = 1/(12√3), at σ = (3 ± √3)/6; and max σ' = 1/4."""
    p = (3 - math.sqrt(3)) / 6
    bend = p * (1 - p) * (1 - 2 * p) / 2
    assert bend * (1 - 1e-15) <= float(CURVE) <= bend * (1 + 1e-12)
    assert float(QUARTER) == 0.25


def facts(s, radius):
    """θ, Δ, v and t_max of the other rows, by their definitions."""
    rows = torch.tensor([i for i in range(s.n) if i != TOKEN and bool(s.seen[i, TOKEN])])
    p = s.p[rows, TOKEN]
    theta = (p / (1 - p)).log()
    rest = s.p[rows].clone()
    rest[:, TOKEN] = 0
    mean = (rest / rest.sum(-1, keepdim=True)).nan_to_num(0.0) @ s.x
    away = torch.where(rest.sum(-1, keepdim=True) > 0, s.x[TOKEN] - mean, 0.0)
    return rows, theta, away, s.v[rows], radius * s.v[rows].norm(dim=-1)


CASES = {"full": {}, "causal": {"support": r.Causal(), "n": 5}, "sharp": {"scale": 6.0, "seed": 2}}
GRID = torch.linspace(-1, 1, 4001, dtype=D)


def reached(theta, t, size, gap):
    """w p r + |p - p(0)| |VᵀΔ|, where p(-t) is at most p(0)."""
    start, moved = torch.sigmoid(theta).unsqueeze(-1), torch.sigmoid(theta.unsqueeze(-1) + t)
    return size * torch.maximum(moved, start) + (moved - start).abs() * gap.unsqueeze(-1)


def on_cells(theta, reach, size, gap):
    """c on each cell from the ends of it: slopes of σ by 1/4 and by σ'(θ) + max|σ''| t,
    what bends by max|σ''| t²/2.
    """
    curve = 1 / (12 * math.sqrt(3))
    times = torch.cat([torch.zeros(1, dtype=D), torch.logspace(-4, 0, 160, dtype=D)]) * reach.unsqueeze(-1)
    left, right = times[:, :-1], times[:, 1:]
    start = torch.sigmoid(theta).unsqueeze(-1)
    slope = start * (1 - start)
    best = torch.zeros_like(reach)
    for sign in (1, -1):
        moved = (torch.sigmoid(theta.unsqueeze(-1) + sign * times) - start).abs()
        bent = (moved - slope * times).abs()
        grown = (right - left) * (2 * curve * right).clamp(max=0.25)
        bow = torch.minimum(curve * right, (torch.maximum(bent[:, :-1], bent[:, 1:]) + grown) / left)
        pace = torch.minimum((slope + 2 * curve * right).clamp(max=0.25), moved[:, 1:] / left)
        best = torch.maximum(best, (size * pace + bow * gap.unsqueeze(-1)).amax(-1))
    return best.square()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("radius", [0.01, 0.5, 4.0])
def test_rows_in_closed_form(name, radius):
    """c and a + c t² are above the squares on a grid of t, and not far above the least that would do."""
    s = plain(**CASES[name])
    move = TokenMove(s.values, TOKEN, radius)
    rows, theta, away, _, reach = facts(s, radius)
    assert torch.equal(move.rows, rows)
    assert torch.allclose(move.theta.center[:, 0], theta, atol=1e-9)
    assert torch.allclose(move.away.center, away, atol=1e-10)
    gap = (away @ s.matrix).norm(dim=-1)
    is_close(move.gap, gap)
    is_close(move.reach, reach)
    w, t = two(s.matrix), GRID * reach.unsqueeze(-1)
    start, moved = torch.sigmoid(theta).unsqueeze(-1), torch.sigmoid(theta.unsqueeze(-1) + t)
    is_close(move.start, start)
    slope = start * (1 - start)
    is_close(move.slope, slope)
    bent = (moved - start - slope * t).abs()
    square = (w * (moved - start).abs() * radius + bent * gap.unsqueeze(-1)).square()
    nonzero = t.abs() > 1e-6 * reach.unsqueeze(-1)
    least = torch.where(nonzero, square / t.square(), 0.0).amax(-1)
    curved = move.curved().bound
    assert bool((least * (1 - 1e-9) <= curved).all())
    assert torch.allclose(curved, on_cells(theta, reach, w * radius, gap), rtol=1e-6)
    a, c = (part.bound for part in move.saturated())
    whole = (w * moved * radius + (moved - start).abs() * gap.unsqueeze(-1)).square()
    assert bool((whole <= a.unsqueeze(-1) + c.unsqueeze(-1) * t.square() + 1e-12).all())
    top = whole.amax(-1)
    assert bool((a + 0.1 * c * reach.square() <= 1.05 * top).all())
    steps = torch.cat([torch.zeros(1, dtype=D), torch.logspace(-4, 0, 160, dtype=D)]) * reach.unsqueeze(-1)
    worse = torch.maximum(*(reached(theta, sign * steps, w * radius, gap) for sign in (1, -1)))
    levels = worse.square()[:, ::20]
    above = (worse.square()[:, None, 1:] - levels.unsqueeze(-1)).clamp_min(0)
    slopes = torch.where(above > 0, above / steps[:, None, :-1].square(), 0.0).amax(-1)
    best = (levels + 0.1 * slopes * reach.square().unsqueeze(-1)).amin(-1)
    assert torch.allclose(a + 0.1 * c * reach.square(), best, rtol=1e-6)
    ends = move.row_bounds(exact(torch.full_like(reach, 1e9))).bound
    assert torch.allclose(ends, top.sqrt(), rtol=1e-6)
    linear = torch.full_like(reach, 1e-9)
    stated = torch.minimum(top.sqrt(), radius * linear + curved.sqrt() * reach)
    assert torch.allclose(move.row_bounds(exact(linear)).bound, stated, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("radius", [0.01, 0.5, 4.0])
def test_ranges_of_weights_and_of_their_slopes(name, radius):
    """[σ(θ - t), σ(θ + t)] exactly, and the mean of σ' between θ and θ + t within a cell of it."""
    s = plain(**CASES[name])
    move = TokenMove(s.values, TOKEN, radius)
    _, theta, _, _, reach = facts(s, radius)
    (p_mid, p_half), (s_mid, s_half) = move.ranges()
    low, high = torch.sigmoid(theta - reach), torch.sigmoid(theta + reach)
    assert torch.allclose(p_mid, (low + high) / 2, rtol=1e-9)
    is_close(p_half, (high - low) / 2, rel=1e-7)
    t = GRID * reach.unsqueeze(-1)
    start = torch.sigmoid(theta).unsqueeze(-1)
    quotient = torch.where(
        t.abs() > 1e-9, (torch.sigmoid(theta.unsqueeze(-1) + t) - start) / t, start * (1 - start)
    )
    half = s_half.bound
    assert bool(((quotient - s_mid.unsqueeze(-1)).abs() <= half.unsqueeze(-1) + 1e-9).all())
    widest = (quotient.amax(-1) - quotient.amin(-1)) / 2
    assert bool((half <= widest + 0.6 * float(CURVE) * reach / 160 + 1e-9).all())


@pytest.mark.parametrize("radius", [0.01, 0.5])
def test_other_rows_together(radius):
    """√(Σ a + r² λ_max(Σ c v vᵀ)), which all see one δ; and the interval form."""
    s = plain(seed=3)
    move = TokenMove(s.values, TOKEN, radius)
    _, _, away, v, _ = facts(s, radius)
    c = move.curved().bound
    gram = torch.einsum("i,ia,ib->ab", c, v, v)
    beyond = radius * float(torch.linalg.eigvalsh(gram)[-1]) ** 0.5
    is_close(_root_of_squares([move], exact(radius), False), beyond, rel=1e-8)
    a, c = (part.bound for part in move.saturated())
    gram = torch.einsum("i,ia,ib->ab", c, v, v)
    whole = (float(a.sum()) + radius**2 * float(torch.linalg.eigvalsh(gram)[-1])) ** 0.5
    is_close(_root_of_squares([move], exact(radius), True), whole, rel=1e-8)
    (p_mid, p_half), (s_mid, s_half) = move.ranges()
    middle = p_mid[:, None, None] * s.matrix.mT + s_mid[:, None, None] * (away @ s.matrix).unsqueeze(
        -1
    ) * v.unsqueeze(1)
    turned = (s_half.bound * (away @ s.matrix).norm(dim=-1)).unsqueeze(-1) * v
    left = two(s.matrix) * float(p_half.bound.norm()) + two(turned)
    interval = radius * (two(middle.flatten(0, 1)) + left)
    is_close(interval_bound(s.heads, [move], exact(radius)), interval, rel=1e-7)
    rows = OtherRows(s.heads, TOKEN, radius)
    is_close(rows.remainder, beyond, rel=1e-8)
    is_close(rows.whole, min(whole, interval), rel=1e-7)


def test_other_rows_of_several_heads():
    """|W_O| times all of them together, or the sum of each after mixing."""
    g = generator(12)
    w_q, w_k, w_v, w_o = normal(g, 2, 3, 2), normal(g, 2, 3, 2), normal(g, 2, 3, 2), normal(g, 2, 2, 3)
    attention, x = r.Attention(r.Dot(w_q, w_k), r.Linear(w_v)), normal(g, 4, 3)
    mixed = LocalHeads(subject_of(r.maps.Heads(attention, w_o)), r.Neighborhood(x, 0.0))
    radius = 0.3
    joined = float(_root_of_squares([TokenMove(v, 1, radius) for v in mixed.separate], exact(radius), False))
    joined *= two(w_o.reshape(4, 3))
    apart = sum(
        float(_root_of_squares([TokenMove(v, 1, radius)], exact(radius), False)) for v in mixed.folded
    )
    is_close(OtherRows(mixed, 1, radius).remainder, min(joined, apart), rel=1e-8)
    map = r.maps.Heads(attention, w_o)
    here, bound = map(x), float(OtherRows(mixed, 1, radius).whole)
    for _ in range(40):
        y = x.clone()
        step = normal(g, 3)
        y[1] += radius * step / step.norm()
        moved = (map(y) - here)[[0, 2, 3]]
        assert float(moved.norm()) <= bound


def test_columns_of_the_jacobian():
    """λ_max(Σ_i J_ijᵀJ_ij)^{1/2} over all rows and over the others, with the rounding of blocks."""
    s = plain(seed=3)
    exactly = torch.func.jacrev(s.attention)(s.x)[:, :, TOKEN]  # (n, e, d)
    found = column_norms(s.heads, TOKEN)
    is_close(found.whole, two(exactly.flatten(0, 1)))
    is_close(found.rest, two(exactly[[0, 2, 3]].flatten(0, 1)))
    moves = torch.zeros(4, dtype=D)
    moves[TOKEN] = 1.0
    assert float(found.error) == pytest.approx(float(s.heads.jacobian_error(moves).norm()), rel=1e-9, abs=0)


# The row of the token itself


def quadratic(s, delta):
    """T(δ, δ) by the second derivative of the row along δ."""
    step = torch.zeros_like(s.x)
    step[TOKEN] = delta

    def along(t):
        return s.attention(s.x + t * step)[TOKEN]

    first = torch.func.jacfwd(along)
    return torch.func.jacfwd(first)(torch.tensor(0.0, dtype=D)) / 2


@pytest.mark.parametrize("name", CASES)
def test_the_second_derivative_of_the_own_row(name):
    s = plain(**CASES[name])
    row = OwnRow(s.heads, TOKEN)
    best = 0.0
    for angle in torch.linspace(0, math.pi, 60, dtype=D):
        for lift in (-0.7, 0.0, 0.7):
            e = torch.tensor([math.cos(angle), math.sin(angle), lift], dtype=D)
            e = e / e.norm()
            exactly = quadratic(s, e)
            assert torch.allclose(torch.einsum("cab,a,b->c", row.form, e, e), exactly, atol=1e-10)
            best = max(best, float(exactly.norm()))
    form = row.form
    stated = min(two(form.flatten(1)), two(form.flatten(0, 1)))
    is_close(row.second_order, stated, rel=1e-8)
    assert best <= stated <= 2 * best


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("radius", [0.01, 0.4])
def test_what_is_of_third_order_in_the_own_row(name, radius):
    """(N26), term by term; and random moves stay below r² |T| and it."""
    s = plain(**CASES[name])
    moves = torch.zeros(s.n, dtype=D)
    moves[TOKEN] = radius
    scores = TokenRadii(s.local, moves)
    row = OwnRow(s.heads, TOKEN)
    p, j = s.p[TOKEN], TOKEN
    reach, own, eps = scores.reach.bound[j], scores.by_own.bound[j], float(scores.excess.bound[j])
    rest = scores.beside_own.bound[j]
    z = s.z[j].norm(dim=-1)
    beyond = float(tail(exact(reach[j]), 2)) + eps * (1 + float(reach[j])) + float(rest[j])
    change = float(scores.laws.change.bound[j, j])
    moved = two(s.matrix) * radius * min(float(p[j]) * beyond, change + float(p[j] * own[j]))
    mixed = float((p * z * (2 * own * rest + rest.square())).sum()) / 2
    square = float((p * z * reach.square()).sum()) / 2
    stated = moved + mixed + eps * square + float(cubic_part(s.values, scores).bound[j])
    is_close(row._third_order(s.values, scores), stated, rel=1e-7)
    is_close(row.remainder(radius), radius**2 * float(row.second_order) + stated, rel=1e-7)
    g, bound = generator(1), float(row.remainder(radius))
    here = s.attention(s.x)[j]
    for _ in range(30):
        step = torch.zeros_like(s.x)
        direction = normal(g, 3)
        step[j] = radius * (1 - 1e-12) * direction / direction.norm()
        linear = torch.func.jvp(s.attention, (s.x,), (step,))[1][j]
        assert float((s.attention(s.x + step)[j] - here - linear).norm()) <= bound


def test_what_rounding_may_hide_of_the_second_derivative():
    s = plain(seed=4)
    row, local, j, n, d, e = OwnRow(s.heads, TOKEN), s.local, TOKEN, 4, 3, 2
    p, own, z = s.p[j], s.own[j].norm(dim=-1), s.z[j].norm(dim=-1)
    e_own, e_z, a = float(local.own.error), float(s.values.z.error), two(s.a)
    thick, wide = float(s.matrix.norm()), s.y[j].norm(dim=-1)
    potential = s.attention.potential
    known = 6 * UNIT * 0.5 * float(potential.w_q.norm() * potential.w_k.norm())
    off = float((p * (z * 2 * own * e_own + e_z * own.square())).sum())
    off += float(p[j]) * (two(s.matrix) * e_own + e_z * a + float(z[j]) * known)
    whole = float((p * thick * wide * own.square()).sum()) + float(p[j]) * thick * float(own[j] + wide[j] * a)
    terms = local.law_roundings + 2 * n + 4 * d + e + 1 + 32
    stated = off + float(relative_error(terms)) * whole
    assert float(row._rounding(0, s.values)) == pytest.approx(stated, rel=1e-6, abs=0)


def test_rotary_scores_pay_for_the_form_that_is_not_known():
    """Without one form for all pairs, P_j |z_j| a is part of what is not known."""
    g = generator(5)
    attention, x = r.Attention(r.Rotary(r.Dot(normal(g, 4, 4), normal(g, 4, 4)))), normal(g, 3, 4)
    heads = LocalHeads(subject_of(attention), r.Neighborhood(x, 0.0))
    local, values = heads.heads[0], heads.separate[0]
    missing = float(local.law.bound[1, 1] * values.size.bound[1, 1] * float(local.a))
    assert float(OwnRow(heads, 1)._rounding(0, values)) == pytest.approx(missing, rel=1e-6, abs=0)
