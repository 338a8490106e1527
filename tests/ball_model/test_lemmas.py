"""Each lemma of the ball model alone: identities, remainders against points of their sets, equality cases."""

import math
from dataclasses import replace
from types import SimpleNamespace

import mpmath
import pytest
import torch

from regard import maps
from regard._upper import exact
from regard.domains import Hull, Neighborhood, Radii
from regard.norms import TokenMax
from regard.proofs.ball_model import activations, beginning
from regard.proofs.ball_model.activations import bend
from regard.proofs.ball_model.attention_gram import attention_gram
from regard.proofs.ball_model.beginning import at_rest, begin, by_orders, second_order
from regard.proofs.ball_model.ellipsoids import Sum, longest, no_diagonal, widths
from regard.proofs.ball_model.groups import no_groups
from regard.proofs.ball_model.inputs import BallPart, BoxPart, Inputs, SimplexPart, shares_of
from regard.proofs.ball_model.margin import quadratic_minimum
from regard.proofs.ball_model.network import through
from regard.proofs.ball_model.opening import closed, opened
from regard.proofs.ball_model.quadratic import Quadratic, own_square, split
from regard.proofs.ball_model.rows import Row, beyond_linear, beyond_square
from regard.proofs.ball_model.score_moves import ScoreMoves
from regard.proofs.ball_model.scores import Projection
from regard.proofs.ball_model.sides import sides
from regard.proofs.ball_model.squares import Pairs, with_quadratic
from regard.proofs.theorem import Refusal
from tests.ball_model.networks import D, attention, drawn, hidden, network, norm, sequence


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_norm_layer_is_homogeneous():
    """N(g + t) = w^{-1/2} (g + z)(1 + q)^{-1/2}."""
    g, t, eps, d = drawn(generator(), 6), 0.3 * drawn(generator(1), 6), 0.01, 6
    g, t = g - g.mean(), t - t.mean()
    w, along = g @ g / d + eps, g @ t / (g @ g)
    z = (t - along * g) / (1 + along)
    q = z @ z / (d * w) + eps * ((1 + along) ** -2 - 1) / w
    assert maps.Normalize(eps)(g + t) == pytest.approx((g + z) * (1 + q) ** -0.5 / w.sqrt(), abs=1e-14)


def test_a_row_of_softmax_in_its_centered_scores():
    """o' - o = Σ P (e^a/Z - 1) y, with Z = Σ P e^a ≥ 1."""
    scores, moves, values = drawn(generator(), 5), drawn(generator(1), 5), drawn(generator(2), 5, 3)
    law = scores.softmax(-1)
    a = moves - law @ moves
    z = law @ a.exp()
    found = (law * (a.exp() / z - 1)) @ (values - law @ values)
    assert z >= 1
    assert found == pytest.approx((scores + moves).softmax(-1) @ values - law @ values, abs=1e-14)


