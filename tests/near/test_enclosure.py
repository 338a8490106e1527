"""How far scores of a head can move: each number of the enclosures by its equation,
and no move of tokens goes beyond it.
"""

import math

import pytest
import torch

from regard._enclosed import Vectors, largest_roots
from regard._upper import Upper, exact
from regard.proofs.near.enclosure import Enclosure
from regard.proofs.near.frobenius import FrobeniusScores, symmetric_root
from regard.proofs.near.laws import Laws
from regard.proofs.near.radii import STATIONS, TokenRadii
from tests.near.sequence import CASES, LOOSE, D, is_close, loosen, plain, two, twos
from tests.theorems.exact import generator, normal

RADII = torch.tensor([0.3, 0.0, 0.2, 0.15, 0.05], dtype=D)
EYE = torch.eye


def others(values):
    return values.sum(-1, keepdim=True) - values


def ingredients(s, rho):
    eye = torch.eye(s.n, dtype=torch.bool)
    step = (s.alpha * rho).masked_fill(eye, 0.0)
    drift = ((1 - s.p) * rho + others(s.p * rho)) * s.seen
    return eye, rho.unsqueeze(-1), step, drift, two(s.a)


@pytest.mark.parametrize("name", CASES)
def test_scores_over_radii(name):
    """(N2), (N4) and (N5)."""
    s = plain(**CASES[name])
    rho = RADII[: s.n]
    found = TokenRadii(s.local, rho)
    eye, turn, step, drift, a = ingredients(s, rho)
    is_close(found.step, step)
    is_close(found.drift, drift)
    by_own = turn * s.own.norm(dim=-1)
    is_close(found.by_own, by_own)
    beside = (others(s.p * step) + (1 - s.p) * step + a * turn * drift) * s.seen
    is_close(found.beside_own, beside)
    is_close(found.reach, (by_own + beside) * s.seen)
    is_close(found.top, ((by_own + beside) * s.seen).amax(-1))
    each = step + a * turn * rho
    both = s.seen.unsqueeze(-1) & s.seen.unsqueeze(-2) & ~eye
    apart = turn.unsqueeze(-1) * torch.cdist(s.own, s.own) + each.unsqueeze(-1) + each.unsqueeze(-2)
    climb = (apart * both).amax(-1)
    is_close(found.laws.climb, climb)
    half = climb.amax(-1) / 2
    is_close(found.half, half)
    own = twos(s.p.sqrt().unsqueeze(-1) * s.own)
    sd = rho * own + (s.p * step.square()).sum(-1).sqrt() + a * rho * (s.p * rho.square()).sum(-1).sqrt()
    is_close(found.deviation, torch.minimum(torch.minimum(sd, half), ((by_own + beside) * s.seen).amax(-1)))


def unit(vectors):
    return (1 - 1e-12) * vectors / vectors.norm(dim=-1, keepdim=True)


def holds(s, found, moves):
    worst = 0.0
    for d in moves:
        zeta = torch.where(s.seen, s.zeta(d), 0.0)
        after = s.law_at(s.x + d)
        assert bool((zeta.abs() <= found.reach.bound + 1e-12).all())
        assert bool(((s.p * zeta.square()).sum(-1).sqrt() <= found.deviation.bound + 1e-12).all())
        spans = torch.where(s.seen, zeta, -math.inf).amax(-1) - torch.where(s.seen, zeta, math.inf).amin(-1)
        assert bool((spans <= 2 * found.half.bound + 1e-12).all())
        z = (s.p * zeta.exp()).sum(-1)
        assert bool((z - 1 <= found.excess.bound + 1e-13).all())
        ratio = torch.where(s.seen & (s.p > 0), after / s.p - 1, 0.0)
        assert bool(((s.p * ratio.square()).sum(-1).sqrt() <= found.relative.bound + 1e-12).all())
        assert bool((ratio.abs().amax(-1) <= found.ratio.bound + 1e-12).all())
        moved = (after - s.p).abs().sum(-1)
        assert bool((moved <= found.swap.bound + 1e-13).all())
        f = torch.tensor([2.0, 0.5, 1.0, 3.0, 0.1], dtype=D)[: s.n]
        assert bool((((after - s.p).abs() @ f) <= found.total_change(exact(f)).bound + 1e-12).all())
        worst = max(worst, float((spans / (2 * found.half.bound)).max()))
    assert worst > 0.2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("radius", [0.02, 0.5])
