"""Powers of two change no digit: everything the ball model says of rounding scales as what is rounded does.

The unit of rounding is made large, and nothing is rounded: what is accounted for it is then a part of every
number, and a size that is left out of it, or is there once too often, is seen.
"""

import math

import pytest
import torch

import regard as r
from regard import maps
from regard._upper import exact
from regard.domains import Hull, Radii
from regard.nonexpansive import MixTokens
from regard.proofs.ball_model import score_moves
from regard.proofs.ball_model.beginning import begin
from regard.proofs.ball_model.ellipsoids import Sum, lifted, pushed, widths
from regard.proofs.ball_model.groups import Groups
from regard.proofs.ball_model.inputs import BallPart, BoxPart, Inputs, SimplexPart
from regard.proofs.ball_model.margin import _dual, least
from regard.proofs.ball_model.network import through
from regard.proofs.ball_model.opening import closed, opened
from regard.proofs.ball_model.quadratic import (
    Own,
    Quadratic,
    own_square,
    quartic_norms,
    reach_of_forms,
    split,
)
from regard.proofs.ball_model.squares import Squares
from regard.proofs.ball_model.state import State
from tests.ball_model.networks import D, drawn
from tests.coarse import large_unit

N, WIDE, MOVING = 2, 3, 2
UP, DOWN = 2.0**5, 2.0**-5
"""Powers of two, and their squares and fourth powers, change no digit."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def unit():
    with large_unit():
        yield


def scaled(found, expected, factor):
    """`found` is `expected` times a power of two."""
    other = factor * expected
    assert bool(((found - other).abs() <= 1e-9 * other.abs() + 1e-100).all())


def state_of(g, size=1.0, curved=True, moves=0.1):
    """A state with all its parts, every one of a size."""
    forms, root = size * moves * drawn(g, N, WIDE, MOVING, MOVING), size * moves * drawn(g, N, WIDE, WIDE)
    groups = Groups(size * moves * drawn(g, N, WIDE, 3), torch.arange(3) - 10, torch.tensor([-5, -5, -6]))
    return State(
        Inputs((BallPart(MOVING),), (1.0,)),
        size * drawn(g, N, WIDE),
        size * moves * drawn(g, N, WIDE, MOVING),
        Quadratic(forms + forms.mT) if curved else None,
        groups,
        root @ root.mT,
    )


def compared(found, other, factor):
    """A state is another one times a power of two."""
    scaled(found.center, other.center, factor)
    scaled(found.linear, other.linear, factor)
    scaled(found.shape, other.shape, factor**2)
    assert (found.curved is None) == (other.curved is None)
    if found.curved is not None:
        scaled(found.curved.forms, other.curved.forms, factor)
    scaled(found.groups.columns, other.groups.columns, factor)


# Parts of a state


def test_ellipsoids():
    g = generator()
    root, matrix, a = drawn(g, N, WIDE, WIDE), drawn(g, N, 2, WIDE), drawn(g, 1, WIDE, 4)
    shape, error = root @ root.mT, exact(torch.rand(N, generator=g, dtype=D))
    for s, t in ((UP, DOWN), (DOWN, UP), (UP, UP)):
        scaled(lifted(s * shape, exact(s * error.value)), lifted(shape, error), s)
        scaled(pushed(t * matrix, s * shape), pushed(matrix, shape), s * t * t)
        scaled(widths(s * s * shape, t * a).bound, widths(shape, a).bound, s * t)


SETS = {
    "shape": lambda found, v, s: found.shape(s * s * (v @ v.mT)),
    "times": lambda found, v, s: found.shape(v @ v.mT, exact(torch.full((N,), s, dtype=D))),
    "gram": lambda found, v, s: found.gram(s * v, exact(torch.full((N,), 0.7, dtype=D))),
    "grown": lambda found, v, s: found.gram(v, exact(torch.full((N,), s, dtype=D))),
    "ball": lambda found, v, s: found.ball(exact(s * v.square().sum((-2, -1)))),
    "segments": lambda found, v, s: found.segments(s * v),
    "groups": lambda found, v, s: Groups(s * v, torch.arange(2), torch.arange(2)).merged_into(found),
    "other": lambda found, v, s: found.add(*Sum(N, WIDE).segments(s * v).parts),
}


@pytest.mark.parametrize("kind", SETS)
def test_sums(kind):
    v = drawn(generator(1), N, WIDE, 2)
    one = SETS[kind](Sum(N, WIDE), v, 1.0).done()
    two = SETS[kind](SETS["ball"](Sum(N, WIDE), v, 1.0), v, 1.0).done()
    for s in (UP, DOWN):
        scaled(SETS[kind](Sum(N, WIDE), v, s).done(), one, s * s)
        scaled(SETS[kind](SETS["ball"](Sum(N, WIDE), v, s), v, s).done(), two, s * s)


def test_groups():
    g = generator(2)
    a = drawn(g, 1, WIDE, 4)

    def groups(s):
        return Groups(s * drawn(generator(3), N, WIDE, 3), torch.arange(3) - 10, torch.tensor([-5, -5, -6]))

    shape = state_of(g).shape
    for s in (UP, DOWN):
        scaled(groups(s).sizes.bound, groups(1.0).sizes.bound, s)
        scaled(groups(s).reach(a).bound, groups(1.0).reach(a).bound, s)
        scaled(groups(1.0).reach(s * a).bound, groups(1.0).reach(a).bound, s)
        for change, most in ((opened, 100), (opened, 4), (closed, 1)):
            few, left = change(groups(s), s * s * shape, most)
            same, other = change(groups(1.0), shape, most)
            scaled(few.columns.abs(), same.columns.abs(), s)
            scaled(left, other, s * s)


def own_of(s):
    return own_square(s * drawn(generator(4), N, WIDE, MOVING))


def test_quadratic_forms():
    """Forms, and the square of the linear part, each with a size of its own."""
    g = generator(5)
    forms, a = drawn(g, N, WIDE, MOVING, MOVING), drawn(g, 1, WIDE, 4)
    forms = forms + forms.mT
    plain = own_of(1.0)
    for s, t in ((UP, 1.0), (DOWN, 1.0), (1.0, UP), (1.0, DOWN)):
        own = own_of(t)
        scaled(own.error.bound, plain.error.bound, t * t)
        scaled(own.norm.bound, plain.norm.bound, t * t)
        scaled(quartic_norms(s * forms).bound, quartic_norms(forms).bound, s)
        near = 1e-3 * s * forms + s / t**2 * own.square.unsqueeze(1)
        alike = 1e-3 * forms + plain.square.unsqueeze(1)
        scaled(reach_of_forms(near, own).bound, reach_of_forms(alike, plain).bound, s)
        scaled(Quadratic(s * forms).reach(a, own).bound, Quadratic(forms).reach(a, plain).bound, s)
        scaled(Quadratic(forms).reach(s * a, own).bound, Quadratic(forms).reach(a, plain).bound, s)
        for found, other, factor in zip(
            _split(s * forms, own), _split(forms, plain), (s, s * s), strict=True
        ):
            scaled(found, other, factor)


def _split(forms: torch.Tensor, own: Own):
    return split(Quadratic(forms).grams(own), own)


def test_squares_of_neurons():
    g = generator(6)
    slopes, factors, mixing = drawn(g, N, 4, MOVING), drawn(g, N, 4), drawn(g, WIDE, 4)
    plain = Squares(slopes, factors, mixing, 0.0)
    for s, t, p in ((UP, 1.0, 1.0), (1.0, UP, 1.0), (1.0, 1.0, UP), (DOWN, DOWN, DOWN)):
        found = Squares(s * slopes, t * factors, p * mixing, 0.0)
        scaled(found.norm.bound, plain.norm.bound, s)
        scaled(found.fourth.bound, plain.fourth.bound, s**4)
        scaled(found.quartic.bound, plain.quartic.bound, s**4)
        one, other = found.grams, plain.grams
        scaled(one.gram, other.gram, (t * p) ** 2 * s**4)
        scaled(one.gram_error.bound, other.gram_error.bound, (t * p) ** 2 * s**4)
        scaled(one.inner, other.inner, t * p * s**4)
        scaled(one.inner_error.bound, other.inner_error.bound, t * p * s**4)


def test_inputs():
    a = drawn(generator(7), 5, 4)
    for part in (BallPart(4), BoxPart(4), SimplexPart(4)):
        scaled(part.reach(UP * a).bound, part.reach(a).bound, UP)


def test_states():
    g = generator(8)
    a = drawn(g, 1, WIDE, 4)
    plain, large = state_of(generator(9)), state_of(generator(9), size=UP)
    for name in ("size", "reach"):
        scaled(getattr(large, name).bound, getattr(plain, name).bound, UP)
    scaled(large.joint_rest().bound, plain.joint_rest().bound, UP)
    scaled(large.rest_shape, plain.rest_shape, UP**2)
    for s, state in ((1.0, large), (UP, plain)):
        scaled(state.first(s * a).bound, plain.first(a).bound, UP)
        scaled(state.rest(s * a).bound, plain.rest(a).bound, UP)
        scaled(state.lost(s * a[0].mT.unsqueeze(0)).bound, plain.lost(a[0].mT.unsqueeze(0)).bound, UP)
        error = exact(s * torch.ones(N, dtype=D))
        other = plain.lost(a[0].mT.unsqueeze(0), exact(torch.ones(N, dtype=D)))
        scaled(state.lost(s * a[0].mT.unsqueeze(0), error).bound, other.bound, UP)


def test_where_it_begins():
    x, corners = drawn(generator(10), N, WIDE), drawn(generator(11), 4, WIDE)
    compared(begin.one(Hull(UP * x, 1, UP * corners)), begin.one(Hull(x, 1, corners)), UP)
    radii = torch.tensor([0.1, 0.3], dtype=D)
    compared(begin.one(Radii(UP * x, UP * radii)), begin.one(Radii(x, radii)), UP)


# Margins


@pytest.mark.parametrize("curved", [False, True])
def test_least_values(curved):
    g = generator(12)
    a, b = drawn(g, WIDE, 4), drawn(g, 4)

    def alone(size):
        state = state_of(generator(13), size, curved)
        parts = (state.center[:1], state.linear[:1], state.curved and Quadratic(state.curved.forms[:1]))
        columns = Groups(state.groups.columns[:1], state.groups.labels, state.groups.owner)
        return State(state.inputs, *parts, columns, state.shape[:1])

    plain = least(alone(1.0), a, b)
    scaled(least(alone(UP), a, UP * b), plain, UP)
    scaled(least(alone(1.0), UP * a, UP * b), plain, UP)


def test_the_dual_of_a_quadratic():
    g = generator(14)
    slope, form = drawn(g, 3), drawn(g, 3, 3)
    form = form @ form.mT
    for s in (UP, DOWN):
        found, other = _dual(s * slope, s * form, s * 0.5, s * 0.5), _dual(slope, form, 0.5, 0.5)
        assert found == pytest.approx(s * other, rel=1e-9)
        assert math.isfinite(found)


# Maps


def attention(g, q=1.0, v=1.0, o=1.0, x=1.0, heads=2):
    """Scores keep their size where queries grow and keys shrink; values and outputs have their own."""

    def made(size, *shape):
        return size * drawn(g, heads, *shape)

    dot = r.Dot(made(q / x, WIDE, 2), made(1 / (q * x), WIDE, 2), b_q=made(q, 2), b_k=made(1 / q, 2))
    lookup = r.Linear(made(v / x, WIDE, 3), made(v, 3))
    return maps.Heads(r.Attention(dot, lookup), made(o, 3, WIDE), v * o * drawn(g, WIDE))


@pytest.mark.parametrize("explicit", [score_moves.EXPLICIT, 0])
@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("change", ["q", "v", "o", "x"])
def test_attention(monkeypatch, change, curved, explicit):
    monkeypatch.setattr(score_moves, "EXPLICIT", explicit)
    plain = through.one(attention(generator(15)), state_of(generator(16), 1.0, curved, 0.01))
    map = attention(generator(15), **{change: UP})
    found = through.one(map, state_of(generator(16), UP if change == "x" else 1.0, curved, 0.01))
    compared(found, plain, UP if change in ("v", "o") else 1.0)


@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_norm_layers(centered, curved):
    """Tokens and the root of ε grow together, and so do weights and biases."""

    def normalize(size, out):
        g = generator(17)
        map = maps.Normalize(0.1 * size**2, out * drawn(g, WIDE), out * drawn(g, WIDE), centered=centered)
        return through.one(map, state_of(generator(18), size, curved))

    for size, out in ((UP, 1.0), (DOWN, 1.0), (1.0, UP)):
        compared(normalize(size, out), normalize(1.0, 1.0), out)


def neurons(size, out, activation, residual):
    """Tokens grow, weights shrink, and arguments stay as they are; outputs have a size of their own."""
    g = generator(19)
    first, second = drawn(g, WIDE, 4) / size, out * drawn(g, 4, WIDE)
    layer = maps.feed_forward(activation, first, second, drawn(g, 4), out * drawn(g, WIDE))
    return maps.Residual(layer) if residual else layer


@pytest.mark.parametrize("activation", [maps.Relu(), maps.Gelu()], ids=repr)
@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_layers_of_neurons(curved, residual, activation):
    plain = through.one(neurons(1.0, 1.0, activation, residual), state_of(generator(20), 1.0, curved))
    for size, out in ((UP, UP), (DOWN, DOWN)) if residual else ((UP, 1.0), (1.0, UP), (DOWN, UP)):
        map = neurons(size, out, activation, residual)
        compared(through.one(map, state_of(generator(20), size, curved)), plain, out)


@pytest.mark.parametrize("curved", [False, True])
def test_gated_layers(curved):
    def layer(size, out):
        g = generator(21)
        weights = drawn(g, WIDE, 4) / size, drawn(g, WIDE, 4) / size, out * drawn(g, 4, WIDE)
        return maps.Gated(maps.Silu(), *weights, drawn(g, 4), drawn(g, 4))

    plain = through.one(layer(1.0, 1.0), state_of(generator(22), 1.0, curved))
    for size, out in ((UP, 1.0), (1.0, UP)):
        compared(through.one(layer(size, out), state_of(generator(22), size, curved)), plain, out)


@pytest.mark.parametrize("curved", [False, True])
def test_maps_that_are_linear(curved):
    def all_of(size, out):
        g = generator(23)
        affine = maps.Affine(out * drawn(g, WIDE, WIDE), out * size * drawn(g, WIDE))
        state = state_of(generator(24), size, curved)
        both = maps.Added((affine, affine))
        mixed = MixTokens(out * drawn(g, 3, N))
        return [through.one(map, state) for map in (affine, both, mixed)]

    plain = all_of(1.0, 1.0)
    for size, out in ((UP, 1.0), (1.0, UP)):
        for found, other in zip(all_of(size, out), plain, strict=True):
            compared(found, other, size * out)