def test_the_gram_matrix_of_attention_against_written_out_forms():
    n, c, e, k = 4, 3, 2, 5
    law = drawn(generator(), n, n).softmax(-1)
    values = drawn(generator(1), n, e)
    apart = values.unsqueeze(0) - (law @ values).unsqueeze(1)
    slopes = drawn(generator(2), n, n, k)
    q, key, v = (drawn(generator(3 + i), n, width, k) for i, width in enumerate((c, c, e)))
    gram = attention_gram(law, apart, slopes, (q, key, v))
    scores = torch.einsum("ick,jcl->ijkl", q, key) + 0.5 * slopes.unsqueeze(-1) * slopes.unsqueeze(-2)
    forms = torch.einsum("ij,ijd,ijkl->idkl", law, apart, scores)
    forms = forms + torch.einsum("ij,ijk,jdl->idkl", law, slopes, v)
    forms = 0.5 * (forms + forms.mT)
    assert gram == pytest.approx(torch.einsum("ickl,idkl->icd", forms, forms), abs=1e-12)
    parts = [torch.stack([part, 2 * part]) for part in (law, apart, slopes, q, key, v)]
    both = attention_gram(parts[0], parts[1], parts[2], (parts[3], parts[4], parts[5]))
    assert both[0] == pytest.approx(gram, abs=1e-12)  # heads together are heads apart
    assert both[1] == pytest.approx(attention_gram(2 * law, 2 * apart, 2 * slopes, (2 * q, 2 * key, 2 * v)))


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_second_order_is_the_second_derivative(pre, gated):
    """A and 2H of a whole network against torch. Without eps: what it bends in norm layers is a remainder."""
    kind = {"pre": pre, "gated": gated, "activation": maps.Silu(), "turned": "rotary", "norms": (True, 0.0)}
    net, x = network(3, **kind), sequence(3, tokens=3)
    radii = torch.tensor([0.0, 1e-9, 0.0], dtype=D)
    state = through.one(net, second_order(begin.one(Radii(x, radii))))

    def last(u):
        return net(torch.cat([x[:1], (x[1] + u).unsqueeze(0), x[2:]]))[0, :2]

    zero = torch.zeros(8, dtype=D)
    slopes = torch.autograd.functional.jacobian(last, zero)
    bends = torch.stack(
        [torch.autograd.functional.hessian(lambda u, c=c: last(u)[c], zero) for c in range(2)]
    )
    assert state.linear[0, :2] / 1e-9 == pytest.approx(slopes, abs=1e-11)
    assert state.curved.forms[0, :2] / 1e-18 == pytest.approx(0.5 * bends, abs=1e-10)


def test_a_sum_of_segments_and_its_equality_case():
    """One segment is itself; two orthogonal ones of one length have the ellipsoid 2(aaᵀ + bbᵀ)."""
    one = torch.tensor([[[3.0], [4.0]]], dtype=D)
    found = Sum(1, 2).segments(one).done()
    assert float(longest(found)) == pytest.approx(5.0, rel=1e-12)
    two = Sum(1, 2).segments(torch.eye(2, dtype=D).unsqueeze(0)).done()
    assert two[0] == pytest.approx(2 * torch.eye(2, dtype=D), rel=1e-12)


def test_sums_hold_every_sum():
    """Random points of an ellipsoid, a ball, a mixed set and segments, along random directions."""
    g = generator(5)
    root, columns, mixed = drawn(g, 1, 4, 4), drawn(g, 1, 4, 3), drawn(g, 1, 4, 2)
    radius, factor = exact(torch.tensor([0.3], dtype=D)), exact(torch.tensor([0.7], dtype=D))
    found = Sum(1, 4).shape(root @ root.mT).segments(columns).ball(radius).gram(mixed, factor).done()
    a = drawn(g, 1, 4, 50)
    most = (root.mT @ a).norm(dim=1) + (columns.mT @ a).abs().sum(1) + 0.3 * a.norm(dim=1)
    most = most + 0.7 * (mixed.mT @ a).norm(dim=1)
    assert bool((widths(found, a).bound >= most).all())


def test_a_quadratic_with_a_positive_part_is_one_sided():
    """H = M: the split gives [0, 1] |M| and next to nothing around it, not ±|M|_F."""
    linear = drawn(generator(), 1, 5, 5)
    own = own_square(linear)
    forms = Quadratic(own.square.unsqueeze(1) * torch.tensor([1.0, -2.0], dtype=D)[None, :, None, None])
    offset, around = split(forms.grams(own), own)
    top = float(torch.linalg.eigvalsh(own.square[0])[-1])
    assert offset[0] == pytest.approx(torch.tensor([top, -2 * top], dtype=D), rel=1e-9)
    assert float(longest(around)) < 1e-4 * top


