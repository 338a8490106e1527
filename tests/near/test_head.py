"""Facts of one head at one sequence: each is the number of its definition,
and what rounding may change is counted as stated.
"""

import math
from types import SimpleNamespace

import mpmath
import pytest
import torch

import regard as r
from regard._enclosed import Numbers, Vectors, exact_matrix
from regard._upper import UNIT, exact, relative_error
from regard.proofs.near import heads as heads_file
from regard.proofs.near import token as token_file
from regard.proofs.near.head import SingularBasis, narrow_value_matrix, value_matrix
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.local_scores import rounding_of_logs
from regard.proofs.near.token import TokenMove, interval_bound
from regard.proofs.scores import FACTOR
from regard.proofs.subject import Head, subject_of
from tests.near.sequence import CASES, LOOSE, D, is_close, loosen, plain, two, twos
from tests.theorems.exact import generator, normal


@pytest.mark.parametrize("name", CASES)
def test_laws(name):
    """P, 1 - P and the odds; from both sides."""
    s = plain(**CASES[name])
    local = s.local
    is_close(local.law, s.p, abs=1e-290)
    low = local.law_low.bound
    assert bool((low <= s.p * (1 + 1e-13)).all())
    assert torch.allclose(low, s.p, rtol=1e-9, atol=1e-280)
    is_close(local.rest, 1 - s.p)
    assert torch.equal(local.seen, s.seen)
    odds = (s.p / (1 - s.p)).log()
    finite = s.seen & torch.isfinite(odds)
    assert torch.allclose(local.odds.center[finite], odds[finite], atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_slopes(name):
    s = plain(**CASES[name])
    local = s.local
    is_close(local.a, two(s.a))
    is_close(local.radius, s.away.norm(dim=-1).max())
    assert torch.allclose(local.means.center, s.p @ s.away, atol=1e-12)
    assert torch.allclose(local.y.center, s.y, atol=1e-12)
    is_close(local.alpha, s.alpha)
    assert torch.allclose(local.own.center, s.own, atol=1e-11)
    is_close(local.own_size, s.own.norm(dim=-1))
    is_close(local.own_spread, twos(s.p.sqrt().unsqueeze(-1) * s.own))
    is_close(local.own_apart, torch.cdist(s.own, s.own), abs=1e-10)
    centered = s.c - (s.p @ s.c).unsqueeze(1)
    assert torch.allclose(local.query_centered.center, centered, atol=1e-11)
    apart = torch.cdist(s.c, s.c)
    halves = torch.stack([apart[row][:, row].max() / 2 for row in s.seen])
    is_close(local.query_half, halves)


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    """|V|, z, its deviation, its largest length, half the diameter of values,
    and the forms (N15) and (N27).
    """
    s = plain(**CASES[name])
    values = s.values
    is_close(values.w, two(s.matrix))
    assert torch.allclose(values.z.center, s.z, atol=1e-12)
    is_close(values.size, s.z.norm(dim=-1))
    is_close(values.spread, twos(s.p.sqrt().unsqueeze(-1) * s.z))
    is_close(values.largest, (s.z.norm(dim=-1) * s.seen).amax(-1))
    apart = torch.cdist(s.x @ s.matrix, s.x @ s.matrix)
    is_close(values.half, torch.stack([apart[row][:, row].max() / 2 for row in s.seen]))
    weighted = s.p.unsqueeze(-1) * s.z
    gram = weighted.mT @ (s.own @ s.own.mT).square() @ weighted
    is_close(values.own_curvature, torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt(), rel=1e-6, abs=1e-7)
    root = s.p.sqrt()
    gram = (s.z @ s.z.mT) * (s.own @ s.own.mT) * root.unsqueeze(-1) * root.unsqueeze(-2)
    is_close(values.mixed, torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt(), rel=1e-6, abs=1e-7)


def test_the_curvature_of_the_own_token_is_attained():
    """|Σ_k P_k z_k (own_k·e)²| over unit e, on a grid of directions of the plane,
    is at most √λ and within a factor of it.
    """
    s = plain(d=2, values=False, seed=5)
    angles = torch.linspace(0, math.pi, 2000, dtype=D)
    e = torch.stack([angles.cos(), angles.sin()])
    seen = torch.einsum("ik,ikc,ikb->icb", s.p, s.z, (s.own @ e).square()).norm(dim=1).amax(-1)
    bound = s.values.own_curvature.bound
    assert bool((seen <= bound).all())
    assert bool((bound <= 1.5 * seen).all())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("residual", [False, True])
def test_the_jacobian_is_the_derivative(name, residual):
    s = plain(**CASES[name], residual=residual, values=not residual)
    map = r.maps.Residual(s.attention) if residual else s.attention
    exactly = torch.func.jacrev(map)(s.x).permute(0, 2, 1, 3)  # (n, n, e, d)
    assert torch.allclose(s.heads.jacobian, exactly, atol=1e-11)
    tokens = torch.tensor([1])
    fresh = LocalHeads(subject_of(s.attention, residual), r.Neighborhood(s.x, 0.0))
    assert torch.allclose(fresh.columns(tokens), exactly[:, 1:2], atol=1e-11)
    own, rest = fresh.column_grams(1)
    assert torch.allclose(own, exactly[1, 1].mT @ exactly[1, 1], atol=1e-10)
    others = [i for i in range(s.n) if i != 1]
    assert torch.allclose(rest, sum(exactly[i, 1].mT @ exactly[i, 1] for i in others), atol=1e-10)
    t = normal(generator(1), s.n, s.x.shape[-1], 2)
    assert torch.allclose(s.heads.push(t), torch.einsum("ijed,jdb->ieb", exactly, t), atol=1e-11)
    u = normal(generator(2), s.n, exactly.shape[2], 2)
    assert torch.allclose(s.heads.pull(u), torch.einsum("ijed,ieb->jdb", exactly, u), atol=1e-11)
    covariance = torch.einsum("ik,ika,kb->iab", s.p, s.y, s.c)
    assert torch.allclose(s.local.covariance_in_query(torch.arange(s.n)), covariance, atol=1e-11)


def test_rows_of_some_queries_are_those_of_all():
    s = plain(n=5, seed=3)
    queries = torch.tensor([1, 3])
    part = s.local.with_rows(queries)
    assert torch.allclose(part.law.bound, s.local.law.bound[queries])
    assert torch.allclose(part.own.center, s.local.own.center[queries])
    assert torch.allclose(part.own_spread.bound, s.local.own_spread.bound[queries], rtol=1e-9)
    assert torch.allclose(part.alpha.bound, s.local.alpha.bound[queries])
    assert torch.allclose(part.y.center, s.local.y.center[queries])
    assert torch.allclose(part.query_half.bound, s.local.query_half.bound[queries])


# What rounding may change


def longest(vectors):
    return float(vectors.norm(dim=-1).max())


def test_errors_of_scores_and_slopes():
    """Of x, of c = Ax, of v = Aᵀx + β and of s = v·x: γ times the sizes they are made of,
    and what was off before.
    """
    s = plain(seed=4)
    local, d = s.local, 3
    a, near, far = float(s.a.norm()), longest(s.away), longest(s.x)
    form = local  # the form itself is off as its own file says
    off = (
        gamma(2 + 4 + FACTOR)
        * 0.5
        * float(s.attention.potential.w_q.norm() * s.attention.potential.w_k.norm())
    )
    off_beta = (
        gamma(2 + 4 + FACTOR)
        * 0.5
        * float(s.attention.potential.w_k.norm() * s.attention.potential.b_q.norm())
    )
    x_error = UNIT * near
    assert float(form.x.error) == pytest.approx(x_error, rel=1e-9, abs=0)
    by_query = gamma(d + 2) * a * near + off * near + two(s.a) * x_error
    assert float(local.by_query.error) == pytest.approx(by_query, rel=1e-6, abs=0)
    by_key = gamma(d + 3) * (a * far + float(s.beta.norm())) + off * far + off_beta
    assert float(local.by_key.error) == pytest.approx(by_key, rel=1e-6, abs=0)
    alpha = longest(s.v)
    error = by_key * near + alpha * x_error + gamma(d + 2) * alpha * near
    scores = s.v @ s.away.mT
    logs = float(s.p.log().abs().max())
    log_law = 2 * error + 8 * UNIT * float(scores.abs().max()) + 16 * UNIT * logs + (2 * 4 + 64) * UNIT
    assert float(local.log_law.error) == pytest.approx(log_law, rel=1e-6, abs=0)
    assert local.law_roundings == math.ceil(float(local.log_law.error) / UNIT) + 16


def gamma(count):
    return float(relative_error(count))


def test_errors_of_the_log_law_with_positions():
    """Twice the largest bias more."""
    s, still = plain(seed=4, slope=3.0), plain(seed=4, slope=0.0)
    scores, before = s.v @ s.away.mT + s.bias, still.v @ still.away.mT
    logs = float(s.p.log().abs().max()) - float(still.p.log().abs().max())
    more = 8 * UNIT * (float(scores.abs().max()) + 2 * 9.0 - float(before.abs().max())) + 16 * UNIT * logs
    assert float(s.local.log_law.error) - float(still.local.log_law.error) == pytest.approx(
        more, rel=1e-6, abs=0
    )


def test_errors_of_means_and_own_slopes():
    s = plain(seed=4)
    local, n = s.local, 4
    count = local.law_roundings
    radius, steep = float(local.radius), float(local.by_query.lengths().bound.max())
    x, c, v = float(local.x.error), float(local.by_query.error), float(local.by_key.error)
    means = x + gamma(count + n + 2) * radius
    assert float(local.means.error) == pytest.approx(means, rel=1e-6, abs=0)
    assert float(local.y.error) == pytest.approx(x + means + 4 * UNIT * radius, rel=1e-6, abs=0)
    own = 2 * c + v + gamma(count + n + 8) * (steep + float(local.alpha.bound.max()))
    assert float(local.own.error) == pytest.approx(own, rel=1e-6, abs=0)
    assert float(local.query_centered.error) == pytest.approx(
        2 * c + gamma(count + n + 4) * steep, rel=1e-6, abs=0
    )
    logs = local.log_rest.center
    rest = float(local.log_law.error) + 16 * UNIT * float(logs.abs().max()) + (2 * n + 64) * UNIT
    assert float(local.log_rest.error) == pytest.approx(rest, rel=1e-6, abs=0)
    odds = float(local.log_law.error) + rest + 16 * UNIT * float(local.odds.center.abs().max()) + 66 * UNIT
    assert float(local.odds.error) == pytest.approx(odds, rel=1e-6, abs=0)


def test_laws_against_sixty_digits():
    """The error of log P holds what float64 loses, far from the origin too."""
    s = plain(seed=7, tokens=30.0)
    with mpmath.workdps(60):
        p = s.attention.potential
        w_q, w_k = mpmath.matrix(p.w_q.tolist()), mpmath.matrix(p.w_k.tolist())
        x = mpmath.matrix(s.x.tolist())
        queries = x * w_q
        for i in range(4):
            for b in range(2):
                queries[i, b] += mpmath.mpf(float(p.b_q[b]))
        scores = queries * (x * w_k).T / 2
        for i in range(4):
            total = mpmath.log(mpmath.fsum(mpmath.exp(scores[i, k]) for k in range(4)))
            for k in range(4):
                off = abs(scores[i, k] - total - mpmath.mpf(float(s.local.log_law.center[i, k])))
                assert off <= float(s.local.log_law.error)


def test_a_score_out_of_range_is_refused():
    from regard.proofs.theorem import Refusal

    x = torch.full((2, 2), 1e160, dtype=D) * torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=D)
    with pytest.raises(Refusal, match="range of float64"):
        LocalHeads(subject_of(r.Attention(r.Dot())), r.Neighborhood(x, 0.0))


