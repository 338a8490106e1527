"""Laws that rows can have when scores change: tails of the exponential, bounds of weights,
and the mass that can be carried.
"""

import math

import mpmath
import pytest
import torch

from regard._upper import UNIT, Lower, Upper, exact
from regard.proofs.near.exponential import SMALL, steepness, tail, tail_over_square
from regard.proofs.near.laws import Laws, fill
from tests.near.sequence import CASES, D, is_close, plain
from tests.theorems.exact import generator


@pytest.mark.parametrize("x", [1e-30, 1e-8, 0.1, 0.4999, 0.5001, 2.0, 30.0])
def test_tails_of_the_exponential_against_sixty_digits(x):
    """eˣ - 1 - x and that less x²/2; over x²; and (eˣ - 1)/x."""
    with mpmath.workdps(150):
        second = mpmath.exp(mpmath.mpf(x)) - 1 - mpmath.mpf(x)
        third = second - mpmath.mpf(x) ** 2 / 2
        for order, truth in ((2, second), (3, third)):
            assert truth <= float(tail(exact(x), order)) <= truth * (1 + 1e-11) + 1e-289
            assert (
                truth / mpmath.mpf(x) ** 2
                <= float(tail_over_square(exact(x), order))
                <= truth / mpmath.mpf(x) ** 2 * (1 + 1e-11)
            )
        ratio = mpmath.expm1(mpmath.mpf(x)) / mpmath.mpf(x)
        assert ratio <= float(steepness(exact(x))) <= ratio * (1 + 1e-13)


def test_where_a_difference_has_its_digits():
    """What is left of eˣ there is more than a hundredth, and of the series little."""
    with mpmath.workdps(30):
        x = mpmath.mpf(SMALL)
        assert mpmath.exp(x) - 1 - x - x**2 / 2 > 0.01
        assert x**14 / mpmath.factorial(16) < 1e-16


def test_tails_at_the_ends():
    assert float(tail(exact(0.0), 2)) == float(tail(exact(0.0), 3)) == 0
    assert float(tail_over_square(exact(0.0), 2)) == pytest.approx(0.5)
    assert 0 <= float(tail_over_square(exact(0.0), 3)) <= 1e-89
    assert tail_over_square(exact(2.0), 2).roundings == tail(exact(2.0), 2).roundings + 2 == 200 * 16 + 2
    assert float(steepness(exact(0.0))) == pytest.approx(1.0)
    assert float(tail(exact(1e4), 2)) == math.inf
    assert float(tail(Upper(0.5, 2**40), 2)) > float(tail(exact(0.5), 2)) * (1 + 1e-5)  # of the bound


@pytest.mark.parametrize("seed", range(5))
def test_filling_rooms_is_a_linear_program(seed):
    """max Σ t_k f_k, 0 ≤ t ≤ room, Σ t ≤ mass: attained by filling from the largest f on."""
    g = generator(seed)
    f, room = torch.rand(5, generator=g, dtype=D), torch.rand(5, generator=g, dtype=D)
    for mass in (0.0, 0.3, 1.1, 9.0):
        left, best = mass, 0.0
        for value, wide in sorted(zip(f.tolist(), room.tolist(), strict=True), reverse=True):
            best += value * min(wide, left)
            left -= min(wide, left)
        is_close(fill(exact(f), exact(room), exact(mass)), best, rel=1e-12)


def test_what_is_left_counts_the_roundings_of_what_is_full():
    """Ten rooms of 0.1 and a mass of 0.55: five are full, and their sum is known to eleven roundings."""
    ones = torch.ones(10, dtype=D)
    found = fill(exact(ones), exact(0.1 * ones), exact(0.55))
    assert 0.55 + 0.5 * 9 * UNIT <= float(found.value) <= 0.55 + 0.5 * 16 * UNIT


def laws(s, time=1.0, own=False):
    """ω and κ by hand for one head."""
    reach = time * torch.tensor([0.3, 0.7, 0.1, 0.9, 0.2], dtype=D)[: s.n].expand(s.n, s.n)
    climb = time * torch.tensor([0.5, 1.1, 0.9, 1.0, 0.6], dtype=D)[: s.n].expand(s.n, s.n)
    half = time * torch.full((s.n,), 0.55, dtype=D)
    return Laws(s.local, exact(reach), exact(climb), exact(half)), reach, climb


