"""Weights of softmax rows whose scores move far: bounds beside what they bound, and where it is attained."""

import pytest
import torch

from regard._upper import Lower, Upper, exact
from regard.proofs.ball_model import rows as rows_room
from regard.proofs.ball_model import weights
from regard.proofs.ball_model.rows import Row, beyond_square
from tests.ball_model.networks import D, drawn

PLACES = torch.linspace(0, 1, 1001, dtype=D).unsqueeze(-1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def least_sum(p, a):
    """Z where all other keys move alike."""
    return p * a.exp() + (1 - p) * (-p * a / (1 - p)).exp()


def cases(seed):
    """Weights and how far scores move, large and small."""
    g = generator(seed)
    p = torch.rand(60, generator=g, dtype=D) ** (1 + 3 * (seed % 2)) * 0.998 + 1e-3
    far = torch.rand(60, generator=g, dtype=D) * (0.1, 1.0, 4.0)[seed % 3]
    return p, far, PLACES * far


def holds(found, true, most):
    """Above all, and within a factor of the largest in the middle of all cases."""
    largest, bound = true.amax(0), found.bound
    assert bool((largest <= bound + 1e-15).all())
    kept = largest > 1e-9
    assert float((bound[kept] / largest[kept]).median()) < most


@pytest.mark.parametrize("seed", range(6))
def test_a_weight_grows_along_a_logistic_function(seed):
    p, far, a = cases(seed)
    true = a.exp() / least_sum(p, a)
    holds(weights.grown(Lower(p), Upper(far)), true, 1 + 1e-12)
    holds(weights.excess(Lower(p), Upper(far)), true - 1 - a, 1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sign", [-1, 1])
def test_sums_bulge_at_least_so_much(seed, sign):
    p, far, a = cases(seed)
    kappa = weights.bulge(Lower(p), far, sign)
    assert bool((least_sum(p, sign * a) >= 1 + kappa * a.square() / 2 - 1e-13).all())
    tiny = torch.full_like(p, 1e-6)
    assert weights.bulge(Lower(p), tiny, sign) == pytest.approx(p / (1 - p), rel=2e-4)  # Z'' at rest


@pytest.mark.parametrize("seed", range(6))
def test_the_third_order_where_a_score_rises_and_where_it_falls(seed):
    p, far, a = cases(seed)
    up = weights.cubic(weights.bulge(Lower(p), far, 1), far, weights.rising_cube(far), 1)
    down = weights.cubic(weights.bulge(Lower(p), far, -1), far, weights.falling_cube(far), -1)
    near = seed % 3 < 2  # up to one
    holds(up, a.expm1() / least_sum(p, a) - a - a.square() / 2, 1.3 if near else 4.0)
    holds(down, -((-a).expm1() / least_sum(p, -a) + a - a.square() / 2), 1.6 if near else 9.0)
    alone = weights.cubic(torch.zeros_like(far), far, weights.rising_cube(far), 1)
    plain = beyond_square(Upper(far)).bound  # κ = 0: e^a - 1 - a - a²/2
    assert alone.bound == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("seed", range(6))
def test_where_a_sum_is_less_than_it_may_be(seed):
    _, far, a = cases(seed)
    share = torch.rand(60, generator=generator(seed + 50), dtype=D) ** 3
    fall = share * -(-a).expm1() - (1 - a + a.square() / 2 - (-a).exp())
    rise = share * a.expm1() - (a.expm1() - a - a.square() / 2)
    holds(weights.largest_fall(share, far), fall, 1.01)
    holds(weights.largest_rise(share, far), rise, 1.01)
    none = torch.zeros_like(share)
    assert bool((weights.largest_fall(none, far).bound <= 1e-12).all())
    assert bool((weights.largest_rise(none, far).bound <= 1e-12).all())
    assert bool((weights.largest_rise(none + 1.0, far).bound == torch.inf).all())  # a share that is all


@pytest.mark.parametrize("p", [0.0, 1e-300, 0.5, 1 - 1e-16, 1.0])
def test_weights_at_the_ends_of_their_range(p):
    """Nothing is NaN, nothing is below the truth."""
    p, far = torch.tensor([p], dtype=D), torch.tensor([2.0], dtype=D)
    grown = float(weights.grown(Lower(p), Upper(far)))
    inside = p if 0 < float(p) < 1 else torch.tensor([min(max(float(p), 1e-12), 1 - 1e-12)], dtype=D)
    assert float(far.exp() / least_sum(inside, far)) <= grown * (1 + 1e-9)
    assert grown <= min(1 / max(float(p), 1e-320), float(far.exp())) * (1 + 1e-9)
    for sign, end in ((1, weights.rising_cube(far)), (-1, weights.falling_cube(far))):
        kappa = weights.bulge(Lower(p), far, sign)
        assert bool(torch.isfinite(weights.cubic(kappa, far, end, sign).bound).all())
    assert not bool(weights.excess(Lower(p), Upper(far)).bound.isnan().any())


def row_of(law, plain, rest):
    """A row that holds moves of either sign."""
    spread = (law * plain.square()).sum(-1).sqrt() * (1 + 1e-12)
    return Row(law, exact(plain.abs()), exact(rest.abs()), exact(torch.zeros_like(law)), exact(spread))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("p", [0.1, 0.35, 0.6, 0.9])
def test_two_keys_attain_what_a_weight_may_become(p, sign):
    """One score moves by s, so that a = (1-p)s and -ps: e^a/Z is the logistic function itself."""
    s = sign * 1.5
    law = torch.tensor([[p, 1 - p]], dtype=D).expand(2, -1)
    plain = torch.tensor([[(1 - p) * s, -p * s]], dtype=D).expand(2, -1)
    row = row_of(law, plain, torch.zeros_like(plain))
    z = (law * plain.exp()).sum(-1, keepdim=True)
    change = plain.exp() / z - 1
    assert bool((change.abs() <= row.change.bound).all())
    if sign > 0 and p < 0.5:  # of a light key; a heavy one may lose more than it can gain
        assert float(change[0, 0]) == pytest.approx(float(row.change.bound[0, 0]), rel=1e-9)
    factor = (change - plain).abs()
    assert bool((factor <= row.factor.bound).all())
    error = (plain.expm1() / z - plain - plain.square() / 2)[0]
    assert bool((error <= row.up.bound[0]).all())
    assert bool((-error <= row.down.bound[0]).all())


@pytest.mark.parametrize("seed", range(40))
def test_rows_hold_their_remainders_where_scores_move_far(seed):
    """E_j between -down and up, and both factors of values, for sharp rows and moves of up to four."""
    g = generator(seed)
    law = (2.5 * drawn(g, 4, 5)).softmax(-1)
    slopes = (0.4, 1.0, 2.0)[seed % 3] * drawn(g, 4, 5, 3)
    slopes = slopes - torch.einsum("ij,ijk->ik", law, slopes).unsqueeze(1)
    rest = (0.0, 0.3)[seed % 2] * torch.rand(4, 5, generator=g, dtype=D)
    spread = torch.linalg.matrix_norm(law.sqrt().unsqueeze(-1) * slopes, 2) * (1 + 1e-12)
    row = Row(law, exact(slopes.norm(dim=-1)), exact(2 * rest), exact(torch.zeros_like(law)), exact(spread))
    for _ in range(60):
        u = torch.nn.functional.normalize(drawn(g, 3), dim=0)
        plain = slopes @ u
        more = rest * (2 * torch.rand(4, 5, generator=g, dtype=D) - 1)
        more = more - (law * more).sum(-1, keepdim=True)
        if bool((more.abs() > 2 * rest).any()):
            continue
        a = plain + more
        z = (law * a.exp()).sum(-1, keepdim=True)
        error, change = a.expm1() / z - a - plain**2 / 2, a.exp() / z - 1
        assert bool((error <= row.up.bound + 1e-14).all())
        assert bool((-error <= row.down.bound + 1e-14).all())
        assert bool((change.abs() <= row.change.bound + 1e-14).all())
        assert bool(((change - plain).abs() <= row.factor.bound + 1e-14).all())


def test_gentle_rows_are_about_as_sharp(monkeypatch):
    """Fewer operations for moves of a hundredth cost little."""
    g = generator(3)
    law, plain = drawn(g, 4, 5).softmax(-1), 0.003 * drawn(g, 4, 5)
    plain = plain - (law * plain).sum(-1, keepdim=True)
    simple = row_of(law, plain, torch.zeros_like(plain))
    monkeypatch.setattr(rows_room, "GENTLE", 0.0)
    sharp = row_of(law, plain, torch.zeros_like(plain))
    for name in ("up", "down"):
        assert bool((getattr(sharp, name).bound <= getattr(simple, name).bound * (1 + 1e-9)).all())
