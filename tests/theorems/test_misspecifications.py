"""Wrong inputs: exact transport on both sides stays below constant × distance,
for laws of different sizes and weights.
"""

import math

import pytest
import torch

import regard as r
from regard._upper import relative_error
from regard.domains import Ball, Neighborhood, Whole, one_token
from regard.maps import Heads
from regard.proofs.misspecifications import apriori, dropped_distance, misspecification, replaced_distance
from regard.transport import wasserstein


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


MAPS = {
    "plain": lambda g: r.Attention(r.Dot()),
    "biases": lambda g: r.Attention(
        r.Dot(0.5 * draw(g, 2, 2), 0.5 * draw(g, 2, 2), b_q=draw(g, 2), b_k=draw(g, 2)),
        r.Linear(draw(g, 2, 3), draw(g, 3)),
    ),
    "gaussian": lambda g: r.Attention(r.Gaussian(bandwidth=1.0), r.Linear(draw(g, 2, 1))),
    "side by side": lambda g: r.Attention(
        r.Dot(draw(g, 2, 2, 2), draw(g, 2, 2, 2)), r.Linear(draw(g, 2, 2, 1))
    ),
    "mixed": lambda g: Heads(
        r.Attention(r.Dot(draw(g, 2, 2, 2), draw(g, 2, 2, 2))), draw(g, 2, 2, 2), draw(g, 2)
    ),
}


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("name", MAPS)
def test_laws_of_different_sizes_stay_below(name, p):
    generator = torch.Generator().manual_seed(len(name))
    for sizes in ((3, 5), (4, 4), (1, 4)):
        map, center = MAPS[name](generator), draw(generator, 2)
        x, y = (center + 0.4 * draw(generator, size, 2) for size in sizes)
        found = misspecification(map, x, y, norm=r.Wasserstein(p))
        assert 0 < found.distance_out <= found.bound.value < math.inf
        assert found.distance_in == pytest.approx(float(wasserstein(x, y, p)), rel=1e-9)
        assert found.distance_in >= float(wasserstein(x, y, p))
        assert found.expansion <= found.constant.value


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_weights(p):
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        attention = MAPS["biases"](generator)
        x, y = (r.Measure(0.5 * draw(generator, size, 2), draw(generator, size)) for size in (3, 5))
        found = misspecification(attention, x, y, norm=r.Wasserstein(p))
        assert found.distance_out <= found.bound.value
        assert found.distance_in == pytest.approx(float(wasserstein(x, y, p)), rel=1e-6)


def test_the_largest_step_needs_equal_weights():
    generator = torch.Generator().manual_seed(1)
    x = r.Measure(0.5 * draw(generator, 4, 2), draw(generator, 4))
    moved = x.push(lambda points: points + 0.01)
    found = misspecification(r.Attention(r.Dot()), x, moved, norm=r.Wasserstein(math.inf))
    assert found.distance_in == pytest.approx(0.01 * math.sqrt(2))
    assert found.distance_out <= found.bound.value
    other = r.Measure(x.points, draw(generator, 4))
    with pytest.raises(r.errors.ArgumentError, match="the last digit of a weight"):
        misspecification(r.Attention(r.Dot()), x, other, norm=r.Wasserstein(math.inf))


@pytest.mark.parametrize("norm", [r.TokenMax(), r.Frobenius(), r.TokenSum()], ids=repr)
def test_sequences(norm):
    generator = torch.Generator().manual_seed(2)
    for support in (r.Full(), r.Causal()):
        for _ in range(5):
            attention = MAPS["biases"](generator).replace(support=support)
            x = 0.5 * draw(generator, 5, 2) + draw(generator, 2)
            found = misspecification(attention, x, x + 0.1 * draw(generator, 5, 2), norm=norm)
            assert found.distance_out <= found.bound.value < math.inf