def test_scores_over_a_ball(name, radius):
    """(N3), (N4) and (N5) for tokens that share one radius."""
    s = plain(**CASES[name])
    found = FrobeniusScores(s.local, radius)
    n, a = s.n, two(s.a)
    eye = torch.eye(n, dtype=torch.bool)
    alpha, off, rest = s.alpha.masked_fill(eye, 0.0), s.p.masked_fill(eye, 0.0), 1 - s.p
    keys = others((s.p * alpha).square()) + (rest * alpha).square()
    apart = others(off.square()) + rest.square().masked_fill(eye, 0.0)
    close = torch.where(eye, rest.diagonal().unsqueeze(-1), s.p.diagonal().unsqueeze(-1).expand(n, n))
    linear = radius * (s.own.square().sum(-1) + keys).sqrt()
    reach = linear + a * radius**2 * (close + (close.square() + apart).sqrt()) / 2
    is_close(found.reach, reach * s.seen)
    both = s.seen.unsqueeze(-1) & s.seen.unsqueeze(-2) & ~eye
    each = alpha.square()
    span = (torch.cdist(s.own, s.own).square() + each.unsqueeze(-1) + each.unsqueeze(-2)).sqrt()
    climb = ((radius * span + a * radius**2 * (1 + math.sqrt(2)) / 2) * both).amax(-1)
    is_close(found.laws.climb, climb)
    is_close(found.half, climb.amax(-1) / 2)
    own = twos(s.p.sqrt().unsqueeze(-1) * s.own)
    sd = (
        radius * (own.square() + (off * alpha.square()).amax(-1)).sqrt() + a * radius**2 * s.p.amax(-1).sqrt()
    )
    is_close(found.deviation, torch.minimum(torch.minimum(sd, climb.amax(-1) / 2), (reach * s.seen).amax(-1)))


