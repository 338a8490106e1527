"""Maps of one token: slopes that are attained, how far a token is carried, and the balls that hold images,
as their statements say.
"""

import math

import mpmath
import pytest
import torch

import regard as r
from regard._upper import exact, relative_error
from regard.domains import Ball, Neighborhood, Radii, Shell, Whole
from regard.maps import (
    Added,
    Affine,
    Compose,
    FromQueries,
    Gated,
    Gelu,
    Heads,
    Joint,
    Normalize,
    Pointwise,
    Relu,
    Residual,
    Silu,
    Tanh,
    ToContext,
)
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.proofs import certify, deviation, image
from regard.proofs.locating import locate
from regard.proofs.setting import balls_of
from regard.proofs.theorem import Refusal
from regard.proofs.tokenwise import growth, least_deviation, steepness, travel
from tests.theorems.exact import D, generator, normal

G = generator(21)
X, CENTER = normal(G, 4, 3), normal(G, 3)
RADII = torch.tensor([0.0, 0.1, 0.7, 40.0], dtype=D)
CLOSE = 1e-9


def two(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


def steepest(function, start):
    """The largest slope of a function of one number, to forty digits."""
    with mpmath.workdps(40):
        at = mpmath.findroot(lambda x: mpmath.diff(function, x, 2), start)
        return mpmath.diff(function, at)


@pytest.mark.parametrize(
    ("activation", "function", "start"),
    [
        (Gelu(), lambda x: x * mpmath.ncdf(x), 1.41),
        (
            Gelu(tanh=True),
            lambda x: (
                x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)))
            ),
            1.4,
        ),
        (Silu(), lambda x: x / (1 + mpmath.exp(-x)), 2.4),
        (Silu(1.7), lambda x: x / (1 + mpmath.exp(-mpmath.mpf("1.7") * x)), 1.4),
    ],
    ids=["erf", "tanh", "silu", "steep silu"],
)
def test_slopes_of_activations_are_attained_to_five_digits(activation, function, start):
    seen = steepest(function, start)
    assert seen <= float(steepness.one(activation)) <= seen + mpmath.mpf("1e-5")


def test_slopes_of_one_are_attained():
    assert float(steepness.one(Relu())) == float(steepness.one(Tanh())) == 1.0
    for activation in (Relu(), Tanh(), Gelu(), Silu()):
        assert [float(part) for part in growth(activation)] == [1.0, 0.0]
        z = torch.linspace(-50, 50, 4001, dtype=D)
        assert bool((activation(z).abs() <= z.abs()).all())


def test_affine_maps_carry_by_their_norm():
    w = normal(G, 3, 5)
    found = travel.one(Affine(w), X, RADII)
    assert torch.allclose(found.slopes.bound, torch.full_like(RADII, two(w)), rtol=CLOSE)
    assert torch.allclose(found.moves.bound, two(w) * RADII, rtol=CLOSE)
    assert bool((found.moves.bound >= two(w) * RADII).all())
    assert float(found.moves[0]) == 0


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, -3.0, 1.0], dtype=D)], ids=["plain", "weights"])
def test_norm_layers_carry_as_far_as_their_slope_or_their_length(centered, weight):
    """min(max|γ| r/√(s₀² + ε), max|γ| (|x̂'| + |x̂|)), s₀ = s - r/√d and |x̂| = √d s/√(s² + ε)."""
    layer = Normalize(0.02, weight, centered=centered)
    away = X - X.mean(-1, keepdim=True) if centered else X
    s, reach = away.norm(dim=-1) / math.sqrt(3), RADII / math.sqrt(3)
    top = 1.0 if weight is None else 3.0
    slopes = top / ((s - reach).clamp_min(0).square() + 0.02).sqrt()

    def length(deviation):
        return math.sqrt(3) * deviation / (deviation.square() + 0.02).sqrt()

    moves = torch.minimum(slopes * RADII, top * (length(s + reach) + length(s)))
    found = travel.one(layer, X, RADII)
    assert torch.allclose(found.slopes.bound, slopes, rtol=CLOSE)
    assert torch.allclose(found.moves.bound, moves, rtol=CLOSE)
    assert bool((moves[2:] < slopes[2:] * RADII[2:]).any())  # both forms are seen
    assert bool((moves[1] == slopes[1] * RADII[1]).any())