def test_search_stays_below():
    """Gradient ascent on the second input, scored by exact transport."""
    generator = torch.Generator().manual_seed(3)
    attention = r.Attention(r.Bilinear(draw(generator, 2, 2)))
    domain = Ball(1.0, torch.zeros(2, dtype=torch.float64))
    x = torch.nn.functional.normalize(draw(generator, 5, 2), dim=-1) * 0.9
    best = 0.0
    for p in (1.0, 2.0, math.inf):
        y = (x + 0.01 * draw(generator, 5, 2)).requires_grad_()
        step = torch.optim.Adam([y], lr=0.01)
        for _ in range(25):
            step.zero_grad()
            apart = (y - x).norm(dim=-1)
            ((attention(y) - attention(x)).norm(dim=-1).sum() / apart.sum()).neg().backward()
            step.step()
            with torch.no_grad():
                y *= (0.999 / y.norm(dim=-1, keepdim=True)).clamp(max=1.0)
        found = misspecification(attention, x, y.detach(), norm=r.Wasserstein(p), domain=domain)
        assert found.distance_out <= found.bound.value
        best = max(best, found.distance_out / found.bound.value)
    assert best > 0.05


def test_a_constant_near_one_is_tight():
    """Equal scores: attention sends every token to the mean, and a common step moves it as far."""
    x = torch.randn(4, 2, dtype=torch.float64)
    flat = r.Attention(r.Bilinear(torch.zeros(2, 2, dtype=torch.float64)))
    found = misspecification(flat, x, x + 1.0, norm=r.Wasserstein(2.0))
    assert found.distance_out / found.bound.value > 0.999999


