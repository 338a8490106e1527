"""Slices of coordinates with a map each, and heads that read different coordinates."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Radii, Shell, Whole
from regard.errors import ArgumentError
from regard.maps import Affine, Compose, Heads, Pointwise, Relu, Residual
from regard.measure import Measure
from regard.nonexpansive import GroupSort, IntoBall, MixTokens, Pool, Reflected, Split
from regard.norms import EntryMax, Frobenius, OwnToken, TokenMax, TokenSum, Wasserstein
from regard.proofs import THEOREMS, certify, deviation, image
from regard.proofs.slicing import sliced
from regard.proofs.theorem import Refusal
from tests.theorems.exact import generator, normal

D = torch.float64


def _mixers(count, tokens=6):
    """Slice h looks up token h for every row."""
    maps = []
    for h in range(count):
        w = torch.zeros(tokens, tokens, dtype=D)
        w[:, h] = 1.0
        maps.append(MixTokens(w))
    return Split(tuple(maps))


def test_the_root_of_the_number_of_slices_is_attained_in_token_max():
    """Four slices copy four tokens that move in their own slice: one row sees all of it."""
    map = _mixers(4)
    d = torch.zeros(6, 8, dtype=D)
    for h in range(4):
        d[h, 2 * h] = 1.0
    assert float(TokenMax().of(map(d)) / TokenMax().of(d)) == pytest.approx(2.0, rel=1e-12)
    assert certify(map, Whole(tokens=6), TokenMax()).value == pytest.approx(2.0, rel=1e-12)


def test_the_root_is_attained_in_token_sum():
    """One token moves in all slices, and each slice sends it to a row of its own."""
    maps = tuple(MixTokens(torch.roll(torch.eye(4, dtype=D), h, 0)) for h in range(4))
    d = torch.zeros(4, 4, dtype=D)
    d[0] = 1.0
    assert float(TokenSum().of(Split(maps)(d)) / TokenSum().of(d)) == pytest.approx(2.0, rel=1e-12)
    assert certify(Split(maps), Whole(tokens=4), TokenSum()).value == pytest.approx(2.0, rel=1e-12)


def test_in_frobenius_norm_the_largest_is_that_of_all():
    maps = (Affine(2 * torch.eye(2, dtype=D)), Affine(3 * torch.eye(2, dtype=D)))
    for norm in (Frobenius(), EntryMax(), OwnToken(), Wasserstein(2.0)):
        assert certify(Split(maps), Whole(), norm).value == pytest.approx(3.0, rel=1e-9)
    for norm in (TokenMax(), TokenSum(), Wasserstein(1.0), Wasserstein(math.inf)):  # each token alone
        assert certify(Split(maps), Whole(), norm).value == pytest.approx(3.0, rel=1e-9)


def test_tokenwise_slices_count_as_one():
    a, b = r.Attention(r.Dot(scale=0.1)), Affine(3 * torch.eye(2, dtype=D))
    domain, part = Ball(1.0, torch.zeros(6, dtype=D), 4), Ball(1.0, torch.zeros(2, dtype=D), 4)
    for norm in (TokenMax(), TokenSum(), Wasserstein(1.0), Wasserstein(3.0), Wasserstein(math.inf)):
        one = certify(a, part, norm).value
        assert certify(Split((a, b, b)), domain, norm).value == pytest.approx(math.hypot(one, 3.0), rel=1e-9)
        assert certify(Split((a, a, b)), domain, norm).value == pytest.approx(
            math.sqrt(2 * one**2 + 9), rel=1e-9
        )
    for norm in (Frobenius(), Wasserstein(2.0), OwnToken()):
        assert certify(Split((a, a, b)), domain, norm).value == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum()], ids=repr)
def test_no_pair_is_farther_apart(norm):
    """1,000 pairs near and far, for attention and a projection in each slice."""
    g = generator(0)
    w = normal(g, 2, 3, 3)
    map = Split((r.Attention(r.Dot(w[0], w[1])), Reflected(r.Attention(r.Dot(scale=0.4)), 1.0)))
    bound = certify(map, Ball(1.0, torch.zeros(6, dtype=D), 3), norm).value
    x, y = (torch.nn.functional.normalize(normal(g, 1000, 3, 6), dim=-1) for _ in range(2))
    y = x + torch.logspace(-4, 0, 1000, dtype=D)[:, None, None] * (y - x)
    assert float((norm.of(map(x) - map(y)) / norm.of(x - y)).max()) <= bound


def test_a_constant_that_does_not_hold_for_couplings_is_refused():
    map = Split((MixTokens(torch.eye(2, dtype=D)), Pointwise(Relu())))
    refused = certify(map, Whole(tokens=2), Wasserstein(2.0))
    assert math.isinf(refused.value)
    several = Split((r.Attention(r.Dot(normal(generator(1), 2, 2, 2), normal(generator(2), 2, 2, 2))),))
    found = certify(several, Ball(1.0, torch.zeros(2, dtype=D), 2), Frobenius())
    assert any("mix them with Heads" in sentence for sentence in found.refused)


def test_residual_connections_around_slices_hold_for_couplings():
    attention = r.Attention(r.Dot(scale=0.1))
    domain = Ball(1.0, torch.zeros(4, dtype=D), 3)
    inner = certify(Split((attention, attention)), domain, Wasserstein(2.0)).value
    found = certify(Residual(Split((attention, attention))), domain, Wasserstein(2.0)).value
    assert found == pytest.approx(1 + inner, rel=1e-9)


def test_sliced_domains():
    x = normal(generator(3), 3, 6)
    assert sliced(Whole(tokens=2), 1, 3) == Whole(tokens=2)
    assert sliced(Ball(1.0, tokens=2), 0, 3) == Ball(1.0, None, 2)
    assert torch.equal(sliced(Ball(1.0, x[0], 2), 1, 3).center, x[0, 2:4])
    near = sliced(Neighborhood(x, 0.1, TokenMax()), 2, 3)
    assert torch.equal(near.points, x[:, 4:])
    assert (near.radius, near.norm) == (0.1, TokenMax())
    radii = torch.tensor([0.1, 0.0, 0.2], dtype=D)
    weighted = sliced(Radii(Measure(x, marks=torch.tensor([3, 1, 2])), radii), 0, 3)
    assert torch.equal(weighted.measure.points, x[:, :2])
    assert weighted.measure.marks.tolist() == [3, 1, 2]
    assert torch.equal(weighted.radii, radii)
    with pytest.raises(Refusal, match="may be anywhere"):
        sliced(Shell(0.5, 1.0), 0, 2)


def test_images_hold_the_values():
    g = generator(4)
    w = normal(g, 2, 2)
    map = Split((Affine(w, normal(g, 2)), r.Attention(r.Dot()), GroupSort(2)))
    for center in (torch.zeros(6, dtype=D), normal(g, 6)):
        held = image(map, Ball(0.5, center, 3))
        x = center + 0.5 * torch.nn.functional.normalize(normal(g, 300, 3, 6), dim=-1)
        assert float((map(x) - held.center).norm(dim=-1).max()) <= held.radius
        near = image(map, Neighborhood(x[0], 0.1, TokenMax()))
        moved = x[0] + 0.1 * torch.nn.functional.normalize(normal(g, 300, 3, 6), dim=-1)
        torch.testing.assert_close(near.points, map(x[0]))
        assert float((map(moved) - near.points).norm(dim=-1).max()) <= near.radius
    assert image(Split((GroupSort(2), GroupSort(2))), Ball(0.5, tokens=3)).radius == pytest.approx(
        math.sqrt(0.5), rel=1e-9
    )
    assert image(Split((GroupSort(2), Affine(w))), Whole(tokens=3)) == Whole(tokens=3)
    half = image(Split((Affine(w, normal(g, 2)), r.Attention(r.Dot(w, w)))), Ball(0.5, tokens=3))
    assert half.center.shape == (4,)
    assert image(Split((Pool(), Pool())), Ball(0.5, torch.zeros(4, dtype=D), 3)).tokens == 1


def test_deviations():
    map = Split((r.Attention(r.Dot(scale=0.3)), Pointwise(Relu())))
    near = Neighborhood(normal(generator(5), 3, 4), 0.05)
    bound = deviation(map, near, Frobenius()).value
    x = near.measure.points
    steps = 0.05 * torch.nn.functional.normalize(normal(generator(6), 500, 12), dim=-1).unflatten(-1, (3, 4))
    assert float(Frobenius().of(map(x + steps) - map(x)).max()) <= bound


def test_widths_that_do_not_fit_are_errors():
    with pytest.raises(ArgumentError, match="equal slices"):
        certify(Split((GroupSort(2), GroupSort(2))), Ball(1.0, torch.zeros(5, dtype=D)), Frobenius())
    with pytest.raises(ArgumentError, match="maps"):
        certify(Split((Affine(torch.eye(2, dtype=D)), Affine(torch.eye(3, dtype=D)))), Whole(), Frobenius())
    composed = Compose(
        (Split((Affine(torch.ones(2, 3, dtype=D)), Affine(torch.ones(2, 1, dtype=D)))), IntoBall())
    )
    with pytest.raises(ArgumentError, match="width"):
        certify(Compose((composed, Affine(torch.eye(5, dtype=D)))), Whole(), Frobenius())


# Heads


def _heads(read, width=6, seed=0, mixed=True):
    """Dot-product heads that read the given coordinates."""
    g = generator(seed)
    w_q, w_k, w_v = (torch.zeros(len(read), width, 2, dtype=D) for _ in range(3))
    for h, rows in enumerate(read):
        for w in (w_q, w_k, w_v):
            w[h, rows] = normal(g, len(rows), 2)
    attention = r.Attention(r.Dot(w_q, w_k, 0.3), r.Linear(w_v))
    return Heads(attention, torch.eye(2 * len(read), dtype=D).unflatten(0, (-1, 2))) if mixed else attention


def _apart(map, domain, norm=Frobenius()):
    found = certify(map, domain, norm)
    return next(
        (one.value for one in (found, *found.others) if one.theorem == THEOREMS["slices"].cited), math.inf
    )


def _each(map, domain, norm=Frobenius()):
    attention = map.attention if isinstance(map, Heads) else map
    dot, lookup = attention.potential, attention.lookup
    parts = [
        r.Attention(r.Dot(dot.w_q[h], dot.w_k[h], 0.3), r.Linear(lookup.w_v[h]))
        for h in range(len(lookup.w_v))
    ]
    return [certify(part, domain, norm).value for part in parts]


def test_heads_that_read_different_coordinates():
    """The largest where no coordinate is read twice; sums of squares over the heads that read one."""
    domain = Ball(1.0, torch.zeros(6, dtype=D), 4)
    for mixed in (True, False):
        apart = _heads([[0, 1], [2, 3], [4, 5]], mixed=mixed)
        assert _apart(apart, domain) == pytest.approx(max(_each(apart, domain)), rel=1e-9)
        assert _apart(apart, domain, OwnToken()) == pytest.approx(
            max(_each(apart, domain, OwnToken())), rel=1e-9
        )
    shared = _heads([[0, 1, 2], [2, 3], [4, 5]])
    one, two, three = _each(shared, domain)
    assert _apart(shared, domain) == pytest.approx(max(math.hypot(one, two), three), rel=1e-9)
    mixer = Heads(shared.attention, 3 * shared.w_o)
    assert _apart(mixer, domain) == pytest.approx(3 * max(math.hypot(one, two), three), rel=1e-9)
    assert math.isinf(_apart(_heads([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]), domain))


@pytest.mark.parametrize("center", [0.0, 0.7])
def test_no_pair_of_heads_is_farther_apart(center):
    g = generator(7)
    map = _heads([[0, 1, 2], [2, 3], [4, 5]], seed=3)
    middle = torch.full((6,), center, dtype=D)
    bound = _apart(map, Ball(1.0, middle, 4))
    x, y = (torch.nn.functional.normalize(normal(g, 500, 4, 6), dim=-1) for _ in range(2))
    y = x + torch.logspace(-4, 0, 500, dtype=D)[:, None, None] * (y - x)
    far = Frobenius().of(map(middle + x) - map(middle + y)) / Frobenius().of(x - y)
    assert float(far.max()) <= bound


def test_heads_whose_reading_is_not_seen_are_left_to_other_theorems():
    domain = Ball(1.0, torch.zeros(6, dtype=D), 4)
    heads = _heads([[0, 1], [2, 3], [4, 5]], mixed=False)
    for potential, lookup in (
        (heads.potential, r.Identity()),
        (r.Dot(heads.potential.w_q, None, 0.3), heads.lookup),
        (r.Gaussian(heads.potential.w_q, heads.potential.w_k, bandwidth=1.0), heads.lookup),
    ):
        try:
            assert math.isinf(_apart(r.Attention(potential, lookup), domain))
        except ArgumentError:  # widths that do not meet
            continue
    assert math.isinf(_apart(_heads([[0, 1]]), domain))  # one head has its own constant
    with_bias = r.Attention(heads.potential + r.Alibi(0.1), heads.lookup)
    assert math.isfinite(_apart(with_bias, domain))
    assert math.isinf(_apart(heads, Shell(0.1, 1.0, 4, centered=False)))
