"""Wrong inputs: exact transport on both sides stays below constant × distance, for laws of different sizes and weights."""

import math

import pytest
import torch

import regard as r
from regard.certify.misspecification import apriori, dropped, misspecification, replaced
from regard.domains import Ball, Neighborhood, Whole, one_token
from regard.maps import Heads
from regard.transport import wasserstein


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


MAPS = {
    "plain": lambda g: r.Attention(r.Dot()),
    "biases": lambda g: r.Attention(
        r.Dot(0.5 * draw(g, 2, 2), 0.5 * draw(g, 2, 2), b_q=draw(g, 2), b_k=draw(g, 2)), r.Linear(draw(g, 2, 3), draw(g, 3))
    ),
    "gaussian": lambda g: r.Attention(r.Gaussian(bandwidth=1.0), r.Linear(draw(g, 2, 1))),
    "side by side": lambda g: r.Attention(r.Dot(draw(g, 2, 2, 2), draw(g, 2, 2, 2)), r.Linear(draw(g, 2, 2, 1))),
    "mixed": lambda g: Heads(r.Attention(r.Dot(draw(g, 2, 2, 2), draw(g, 2, 2, 2))), draw(g, 2, 2, 2), draw(g, 2)),
}


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("name", MAPS)
def test_laws_of_different_sizes_stay_below(name, p):
    generator = torch.Generator().manual_seed(len(name))
    for sizes in ((3, 5), (4, 4), (1, 6), (6, 2)):
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
    for _ in range(10):
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
    with pytest.raises(r.ArgumentError, match="the last digit of a weight"):
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
    assert math.isinf(inside.bound.value)  # the width is not known
    known = Ball(1.0001, torch.zeros(2, dtype=torch.float64))
    assert math.isfinite(misspecification(attention, x, 0.5 * x, domain=known).bound.value)
    for domain in (Ball(0.9), Ball(2.0, tokens=3), Neighborhood(x, 0.1), one_token(x, 0, 0.1)):
        with pytest.raises(r.ArgumentError, match="does not hold both inputs"):
            misspecification(attention, x, 0.5 * x, domain=domain)
    near = Neighborhood(x, 1.0)
    assert math.isfinite(misspecification(attention, x, 0.5 * x, norm=r.Frobenius(), domain=near).bound.value)


def test_sentences_of_theorems_are_passed_on():
    x = torch.randn(3, 2, dtype=torch.float64)
    found = misspecification(r.Attention(r.Dot(), support=r.Causal()), x, x[:2])
    assert math.isinf(found.bound.value)
    assert any("masks and positions are not functions of the law of tokens" in why for why in found.bound.refused)
    assert "masks and positions" in str(found)
    whole = misspecification(r.Attention(r.Dot()), x, x[:2], domain=Whole())
    assert math.isinf(whole.bound.value)
    assert whole.bound.refused


def test_bad_input():
    x = torch.randn(3, 2, dtype=torch.float64)
    attention = r.Attention(r.Dot())
    with pytest.raises(r.ArgumentError, match=r"Wasserstein\(p\) takes different numbers of tokens"):
        misspecification(attention, x, x[:2], norm=r.Frobenius())
    with pytest.raises(r.ArgumentError, match="x: has weights"):
        misspecification(attention, r.Measure(x, x[:, 0]), x, norm=r.Frobenius())
    with pytest.raises(r.ArgumentError, match="x: has marks"):
        misspecification(attention, r.Measure(x, None, torch.arange(3)), x, norm=r.Frobenius())
    with pytest.raises(r.ArgumentError, match="distance: is -1"):
        apriori(attention, Ball(1.0), r.Wasserstein(1.0), -1.0)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_a_replaced_token(p):
    generator = torch.Generator().manual_seed(4)
    for size in (1, 2, 7):
        x = draw(generator, size, 2)
        y = x.clone()
        y[0] += draw(generator, 2)
        bound = replaced(size, float((y - x).norm()), p)
        assert float(wasserstein(x, y, p)) <= bound * (1 + 1e-12)
    assert replaced(8, 1.0, 3.0) == pytest.approx(0.5)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_a_dropped_token(p):
    """For p = 1 the bound from the tokens is the largest of the exact distances."""
    generator = torch.Generator().manual_seed(5)
    for size in (2, 3, 6):
        x = draw(generator, size, 2)
        diameter = float(torch.cdist(x, x).max())
        exact = [float(wasserstein(x, torch.cat([x[:i], x[i + 1 :]]), p)) for i in range(size)]
        assert max(exact) <= dropped(x, p=p) * (1 + 1e-12) <= dropped(size, diameter, p) * (1 + 1e-9)
        if p == 1:
            assert max(exact) == pytest.approx(dropped(x))


def test_a_priori_bounds_hold():
    generator = torch.Generator().manual_seed(6)
    attention, domain = MAPS["biases"](generator), Ball(1.0, torch.zeros(2, dtype=torch.float64))
    x = torch.nn.functional.normalize(draw(generator, 6, 2), dim=-1)
    for p in (1.0, 2.0, math.inf):
        norm = r.Wasserstein(p)
        certificate = apriori(attention, domain, norm, dropped(6, 2.0, p))
        assert float(wasserstein(attention(x), attention(x[1:]), p)) <= certificate.value
        y = x.clone()
        y[0] = -y[0]
        certificate = apriori(attention, domain, norm, replaced(6, 2.0, p))
        assert float(wasserstein(attention(x), attention(y), p)) <= certificate.value
        assert "assumed: inputs are at most" in str(certificate)


def test_counts_are_checked():
    with pytest.raises(r.ArgumentError, match="tokens: is 1; give how many there are, 2 or more"):
        dropped(1, 1.0)
    with pytest.raises(r.ArgumentError, match="diameter: is not given"):
        dropped(3)
    with pytest.raises(r.ArgumentError, match=r"p: is 0\.5"):
        replaced(3, 1.0, 0.5)
    with pytest.raises(r.ArgumentError, match="distance: is -1"):
        replaced(3, -1.0)
