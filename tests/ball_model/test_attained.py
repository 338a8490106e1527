"""Bounds of the ball model where they are attained, and where rounding is all there is: a constant that is
halved or a term that is left out makes one of them false.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import pytest
import torch

import regard as r
from regard import maps
from regard._upper import exact
from regard.domains import Radii
from regard.proofs.ball_model import score_moves
from regard.proofs.ball_model.attention import attend
from regard.proofs.ball_model.batches import head_moves
from regard.proofs.ball_model.beginning import at_rest, begin, second_order
from regard.proofs.ball_model.ellipsoids import Sum, widths
from regard.proofs.ball_model.inputs import BallPart, Inputs
from regard.proofs.ball_model.network import through
from regard.proofs.ball_model.neurons import arguments
from regard.proofs.ball_model.norms import Token, _Moves, normalize
from regard.proofs.ball_model.quadratic import own_square, symmetric
from regard.proofs.ball_model.rows import Row
from regard.proofs.ball_model.sides import product_norms
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
    g = x - x.mean(-1, keepdim=True) if centered else x
    square = g.square().sum(-1)
    return state, _Moves(state, Token(g, square, square / 5 + 0.1, 0.1), centered)


@pytest.mark.parametrize("centered", [False, True])
def test_the_gram_matrix_of_a_norm_layer_against_written_out_forms(centered):
    state, moves = moves_of_norm(centered)
    map = maps.Normalize(0.1, 1 + 0.3 * drawn(generator(1), 5), centered=centered)
    forms = normalize(second_order(state), map).curved.forms
    square = own_square(moves.across).square
    one = exact(vector(1.0, 1.0))
    found = moves._grams(map.weight, one, one)
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


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_directions_of_tokens_far_from_zero_are_off_by_no_more_than_their_slip(offset):
    """λ and T of short centered tokens whose mean is large, in 50 digits."""
    x, linear = offset + 1e-4 * drawn(generator(8), 4, 5), 1e-6 * drawn(generator(9), 4, 5, 3)
    state = replace(at_rest(x), inputs=Inputs((BallPart(3),), (1.0,)), linear=linear)
    g = x - x.mean(-1, keepdim=True)
    square = g.square().sum(-1)
    moves = _Moves(state, Token(g, square, square / 5 + 0.1, 0.1), True)
    shares = []
    for i in range(4):
        along, across = exact_directions(x[i], linear[i])
        off = vector(*along) - moves.along[i], vector(*across).unflatten(0, (5, 3)) - moves.across[i]
        shares.append([float(off[0].norm() / moves.slip_along.bound[i])])
        shares[-1].append(float(off[1].norm() / moves.slip_across.bound[i]))
    for found in zip(*shares, strict=True):
        assert 3e-4 < max(found) <= 1


def exact_directions(x, linear):
    """Aᵀg/|g|² and (I - 11ᵀ/d - ggᵀ/|g|²)A, rounded once."""
    with mpmath.workdps(50):
        token, a, ones = mpmath.matrix(x.tolist()), mpmath.matrix(linear.tolist()), mpmath.ones(len(x), 1)
        token = token - ones * (mpmath.fsum(token) / len(x))
        size = (token.T * token)[0]
        across = a - ones * (ones.T * a) / len(x) - token * (token.T * a) / size
        return [float(c) for c in a.T * token / size], [float(c) for c in across]


# Rows of attention


def remainder(law, plain, rest, spread, mixed=0.0):
    """E of each key at these moves, and a row that holds them."""
    law, plain, rest = (vector(*numbers).expand(len(numbers), -1) for numbers in (law, plain, rest))
    held = torch.full_like(law, mixed)
    row = Row(law, exact(plain.abs()), exact(rest.abs()), exact(held), exact(torch.full_like(law[0], spread)))
    a = plain + rest
    z = (law * a.exp()).sum(-1, keepdim=True)
    return (a.expm1() / z - a - plain.square() / 2)[0], row


def test_remainders_of_a_key_that_has_no_weight_are_attained():
    """Z = 1: E = a°r + r²/2 + a³/6, whichever way r goes; and what is mixed comes on top."""
    law, first, rest = (1e-12, 1 - 1e-12), 1e-3, 1e-4
    high, row = remainder(law, (first, 0.0), (rest, 0.0), 1e-9)
    low, _ = remainder(law, (first, 0.0), (-rest, 0.0), 1e-9)
    up, down = float(row.up.bound[0, 0]), float(row.down.bound[0, 0])
    assert 0.999 * up < float(high[0]) < up
    assert 0.9 * down < -float(low[0]) < down
    _, more = remainder(law, (first, 0.0), (rest, 0.0), 1e-9, mixed=0.5)
    assert float(more.up.bound[0, 0]) == pytest.approx(up + 0.5, rel=1e-12)
    assert float(more.down.bound[0, 0]) == pytest.approx(down + 0.5, rel=1e-12)


@pytest.mark.parametrize("sign", [-1, 1])
def test_remainders_of_a_key_in_a_row_that_grows_are_attained(sign):
    """Z > 1 by others: E = -a(1 - 1/Z) for a key that moves little."""
    law, little = (1e-12, 0.1, 0.9), sign * 1e-4
    found, row = remainder(law, (little, 1.0, -1 / 9), (0.0, 0.0, 0.0), (1 / 9) ** 0.5 + 1e-9)
    proved = float((row.down if sign > 0 else row.up).bound[0, 0])
    assert 0.97 * proved < -sign * float(found[0]) < proved


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
    subject = subject_of(attention(generator(7), 6, heads=1, sharp=1e-9))
    (head,) = head_moves(at_rest(x), subject)
    values, law = head.values, [fractions(row) for row in head.law]
    w, b = [fractions(column) for column in values.w[0].mT], fractions(subject.separate[0].value_bias)
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


def head_with(shape=None, radius=0.0, seed=9):
    """One head at three tokens, of which the second moves in a ball, or in an ellipsoid of its own."""
    g = generator(seed)
    x, map = drawn(g, 3, 4), attention(g, 4, heads=1, sharp=2.0)
    state = begin.one(Radii(x, vector(0.0, radius, 0.0)))
    if shape is not None:
        state = replace(state, shape=torch.stack([torch.zeros(4, 4, dtype=D), shape, 0.0 * shape]))
    (head,) = head_moves(state, subject_of(map))
    return head


def test_what_an_ellipsoid_of_one_token_does_to_scores_is_attained():
    """Rows of other tokens see it as a key alone: (1 - P) and P times the width along its query."""
    root = 0.1 * drawn(generator(1), 4, 4)
    head = head_with(shape=root @ root.mT)
    query, key = head.scores.query, head.scores.key
    keys = (root.mT @ key.w[0] @ query.value.mT).T  # how e moves q_i·k_1, by w with e = root w
    share = torch.eye(3, dtype=D)[1] - head.law[:, 1:2]
    away = key.value.unsqueeze(0) - (head.law @ key.value).unsqueeze(1)
    slopes = share.unsqueeze(-1) * keys.unsqueeze(1)
    slopes[1] += away[1] @ query.w[0].mT @ root
    exactly, proved = slopes.norm(dim=-1), head.scores.by_remainders.bound
    assert bool((exactly <= proved * (1 + 1e-14)).all())
    assert proved[[0, 2]] == pytest.approx(exactly[[0, 2]], rel=1e-6)
    asked = share[1].abs() * keys[1].norm() + (away[1] @ query.w[0].mT @ root).norm(dim=-1)
    assert proved[1] == pytest.approx(asked, rel=1e-6)
    assert bool((head.row.rest.bound >= proved).all())
    assert bool((head.row.mixed.bound[[0, 2]] < 1e-12).all())  # it is linear, and goes on by the derivative


@pytest.mark.parametrize("explicit", [score_moves.EXPLICIT, 0])
def test_products_of_moves_hold_their_norms(monkeypatch, explicit):
    """Quadratic moves of scores about their mean, written out or by their norms."""
    monkeypatch.setattr(score_moves, "EXPLICIT", explicit)
    head = head_with(radius=0.3)
    query, key = head.scores.query, head.scores.key
    moves = torch.einsum("ick,jcl->ijkl", query.moves, key.moves)
    centered = symmetric(moves - torch.einsum("ij,ijkl->ikl", head.law, moves).unsqueeze(1))
    exactly, proved = torch.linalg.matrix_norm(centered, 2), head.scores.bilinear.bound
    assert bool((exactly <= proved).all())
    assert float(proved[1, 1]) < (1.3 if explicit else 3.0) * float(exactly[1, 1])
    found = product_norms(
        head.scores.query.moves, head.scores.key.moves, head.scores.query.first, head.scores.key.first
    ).bound
    exactly = torch.linalg.matrix_norm(query.moves[1].mT @ key.moves[1], 2)
    assert float(exactly) <= float(found[1, 1]) < 1.2 * float(exactly)


@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("radius", [1e-3, 0.1])
def test_attention_without_written_out_forms_holds_its_values(monkeypatch, radius, curved):
    """Values along directions at points of the sphere: within what is proved, and a part not small."""
    monkeypatch.setattr(score_moves, "EXPLICIT", 0)
    g = generator(21)
    x, map = drawn(g, 3, 4), attention(g, 4, sharp=2.0)
    state = begin.one(Radii(x, vector(0.0, radius, 0.0)))
    state = attend(second_order(state) if curved else state, subject_of(map))
    a = torch.nn.functional.normalize(drawn(g, 4, 30), dim=0)
    proved = state.rest(a.unsqueeze(0), curved=False).bound
    u = torch.nn.functional.normalize(drawn(g, 200, 4), dim=-1)
    moved = x.repeat(200, 1, 1)
    moved[:, 1] += radius * u
    model = state.center + torch.einsum("ndk,sk->snd", state.linear, u)
    if curved:
        model = model + torch.einsum("ndkl,sk,sl->snd", state.curved.forms, u, u)
    seen = ((torch.stack([map(points) for points in moved]) - model) @ a).abs().amax(0)
    assert bool((seen <= proved).all())
    assert float((seen / proved).max()) > 0.02


# Neurons


def products(rows, columns):
    return [[sum(map(Fraction.__mul__, row, column)) for column in columns] for row in rows]


def cancelling(size):
    """Tokens and weights whose products are small beside their terms, and a bias."""
    g = generator(13)
    x, w, b = size * drawn(g, 3, 6), drawn(g, 6, 5), drawn(g, 5)
    x[:, 3:] = -x[:, :3]
    w[3:] = w[:3] * (1 + 1e-3 / size)
    return x, w, b


@pytest.mark.parametrize("size", [1.0, 1e8])
def test_arguments_of_neurons_are_off_by_no_more_than_their_rounding(size):
    """Products that cancel, against rationals."""
    x, w, b = cancelling(size)
    found = arguments(at_rest(x), w, b)
    exactly = products([fractions(row) for row in x], [fractions(column) for column in w.mT])
    shares = []
    for i, k in itertools.product(range(3), range(5)):
        off = abs(Fraction(float(found.value[i, k])) - exactly[i][k] - Fraction(float(b[k])))
        assert off <= Fraction(float(found.error.bound[i, k]))
        assert off <= Fraction(float(found.rest.bound[i, k]))
        shares.append(float(off) / float(found.error.bound[i, k]))
    assert max(shares) > 1e-3


@pytest.mark.parametrize("size", [1.0, 1e8])
def test_a_layer_of_neurons_at_rest_holds_its_exact_value(size):
    """Relu is exact in rationals: what remains is the rounding of arguments that cancel."""
    x, w, b = cancelling(size)
    b, out = b / 16, drawn(generator(14), 5, 6)
    layer = maps.feed_forward(maps.Relu(), w, out, b)
    state = through.one(layer, at_rest(x))
    exactly = products([fractions(row) for row in x], [fractions(column) for column in w.mT])
    active = [[max(Fraction(0), h + c) for h, c in zip(row, fractions(b), strict=True)] for row in exactly]
    values = products(active, [fractions(column) for column in out.mT])
    for i in range(3):
        away = vector(*(float(c - v) for c, v in zip(fractions(state.center[i]), values[i], strict=True)))
        proved = widths(state.shape, (away / away.norm().clamp_min(1e-300))[None, :, None]).bound[i, 0]
        assert float(away.norm()) <= float(proved) < 1e-8 * size


def test_scores_that_are_sums_of_turned_and_plain_products():
    """Projections of every token beside one for all: the value at rest is that of the attention."""
    g = generator(15)
    turned, plain = (r.Dot(drawn(g, 2, 6, 4), drawn(g, 2, 6, 4)) for _ in range(2))
    for potential in (r.Rotary(turned) + plain, plain + r.Rotary(turned)):
        map = maps.Heads(r.Attention(potential, r.Linear(drawn(g, 2, 6, 4))), drawn(g, 2, 4, 6))
        x = drawn(g, 3, 6)
        assert through.one(map, at_rest(x)).center == pytest.approx(map(x), rel=1e-11, abs=1e-12)


def test_the_reach_of_a_state_is_all_that_moves_it():
    """A ball of the input by the root of its trace, and an ellipsoid that is a ball by its radius."""
    state = begin.one(Radii(drawn(generator(), 2, 4), vector(0.0, 0.3)))
    state = state.with_rest(Sum(2, 4).ball(exact(vector(0.5, 0.25))))
    assert bool((state.reach.bound >= vector(0.5, 0.55)).all())
    assert state.reach.bound == pytest.approx(vector(0.5, 0.85), rel=1e-6)


def test_the_factor_of_a_key_that_has_no_weight_is_attained_from_above():
    """Z = 1: e^a - 1 - a°, however far it moves."""
    _, row = remainder((1e-12, 1 - 1e-12), (3.0, 0.0), (0.5, 0.0), 1e-5)
    seen, proved = math.expm1(3.5) - 3.0, float(row.factor.bound[0, 0])
    assert 0.999 * proved < seen < proved * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.89, 0.91])
def test_a_token_may_lose_nine_tenths_of_itself(share, monkeypatch):
    """Beyond that its direction is not followed: it may be anywhere."""
    x = drawn(generator(3), 1, 5)
    layer = maps.Normalize(0.1, centered=False)
    state = begin.one(Radii(x, share * x.norm(dim=-1)))
    monkeypatch.setattr(Sum, "trace", property(lambda found: torch.zeros(1, dtype=D)))
    after = normalize(state, layer)
    assert bool((after.linear != 0).any()) is (share < 0.9)
    assert bool(torch.isfinite(after.shape).all())