def test_rotary_scores_are_differentiated():
    """By automatic differentiation, with an error of 8 γ(4d + 16) √d of their sizes."""
    g = generator(8)
    attention = r.Attention(r.Rotary(r.Dot(normal(g, 4, 4), normal(g, 4, 4))))
    x = normal(g, 3, 4)
    heads = LocalHeads(subject_of(attention), r.Neighborhood(x, 0.0))
    (local,) = heads.heads
    assert torch.allclose(heads.jacobian, torch.func.jacrev(attention)(x).permute(0, 2, 1, 3), atol=1e-11)
    t, u = normal(g, 3, 4, 2), normal(g, 3, 4, 2)
    assert torch.allclose(heads.push(t), torch.einsum("ijed,jdb->ieb", heads.jacobian, t), atol=1e-11)
    assert torch.allclose(heads.pull(u), torch.einsum("ijed,ieb->jdb", heads.jacobian, u), atol=1e-11)
    part, some = local.with_rows(torch.tensor([2, 0])), torch.tensor([2, 0])
    assert torch.equal(part.by_query.center, local.by_query.center[some])
    assert torch.allclose(part.own.center, local.own.center[some])
    relative, far = 8 * gamma(4 * 4 + 16) * 2, longest(x)
    steep = longest(local.by_key.center) + longest(local.by_query.center) + float(local.a) * far
    assert (
        float(local.by_key.error)
        == float(local.by_query.error)
        == pytest.approx(relative * steep, rel=1e-6, abs=0)
    )
    scores = attention.potential.scores(x, x, torch.arange(3), torch.arange(3))
    error = 2 * relative * (steep * far + float(scores.abs().max()))
    logs = float(local.log_law.center.abs().max())
    stated = error + 8 * UNIT * float(scores.abs().max()) + 16 * UNIT * logs + (6 + 64) * UNIT
    assert float(local.log_law.error) == pytest.approx(stated, rel=1e-6, abs=0)