def test_the_given_domain_must_hold_both():
    x = torch.tensor([[1.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
    attention = r.Attention(r.Dot())
    inside = misspecification(attention, x, 0.5 * x, domain=Ball(1.0001))
    assert math.isinf(inside.constant.value)  # the width is not known
    assert math.isfinite(inside.bound.value)  # and is that of the inputs, near them
    known = Ball(1.0001, torch.zeros(2, dtype=torch.float64))
    assert math.isfinite(misspecification(attention, x, 0.5 * x, domain=known).constant.value)
    for domain in (Ball(0.9), Ball(2.0, tokens=3), Neighborhood(x, 0.1), one_token(x, 0, 0.1)):
        with pytest.raises(r.errors.ArgumentError, match="does not hold both inputs"):
            misspecification(attention, x, 0.5 * x, domain=domain)
    near = Neighborhood(x, 1.0)
    assert math.isfinite(misspecification(attention, x, 0.5 * x, norm=r.Frobenius(), domain=near).bound.value)


def test_sentences_of_theorems_are_passed_on():
    x = torch.randn(3, 2, dtype=torch.float64)
    found = misspecification(r.Attention(r.Dot(), support=r.Causal()), x, x[:2])
    assert math.isinf(found.bound.value)
    assert any(
        "masks and positions are not functions of the law of tokens" in why for why in found.bound.refused
    )
    assert "masks and positions" in str(found)
    whole = misspecification(r.Attention(r.Dot()), x, x[:2], domain=Whole())
    assert math.isinf(whole.constant.value)
    assert whole.constant.refused


def test_bad_input():
    x = torch.randn(3, 2, dtype=torch.float64)
    attention = r.Attention(r.Dot())
    with pytest.raises(r.errors.ArgumentError, match=r"Wasserstein\(p\) takes different numbers of tokens"):
        misspecification(attention, x, x[:2], norm=r.Frobenius())
    with pytest.raises(r.errors.ArgumentError, match="x: has weights"):
        misspecification(attention, r.Measure(x, x[:, 0]), x, norm=r.Frobenius())
    with pytest.raises(r.errors.ArgumentError, match="x: has marks"):
        misspecification(attention, r.Measure(x, None, torch.arange(3)), x, norm=r.Frobenius())
    with pytest.raises(r.errors.ArgumentError, match="distance: is -1"):
        apriori(attention, Ball(1.0), r.Wasserstein(1.0), -1.0)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_a_replaced_token(p):
    generator = torch.Generator().manual_seed(4)
    for size in (1, 2, 7):
        x = draw(generator, size, 2)
        y = x.clone()
        y[0] += draw(generator, 2)
        bound = replaced_distance(size, float((y - x).norm()), p)
        assert float(wasserstein(x, y, p)) <= bound * (1 + 1e-12)
    assert replaced_distance(8, 1.0, 3.0) == pytest.approx(0.5)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_a_dropped_token(p):
    """For p = 1 the bound from the tokens is the largest of the exact distances."""
    generator = torch.Generator().manual_seed(5)
    for size in (2, 3, 6):
        x = draw(generator, size, 2)
        diameter = float(torch.cdist(x, x).max())
        exact = [float(wasserstein(x, torch.cat([x[:i], x[i + 1 :]]), p)) for i in range(size)]
        assert (
            max(exact)
            <= dropped_distance(x, p=p) * (1 + 1e-12)
            <= dropped_distance(size, diameter, p) * (1 + 1e-9)
        )
        if p == 1:
            assert max(exact) == pytest.approx(dropped_distance(x))


def test_a_priori_bounds_hold():
    generator = torch.Generator().manual_seed(6)
    attention, domain = MAPS["biases"](generator), Ball(1.0, torch.zeros(2, dtype=torch.float64))
    x = torch.nn.functional.normalize(draw(generator, 6, 2), dim=-1)
    for p in (1.0, 2.0, math.inf):
        norm = r.Wasserstein(p)
        certificate = apriori(attention, domain, norm, dropped_distance(6, 2.0, p))
        assert float(wasserstein(attention(x), attention(x[1:]), p)) <= certificate.value
        y = x.clone()
        y[0] = -y[0]
        certificate = apriori(attention, domain, norm, replaced_distance(6, 2.0, p))
        assert float(wasserstein(attention(x), attention(y), p)) <= certificate.value
        assert "assumed: inputs are at most" in str(certificate)


def test_counts_are_checked():
    with pytest.raises(r.errors.ArgumentError, match="tokens: is 1; give how many there are, 2 or more"):
        dropped_distance(1, 1.0)
    with pytest.raises(r.errors.ArgumentError, match="diameter: is not given"):
        dropped_distance(3)
    with pytest.raises(r.errors.ArgumentError, match=r"p: is 0\.5"):
        replaced_distance(3, 1.0, 0.5)
    with pytest.raises(r.errors.ArgumentError, match="distance: is -1"):
        replaced_distance(3, -1.0)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_a_token_among_equal_ones_attains_both_formulas(p):
    """n - 1 equal tokens and one at the distance d: replacing and dropping it move the law by d / n^{1/p}."""
    points = torch.zeros(4, 1, dtype=torch.float64)
    points[0] = 6.0
    assert replaced_distance(4, 6.0, p) == pytest.approx(6 / 4 ** (1 / p), rel=1e-12)
    assert dropped_distance(4, 6.0, p) == pytest.approx(6 / 4 ** (1 / p), rel=1e-12)
    assert dropped_distance(points, p=p) == pytest.approx(6 / 4 ** (1 / p), rel=1e-9)
    assert dropped_distance(points, p=p) >= 6 / 4 ** (1 / p)


def test_a_dropped_token_of_a_sequence_goes_to_the_others_in_equal_shares():
    """max_i (mean_{j≠i} |x_i - x_j|^p / n)^{1/p}."""
    points = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    assert dropped_distance(points, p=2.0) == pytest.approx(math.sqrt((25 + 16) / 2 / 3), rel=1e-9)
    assert dropped_distance(points, p=1.0) == pytest.approx((5 + 4) / 2 / 3, rel=1e-9)
    assert dropped_distance(points, p=math.inf) == pytest.approx(5.0, rel=1e-9)


def test_the_bound_is_the_constant_times_the_distance():
    g = torch.Generator().manual_seed(2)
    w = torch.randn(2, 3, generator=g, dtype=torch.float64)
    norm = float(torch.linalg.matrix_norm(w, 2))
    x, y = (torch.randn(5, 2, generator=g, dtype=torch.float64) for _ in range(2))
    for measured, stated in (
        (r.Frobenius(), float((x - y).norm())),
        (r.TokenMax(), float((x - y).norm(dim=-1).max())),
        (r.Wasserstein(2.0), float(wasserstein(r.Measure(x), r.Measure(y), 2.0))),
        (r.Wasserstein(math.inf), float(wasserstein(r.Measure(x), r.Measure(y), math.inf))),
    ):
        found = misspecification(r.maps.Affine(w), x, y, norm=measured)
        assert found.distance_in == pytest.approx(stated, rel=1e-9)
        assert found.distance_in >= stated * (1 - 1e-15)
        assert found.bound.value == pytest.approx(norm * stated, rel=1e-9)
    assert apriori(r.maps.Affine(w), r.Whole(), r.TokenMax(), 0.5).value == pytest.approx(
        0.5 * norm, rel=1e-9
    )


def test_measures_with_weights_pay_for_what_a_plan_may_miss():
    """Twice the rounding of the masses, carried across the whole set: the same law,
    and W_8 sees the eighth root of it.
    """
    points, weights = (
        torch.tensor([[0.0], [8.0]], dtype=torch.float64),
        torch.tensor([0.25, 0.75], dtype=torch.float64).log(),
    )
    map = r.Attention(r.Dot(scale=0.0))
    found = misspecification(
        map, r.Measure(points, weights), r.Measure(points, weights), norm=r.Wasserstein(8.0)
    ).distance_in
    missed = 2 * float(relative_error(8 * 4 + 64))
    assert 8 * missed**0.125 * (1 - 1e-9) <= found <= 8 * (missed + 8e-16) ** 0.125
    assert misspecification(map, points, points, norm=r.Wasserstein(8.0)).distance_in == 0


def test_balls_that_hold_both_inputs_are_as_small_as_can_be():
    """An equilateral triangle: the ball about its center, R = side/√3, beats those about zero,
    and the box.
    """
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(0.75)]], dtype=torch.float64)
    slope = torch.eye(2, dtype=torch.float64)
    found = misspecification(r.Attention(r.Bilinear(slope)), x, x + 1e-9, norm=r.TokenMax()).constant
    assert found.domain.radius == pytest.approx(1 / math.sqrt(3), rel=1e-6)
    line = torch.tensor([[0.0], [0.1], [0.2], [4.0]], dtype=torch.float64) + 3.0
    found = misspecification(
        r.Attention(r.Bilinear(torch.ones(1, 1, dtype=torch.float64))), line, line, norm=r.TokenMax()
    ).constant
    assert found.domain.radius == pytest.approx(2.0, rel=1e-9)