def test_splits_hold_the_quadratic():
    g = generator(4)
    linear, forms = drawn(g, 1, 3, 4), drawn(g, 1, 2, 4, 4)
    forms = 0.5 * (forms + forms.mT)
    own = own_square(linear)
    offset, around = split(Quadratic(forms).grams(own), own)
    u = torch.nn.functional.normalize(drawn(g, 500, 4), dim=-1)
    values = torch.einsum("sk,ckl,sl->sc", u, forms[0], u)
    a = drawn(g, 20, 2)
    high = (a @ offset[0]).clamp_min(0) + widths(around, a.mT.unsqueeze(0)).bound[0]
    low = (a @ offset[0]).clamp_max(0) - widths(around, a.mT.unsqueeze(0)).bound[0]
    assert bool((values @ a.mT <= high + 1e-12).all())
    assert bool((values @ a.mT >= low - 1e-12).all())


def test_collatz_and_wielandt():
    """λ_max from above, and equal for a matrix of ones."""
    pairs = drawn(generator(), 6, 6).abs()
    pairs = pairs + pairs.mT
    found = Pairs((0, len(pairs)), (pairs,)).largest()
    assert float(found) >= float(torch.linalg.eigvalsh(pairs)[-1])
    ones = Pairs((0, 4), (torch.ones(4, 4, dtype=D),))
    assert float(ones.largest()) == pytest.approx(4.0, rel=1e-8)