def test_the_slope_of_a_norm_layer_is_attained():
    """Across the token the derivative is γ/√(s² + ε): two entries of a token move against each other."""
    layer, token = Normalize(0.02, centered=False), torch.tensor([[3.0, 0.0]], dtype=D)
    seen = two(torch.func.jacrev(layer)(token).reshape(2, 2))
    found = certify(layer, Neighborhood(token, 0.0, Frobenius()), Frobenius()).value
    assert seen <= found <= seen * (1 + CLOSE)


def test_the_least_deviation_of_a_domain():
    layer = Normalize(0.02)

    def least(domain):
        return float(least_deviation(layer, domain))

    s = (X - X.mean(-1, keepdim=True)).norm(dim=-1) / math.sqrt(3)
    assert least(Neighborhood(X, 0.1, TokenMax())) == pytest.approx(
        float(s.min()) - 0.1 / math.sqrt(3), rel=CLOSE, abs=0
    )
    assert least(Radii(X, RADII)) == 0
    about = float((CENTER - CENTER.mean()).norm()) / math.sqrt(3)
    assert least(Ball(0.1, CENTER)) == pytest.approx(about - 0.1 / math.sqrt(3), rel=CLOSE, abs=0)
    assert least(Ball(0.1)) == least(Whole()) == 0
    assert least(Shell(0.25)) == 0.25


def test_gated_layers():
    """|w_out| (L |w| max|gate| + max|φ| |w_gate|), the maxima of entries |wᵀx + b| + r |w e_c|."""
    w, gate, out, b, b_gate = normal(G, 3, 4), normal(G, 3, 4), normal(G, 4, 2), normal(G, 4), normal(G, 4)
    layer = Gated(Silu(), w, gate, out, b, b_gate)
    inner = ((X @ w + b).abs() + RADII.unsqueeze(-1) * w.norm(dim=0)).amax(-1)
    other = ((X @ gate + b_gate).abs() + RADII.unsqueeze(-1) * gate.norm(dim=0)).amax(-1)
    slopes = two(out) * (1.09984 * two(w) * other + inner * two(gate))
    found = travel.one(layer, X, RADII)
    assert torch.allclose(found.slopes.bound, slopes, rtol=CLOSE)
    assert torch.allclose(found.moves.bound, slopes * RADII, rtol=CLOSE)
    ball = Ball(0.3, CENTER)
    held = image(layer, ball)
    first = (CENTER @ w + b).abs() + 0.3 * w.norm(dim=0)
    second = (CENTER @ gate + b_gate).abs() + 0.3 * gate.norm(dim=0)
    size = min(float(first.norm() * second.max()), float(first.max() * second.norm()))
    assert held.radius == pytest.approx(two(out) * size, rel=CLOSE, abs=0)


class Shifted(r.maps.Activation):
    """z + 2: not zero at zero."""

    def __call__(self, x):
        return x + 2


def test_activations_that_move_zero():
    steepness.rule(Shifted)(lambda activation: exact(1.0))
    factor, offset = growth(Shifted())
    assert (float(factor), float(offset)) == (1.0, pytest.approx(2.0, rel=CLOSE, abs=0))
    one = torch.ones(1, 1, dtype=D)
    layer, token = Gated(Shifted(), one, 3 * one, one), torch.tensor([[5.0]], dtype=D)
    assert float(travel.one(layer, token, torch.zeros(1, dtype=D)).slopes) == pytest.approx(
        15 + 7 * 3, rel=CLOSE, abs=0
    )


