"""One token moves: closed forms of the other rows on grids, the exact second derivative of its own row,
and what is beyond both.
"""

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import pytest
import torch

import regard as r
from regard._enclosed import Numbers, Vectors
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
    _middle_errors,
    _root_of_squares,
    column_norms,
    interval_bound,
)
from regard.proofs.scores import FACTOR
from regard.proofs.subject import subject_of
from tests.near.sequence import LOOSE, D, is_close, loosen, plain, two
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
    curved = move.curvature().bound
    assert bool((least * (1 - 1e-9) <= curved).all())
    assert torch.allclose(curved, on_cells(theta, reach, w * radius, gap), rtol=1e-6)
    counts = [move._change(move.times, rising).roundings for rising in (True, False)]
    assert counts == [3 * 16 + 2] * 2
    assert move.saturation()[1].roundings == 3
    a, c = (part.bound for part in move.saturation())
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


@pytest.mark.parametrize("error", [0.0, 1e-12])
@pytest.mark.parametrize("reach", [1e-251, 1e-160, 1e-3, 900.0])
@pytest.mark.parametrize("theta", [-333.3, -30.1, 0.3, 37.7, 650.9])
def test_ranges_hold_sixty_digits(theta, reach, error):
    """σ(θ ± t) and both ends of the mean of σ', for every θ within its error:
    the rounding of θ + t is counted too.
    """
    s = plain(n=2)
    move = TokenMove(s.values, TOKEN, 1.0)
    move.theta, move.reach = (
        Numbers(torch.tensor([[theta]], dtype=D), exact(error)),
        exact(torch.tensor([reach], dtype=D)),
    )
    (p_mid, p_half), (s_mid, s_half) = move.ranges()
    with mpmath.workdps(60):

        def logistic(x):
            return 1 / (1 + mpmath.exp(-x))

        def mean(at, t):
            """(σ(θ + t) - σ(θ))/t = σ(θ + t) σ(-θ) (1 - e^{-t})/t."""
            return -mpmath.expm1(-t) / t * logistic(at + t) * logistic(-at)

        known = [mpmath.mpf(theta) + k * mpmath.mpf(error) for k in (-1, 0, 1)]
        times = [sign * mpmath.mpf(reach) for sign in (-1, 1)]
        for found, half, truths in (
            (p_mid, p_half, [logistic(at + t) for at in known for t in times]),
            (s_mid, s_half, [mean(at, t) for at in known for t in times]),
        ):
            for truth in truths:
                assert abs(truth - mpmath.mpf(found.item())) <= mpmath.mpf(half.bound.item())
        bent = move._bent(move._change(move.times, True)).bound[0]
        for t, bound in zip(move.times[0, 1:].tolist(), bent[1:].tolist(), strict=True):
            for at in known:
                straight = t * logistic(at) * logistic(-at)
                assert abs(mean(at, mpmath.mpf(t)) * t - straight) <= bound


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
    for error in (0.0, 1e-3):
        move.__dict__.clear()
        move.__init__(s.values, TOKEN, radius)
        move.theta = Numbers(move.theta.center, exact(error))
        check_uncertain_odds(move, theta, error, reach)