def test_a_domain_that_just_holds_both():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    map, y = r.maps.Affine(torch.eye(2, dtype=torch.float64)), torch.zeros(2, 2, dtype=torch.float64)
    for domain, enough in (
        (lambda size: r.Ball(size), 5.0),
        (lambda size: r.Neighborhood(y, size, r.Frobenius()), 5.0),
        (lambda size: r.Neighborhood(y, size, r.TokenMax()), 5.0),
        (lambda size: r.Radii(y, torch.tensor([size, 0.0], dtype=torch.float64)), 5.0),
    ):
        misspecification(map, x, y, norm=r.TokenMax(), domain=domain(enough + 1e-9))
        with pytest.raises(r.errors.ArgumentError, match="does not hold both"):
            misspecification(map, x, y, norm=r.TokenMax(), domain=domain(enough - 1e-9))
    misspecification(map, x, y, norm=r.TokenMax(), domain=r.Ball(9.0, tokens=2))
    with pytest.raises(r.errors.ArgumentError, match="does not hold both"):
        misspecification(map, x, y, norm=r.TokenMax(), domain=r.Ball(9.0, tokens=3))


def test_distances_are_in_w_1_unless_said():
    assert dropped_distance(4, 6.0) == replaced_distance(4, 6.0) == pytest.approx(1.5, rel=1e-12)
    assert dropped_distance(torch.tensor([[0.0], [0.0], [6.0]], dtype=torch.float64)) == pytest.approx(
        2.0, rel=1e-9
    )