def test_weights_too_small_for_float64():
    """They are not zero from above, and nothing is said of them from below; nor of any without digits."""
    s = plain()
    logs = torch.tensor([[0.0, -680.0, -2000.0, -math.inf]], dtype=D).expand(4, 4)
    s.local.seen = logs > -math.inf
    for error, low in ((0.0, [1.0, 0.0, 0.0, 0.0]), (0.2, [0.0] * 4)):
        s.local.__dict__.pop("law_roundings", None)
        for name in ("law", "law_low", "p"):
            s.local.__dict__.pop(name, None)
        s.local.log_law = Numbers(logs, exact(error))
        assert s.local.law_low.value[0].tolist() == low
        assert s.local.law.value[0, 1:].tolist() == pytest.approx(
            [math.exp(-680), 1e-300, 0.0], rel=1e-9, abs=0
        )
    for name in ("law", "law_low", "p", "law_roundings"):
        s.local.__dict__.pop(name)
    s.local.log_law = Numbers(logs, exact(1e-3))
    assert math.exp(1e-3) <= float(s.local.law.bound[0, 0]) <= math.exp(1.01e-3)
    assert math.exp(-1.01e-3) <= float(s.local.law_low.bound[0, 0]) <= math.exp(-1e-3)
    s.local.__dict__.pop("law_roundings")
    s.local.log_law = Numbers(logs, exact(100.0))
    assert s.local.law_roundings == 2**52 + 16
    assert rounding_of_logs(torch.tensor([-3.0, -math.inf], dtype=D), 5).roundings == 1
    s.local.__dict__["own"] = Vectors(s.local.own.center, exact(0.0))
    assert s.local.own_apart.roundings == 3 + 4 + 1


