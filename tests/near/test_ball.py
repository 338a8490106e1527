"""Heads on a Frobenius ball: each part of the constant and of the move by its equation,
and nothing of the ball goes beyond.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import regard as r
from regard._round import spectral_norm_bound
from regard._upper import exact, relative_error
from regard.proofs.near import ball as ball_file
from regard.proofs.near.ball import (
    FrobeniusBall,
    _cumulant_factor,
    _warp,
    constant_change,
    direct_constant,
    remainder_constant,
    saturated_move,
    shifted_values,
)
from regard.proofs.near.exponential import tail_over_square
from regard.proofs.near.frobenius import FrobeniusScores
from tests.near.sequence import CASES, D, is_close, plain, two, twos
from tests.theorems.exact import generator, normal

RADII = [0.02, 0.3, 3.0]


def by_keys(s, factors, weights):
    grams = torch.einsum("i,ij,ia,ib->jab", factors.square(), weights, s.v, s.v)
    return float(torch.linalg.eigvalsh(grams)[:, -1].max().clamp_min(0)) ** 0.5


def off_diagonal(matrix):
    return matrix.masked_fill(torch.eye(len(matrix), dtype=torch.bool), 0.0)


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_constant(name, radius):
    """T_a + T_b + T_c + T_d of (N29) and (N30), and (N31) without the center."""
    s = plain(**CASES[name])
    scores, values, w, a = FrobeniusScores(s.local, radius), s.values, two(s.matrix), two(s.a)
    chi, spread, own, top = (
        part.bound for part in (scores.relative, values.spread, s.local.own_spread, scores.apart)
    )
    t_a = w * min(float(scores.column) * float(chi.max()), float(scores.law_change))
    is_close(shifted_values(scores, values), t_a, rel=1e-8)
    alpha, law, z = off_diagonal(s.alpha), s.p, s.z.norm(dim=-1)
    weighted = law.sqrt() * z
    longest = weighted.amax(-1)
    keys = (weighted * alpha).amax(-1) + spread * (law * alpha).norm(dim=-1)
    bent = a * radius**2 * (longest + spread * law.norm(dim=-1))
    turned = radius * (values.mixed.bound.square() + keys.square()).sqrt() + bent
    whole = scores.steep.bound * turned + scores.excess.bound * spread
    largest = (z * s.seen).amax(-1)
    warped = torch.stack([largest * chi, spread * scores.ratio.bound, whole]).amin(0)
    is_close(_warp(scores, values), warped, rel=1e-6)
    beyond = spread * chi.square()
    first = torch.minimum(values.mixed.bound * chi, own * warped) + own * beyond
    t_b = float(first.max()) + by_keys(s, warped + beyond, off_diagonal(law))
    wide = scores.value_spread(values).bound
    t_c = 2 * a * radius * float((wide * top).max())
    steep = s.v.norm(dim=-1) + a * radius
    slope = scores.query_spread.bound + a * top * radius
    high = scores.laws.high.bound
    columns = float(((top * steep).square().unsqueeze(-1) * high).sum(0).max()) ** 0.5
    other = float(scores.high_column) * float((steep * top).max())
    t_d = w * radius * (float((top * slope).max()) + min(columns, other))
    is_close(constant_change(scores, values), t_a + t_b + t_c + t_d, rel=1e-6)
    wide = wide + w * top * radius
    direct = w * float(scores.high_column) + by_keys(s, wide, scores.split.bound)
    direct += a * radius * float((wide * top).max()) + float((wide * slope).max())
    is_close(direct_constant(scores, values), direct, rel=1e-6)


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_move(name, radius):
    """(N32): rows by b_i sd_i(ζ), gathered; and (N33), however large the ball."""
    s = plain(**CASES[name])
    scores, values, a, w = FrobeniusScores(s.local, radius), s.values, two(s.a), two(s.matrix)
    spread, sigma, top, largest = (
        part.bound for part in (values.spread, scores.deviation, scores.top, values.largest)
    )
    parts = torch.zeros(s.n, dtype=D)
    for station in range(1, 7):
        laws = scores.laws.part(station / 6)
        grown = torch.where(s.seen, laws.high.bound / s.p, 0.0).amax(-1).sqrt()
        wide = torch.minimum(twos(laws.high.bound.sqrt().unsqueeze(-1) * s.z), values.half.bound)
        parts = parts + (1 - (station - 0.5) / 6) / 6 * wide * grown
    cumulant = 2 * scores.half.bound * parts
    is_close(_cumulant_factor(scores, values), cumulant, rel=1e-6)
    wide, grown = values.z.spreads(laws.high).minimum(values.half), (laws.high / s.local.law_low).sqrt()
    pieces = 8 + wide.roundings + 1 + grown.roundings + 1 + 5
    assert _cumulant_factor(scores, values).roundings == scores.half.roundings + 1 + pieces + 1
    second = torch.minimum(largest * sigma, spread * top)
    series = tail_over_square(scores.top, 2).bound * (second + spread * sigma.square())
    factors = torch.minimum(series, cumulant)
    weighted = spread.square().unsqueeze(-1) * s.p
    curved = a * radius**2 * float((weighted + weighted.mT).max() / 2) ** 0.5
    stated = float(scores.gather(exact(factors))) + radius * float(shifted_values(scores, values)) + curved
    is_close(remainder_constant(scores, values), stated, rel=1e-6)
    carried = scores.laws.total_change(exact(s.z.norm(dim=-1))).bound
    turned = torch.stack([largest, carried, spread * scores.relative.bound]).amin(0)
    stated = w * float(scores.high_column) * radius + float(turned.norm())
    is_close(saturated_move(scores, values), stated, rel=1e-6)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("radius", [0.0, *RADII])
def test_constants_and_moves_of_balls(radius, residual):
    """From the center or without it; the derivative itself at radius zero;
    and moves in four pieces of a path.
    """
    s = plain(seed=3, residual=residual, values=not residual)
    map = r.maps.Residual(s.attention) if residual else s.attention
    whole = FrobeniusBall(s.heads)
    jacobian = torch.func.jacrev(map)(s.x).reshape(s.x.numel() if residual else 8, -1)
    is_close(whole.norm, two(jacobian))
    assert whole.probability == 1.0
    scores = FrobeniusScores(s.local, radius)
    found, moved = whole.constant(radius), whole.deviation(radius)
    if radius == 0:
        is_close(found, two(jacobian))
        is_close(moved, 0.0)
        return
    direct = float(direct_constant(scores, s.values)) + residual
    is_close(found, min(two(jacobian) + float(constant_change(scores, s.values)), direct), rel=1e-7)
    taylor = two(jacobian) * radius + float(remainder_constant(scores, s.values))
    saturated = float(saturated_move(scores, s.values)) + radius * residual
    best = min(taylor, saturated)
    if best > 1.5 * two(jacobian) * radius:
        best = min(best, sum(float(whole.constant(radius * k / 4)) for k in (1, 2, 3, 4)) * radius / 4)
    is_close(moved, best, rel=1e-7)
    g, here = generator(5), map(s.x)
    for _ in range(40):
        step = normal(g, 4, 3)
        d = radius * (1 - 1e-12) * step / step.norm()
        assert float((map(s.x + d) - here).norm()) <= float(moved)
        assert two(torch.func.jacrev(map)(s.x + d).flatten(2).flatten(0, 1)) <= float(found)


def test_what_rounding_may_hide_of_the_norm():
    """|ΔJ E|_F over |E|_F ≤ 1 is at most the ℓ² length of what rows lose where every token moves by one."""
    s = plain(n=5, seed=3, tokens=1e4)
    jacobian = s.heads.jacobian.permute(0, 2, 1, 3).reshape(10, 15)
    lost = s.heads.jacobian_error(torch.ones(5, dtype=D)).bound.norm()
    assert float(lost) > 1e-9
    is_close(FrobeniusBall(s.heads).norm, spectral_norm_bound(jacobian) + float(lost), rel=1e-8, abs=0)


def test_the_norm_that_is_drawn_for(monkeypatch):
    """Dixon's bound of four starts: above the norm, within what 128 powers leave;
    and its number where every start is exact.
    """
    s = plain(seed=3)
    exactly = float(FrobeniusBall(s.heads).norm)
    monkeypatch.setattr(ball_file, "DENSE", 5)
    torch.manual_seed(0)
    drawn = FrobeniusBall(s.heads)
    assert 1.01 * exactly <= float(drawn.norm) <= 1.05 * exactly
    assert drawn.probability == 1 - 1e-6
    x = normal(generator(1), 1, 3)  # one token: the identity
    from regard.proofs.near.heads import LocalHeads
    from regard.proofs.subject import subject_of

    one = FrobeniusBall(LocalHeads(subject_of(r.Attention(r.Dot())), r.Neighborhood(x, 0.0)))
    monkeypatch.setattr(ball_file, "DENSE", 2)
    each = 1e-6 ** (1 / 4) / (0.8 * math.sqrt(3)) - 2 * 128 * 1e-9
    assert float(one.norm) == pytest.approx(each ** (-1 / 256), rel=1e-9, abs=0)
    tripled = SimpleNamespace(n=2, d=3, push=lambda block: 3 * block, pull=lambda block: 3 * block)
    least = 1e-6 ** (1 / 4) / (0.8 * math.sqrt(6)) - 2 * 128 * 1e-9
    drawn = 3 * least ** (-1 / 256) * (1 + float(relative_error(128 * 6)))
    assert float(FrobeniusBall(tripled)._drawn_norm().value) == pytest.approx(drawn, rel=1e-14, abs=0)
    error = float(one.heads.jacobian_error(torch.ones(1, dtype=D)))
    one.heads.separate[0].matrix = replace(one.heads.separate[0].matrix, error=exact(0.1))
    loose = float(one.heads.jacobian_error(torch.ones(1, dtype=D)))
    assert error < 1e-12 < 1e-3 < loose
    assert float(FrobeniusBall(one.heads).norm) == pytest.approx(each ** (-1 / 256) + loose, rel=1e-9, abs=0)
    monkeypatch.setattr(ball_file, "DENSE", 3)
    fresh = FrobeniusBall(one.heads)
    assert fresh.probability == 1.0
    assert float(fresh.norm) == pytest.approx(1.0 + loose, rel=1e-9, abs=0)
    s.local.by_key = replace(s.local.by_key, error=exact(0.1))
    monkeypatch.setattr(ball_file, "DENSE", 12)
    loose = float(s.heads.jacobian_error(torch.ones(4, dtype=D)).norm())
    assert float(FrobeniusBall(s.heads).norm) == pytest.approx(exactly + loose, rel=1e-9, abs=0)