def check_uncertain_odds(move, theta, error, reach):
    """Odds that are known to an error: bounds of p, p', changes and of what is beyond the linear part."""
    up, down = torch.sigmoid(theta + error), torch.sigmoid(error - theta)
    is_close(move.start, up)
    is_close(move.slope, up * down)
    t = torch.linspace(0, 1, 161, dtype=D) * reach.unsqueeze(-1)
    times, odds = t[:, 1:], theta.unsqueeze(-1)
    rounding = float(relative_error(move.theta.error.roundings + 16)) * (3 * (odds.abs() + 1) + error)
    factor = torch.expm1(2 * (error + rounding))  # θ at its worst, and θ + t rounded
    part = -torch.expm1(-times)
    rising = down.unsqueeze(-1) * torch.sigmoid(odds + error + times) * part
    falling = up.unsqueeze(-1) * torch.sigmoid(error - odds + times) * part
    slope = (up * down).unsqueeze(-1)
    for up_, moved in ((True, rising), (False, falling)):
        found = move._change(times, up_)
        is_close(found, moved)
        move.times = times
        bent = (moved - slope * times).abs() + 2 * factor * (moved + slope * times)
        is_close(move._bent(found), bent, rel=1e-6 if error else 1e-3, abs=1e-14)
    if not error:  # where the difference has no digits, rounding is all of it
        tiny = move.times = torch.full_like(times, 1e-15)
        found = move._change(tiny, True)
        lost = 2 * (float(relative_error(50 + 33)) + factor) * (found.value + slope * tiny)
        assert torch.allclose(move._bent(found).value, lost, rtol=0.1, atol=0)
    top = torch.maximum((rising / times).amax(-1), (falling / times).amax(-1))
    top = torch.maximum(top, up * down) + float(CURVE) * reach / 160
    slow = (part / times)[:, -1]  # at the end, with θ at its worst
    up_low, down_low = torch.sigmoid(theta - error), torch.sigmoid(-theta - error)
    low = slow * torch.minimum(
        down_low * torch.sigmoid(theta + reach - error), up_low * torch.sigmoid(reach - theta - error)
    )
    (p_mid, p_half), (s_mid, s_half) = move.ranges()
    ends = torch.sigmoid(theta - error - reach), torch.sigmoid(theta + error + reach)
    assert torch.allclose(p_mid, (ends[0] + ends[1]) / 2, rtol=1e-9)
    is_close(p_half, (ends[1] - ends[0]) / 2, rel=1e-7)
    assert torch.allclose(s_mid, (top + low) / 2, rtol=1e-9, atol=0)
    is_close(s_half, (top - low) / 2, rel=1e-7)
    if not error:
        for middle, half, least in zip(s_mid.tolist(), s_half.bound.tolist(), low.tolist(), strict=True):
            assert Fraction(middle) - Fraction(half) <= Fraction(least) * (1 - 40 * Fraction(UNIT))


def test_a_token_that_does_not_move():
    """Nothing moves; and where a difference vanishes in float64, its slope has no bound from below."""
    s = plain(seed=3)
    rows = OtherRows(s.heads, TOKEN, 0.0)
    assert 0 <= float(rows.remainder) <= 1e-140
    assert 0 <= float(rows.whole) <= 1e-140
    move = TokenMove(s.values, TOKEN, 0.0)
    middles, ends = torch.stack([part for part, _ in move.ranges()]), [move.start.bound, move.slope.bound]
    assert torch.allclose(middles, torch.cat(ends, 1).mT, rtol=1e-12, atol=0)
    move = TokenMove(s.values, TOKEN, 0.0)
    move.theta = Numbers(torch.full((3, 1), -138.0, dtype=D), exact(0.0))  # p' = 1e-60, and a step of 1e-250
    slope, half = move.ranges()[1]
    assert bool((slope - half.bound <= 1e-60).all())


@pytest.mark.parametrize("radius", [0.01, 0.5])
def test_other_rows_together(radius):
    """√(Σ a + r² λ_max(Σ c v vᵀ)), which all see one δ; and the interval form."""
    s = plain(seed=3)
    move = TokenMove(s.values, TOKEN, radius)
    _, _, away, v, _ = facts(s, radius)
    c = move.curvature().bound
    gram = torch.einsum("i,ia,ib->ab", c, v, v)
    beyond = radius * float(torch.linalg.eigvalsh(gram)[-1]) ** 0.5
    is_close(_root_of_squares([move], exact(radius), False), beyond, rel=1e-8)
    a, c = (part.bound for part in move.saturation())
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