def test_moves_of_tokens_are_gathered_in_each_norm():
    """√Σr², Σr and max r of what tokens are carried; and slope × radius where tokens share one."""
    w = normal(G, 3, 3)
    size, domain = two(w), Radii(X, torch.tensor([0.3, 0.0, 0.4, 1.2], dtype=D))
    for norm, moved in ((Frobenius(), 1.3), (TokenSum(), 1.9), (TokenMax(), 1.2)):
        assert deviation(Affine(w), domain, norm).value == pytest.approx(size * moved, rel=CLOSE, abs=0)
    shared = Neighborhood(X, 0.5, Frobenius())
    for norm, factor in ((Frobenius(), 1.0), (TokenSum(), 2.0), (TokenMax(), 1.0)):
        assert deviation(Affine(w), shared, norm).value == pytest.approx(
            size * 0.5 * factor, rel=CLOSE, abs=0
        )
    each = Neighborhood(X, 0.5, TokenMax())
    for norm, factor in ((Frobenius(), 2.0), (TokenSum(), 4.0), (TokenMax(), 1.0)):
        assert deviation(Affine(w), each, norm).value == pytest.approx(size * 0.5 * factor, rel=CLOSE, abs=0)


# Images


def ball_is(found, center, radius):
    assert isinstance(found, Ball)
    if center is None:
        assert found.center is None
    else:
        assert torch.allclose(found.center, center, rtol=0, atol=1e-12)
    assert radius * (1 - 1e-14) <= float(found.radius) <= radius * (1 + CLOSE) + 1e-12


def test_images_of_balls_under_maps_of_one_token():
    w, b, ball = normal(G, 3, 2), normal(G, 2), Ball(0.7, CENTER, tokens=4)
    ball_is(image(Affine(w, b), ball), CENTER @ w + b, two(w) * 0.7)
    ball_is(image(Affine(w, b), Ball(0.7)), b, two(w) * 0.7)
    assert image(Affine(w, b), ball).tokens == 4
    ball_is(image(Pointwise(Silu()), ball), Silu()(CENTER), 1.09984 * 0.7)
    ball_is(image(Pointwise(Tanh()), Ball(0.7)), None, 0.7)
    ball_is(image(Pointwise(Silu()), Ball(0.7)), None, 1.09984 * 0.7)
    ball_is(image(Residual(Affine(2 * torch.eye(3, dtype=D))), ball), 3 * CENTER, 3 * 0.7)
    ball_is(
        image(Added((Affine(torch.eye(3, dtype=D)), Pointwise(Relu()))), ball), CENTER + Relu()(CENTER), 1.4
    )
    ball_is(image(Compose((Affine(w, b), Pointwise(Relu()))), ball), Relu()(CENTER @ w + b), two(w) * 0.7)


def test_images_of_norm_layers():
    """B(β, max|γ| |x̂|), or B(N(c), slope · R) where that is smaller."""
    weight, bias = torch.tensor([0.5, -3.0, 1.0], dtype=D), normal(G, 3)
    layer = Normalize(0.02, weight, bias)
    ball_is(image(layer, Whole()), bias, 3 * math.sqrt(3))
    ball_is(image(layer, Shell(0.1, 0.2)), bias, 3 * math.sqrt(3) * 0.2 / math.sqrt(0.04 + 0.02))
    s = float((CENTER - CENTER.mean()).norm()) / math.sqrt(3)
    high = s + 5.0 / math.sqrt(3)
    ball_is(image(layer, Ball(5.0, CENTER)), bias, 3 * math.sqrt(3) * high / math.sqrt(high**2 + 0.02))
    slope = 3 / math.sqrt((s - 0.01 / math.sqrt(3)) ** 2 + 0.02)
    ball_is(image(layer, Ball(0.01, CENTER)), layer(CENTER.unsqueeze(0))[0], slope * 0.01)