def test_value_matrices():
    """V = w u with its rounding γ(inner + 2) |w|_F |u|_F; narrow ones keep every length."""
    g = generator(9)
    w, u = normal(g, 5, 2), normal(g, 2, 6)
    (head,) = subject_of(r.Attention(r.Dot(), r.Factored(w, u))).separate
    made = value_matrix(head, 5)
    assert torch.allclose(made.center, w @ u)
    assert float(made.error) == pytest.approx(gamma(2 + 2) * float(w.norm() * u.norm()), rel=1e-6, abs=0)
    is_close(made.norm, two(w @ u))
    narrow = narrow_value_matrix(head, 5)
    assert narrow.center.shape == (5, 2)
    y = normal(g, 7, 5)
    assert torch.allclose((y @ narrow.center).norm(dim=-1), (y @ w @ u).norm(dim=-1), rtol=1e-12)
    error = (16 * 12 * 2 * UNIT + gamma(2 + 2)) * float(w.norm() * u.norm())
    assert float(narrow.error) == pytest.approx(error, rel=1e-6, abs=0)
    single = Head(r.Attention(r.Dot(), r.Linear(w @ u)))
    again = narrow_value_matrix(single, 5)
    assert again.center.shape == (5, 2)
    assert torch.allclose((y @ again.center).norm(dim=-1), (y @ w @ u).norm(dim=-1), rtol=1e-12)
    assert float(again.error) == pytest.approx(
        (16 * 11 * 2 * UNIT + 2e-14) * float((w @ u).norm()), rel=1e-6, abs=0
    )
    whole = Head(r.Attention(r.Dot(), r.Linear(normal(g, 3, 3))))
    assert float(narrow_value_matrix(whole, 3).error) == pytest.approx(
        16 * 6 * 2 * UNIT * float(whole.lookup.w_v.norm()), rel=1e-6, abs=0
    )