def test_counts_start_where_there_is_something_to_do():
    """One token can be replaced_distance, two are needed to drop one; a truth value is no count."""
    assert replaced_distance(1, 3.0) == pytest.approx(3.0, rel=1e-12)
    assert dropped_distance(2, 3.0) == pytest.approx(1.5, rel=1e-12)
    assert replaced_distance(2, 0.0) == dropped_distance(2, 0.0) == 0
    for ask in (
        lambda: replaced_distance(0, 1.0),
        lambda: replaced_distance(True, 1.0),
        lambda: dropped_distance(2, -1.0),
    ):
        with pytest.raises(r.errors.ArgumentError):
            ask()
    with pytest.raises(r.errors.ArgumentError, match="tokens: is 1"):
        dropped_distance(torch.zeros(1, 2, dtype=torch.float64))
    assert dropped_distance(torch.ones(3, 2, dtype=torch.float64)) == 0


def test_inputs_that_are_equal_have_no_expansion():
    x = torch.randn(3, 2, dtype=torch.float64)
    for norm in (r.Frobenius(), r.Wasserstein(2.0)):
        found = misspecification(r.Attention(r.Dot()), x, x, norm=norm)
        assert found.distance_in <= 1e-300
        assert found.expansion == 0
        assert found.bound.value <= 1e-290


def test_distances_a_priori_are_numbers():
    map, ball = r.maps.Affine(torch.eye(2, dtype=torch.float64)), Ball(1.0)
    assert apriori(map, ball, r.TokenMax(), 0).value <= 1e-290
    for wrong in (math.inf, math.nan, -1e-9, "1"):
        with pytest.raises(r.errors.ArgumentError, match="distance"):
            apriori(map, ball, r.TokenMax(), wrong)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_laws_with_weights_are_as_far_as_their_plan(p):
    """A quarter of the mass goes a distance of 8: 8 / 4^{1/p}, and next to nothing more."""
    points = torch.tensor([[0.0], [8.0]], dtype=torch.float64)
    first, second = (
        r.Measure(points, torch.tensor(masses, dtype=torch.float64).log())
        for masses in ([0.75, 0.25], [0.5, 0.5])
    )
    found = misspecification(r.Attention(r.Dot(scale=0.0)), first, second, norm=r.Wasserstein(p))
    stated = 8 / 4 ** (1 / p)
    assert stated <= found.distance_in <= stated * (1 + 1e-10)
    assert found.distance_out == pytest.approx(2.0, rel=1e-9)  # all tokens go to the mean, 2 or 4
    assert found.expansion == pytest.approx(found.distance_out / found.distance_in)


def test_widths_and_marks_of_domains():
    x = torch.tensor([[1.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
    map = r.maps.Affine(torch.eye(2, dtype=torch.float64))
    with pytest.raises(r.errors.ArgumentError, match="compare tokens of one width"):
        misspecification(map, x, torch.ones(2, 3, dtype=torch.float64))
    for measure in (
        r.Measure(x, torch.zeros(2, dtype=torch.float64)),
        r.Measure(x, None, torch.arange(2)),
    ):
        with pytest.raises(r.errors.ArgumentError, match="has weights or marks"):
            misspecification(map, x, x, norm=r.Frobenius(), domain=Neighborhood(measure, 1.0))
    for tokens, held in ((None, True), (2, True), (3, False)):
        if held:
            assert misspecification(map, x, x, domain=Whole(tokens), norm=r.TokenMax()).bound.value <= 1e-290
        else:
            with pytest.raises(r.errors.ArgumentError, match="does not hold both"):
                misspecification(map, x, x, domain=Whole(tokens), norm=r.TokenMax())


def test_a_ball_that_neither_mean_nor_box_finds():
    """Three points of a circle, one four times: steps towards the farthest come close to its center."""
    circle = torch.tensor([[1.0, 0.0]] * 4 + [[-0.6, 0.8], [-0.6, -0.8]], dtype=torch.float64) + 5.0
    map = r.Attention(r.Bilinear(torch.eye(2, dtype=torch.float64)))
    found = misspecification(map, circle, circle, norm=r.TokenMax()).constant.domain
    assert 1.0 <= found.radius <= 1.01
    assert float((found.center - 5.0).norm()) <= 0.02