def test_images_of_attention_hold_averages_of_values():
    """B(Wᵀc + b, |W| R); several heads that are mixed: Σ_h, or |W_O| √Σ_h (|W_h| R)²."""
    w_v, b_v, ball = normal(G, 3, 2), normal(G, 2), Ball(0.7, CENTER)
    ball_is(image(r.Attention(r.Dot(), r.Linear(w_v, b_v)), ball), CENTER @ w_v + b_v, two(w_v) * 0.7)
    values, biases, w_o, b_o = normal(G, 2, 3, 2), normal(G, 2, 2), normal(G, 2, 2, 3), normal(G, 3)
    heads = Heads(
        r.Attention(r.Dot(normal(G, 2, 3, 2), normal(G, 2, 3, 2)), r.Linear(values, biases)), w_o, b_o
    )
    center = sum((CENTER @ values[h] + biases[h]) @ w_o[h] for h in range(2)) + b_o
    apart = sum(two(values[h] @ w_o[h]) for h in range(2)) * 0.7
    joined = two(w_o.reshape(4, 3)) * math.hypot(*(two(values[h]) for h in range(2))) * 0.7
    ball_is(image(heads, ball), center, min(apart, joined))


def test_rows_that_see_nothing_give_zero():
    """The ball of the values reaches zero too, where a support may leave a row empty."""
    w_v, b_v = torch.eye(3, dtype=D), torch.tensor([5.0, 0.0, 0.0], dtype=D)
    map = r.Attention(r.Dot(), r.Linear(w_v, b_v), support=r.Window(0, 0))
    ball_is(image(map, Ball(0.5, torch.zeros(3, dtype=D))), b_v, 5.0)
    context = ToContext(map, torch.zeros(2, 3, dtype=D))
    assert image(context, Ball(0.5, torch.zeros(3, dtype=D))).radius >= 5.0


def test_images_of_neighborhoods_are_neighborhoods_of_the_value():
    w = normal(G, 3, 2)
    for norm in (Frobenius(), TokenMax()):
        found = image(Affine(w), Neighborhood(X, 0.25, norm))
        assert torch.allclose(found.measure.points, X @ w, atol=1e-13)
        assert found.radius == pytest.approx(two(w) * 0.25, rel=CLOSE, abs=0)
    found = image(Affine(w), Radii(X, RADII))
    assert torch.allclose(found.radii, two(w) * RADII, rtol=CLOSE, atol=1e-12)
    found = image(Residual(Affine(2 * torch.eye(3, dtype=D))), Radii(X, RADII))
    assert torch.allclose(found.radii, 3 * RADII, rtol=CLOSE, atol=1e-12)
    found = image(Added((Affine(2 * torch.eye(3, dtype=D)), Pointwise(Relu()))), Radii(X, RADII))
    assert torch.allclose(found.radii, 3 * RADII, rtol=CLOSE, atol=1e-12)


def test_queries_that_stay_give_what_they_gave():
    map = ToContext(r.Attention(r.Dot()), normal(G, 5, 3))
    domain = Radii(X, torch.tensor([0.0, 0.1, 0.0, 0.05], dtype=D))
    moved = deviation(map, domain, TokenMax()).value
    found = image(map, domain).radii
    assert found.dtype == D
    assert float(found.max()) >= moved
    assert torch.allclose(found, torch.tensor([0.0, moved, 0.0, moved], dtype=D), rtol=1e-6, atol=1e-10)


def test_as_many_tokens_come_out_as_there_are_queries():
    ball, map = Ball(0.3, CENTER, tokens=5), r.Attention(r.Dot())
    some, dense = FromQueries(map, normal(G, 2, 3)), Affine(torch.eye(3, dtype=D))
    assert image(some, ball).tokens == 2
    assert image(Compose((dense, some, dense)), ball).tokens == 2
    assert image(Joint(map, 3), ball).tokens == 3
    assert image(map, ball).tokens == image(dense, ball).tokens == 5


def test_images_near_a_sequence_are_the_smaller_of_two_sets():
    """A neighborhood of the value where tokens hardly move, and the ball of all values where they do."""
    layer = Normalize(0.02)
    assert isinstance(image(layer, Neighborhood(X, 1e-3, TokenMax())), Neighborhood)
    held = image(layer, Neighborhood(X, 1e3, TokenMax()))
    assert isinstance(held, Ball)
    assert held.radius == pytest.approx(math.sqrt(3), rel=1e-6)