@pytest.mark.parametrize("radius", [0.01, 0.5])
def test_other_rows_with_errors_of_their_facts(radius):
    """Each of v, Δ and V known to an error: what that adds to (N23) and (N24)."""
    s = loosen(plain(seed=3))
    move = TokenMove(s.values, TOKEN, radius)
    _, _, away, v, _ = facts(s, radius)
    v_error, matrix, far = LOOSE["by_key"], LOOSE["matrix"], 2 * LOOSE["x"]
    w = two(s.matrix) + matrix
    gap = (away @ s.matrix).norm(dim=-1) + w * far + float(away.norm(dim=-1).max()) * matrix
    is_close(move.away.error, far)
    is_close(move.gap, gap)
    is_close(move.reach, radius * (v.norm(dim=-1) + v_error))
    c = move.curvature().bound
    steep = two(c.sqrt().unsqueeze(-1) * v) + float(c.sqrt().norm()) * v_error
    is_close(_root_of_squares([move], exact(radius), False), radius * steep, rel=1e-8)
    a, c = (part.bound for part in move.saturation())
    steep = two(c.sqrt().unsqueeze(-1) * v) + float(c.sqrt().norm()) * v_error
    is_close(
        _root_of_squares([move], exact(radius), True),
        (float(a.sum()) + (radius * steep) ** 2) ** 0.5,
        rel=1e-8,
    )
    (p_mid, p_half), (s_mid, s_half) = move.ranges()
    lengths, steeps = away.norm(dim=-1) + far, v.norm(dim=-1) + v_error
    factors = s_mid * w * (far * steeps + lengths * v_error)
    known = matrix * (p_mid + s_mid * lengths * steeps)
    lost = float((factors + known).norm())
    is_close(_middle_errors(move, exact(p_mid), exact(s_mid), s.heads), lost, rel=1e-8)
    middle = p_mid[:, None, None] * s.matrix.mT
    middle = middle + s_mid[:, None, None] * (away @ s.matrix).unsqueeze(-1) * v.unsqueeze(1)
    turned = s_half.bound * gap
    wide = two(turned.unsqueeze(-1) * v) + float(turned.norm()) * v_error
    interval = radius * (two(middle.flatten(0, 1)) + lost + w * float(p_half.bound.norm()) + wide)
    is_close(interval_bound(s.heads, [move], exact(radius)), interval, rel=1e-7)


def test_roundings_of_rows_whose_facts_are_exact():
    """γ of the sizes that rows p V + σ VᵀΔ vᵀ are made of, for heads that are mixed; γ of the law in Δ."""
    g = generator(12)
    w_q, w_k, w_v, w_o = normal(g, 2, 3, 2), normal(g, 2, 3, 2), normal(g, 2, 3, 2), normal(g, 2, 2, 5)
    attention, x = r.Attention(r.Dot(w_q, w_k), r.Linear(w_v)), normal(g, 4, 3)
    heads = LocalHeads(subject_of(r.maps.Heads(attention, w_o)), r.Neighborhood(x, 0.0))
    move = TokenMove(heads.separate[1], TOKEN, 0.3)
    count = 2 * heads.heads[1].law_roundings + 2 * 4 + 32
    error = 2 * float(heads.heads[1].x.error) + 2 * float(relative_error(count)) * float(
        heads.heads[1].radius
    )
    assert float(move.away.error) == pytest.approx(error, rel=1e-9, abs=0)
    mixing = two(w_o.reshape(4, 5))
    p, turn = torch.tensor([0.3, 0.1, 0.2], dtype=D), torch.tensor([0.02, 0.2, 0.1], dtype=D)
    move.v, move.away = (Vectors(part.center, exact(0.0)) for part in (move.v, move.away))
    lengths, steeps = move.away.center.norm(dim=-1), move.v.center.norm(dim=-1)
    thick = float(w_v[1].norm()) * mixing * math.sqrt(5)
    relative = float(relative_error(2 * 3 + 2 * 5 + 2 + 16))
    stated = relative * float((p * thick + turn * thick * lengths * steeps).norm())
    found = float(_middle_errors(move, exact(p), exact(turn), heads))
    assert found == pytest.approx(stated, rel=1e-9, abs=0)
    move.v = Vectors(move.v.center, exact(0.5))
    known = mixing * two(w_v[1]) * float((turn * lengths * 0.5).norm())
    assert float(_middle_errors(move, exact(p), exact(turn), heads)) == pytest.approx(known, rel=1e-9, abs=0)
    move.v, move.values.matrix = (
        Vectors(move.v.center, exact(0.0)),
        replace(move.values.matrix, error=exact(0.5)),
    )
    known = mixing * 0.5 * float((p + turn * lengths * steeps).norm())
    assert float(_middle_errors(move, exact(p), exact(turn), heads)) == pytest.approx(known, rel=1e-9, abs=0)