def test_what_rounding_may_hide_of_the_jacobian():
    """For moves ρ of tokens: errors of factors times the sizes of the others, and γ of all of it."""
    s = plain(seed=4)
    local, values, n, d, e = s.local, s.values, 4, 3, 2
    rho = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=D)
    wide = 2 * float(local.radius) + float(local.y.error)
    steep = float(local.by_query.lengths().bound.max())
    relative = gamma(local.law_roundings + 2 * n + 3 * d + e + 1 + 16)
    size = (s.p * (wide * s.alpha + 1)) @ rho
    both = size + 2 * wide * steep * rho
    slope = (s.p * (float(local.y.error) * s.alpha + wide * float(local.by_key.error))) @ rho
    turned = 2 * (float(local.y.error) * steep + wide * float(local.by_query.error)) * rho
    stated = float(s.matrix.norm()) * relative * both + two(s.matrix) * (slope + turned)
    assert torch.allclose(s.heads.jacobian_error(rho).bound, stated, rtol=1e-6, atol=0)
    assert values.matrix.error.value == 0
    added = plain(seed=4, residual=True, values=False)
    without = plain(seed=4, values=False)
    more = added.heads.jacobian_error(rho).bound - without.heads.jacobian_error(rho).bound
    assert torch.allclose(more, float(relative_error(2)) * rho, rtol=1e-2, atol=1e-20)


@pytest.mark.parametrize("name", ["full", "causal"])
def test_errors_are_part_of_every_bound(name):
    """Lengths, deviations and half diameters are as much larger as their vectors are uncertain; (N15) and
    (N27) by errors of each of their factors.
    """
    s = loosen(plain(**CASES[name]))
    local, values = s.local, s.values
    w = two(s.matrix) + LOOSE["matrix"]
    is_close(local.alpha, s.alpha + LOOSE["by_key"])
    is_close(local.means.error, LOOSE["x"], rel=1e-9)
    is_close(local.y_error, 2 * LOOSE["x"])
    own, z = 2 * LOOSE["by_query"] + LOOSE["by_key"], 2 * w * LOOSE["x"]
    z += float(s.y.norm(dim=-1).max()) * LOOSE["matrix"]
    is_close(local.own.error, own)
    is_close(local.query_centered.error, 2 * LOOSE["by_query"])
    is_close(local.own_size, s.own.norm(dim=-1) + own)
    is_close(local.own_spread, twos(s.p.sqrt().unsqueeze(-1) * s.own) + own)
    is_close(local.own_apart, torch.cdist(s.own, s.own) + 2 * own, abs=1e-10)
    halves = torch.stack([torch.cdist(s.c, s.c)[row][:, row].max() / 2 for row in s.seen])
    is_close(local.query_half, halves + LOOSE["by_query"])
    is_close(values.z.error, z)
    size = s.z.norm(dim=-1) + z
    is_close(values.size, size)
    is_close(values.spread, twos(s.p.sqrt().unsqueeze(-1) * s.z) + z)
    is_close(values.largest, (size * s.seen).amax(-1))
    apart = torch.cdist(s.x @ s.matrix, s.x @ s.matrix)
    moved = w * LOOSE["x"] + float(s.away.norm(dim=-1).max()) * LOOSE["matrix"]
    is_close(values.half, torch.stack([apart[row][:, row].max() / 2 for row in s.seen]) + moved)
    weighted, lengths = s.p.unsqueeze(-1) * s.z, s.own.norm(dim=-1)
    gram = weighted.mT @ (s.own @ s.own.mT).square() @ weighted
    off = (s.p * (z * lengths.square() + size * (2 * lengths * own + own**2))).sum(-1)
    curved = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt() + 2 * off
    is_close(values.own_curvature, curved, rel=1e-6, abs=1e-7)
    root = s.p.sqrt()
    gram = (s.z @ s.z.mT) * (s.own @ s.own.mT) * root.unsqueeze(-1) * root.unsqueeze(-2)
    around = ((z * (lengths + own) + size * own) * s.seen).amax(-1)
    mixed = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt() + 2 * around
    is_close(values.mixed, mixed, rel=1e-6, abs=1e-7)
    wide, rho = 2 * float(local.radius) + 2 * LOOSE["x"], torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=D)
    is_close(local.radius, s.away.norm(dim=-1).max() + LOOSE["x"])
    steep = longest(local.by_query.center) + LOOSE["by_query"]
    alpha = s.alpha + LOOSE["by_key"]
    both = (s.p * (wide * alpha + 1)) @ rho + 2 * wide * steep * rho
    slope = (s.p * (2 * LOOSE["x"] * alpha + wide * LOOSE["by_key"])) @ rho
    turned = 2 * (2 * LOOSE["x"] * steep + wide * LOOSE["by_query"]) * rho
    is_close(s.heads.jacobian_error(rho), w * (slope + turned) + LOOSE["matrix"] * both, rel=1e-7)