def test_values_that_move_are_known_to_their_margin():
    """The radius of the image is the deviation and the margin, √n times in Frobenius norm."""
    w, far = 1e-9 * normal(G, 3, 3), 1e6 * X
    margin = locate.one(Affine(w), r.Measure(far))[1]
    for norm, factor in ((Frobenius(), 2.0), (TokenMax(), 1.0)):
        domain = Neighborhood(far, 1e-12, norm)
        moved = deviation(Affine(w), domain, norm).value
        found = float(image(Affine(w), domain).radius)
        assert found == pytest.approx(moved + factor * float(margin), rel=1e-6, abs=0)
    found = image(Affine(w), Radii(far, torch.zeros(4, dtype=D))).radii
    assert torch.allclose(found, torch.full((4,), float(margin), dtype=D), rtol=1e-6, atol=0)


def test_attention_to_a_context_is_among_its_values():
    """W of the smallest ball at hand that holds the context; and zero, where a query may see nothing."""
    keys = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 0.5]], dtype=D) + 3.0
    w_v = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=D)
    map = r.Attention(r.Dot(), r.Linear(w_v))
    middle, radius = 0.5 * (keys.amax(0) + keys.amin(0)), math.hypot(1.0, 0.25)
    mean = keys.mean(0)
    radius_of_mean = float((keys - mean).norm(dim=-1).max())
    center, least = min((radius, middle), (radius_of_mean, mean), key=lambda pair: pair[0])[::-1]
    ball_is(image(ToContext(map, keys), Ball(9.0, mean)), center @ w_v, 2 * least)
    blind = image(ToContext(map.replace(support=r.Window(0, 0)), keys), Ball(9.0, mean))
    ball_is(blind, center @ w_v, max(2 * least, float((center @ w_v).norm())))
    weights = torch.tensor([0.0, 0.0, -math.inf], dtype=D)
    ball_is(image(ToContext(map, r.Measure(keys, weights)), Ball(9.0, mean)), center @ w_v, 2 * least)


@pytest.mark.parametrize(
    "points",
    [
        [[0.1, -0.1, 0.0], [9.0, 0.0, -9.0], [80.0, 1.0, 0.0]],
        [[0.1, -0.1, 0.0], [0.0, 0.1, -0.1], [0.1, 0.0, -0.1]],
    ],
    ids=["one is steep", "all are"],
)
@pytest.mark.parametrize("radius", [0.01, 1.0, 50.0])
def test_moves_of_norm_layers_are_gathered_in_each_norm(radius, points):
    """The smaller of the moves together and of the steepest slope times a shared radius; √n of that in
    TokenSum.
    """
    layer, points = Normalize(0.02), torch.tensor(points, dtype=D)
    found = travel.one(layer, points, torch.full((3,), radius, dtype=D))
    slope, moves = float(found.slopes.amax()), found.moves.bound
    shared = slope * radius
    stated = {
        Frobenius(): min(float(moves.norm()), shared),
        TokenSum(): min(float(moves.sum()), math.sqrt(3) * shared),
        TokenMax(): float(moves.max()),
    }
    for norm, number in stated.items():
        rungs = deviation(layer, Neighborhood(points, radius, Frobenius()), norm)
        seen = [rung.value for rung in (rungs, *rungs.others) if rung.theorem.startswith("norm layer")]
        assert seen == [pytest.approx(number, rel=CLOSE, abs=0)], (norm, rungs)