ACTIVATIONS = [maps.Gelu(), maps.Gelu(True), maps.Silu(), maps.Silu(1.702), maps.Tanh(), maps.Relu()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("reach", [1e-3, 0.3, 2.0])
def test_remainders_of_activations_hold_on_their_interval(activation, reach):
    h = torch.linspace(-6, 6, 241, dtype=D)
    found = bend.one(activation, h, exact(torch.full_like(h, reach)))
    s = torch.linspace(-1, 1, 201, dtype=D).unsqueeze(-1) * reach
    model = found.value + found.slope * s + found.second * s**2 / 2 + found.middle
    rest = (activation(h + s) - model).abs()
    assert bool((rest <= (found.beyond + found.error).bound * (1 + 1e-9) + 1e-14).all())
    if not isinstance(activation, maps.Relu):
        assert float((rest.amax(0) / found.beyond.bound).max()) > (0.9 if reach < 0.01 else 0.2)


SMOOTH = [
    (maps.Gelu(), activations.NORMAL_GELU),
    (maps.Gelu(True), activations.TANH_GELU),
    (maps.Tanh(), activations.TANH),
]


@pytest.mark.parametrize(("activation", "smooth"), SMOOTH, ids=lambda one: type(one).__name__)
def test_derivatives_of_activations_and_the_largest_fourth_one(activation, smooth):
    """The numbers that cubic remainders rest on, on a fine grid."""
    x = torch.linspace(-14, 14, 40001, dtype=D)
    at, jets = x.clone().requires_grad_(), smooth.jets(x)
    value = activation(at)
    for order in range(4):
        assert value.detach() == pytest.approx(jets[order], abs=1e-11)
        (value,) = torch.autograd.grad(value.sum(), at, create_graph=True)
    assert 0.99 * smooth.fourth < float(value.detach().abs().max()) < smooth.fourth


@pytest.mark.parametrize("activation", ACTIVATIONS[:-1], ids=repr)
@pytest.mark.parametrize("reach", [1e-4, 0.2, 1.5])
def test_the_largest_third_derivative_is_at_an_end_or_a_peak(monkeypatch, activation, reach):
    """At least that on a fine grid, and equal to it but for the grid."""
    asked = []
    whole = activations.Smooth.largest_third
    monkeypatch.setattr(
        activations.Smooth, "largest_third", lambda *given: asked.append(given) or whole(*given)
    )
    h = torch.linspace(-6, 6, 121, dtype=D)
    bend.one(activation, h, exact(torch.full_like(h, reach)))
    smooth = asked[0][0]
    s = reach * torch.linspace(-1, 1, 2001, dtype=D).unsqueeze(-1)
    seen = smooth.jets(h + s)[3].abs().amax(0)
    found = whole(*asked[0]).bound
    assert bool((seen <= found + 1e-13).all())
    assert bool((found <= 1.001 * seen + 1e-7).all())


def test_the_end_of_an_interval_may_be_a_peak():
    """An interval that ends where the third derivative is largest, and one that ends just before."""
    place, height = activations.NORMAL_GELU.peaks[0]
    for side in (1, -1):
        h = torch.tensor([side * (place - 0.5)], dtype=D)
        found = activations.NORMAL_GELU.largest_third(h, exact(torch.tensor([0.5], dtype=D)))
        assert float(found) >= height
        found = activations.NORMAL_GELU.largest_third(h, exact(torch.tensor([0.4], dtype=D)))
        assert float(found) < height


def test_exponentials_from_above():
    numbers = [1e-15, 1e-8, 1e-3, 0.5, 3.0]
    t = exact(torch.tensor(numbers, dtype=D))
    linear, square = beyond_linear(t).bound.tolist(), beyond_square(t).bound.tolist()
    for number, one, two in zip(numbers, linear, square, strict=True):
        x = mpmath.mpf(number)
        with mpmath.workdps(80):
            assert 1 <= one / (mpmath.expm1(x) - x) < 1.002
            assert 1 <= two / (mpmath.expm1(x) - x - x**2 / 2) < 1.002


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0])
def test_rows_hold_their_remainders(scale):
    """E_j between -down and up, Z below its bound and the factor of values, for random moves."""
    g = generator(2)
    law = drawn(g, 4, 5).softmax(-1)
    slopes = scale * drawn(g, 4, 5, 3)
    slopes = slopes - torch.einsum("ij,ijk->ik", law, slopes).unsqueeze(1)
    rest = 0.2 * scale * torch.rand(4, 5, generator=g, dtype=D)
    first = exact(slopes.norm(dim=-1))
    shaken = law.sqrt().unsqueeze(-1) * slopes
    spread = exact(torch.linalg.matrix_norm(shaken, 2) * (1 + 1e-12))
    row = Row(law, first, exact(2 * rest), exact(torch.zeros(4, 5, dtype=D)), spread)
    for _ in range(200):
        u = torch.nn.functional.normalize(drawn(g, 3), dim=0)
        plain = slopes @ u
        more = rest * (2 * torch.rand(4, 5, generator=g, dtype=D) - 1)
        more = more - (law * more).sum(-1, keepdim=True)
        more = more.clamp(-2 * rest, 2 * rest)
        a = plain + more
        a = a - (law * a).sum(-1, keepdim=True)
        if bool(((a - plain).abs() > 2 * rest).any()):
            continue
        z = (law * a.exp()).sum(-1, keepdim=True)
        error = (a.exp() - 1) / z - a - plain**2 / 2
        assert bool((error <= row.up.bound).all())
        assert bool((-error <= row.down.bound).all())
        assert bool((z - 1 <= row.above.bound).all())
        assert bool(((a.exp() / z - 1 - plain).abs() <= row.factor.bound).all())


@pytest.mark.parametrize("part", [BallPart(4), BoxPart(4), SimplexPart(4)])
def test_reaches_are_attained(part):
    """The largest |a·u| over a ball, a box, a simplex."""
    a = drawn(generator(8), 4)
    if isinstance(part, BallPart):
        points = torch.stack([a / a.norm()])
    elif isinstance(part, BoxPart):
        points = torch.stack([a.sign() / 2])
    else:
        points = math.sqrt(4 / 3) * (torch.eye(4, dtype=D) - 0.25)
    assert float(part.reach(a)) == pytest.approx(float((points @ a).abs().max()), rel=1e-9)
    assert float(points.norm(dim=-1).max()) <= 1 + 1e-12