def test_roundings_of_bounds_whose_facts_are_exact():
    """(N15) and (N27) where every factor is known: γ of the sizes they are made of, and of the law."""
    s = loosen(plain(seed=4), 0.0)
    s.local.log_law = Numbers(s.local.log_law.center, exact(1e-6))
    law, own, z = s.local.law, s.own.norm(dim=-1), s.z.norm(dim=-1)
    assert s.local.law_roundings == math.ceil(1e-6 / UNIT) + 16
    weighted = s.p.unsqueeze(-1) * s.z
    gram = weighted.mT @ (s.own @ s.own.mT).square() @ weighted
    curved = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt()
    z_error, own_error = float(s.values.z.error), float(s.local.own.error)
    size = z + z_error
    moved = s.p * (z_error * own.square() + size * 2 * own * own_error)
    inexact = gamma(s.local.law_roundings + 8 * 4) * s.p * size * own.square()
    found = s.values.own_curvature.bound
    stated = curved + (inexact + 2 * moved).sum(-1)
    assert bool((found >= stated).all())
    grown = float(law.bound[0, 0] / law.value[0, 0]) - 1  # all of it is grown as its law is
    assert torch.allclose(found - curved, stated - curved + grown * stated, rtol=1e-3, atol=0)
    root = s.p.sqrt()
    gram = (s.z @ s.z.mT) * (s.own @ s.own.mT) * root.unsqueeze(-1) * root.unsqueeze(-2)
    top = torch.linalg.eigvalsh(gram)[:, -1].sqrt()
    around = 2 * (z_error * own + size * own_error).amax(-1)
    more = s.values.mixed.bound - top
    assert torch.allclose(more, grown * top + around, rtol=1e-3, atol=0)


def test_few_numbers_at_a_time_make_the_same_sums(monkeypatch):
    g = generator(10)
    w_q, w_k, w_v, w_o = normal(g, 3, 3, 2), normal(g, 3, 3, 2), normal(g, 3, 3, 2), normal(g, 3, 2, 3)
    map, x = r.maps.Heads(r.Attention(r.Dot(w_q, w_k), r.Linear(w_v)), w_o), normal(g, 5, 3)
    subject, near = subject_of(map), r.Neighborhood(x, 0.0)
    whole = LocalHeads(subject, near)
    interval = interval_bound(whole, [TokenMove(values, 1, 0.3) for values in whole.separate], exact(0.3))
    grams = whole.column_grams(1)
    for some in (1, 20):
        monkeypatch.setattr(heads_file, "AT_ONCE", some)
        monkeypatch.setattr(token_file, "AT_ONCE", some)
        parts = LocalHeads(subject, near)
        assert torch.allclose(parts.jacobian, whole.jacobian, atol=1e-13)
        for one, other in zip(LocalHeads(subject, near).column_grams(1), grams, strict=True):
            assert torch.allclose(one, other, atol=1e-13)
        moves = [TokenMove(values, 1, 0.3) for values in parts.separate]
        assert float(interval_bound(parts, moves, exact(0.3))) == pytest.approx(float(interval), rel=1e-12)