@pytest.mark.parametrize("radius", [0.02, 0.5, 3.0])
def test_what_rows_share_over_a_ball(radius):
    """Deviations under every law, weights of Laplacians, and rows gathered in ℓ²."""
    s = plain(seed=3)
    found = FrobeniusScores(s.local, radius)
    high, low = found.laws.high.bound, found.laws.low.bound
    is_close(found.apart, high.amax(-1).sqrt().clamp(max=math.sqrt(0.5)))
    nearest = torch.minimum(torch.maximum(torch.tensor(0.5, dtype=D), low), high)
    halved = 2 * nearest * (1 - nearest)
    smaller = (halved.amax(-1) < high.amax(-1)).unsqueeze(-1)
    is_close(found.split, torch.where(smaller, halved, high))
    is_close(found.column, s.p.sum(0).max().sqrt())
    is_close(found.high_column, high.sum(0).max().sqrt())
    centered = s.c - (s.p @ s.c).unsqueeze(1)
    apart = torch.cdist(s.c, s.c).max() / 2
    is_close(found.query_spread, twos(high.sqrt().unsqueeze(-1) * centered).clamp(max=float(apart)))
    widest = torch.cdist(s.x @ s.matrix, s.x @ s.matrix).max() / 2
    is_close(found.value_spread(s.values), twos(high.sqrt().unsqueeze(-1) * s.z).clamp(max=float(widest)))
    factors = torch.tensor([0.5, 2.0, 1.0, 0.3], dtype=D)
    off = s.p.masked_fill(torch.eye(4, dtype=torch.bool), 0.0)

    def by_keys(weights):
        grams = torch.einsum("i,ij,ia,ib->jab", factors.square(), weights, s.v, s.v)
        return float(torch.linalg.eigvalsh(grams)[:, -1].max().clamp_min(0)) ** 0.5

    is_close(found.by_keys(exact(factors), exact(off)), by_keys(off), rel=1e-8)
    own = twos(s.p.sqrt().unsqueeze(-1) * s.own)
    weighted = factors.square().unsqueeze(-1) * s.p
    cross = float((weighted + weighted.mT).max() / 2) ** 0.5
    stated = radius * (float((factors * own).max()) + by_keys(off)) + two(s.a) * radius**2 * cross
    is_close(found.gather(exact(factors)), stated, rel=1e-8)
    is_close(symmetric_root(exact(weighted)), cross)
    uncertain = FrobeniusScores(loosen(plain(seed=3)).local, radius)
    columns = (factors.square().unsqueeze(-1) * off).sum(0).sqrt().max()
    more = by_keys(off) + float(columns) * LOOSE["by_key"]
    is_close(uncertain.by_keys(exact(factors), exact(off)), more, rel=1e-8)
    found.__dict__["slopes"] = Vectors(found.slopes.center, exact(0.0))
    counted = found.by_keys(Upper(factors, 30), Upper(off, 50)).roundings
    roots = (2 * 30 + 1 + 50 + 1 + 1) // 2 + 1
    assert counted == largest_roots(torch.eye(found.slopes.shape[-1], dtype=D)).roundings + roots + 1 + 1
    assert found.split.roundings == 4
    factors = s.p.amax(-1).sqrt() * found.steep.bound
    weighted = factors.square().unsqueeze(-1) * s.p
    stated = radius * (float((factors * own).max()) + by_keys(off))
    stated += two(s.a) * radius**2 * float((weighted + weighted.mT).max() / 2) ** 0.5
    is_close(found.law_change, stated, rel=1e-8)


def enclosure(s, reach, climb, deviation):
    laws = Laws(s.local, exact(reach), exact(climb), exact(climb.amax(-1) / 2))
    return Enclosure(s.local, laws, exact(deviation))


@pytest.mark.parametrize("size", [1e-4, 0.1, 1.0, 4.0, 6.0])
def test_what_follows_from_the_enclosure(size):
    """(N10), (N11) and (N12) by their formulas."""
    s = plain(seed=3)
    reach = size * torch.tensor([0.3, 0.7, 0.1, 0.9], dtype=D).expand(4, 4)
    climb = size * torch.tensor([0.5, 1.1, 0.9, 1.0], dtype=D).expand(4, 4)
    sigma = size * torch.tensor([0.2, 0.3, 0.4, 2.0], dtype=D)
    found = enclosure(s, reach, climb, sigma)
    top, half = 0.9 * size, 0.55 * size
    sigma = sigma.clamp(max=half)
    is_close(found.deviation, sigma)
    is_close(found.steep, torch.full((4,), math.expm1(top) / top, dtype=D))
    second = torch.expm1(reach) - reach
    by_sigma = sigma.square() * ((math.expm1(top) - top) / top**2)
    is_close(found.excess, torch.minimum((s.p * second).sum(-1), by_sigma), rel=1e-6, abs=1e-15)
    bow = (math.expm1(-top) + top) / top**2
    assert found.bow.bound.tolist() == pytest.approx([min(bow, 0.4995)] * 4, rel=1e-6, abs=0)
    steep = math.expm1(top) / top
    high, low = found.laws.high.bound, found.laws.low.bound
    change = torch.maximum(high - s.p, s.p - low)
    boxed = (change.square() / s.p).sum(-1).sqrt()
    peak = torch.where(
        sigma.square() * min(bow, 0.4995) < 0.99,
        steep * sigma / (1 + min(bow, 0.4995) * sigma.square()),
        steep / (2 * min(bow, 0.4995) ** 0.5),
    )
    parts = torch.stack(
        [
            boxed,
            steep * sigma,
            peak,
            torch.full_like(sigma, math.expm1(top) ** 0.5),
            torch.full_like(sigma, math.sinh(half)),
        ]
    )
    is_close(found.relative, parts.amin(0), rel=1e-5, abs=1e-13)
    is_close(found._by_deviation, peak, rel=1e-6, abs=1e-13)
    assert found._by_deviation.roundings > found.bow.roundings // 2 >= 20_000
    is_close(found.swap, torch.full((4,), 2 * math.tanh(half / 2), dtype=D))
    is_close(found.ratio, (change / s.p).amax(-1).clamp(max=math.expm1(top)), rel=1e-6)
    f = torch.tensor([2.0, 0.5, 1.0, 3.0], dtype=D)
    shifted = torch.stack(
        [
            2 * math.tanh(half / 2) * torch.full((4,), 3.0, dtype=D),
            found.relative.bound * (s.p * f.square()).sum(-1).sqrt(),
            found.laws.total_change(exact(f)).bound,
        ]
    )
    is_close(found.total_change(exact(f)), shifted.amin(0))