def test_a_product_of_balls_lies_in_the_ball():
    shares = shares_of([0.1, 2.0, 0.5])
    assert math.fsum(share**2 for share in shares) <= 1
    inputs = Inputs((BallPart(2),) * 3, shares)
    a = drawn(generator(), 6)
    exactly = sum(share * float(piece.norm()) for share, piece in zip(shares, a.split(2), strict=True))
    assert float(inputs.reach(a)) == pytest.approx(exactly, rel=1e-9)


def test_opening_and_closing_lose_no_direction():
    """Reaches after an ellipsoid is opened, with all columns or a few, and after groups are closed."""
    g = generator(1)
    root, a = drawn(g, 2, 5, 5), drawn(g, 1, 5, 30)
    shape = root @ root.mT
    before = widths(shape, a).bound
    for most in (10, 4, 0):
        groups, left = opened(no_groups(2, 5), shape, most)
        after = (groups.reach(a) + widths(left, a)).bound
        assert len(groups.labels) == most
        assert bool((after >= before * (1 - 1e-12)).all())
        assert bool((after <= before * (1 + 1e-6 if most == 10 else 2.0)).all())
        kept, tail = closed(groups, left, 3)
        assert bool(((kept.reach(a) + widths(tail, a)).bound >= before * (1 - 1e-12)).all())


def test_the_least_value_of_a_quadratic():
    """By duality: exact for a convex and for an indefinite form."""
    g = generator(6)
    for form in (torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=D)), drawn(g, 3, 3)):
        form = 0.5 * (form + form.mT)
        slope = drawn(g, 3)
        u = torch.nn.functional.normalize(drawn(g, 40000, 3), dim=-1)
        u = u * torch.rand(40000, 1, generator=g, dtype=D) ** 0.2
        seen = float((u @ slope + ((u @ form) * u).sum(-1)).min())
        found = quadratic_minimum(slope, form)
        assert found <= seen
        assert found >= seen - 0.05 * abs(seen) - 0.02