def test_values_in_a_singular_basis():
    """Squares along the right singular vectors of V, and what is outside of them, with its rounding."""
    matrix = torch.diag(torch.tensor([3.0, 2.0], dtype=D)) @ torch.tensor(
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=D
    )
    z = torch.tensor([[[1.0, 2.0, 2.0], [4.0, 0.5, 0.0]]], dtype=D)
    found = SingularBasis(SimpleNamespace(z=Vectors(z, exact(0.0)), matrix=exact_matrix(matrix)))
    assert found.singular.tolist() == pytest.approx([3.0, 2.0])
    assert torch.allclose(found.inside, torch.tensor([[[4.0, 1.0], [0.25, 16.0]]], dtype=D))
    assert found.outside.bound[0].tolist() == pytest.approx([4.0, gamma(4 * 3 + 8) * 16.25], rel=1e-9, abs=0)
    assert float(found.outside.bound[0, 0]) >= 4 + gamma(20) * 8


def test_heads_together():
    """|W_O| √Σ b² of separate values, or Σ b of folded ones; side by side √Σ b²."""
    g = generator(10)
    w_q, w_k, w_v = (normal(g, 2, 3, 2) for _ in range(3))
    attention, w_o = r.Attention(r.Dot(w_q, w_k), r.Linear(w_v)), normal(g, 2, 2, 3)
    x = normal(g, 4, 3)
    mixed = LocalHeads(subject_of(r.maps.Heads(attention, w_o)), r.Neighborhood(x, 0.0))
    apart = LocalHeads(subject_of(attention), r.Neighborhood(x, 0.0))
    norms = [two(w) for w in w_v], [two(w_v[h] @ w_o[h]) for h in range(2)]
    joined, summed = two(w_o.reshape(4, 3)) * math.hypot(*norms[0]), sum(norms[1])
    is_close(mixed.combine(lambda values, h: values.w), min(joined, summed))
    is_close(mixed.combine(lambda values, h: exact(1.0)), min(two(w_o.reshape(4, 3)) * math.sqrt(2), 2.0))
    is_close(apart.combine(lambda values, h: values.w), math.hypot(*norms[0]))
    is_close(mixed.add([exact(3.0), exact(4.0)]), 7.0)
    is_close(apart.add([exact(3.0), exact(4.0)]), 5.0)
    assert (mixed.width, apart.width) == (3, 4)
    exactly = torch.func.jacrev(r.maps.Heads(attention, w_o))(x).permute(0, 2, 1, 3)
    assert torch.allclose(mixed.jacobian, exactly, atol=1e-11)
    t = normal(g, 4, 3, 1)
    assert torch.allclose(mixed.push(t), torch.einsum("ijed,jdb->ieb", exactly, t), atol=1e-11)


def test_heads_side_by_side_have_their_own_cotangents():
    """Three heads that are not mixed: ⟨J t, u⟩ = ⟨t, Jᵀu⟩, and no head reads another's part of u."""
    g = generator(11)
    attention = r.Attention(r.Dot(normal(g, 3, 4, 2), normal(g, 3, 4, 2)), r.Linear(normal(g, 3, 4, 2)))
    heads = LocalHeads(subject_of(attention), r.Neighborhood(normal(g, 5, 4), 0.0))
    t, u = normal(g, 5, 4, 6), normal(g, 5, 6, 6)
    pushed, pulled = (heads.push(t) * u).sum((0, 1)), (t * heads.pull(u)).sum((0, 1))
    torch.testing.assert_close(pushed, pulled, rtol=1e-12, atol=1e-12)
    exactly = heads.columns(torch.arange(5), torch.arange(5))
    assert torch.allclose(heads.pull(u), torch.einsum("ijed,ieb->jdb", exactly, u), atol=1e-11)
