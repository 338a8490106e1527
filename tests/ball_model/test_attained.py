"""Bounds of the ball model where they are attained, and where rounding is all there is: a constant that is
halved or a term that is left out makes one of them false.
"""

import itertools
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import pytest
import torch

from regard import maps
from regard._upper import exact
from regard.domains import Radii
from regard.proofs.ball_model.attention import head_moves
from regard.proofs.ball_model.beginning import at_rest, begin, second_order
from regard.proofs.ball_model.ellipsoids import Sum
from regard.proofs.ball_model.norms import Token, _Moves, normalize
from regard.proofs.ball_model.quadratic import own_square
from regard.proofs.ball_model.rows import Row
from regard.proofs.subject import subject_of
from tests.ball_model.networks import D, attention, drawn, norm


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def vector(*numbers):
    return torch.tensor(numbers, dtype=D)


def fractions(tensor):
    return [Fraction(number) for number in tensor.flatten().tolist()]


# Norm layers: |g|² = d, so that w = 1 and the share of ε is ε

MOVES = {
    "bent": ((0.0, 0.0, 1e-3, 0.0, 0.0), (0.999, 0.999, 0.999)),
    "mixed": ((0.0, 0.0, 1e-2, 1e-2, 0.0), (0.999, 0.999, 0.999)),
    "rest": ((0.0, 0.0, 0.0, 1e-2, 0.0), (0.999, 0.999, 0.999)),
    "eps": ((1e-3, 0.0, 0.0, 0.0, 1e-6), (0.998, 0.997, 0.999)),
    "large eps": ((1e-3, 0.0, 0.0, 0.0, 0.5), (0.13, 0.35, 0.2)),
    "small eps": ((0.8, 0.0, 0.0, 0.0, 1e-4), (0.3, 0.99, 0.99)),
    "along": ((0.5, 0.0, 1e-3, 1e-9, 1e-9), (0.99, 0.999, 0.999)),
    "along rest": ((0.0, 1e-3, 1e-3, 0.0, 0.0), (0.999, 0.999, 0.999)),
    "grown": ((0.3, 0.0, 0.2, 0.0, 0.0), (0.94, 0.89, 0.96)),
    "all": ((0.3, 0.1, 0.5, 0.2, 0.1), (0.33, 0.27, 0.45)),
    "far": ((0.5, 0.3, 3.0, 1.0, 0.3), (0.0, 0.1, 0.07)),
}
"""How far tokens move along themselves, by u and else, across by u and else, and ε; and which share of three
bounds is attained.
"""


def numbers_of_norm(first_along, rest_along, first, rest, eps):
    """What is proved, as three numbers."""
    token = Token(torch.ones(1, 4, dtype=D), vector(4.0), vector(1.0), eps)
    moves = SimpleNamespace(token=token, along_rest=exact(vector(rest_along)))
    moves.reach_along = exact(vector(first_along)) + moves.along_rest
    moves.first, moves.rest = exact(vector(first)), exact(vector(rest))
    return [float(number) for number in _Moves.numbers.fget(moves)]


def seen_of_norm(first_along, rest_along, first, rest, eps):
    """The same three at the corners of all moves, by the identity of the norm layer in 50 digits."""
    most = [mpmath.mpf(0)] * 3
    signs = (-1, 0, 1)
    with mpmath.workdps(50):
        for one, two, f, r, cos in itertools.product(signs, signs, (0, 1), (0, 1), signs):
            line, f, r = one * mpmath.mpf(first_along), f * mpmath.mpf(first), r * mpmath.mpf(rest)
            t = line + two * mpmath.mpf(rest_along)
            across = f * f + r * r + 2 * cos * f * r
            q = across / (4 * (1 + t) ** 2) + mpmath.mpf(eps) * ((1 + t) ** -2 - 1)
            falling = (1 + q) ** mpmath.mpf(-0.5)
            found = (falling - 1 - eps * t + f * f / 8, falling / (1 + t) - 1 + line, falling / (1 + t) - 1)
            most = [max(a, abs(b)) for a, b in zip(most, found, strict=True)]
    return most


@pytest.mark.parametrize("kind", MOVES)
def test_remainders_of_norm_layers_hold_and_are_attained(kind):
    """Along the token, in multiples of the first part across it, and of the rest."""
    moves, shares = MOVES[kind]
    for bound, value, tight in zip(numbers_of_norm(*moves), seen_of_norm(*moves), shares, strict=True):
        assert tight * bound <= value <= bound


def moves_of_norm(centered, rest=0.0):
    """A norm layer with two tokens, of which the second moves."""
    x = drawn(generator(3), 2, 5)
    state = begin.one(Radii(x, vector(0.0, 0.2)))
    state = state.with_rest(Sum(2, 5).ball(exact(vector(rest, rest)))) if rest else state
    whole = torch.eye(5, dtype=D) - (0.2 if centered else 0.0)
    g = x - x.mean(-1, keepdim=True) if centered else x
    square = g.square().sum(-1)
    return state, _Moves(state, Token(g, square, square / 5 + 0.1, 0.1), whole)