def test_the_total_variation_is_attained_by_two_keys():
    """Odds that go from e^{-M} to e^{M}: Σ|P' - P| = 2 tanh(M/2)."""
    for half in (0.01, 1.0, 3.0):
        before, after = (1 / (1 + math.exp(sign * half)) for sign in (1, -1))
        assert float(2 * exact(half).halved().tanh()) == pytest.approx(2 * (after - before), rel=1e-9, abs=0)


def test_stations_of_a_path():
    """Sixths of the way, at once for few rows and one by one for many; each bound at its far end."""
    for n in (4, 5):
        s = plain(n=n, seed=3)
        found = TokenRadii(s.local, RADII[:n])
        assert STATIONS == 6
        asked = []
        found.everywhere(lambda laws, asked=asked: asked.append(laws) or laws.high)
        assert len(asked) == (1 if n == 4 else 6)
        for station in range(1, 7):
            part = found.laws.part(station / 6)
            is_close(found.highs[station - 1], part.high.bound, rel=1e-9)
            is_close(found.at(station).reach, found.reach.bound * station / 6)
            own = twos(part.high.bound.sqrt().unsqueeze(-1) * s.own)
            _, _, step, _, a = ingredients(s, RADII[:n])
            keys, moved = (
                part.most(exact(values.square())).bound.sqrt() for values in (step, RADII[:n].expand(n, n))
            )
            spread = RADII[:n] * own + keys + a * RADII[:n] * moved
            is_close(found.spreads[station - 1], torch.minimum(spread, found.half.bound), rel=1e-8)
            boxed = twos(part.high.bound.sqrt().unsqueeze(-1) * s.z)
            widest = torch.cdist(s.x @ s.matrix, s.x @ s.matrix).max() / 2
            other = part.most(exact(s.z.square().sum(-1))).bound.sqrt().clamp(max=float(widest))
            spreads, which = found.value_spreads(s.values)
            is_close(spreads[station - 1], torch.minimum(boxed, other), rel=1e-8)
            assert torch.equal(which[station - 1], boxed <= other)
    assert isinstance(found.half, Upper)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [0.05, 0.6])
def test_no_move_within_radii_goes_beyond(name, size):
    """ω, κ, σ, ε, χ, the total variation and the weights, for random moves and moves to the ends."""
    s = plain(**CASES[name])
    g, rho = generator(1), size * RADII[: s.n] / 0.3
    found = TokenRadii(s.local, rho)
    holds(s, found, [rho.unsqueeze(-1) * unit(normal(g, s.n, 3)) for _ in range(60)])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("radius", [0.05, 0.6])
def test_no_move_of_a_ball_goes_beyond(name, radius):
    s = plain(**CASES[name])
    g = generator(2)
    found = FrobeniusScores(s.local, radius)
    moves = [normal(g, s.n, 3) for _ in range(60)]
    holds(s, found, [radius * (1 - 1e-12) * move / move.norm() for move in moves])