def test_roundings_of_wide_rows_are_counted():
    """(d + 2)/2 and a root of each length, and one of what it is scaled by."""
    v = Vectors(torch.ones(1, 400, dtype=D), exact(0.0))
    move = SimpleNamespace(rows=torch.zeros(1), v=v, curvature=lambda: exact(torch.ones(1, dtype=D)))
    steep = (400 + 2 + 1) // 2 + 1 + 1 + 1
    together = (2 * steep + 1) + 1 + 1 + 1
    assert _root_of_squares([move], exact(2.0), False).roundings == (together + 1) // 2 + 1


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
    unit = float(relative_error(2 + 4 + FACTOR))
    known = unit * 0.5 * float(potential.w_q.norm() * potential.w_k.norm())
    off = float((p * (z * 2 * own * e_own + e_z * own.square())).sum())
    off += float(p[j]) * (two(s.matrix) * e_own + e_z * a + float(z[j]) * known)
    whole = float((p * thick * wide * own.square()).sum()) + float(p[j]) * thick * float(own[j] + wide[j] * a)
    terms = local.law_roundings + 2 * n + 4 * d + e + 1 + 32
    stated = off + float(relative_error(terms)) * whole
    assert float(row._rounding(0, s.values)) == pytest.approx(stated, rel=1e-6, abs=0)


def test_errors_of_what_the_second_derivative_is_made_of():
    """2|own| e + e² of own·e squared, e_z, e_V and the form: each by the sizes it is multiplied with."""
    s = loosen(plain(seed=4))
    row, j = OwnRow(s.heads, TOKEN), TOKEN
    matrix, e = LOOSE["matrix"], 2 * LOOSE["by_query"] + LOOSE["by_key"]
    w, a, p = two(s.matrix) + matrix, two(s.a), s.p[j]
    e_z = float(s.values.z.error)
    own, z = s.own[j].norm(dim=-1) + e, s.z[j].norm(dim=-1) + e_z
    off = float((p * (z * (2 * own * e + e**2) + e_z * own.square())).sum())
    off += float(p[j]) * (w * e + matrix * float(own[j]) + e_z * a)
    is_close(row._rounding(0, s.values), off, rel=1e-9)
    is_close(row.second_order, min(two(row.form.flatten(1)), two(row.form.flatten(0, 1))) + off, rel=1e-9)


def test_rotary_scores_pay_for_the_form_that_is_not_known():
    """Without one form for all pairs, P_j |z_j| a is part of what is not known."""
    g = generator(5)
    attention, x = r.Attention(r.Rotary(r.Dot(normal(g, 4, 4), normal(g, 4, 4)))), normal(g, 3, 4)
    heads = LocalHeads(subject_of(attention), r.Neighborhood(x, 0.0))
    local, values = heads.heads[0], heads.separate[0]
    missing = float(local.law.bound[1, 1] * values.size.bound[1, 1] * float(local.a))
    assert float(OwnRow(heads, 1)._rounding(0, values)) == pytest.approx(missing, rel=1e-6, abs=0)