STAGES = {
    "norm": lambda g: norm(g, 6),
    "rms": lambda g: norm(g, 6, centered=False, eps=1e-2),
    "gelu": lambda g: hidden(g, 6, maps.Gelu()),
    "relu": lambda g: hidden(g, 6, maps.Relu()),
    "gated": lambda g: hidden(g, 6, maps.Silu(), gated=True),
    "attention": lambda g: attention(g, 6, sharp=2.0),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_alone_holds_its_values(stage, order):
    """A state with ellipsoids: values at points of it stay within the reach of the state after the map, along
    random directions.
    """
    g = generator(11)
    map, x = STAGES[stage](g), drawn(g, 3, 6)
    state = begin.one(Radii(x, torch.tensor([0.1, 0.0, 0.2], dtype=D)))
    state = second_order(state) if order == 2 else state
    before = through.one(maps.Affine(torch.eye(6, dtype=D)), state)
    ball = exact(torch.full((3,), 0.05, dtype=D))
    before = before.with_rest(Sum(3, 6).ball(ball))
    after = through.one(map, before)
    a = drawn(g, 1, 6, 8)
    reach = (after.first(a) + after.rest(a)).bound
    for _ in range(60):
        away = torch.nn.functional.normalize(drawn(g, 3, 6), dim=-1) * torch.tensor(
            [[0.1], [0.0], [0.2]], dtype=D
        )
        more = 0.05 * torch.nn.functional.normalize(drawn(g, 3, 6), dim=-1)
        moved = (map(x + away + more) - after.center) @ a[0]
        assert bool((moved.abs() <= reach).all())


@pytest.mark.parametrize("radius", [0.05, 0.3])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_beyond_the_second_order_is_in_the_remainder(stage, radius):
    """x' - c - Au - uᵀHu at points u of the ball, along directions: each is within what is proved, and some
    use a part of it that is not small, so that a remainder that is left out is seen.
    """
    g = generator(17)
    map, x = STAGES[stage](g), drawn(g, 3, 6)
    state = through.one(map, second_order(begin.one(Radii(x, torch.tensor([0.0, radius, 0.0], dtype=D)))))
    a = torch.nn.functional.normalize(drawn(g, 6, 40), dim=0)
    proved = state.rest(a.unsqueeze(0), curved=False).bound
    largest = torch.zeros_like(proved)
    for u in torch.nn.functional.normalize(drawn(g, 300, 6), dim=-1):
        moved = x.clone()
        moved[1] += radius * u
        model = state.center + state.linear @ u + torch.einsum("ndkl,k,l->nd", state.curved.forms, u, u)
        largest = torch.maximum(largest, ((map(moved) - model) @ a).abs())
    assert bool((largest <= proved).all())
    assert stage == "relu" or float((largest / proved).max()) > 0.02  # where no sign is open there is nothing


def test_products_of_moves_that_rounding_hides():
    """Keys that differ by less than a product keeps: the scores move by 2⁻²⁷, of which none is computed."""
    query = SimpleNamespace(moves=torch.full((2, 2, 1), 2.0**27, dtype=D))
    key = SimpleNamespace(moves=torch.tensor([[[1.0], [2.0**-54]], [[1.0], [-(2.0**-54)]]], dtype=D))
    head = SimpleNamespace(first_width=1, query=query, key=key, law=torch.full((2, 2), 0.5, dtype=D))
    head.state = SimpleNamespace(tokens=2, own=own_square(torch.ones(2, 1, 1, dtype=D)))
    head._written_out, head._mean = True, lambda pairs: ScoreMoves._mean(head, pairs)
    head.products_of = ScoreMoves.products_of.func(head)
    assert bool((head.products_of == 2.0**27).all())
    assert bool((ScoreMoves.bilinear.func(head).bound >= 2.0**-27).all())


def test_what_rounding_changed_in_a_sum_goes_on_into_another():
    """(Σ s)(Σ Q/s) with nothing but an error of one half, and a weight of two."""
    error, none = exact(torch.tensor([0.5], dtype=D)), torch.zeros(1, 3, 3, dtype=D)
    found = Sum(1, 3).add(torch.tensor([2.0], dtype=D), none, error).done()
    assert found[0] == pytest.approx(torch.eye(3, dtype=D), rel=1e-12)


def test_weights_of_a_sum_may_be_lengths_after_a_map():
    """The sum holds all its sets, and after the map no other weights make its trace less."""
    g = generator(4)
    map, columns, root = drawn(g, 5, 3), drawn(g, 1, 3, 4), drawn(g, 1, 3, 3)
    shape, metric = root @ root.mT, map.mT @ map
    found = Sum(1, 3, metric).segments(columns).shape(shape).done()
    plain = Sum(1, 3).segments(columns).shape(shape).done()
    for _ in range(200):
        a = drawn(g, 3)
        far = (a @ columns[0]).abs().sum() + (a @ root[0]).norm()
        assert far**2 <= a @ found[0] @ a
    lengths = (map @ columns[0]).norm(dim=0).sum() + (map @ root[0]).norm()
    after, otherwise = ((map @ one[0] @ map.mT).trace() for one in (found, plain))
    assert float(after) == pytest.approx(float(lengths) ** 2, rel=1e-9)
    assert after < otherwise


def test_mixtures_and_balls_with_weights_after_a_map():
    g = generator(5)
    map, roots, factors = drawn(g, 5, 3), drawn(g, 2, 3, 3), drawn(g, 4, 2).abs()
    shapes, metric = roots @ roots.mT, map.mT @ map
    lengths = exact(roots.flatten(1).norm(dim=-1) * (1 + 1e-14))
    radius = exact(torch.full((4,), 0.7, dtype=D))
    found = Sum(4, 3, metric).mixture(exact(factors), shapes, lengths, 3).ball(radius).done()
    after = (map @ found @ map.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    each = factors @ (map @ roots).flatten(1).norm(dim=-1) + 0.7 * map.norm()
    assert after == pytest.approx(each**2, rel=1e-9)
    for _ in range(200):
        a = drawn(g, 3)
        far = factors @ (a @ roots).norm(dim=-1) + 0.7 * a.norm()
        assert bool((far**2 <= a @ found @ a).all())


@pytest.mark.parametrize("most", [299, 300])
def test_second_derivatives_are_carried_where_all_their_numbers_have_room(monkeypatch, most):
    """Three tokens of five coordinates, one of which moves: 3 · 4 · 5 · 5 · 5 numbers."""
    monkeypatch.setattr(beginning, "CURVED", most * 5)
    state = begin.one(Radii(sequence(0, 3, 5), torch.tensor([0.1, 0.0, 0.0], dtype=D)))
    assert beginning.is_small(state) == (most == 300)


def test_a_one_sided_move_is_held_from_its_beginning_to_its_end():
    """Nothing, half of it and all of it: the center goes half of the way, and the other half is a segment."""
    offset = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=D)
    state = at_rest(torch.ones(2, 2, dtype=D))
    after = with_quadratic(state, torch.arange(2), offset, torch.zeros(2, 2, 2, dtype=D), Sum(2, 2))
    direction = torch.tensor([[0.6], [0.8]], dtype=D)
    width = float(widths(after.shape, direction.unsqueeze(0)).bound[0, 0])
    middle = float((after.center[0] - 1) @ direction)
    assert middle == pytest.approx(2.5, rel=1e-12)
    assert 2.5 <= width < 2.5 * (1 + 1e-6)
    assert after.center[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("most", [0, -1])
def test_derivatives_are_refused_where_they_hold_too_many_numbers(monkeypatch, most):
    """As many numbers as tokens and coordinates, times those that move."""
    x, corners = sequence(0, 3, 5), sequence(1, 4, 5)
    for domain, numbers in (
        (Radii(x, torch.tensor([0.1, 0.1, 0.0], dtype=D)), 15 * 10),
        (Neighborhood(x, 0.1), 15 * 15),
        (Neighborhood(x, 0.1, TokenMax()), 15 * 15),
        (Hull(x, 1, corners), 15 * 5),
    ):
        monkeypatch.setattr(beginning, "LARGEST", numbers + most)
        if most < 0:
            with pytest.raises(Refusal, match=f"has {numbers} numbers"):
                begin.one(domain)
        else:
            begin.one(domain)


def still_state(seed, size):
    """Tokens that nothing moves but ellipsoids of their own, and moves in them, (200, n, d)."""
    g = generator(seed)
    x, roots = drawn(g, 4, 6), size * drawn(g, 4, 6, 6)
    state = replace(at_rest(x), shape=roots @ roots.mT)
    inside = torch.nn.functional.normalize(drawn(g, 200, 4, 6), dim=-1)
    return state, torch.einsum("nde,sne->snd", roots, inside)


@pytest.mark.parametrize("size", [1e-6, 1e-2])
@pytest.mark.parametrize("kind", ["norm", "neurons", "kinks", "heads"])
def test_where_nothing_moves_but_by_rounding_lengths_are_enough(kind, size):
    """Ellipsoids after a map hold what it makes of every move in those before, and are not much wider."""
    g = generator(3)
    map = {
        "norm": lambda: norm(g, 6),
        "neurons": lambda: maps.Residual(hidden(g, 6, maps.Gelu())),
        "kinks": lambda: maps.Residual(hidden(g, 6, maps.Relu())),
        "heads": lambda: maps.Residual(attention(g, 6)),
    }[kind]()
    state, moves = still_state(4, size)
    assert state.is_still
    after = through.one(map, state)
    directions = drawn(g, 4, 6, 30)
    values = torch.stack([map(state.center + move) for move in moves]) - after.center
    seen = (values.unsqueeze(-2) @ directions).squeeze(-2).abs().amax(0)
    proved = widths(after.shape, directions).bound
    assert bool((seen <= proved).all())
    assert bool((proved <= (12.0 if kind == "heads" or size > 1e-3 else 2.5) * seen).all())


def longest_of(state):
    """The smaller of two bounds of the longest axis: by the trace, and by sums of rows."""
    trace = state.shape.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.minimum(trace, state.shape.abs().sum(-1).amax(-1)).sqrt()


def test_where_nothing_moves_reaches_are_lengths():
    state, moves = still_state(5, 0.1)
    a = drawn(generator(6), 4, 6, 3)
    found = state.rest(a).bound
    assert bool(((moves.unsqueeze(-2) @ a).squeeze(-2).abs().amax(0) <= found).all())
    lengths = longest_of(state).unsqueeze(-1) * a.norm(dim=1)
    assert found == pytest.approx(lengths, rel=1e-12)
    assert not begin.one(Radii(state.center, torch.tensor([0.1, 0.0, 0.0, 0.0], dtype=D))).is_still


def test_moves_along_columns_are_no_longer_than_their_reach():
    g = generator(8)
    mixing, halves = drawn(g, 4, 7), exact(drawn(g, 3, 7).abs())
    found = no_diagonal(3, mixing).segments(halves).reach.bound
    assert found == pytest.approx(halves.value @ mixing.norm(dim=0), rel=1e-12)
    assert bool((found >= halves.value @ mixing.norm(dim=0)).all())


def test_one_order_may_speak_where_the_other_refuses():
    """What was found, in the order of orders; where none speaks, the first refusal."""
    state = begin.one(Radii(sequence(0, 3, 5), torch.tensor([0.1, 0.0, 0.0], dtype=D)))

    def refuse(*orders):
        def ask(one):
            order = 1 if one.curved is None else 2
            if order in orders:
                raise Refusal(f"order {order}")
            return order

        return list(by_orders(state, ask))

    assert refuse() == [1, 2]
    assert refuse(1) == [2]
    assert refuse(2) == [1]
    with pytest.raises(Refusal, match="order 1"):
        refuse(1, 2)
    assert list(by_orders(at_rest(sequence(0, 3, 5)), lambda one: one.curved)) == [None]


def test_projections_of_what_is_still_move_by_lengths():
    state, moves = still_state(7, 0.1)
    w = drawn(generator(8), 1, 6, 3)
    (side,) = sides(state, [Projection(w, torch.zeros(1, 3, dtype=D), 0)], by_groups=True)
    seen = moves @ w[0]
    assert bool((seen.norm(dim=-1).amax(0) <= side.rest.bound).all())
    lengths = torch.linalg.matrix_norm(w[0], 2) * longest_of(state)
    assert side.rest.bound == pytest.approx(lengths, rel=1e-9)
    a = drawn(generator(9), 4, 3, 20)
    reached = (seen.unsqueeze(-2) @ a).squeeze(-2).abs().amax(0)
    assert bool((reached <= widths(side.around, a).bound).all())


def test_derivatives_of_a_steep_silu_are_as_far_off_as_is_said():
    """In sixty digits: they grow with the slope, and so do their roundings."""
    c, places = 1e4, torch.linspace(-8e-4, 8e-4, 41, dtype=D)
    found = bend.one(maps.Silu(c), places, exact(torch.zeros_like(places)))
    off = []
    with mpmath.workdps(60):
        for place, second in zip(places.tolist(), found.second.tolist(), strict=True):
            s = 1 / (1 + mpmath.exp(-mpmath.mpf(c) * place))
            truth = c * s * (1 - s) * (2 + mpmath.mpf(c) * place * (1 - 2 * s))
            off.append(float(abs(truth - second)))
    assert all(one <= allowed for one, allowed in zip(off, found.error.bound.tolist(), strict=True))
    assert max(off) > 8 * 16 * 2**-53  # more than roundings of numbers of size one