def test_a_norm_layer_without_eps_needs_every_token_away_from_its_mean():
    layer = Normalize(0.0)
    away = torch.tensor([[1.0, -1.0, 0.0], [0.0, 2.0, -2.0]], dtype=D)
    near = torch.tensor([[1.0, -1.0, 0.0], [3.0, 3.0, 3.1]], dtype=D)
    radii = torch.full((2,), 0.2, dtype=D)
    slopes = 1 / (away.norm(dim=-1) / math.sqrt(3) - 0.2 / math.sqrt(3))
    assert torch.allclose(travel.one(layer, away, radii).slopes.bound, slopes, rtol=CLOSE)
    with pytest.raises(Refusal, match="LayerNorm jumps at constant tokens"):
        travel.one(layer, near, radii)
    with pytest.raises(Refusal, match="RMSNorm jumps at zero"):
        travel.one(Normalize(0.0, centered=False), torch.zeros(1, 3, dtype=D), torch.zeros(1, dtype=D))


def test_constants_of_gated_layers_near_a_sequence():
    """Token by token in TokenMax norm; in Wasserstein norms tokens are paired anywhere: the least of
    three balls.
    """
    w, gate, out = normal(G, 3, 4), normal(G, 3, 4), normal(G, 4, 2)
    layer, radii = Gated(Silu(), w, gate, out), torch.tensor([0.0, 0.1, 0.7, 0.3], dtype=D)
    domain = Radii(X, radii)
    own = float(travel.one(layer, X, radii).slopes.amax())
    for norm in (TokenMax(), Frobenius(), TokenSum()):
        assert certify(layer, domain, norm).value == pytest.approx(own, rel=CLOSE, abs=0)
    held = [
        float(
            travel.one(
                layer, ball.center.unsqueeze(0), torch.tensor([float(ball.radius)], dtype=D)
            ).slopes.amax()
        )
        for ball in balls_of(domain, 3)
    ]
    assert max(held) > min(held) * 1.01
    found = certify(layer, domain, r.Wasserstein(2.0)).value
    assert found == pytest.approx(min(held), rel=CLOSE, abs=0)


def test_images_of_points_are_known_to_their_rounding():
    """A ball of radius 0 goes to a ball of γ(4d + 64) (|c||W|_F + |b|), for every head and what mixes them;
    affine maps have γ(2d + 8).
    """
    point, length = Ball(0.0, CENTER), float(CENTER.norm())

    def size(*tensors):
        return math.prod(float(tensor.norm()) for tensor in tensors)

    w, b, u = normal(G, 3, 2), normal(G, 2), normal(G, 2, 3)
    for lookup, stated in (
        (r.Linear(w), length * size(w)),
        (r.Linear(w, b), length * size(w) + size(b)),
        (r.Factored(w, u), length * size(w, u)),
    ):
        found = float(image(r.Attention(r.Dot(), lookup), point).radius)
        assert found == pytest.approx(float(relative_error(4 * 3 + 64)) * stated, rel=1e-6, abs=0)
    values, biases, w_o, b_o = normal(G, 2, 3, 2), normal(G, 2, 2), normal(G, 2, 2, 3), normal(G, 3)
    attention = r.Attention(r.Dot(normal(G, 2, 3, 2), normal(G, 2, 3, 2)), r.Linear(values, biases))
    each = [size(w_o[h]) * (length * size(values[h]) + size(biases[h])) for h in range(2)]
    for last, stated in ((None, sum(each)), (b_o, sum(each) + size(b_o))):
        found = float(image(Heads(attention, w_o, last), point).radius)
        assert found == pytest.approx(float(relative_error(4 * 3 + 4 * 2 + 64)) * stated, rel=1e-6, abs=0)
    both = Added((Affine(w, b), Affine(2 * w)))
    inner = [image(part, point) for part in both.maps]
    counted = float(relative_error(2 * 2)) * (float(inner[0].center.norm()) + float(inner[1].center.norm()))
    assert float(image(both, point).radius) == pytest.approx(
        float(inner[0].radius) + float(inner[1].radius) + counted, rel=1e-6, abs=0
    )
    found = float(image(Affine(w, b), point).radius)
    assert found == pytest.approx(
        float(relative_error(2 * 3 + 8)) * (length * size(w) + size(b)), rel=1e-6, abs=0
    )