@pytest.mark.parametrize("time", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_between_their_bounds(name, time):
    """(N6) and (N7): each of the three bounds by itself, and the smallest or largest of them."""
    s = plain(**CASES[name])
    found, reach, climb = laws(s, time)
    p = s.p
    odds = (p / (1 - p)).clamp(max=1e300)
    raised = torch.minimum(climb, (reach / (1 - p)).nan_to_num(0.0))
    grown = p * reach.exp()
    high = torch.minimum(grown, 1 / (1 + torch.exp(-raised) / odds))
    is_close(found.high, torch.where(s.seen, high, 0.0), rel=1e-8, abs=1e-14)
    shrunk = p * torch.exp(-reach)
    others = grown.sum(-1, keepdim=True) - grown
    among = shrunk / (shrunk + others)
    fallen = 1 / (1 + torch.exp(climb) / odds)
    left = 1 - (high.sum(-1, keepdim=True) - high)
    low = torch.where(s.seen, torch.maximum(torch.maximum(among, fallen), left), 0.0).clamp_min(0)
    assert torch.allclose(found.low.bound, low, rtol=1e-8, atol=1e-12)
    assert bool((found.low.bound <= low * (1 + 1e-12) + 1e-15).all())
    change = torch.maximum(high - p, p - low)
    is_close(found.change, torch.where(s.seen, change, 0.0), rel=1e-7, abs=1e-11)
    f = torch.tensor([2.0, 0.5, 1.0, 3.0, 0.1], dtype=D)[: s.n]
    most, carried = [], []
    for row in range(s.n):
        rooms = (high[row] - low[row]).clamp_min(0)
        most.append(float(low[row] @ f) + filled(f, rooms, 1 - float(low[row].sum())))
        put, taken = (high[row] - p[row]).clamp_min(0), (p[row] - low[row]).clamp_min(0)
        mass = min(float(put.sum()), float(taken.sum()))
        carried.append(filled(f, put, mass) + filled(f, taken, mass))
    is_close(found.most(exact(f)), torch.tensor(most, dtype=D), rel=1e-7, abs=1e-10)
    is_close(found.total_change(exact(f)), torch.tensor(carried, dtype=D), rel=1e-7, abs=1e-9)


def filled(f, room, mass):
    left, best = max(mass, 0.0), 0.0
    for value, wide in sorted(zip(f.tolist(), room.tolist(), strict=True), reverse=True):
        best += value * min(wide, left)
        left -= min(wide, left)
    return best


def test_two_keys_attain_every_bound():
    """With two keys and ζ = (P₂ 2M, -P₁ 2M) the law is known: the odds grow by e^{2M},
    and all bounds meet there.
    """
    s = plain(n=2, seed=6)
    p = s.p
    change = 1.4
    reach = change * p.flip(-1)
    found = Laws(
        s.local,
        exact(reach),
        exact(torch.full((2, 2), change, dtype=D)),
        exact(torch.full((2,), change / 2, dtype=D)),
    )
    up = 1 / (1 + torch.exp(torch.tensor(-change, dtype=D)) * p.flip(-1) / p)
    is_close(found.high, up)
    down = 1 / (1 + torch.exp(torch.tensor(change, dtype=D)) * p.flip(-1) / p)
    assert torch.allclose(found.low.bound, down, rtol=1e-9)


def test_parts_of_a_change():
    """t ω, t κ and t M for one time, or for several at once."""
    s = plain()
    found, reach, climb = laws(s)
    half = found.part(0.5)
    is_close(half.reach, reach / 2)
    is_close(half.climb, climb / 2)
    is_close(half.half, torch.full((4,), 0.275, dtype=D))
    several = found.part(torch.tensor([0.25, 1.0], dtype=D)[:, None, None])
    is_close(several.reach, torch.stack([reach / 4, reach]))
    is_close(several.half, torch.stack([torch.full((4,), 0.1375, dtype=D), torch.full((4,), 0.55, dtype=D)]))
    assert several.high.value.shape == (2, 4, 4)
    assert Lower(1.0).value == 1