@pytest.mark.parametrize("centered", [False, True])
def test_the_gram_matrix_of_a_norm_layer_against_written_out_forms(centered):
    state, moves = moves_of_norm(centered)
    map = maps.Normalize(0.1, 1 + 0.3 * drawn(generator(1), 5), centered=centered)
    forms = normalize(second_order(state), map).curved.forms
    square = own_square(moves.across).square
    one = exact(vector(1.0, 1.0))
    found = moves._grams(map.weight, square, one, one)
    assert found.gram == pytest.approx(torch.einsum("nckl,ndkl->ncd", forms, forms), rel=1e-11, abs=1e-16)
    assert found.inner == pytest.approx(torch.einsum("nckl,nkl->nc", forms, square), rel=1e-11, abs=1e-16)


@pytest.mark.parametrize("centered", [False, True])
def test_moves_along_and_across_a_token_are_those_of_a_ball(centered):
    """A ball of 0.2 and a rest of 0.1 move a token by so much along itself, over its length, and across."""
    _, moves = moves_of_norm(centered, rest=0.1)
    length = moves.token.square.sqrt()
    assert bool((moves.along_rest.bound >= 0.1 / length).all())
    assert moves.along_rest.bound == pytest.approx(0.1 / length, rel=1e-6)
    assert moves.reach_along.bound == pytest.approx((vector(0.0, 0.2) + 0.1) / length, rel=1e-6)
    assert moves.first.bound == pytest.approx(vector(0.0, 0.2), rel=1e-6, abs=1e-12)
    assert moves.rest.bound == pytest.approx(vector(0.1, 0.1), rel=1e-6)
    assert bool((moves.rest.bound >= 0.1).all())


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e9])
def test_a_norm_layer_at_rest_holds_its_exact_value(offset):
    """Tokens far from zero whose differences are small: rounding of the mean is all there is."""
    x = offset + drawn(generator(5), 3, 6)
    map = norm(generator(6), 6)
    state = normalize(at_rest(x), map)
    with mpmath.workdps(60):
        for row, center, shape in zip(x.tolist(), state.center.tolist(), state.shape, strict=True):
            mean = mpmath.fsum(row) / 6
            scale = mpmath.sqrt(mpmath.fsum((a - mean) ** 2 for a in row) / 6 + mpmath.mpf(map.eps))
            weights = zip(row, map.weight.tolist(), map.bias.tolist(), center, strict=True)
            off = [g * ((a - mean) / scale) + b - c for a, g, b, c in weights]
            length = mpmath.norm(off)
            assert float(length) <= float(torch.linalg.eigvalsh(shape)[0].clamp_min(0)) ** 0.5
            assert not offset or float(length) > 0


# Rows of attention


def test_the_factor_of_values_is_attained_from_below():
    """A key that moves little, and less than a row that grows: e^a/Z - 1 - a° is near -rest - log Z."""
    law = vector(0.02, 0.49, 0.49)
    little, other = 0.1, 0.46
    plain = vector(0.1, other - 0.02 / 0.98 * 0.1, -other - 0.02 / 0.98 * 0.1)
    rest = vector(-little, little * 0.02 / 0.98, little * 0.02 / 0.98)
    assert float(law @ plain) == pytest.approx(0.0, abs=1e-16)
    assert float(law @ rest) == pytest.approx(0.0, abs=1e-16)
    law, plain, rest = (tensor.expand(3, 3) for tensor in (law, plain, rest))
    spread = (law * plain.square()).sum(-1).sqrt() * (1 + 1e-12)
    row = Row(law, exact(plain.abs()), exact(rest.abs()), exact(torch.zeros(3, 3, dtype=D)), exact(spread))
    a = plain + rest
    z = (law * a.exp()).sum(-1, keepdim=True)
    seen, proved = (a.exp() / z - 1 - plain).abs(), row.factor.bound
    assert bool((seen <= proved).all())
    assert float(seen[0, 0]) > 0.85 * float(proved[0, 0])
    assert float(z[0] - 1) > 0.8 * float(row.above.bound[0])


@pytest.mark.parametrize("size", [1.0, 1e8])
def test_differences_of_values_are_off_by_no_more_than_their_rounding(size):
    """v_j - Σ P v of values far from zero, against rationals."""
    x = size + drawn(generator(2), 4, 6)
    (head,) = head_moves(at_rest(x), subject_of(attention(generator(7), 6, heads=1, sharp=1e-9)))
    values, law = head.values, [fractions(row) for row in head.law]
    w, b = [fractions(column) for column in values.w[0].mT], fractions(head.projections[2].b)
    tokens = [fractions(row) for row in x]
    v = [[sum(map(Fraction.__mul__, t, c)) + b_c for c, b_c in zip(w, b, strict=True)] for t in tokens]
    worst = Fraction(0)
    for i, j in itertools.product(range(4), range(4)):
        mean = [sum(p * v_k[c] for p, v_k in zip(law[i], v, strict=True)) for c in range(len(w))]
        found = fractions(head.apart[i, j])
        worst = max(worst, sum((f - v[j][c] + mean[c]) ** 2 for c, f in enumerate(found)))
    length, bound = float(worst) ** 0.5, float(head.apart_error)
    assert 1e-3 * bound < length <= bound
    assert float(head.apart_sizes.amax()) < 100 * size
