"""Projections of tokens into a ball, and onto those with mean zero."""

import math

import numpy as np
import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.maps import Affine, Compose, Pointwise, Tanh
from regard.measure import Measure
from regard.nonexpansive import Center, IntoBall
from regard.norms import EntryMax, Frobenius, OwnToken, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, image
from regard.proofs.locating import locate
from regard.proofs.near.stages import stage
from tests.theorems.exact import generator, normal

D = torch.float64
NORMS = [Frobenius(), TokenMax(), TokenSum(), Wasserstein(1.0), Wasserstein(2.0), OwnToken()]


def test_the_derivative_of_centering_is_centering():
    g = generator(3)
    value, tangents = normal(g, 3, 4), normal(g, 3, 4, 2)
    found = stage.one(Center(), value, torch.zeros(3, dtype=D))
    assert found.push(tangents) == pytest.approx(tangents - tangents.mean(1, keepdim=True), abs=1e-14)


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@pytest.mark.parametrize("map", [IntoBall(0.7), IntoBall(0.7, smooth=True), Center()], ids=repr)
def test_one_everywhere(map, norm):
    for domain in (Whole(), Ball(3.0, tokens=4), Neighborhood(normal(generator(0), 4, 3), 0.2)):
        assert certify(map, domain, norm).value == 1.0


@pytest.mark.parametrize("map", [IntoBall(0.7), IntoBall(0.7, smooth=True), Center()], ids=repr)
def test_no_pair_is_stretched_and_some_is_not_shrunk(map):
    """1,000 pairs of tokens, inside and outside of the ball."""
    g = generator(1)
    x = normal(g, 1000, 4) * torch.logspace(-3, 3, 1000, dtype=D).unsqueeze(-1)
    y = x + normal(g, 1000, 4) * torch.logspace(3, -3, 1000, dtype=D).unsqueeze(-1)
    ratio = (map(x) - map(y)).norm(dim=-1) / (x - y).norm(dim=-1)
    assert float(ratio.max()) <= 1 + 1e-9
    small = torch.tensor([[1e-6, -1e-6, 0.0, 0.0]], dtype=D)
    assert float(map(small).norm() / small.norm()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("smooth", [False, True])
def test_tokens_are_in_the_ball_afterwards(smooth):
    map, x = IntoBall(0.7, smooth), 100 * normal(generator(2), 50, 3)
    assert float(map(x).norm(dim=-1).max()) <= 0.7 * (1 + 1e-12)
    found = image(map, Whole(tokens=5))
    assert (found.radius, found.tokens) == (0.7, 5)
    assert image(map, Ball(3.0, torch.ones(3, dtype=D))).radius == 0.7
    assert image(map, Ball(0.0, tokens=2)).radius == 0.0
    inside = image(map, Ball(0.5, tokens=2)).radius
    assert inside == pytest.approx(0.5 / math.sqrt(1 + (0.5 / 0.7) ** 2) if smooth else 0.5, rel=1e-9)
    center = torch.tensor([2.0, 0.0, 0.0], dtype=D)
    near = image(map, Ball(0.1, center, 4))
    torch.testing.assert_close(near.center, map(center))
    assert 0.1 <= near.radius <= 0.1 * (1 + 1e-9)
    points = center + 0.1 * normal(generator(3), 200, 3).tanh() / math.sqrt(3)
    assert float((map(points) - near.center).norm(dim=-1).max()) <= near.radius


def test_single_entries():
    assert math.isinf(certify(IntoBall(), Whole(), EntryMax()).value)
    assert certify(Center(), Whole(), EntryMax()).value == 2.0
    bound = certify(Center(), Ball(1.0, torch.zeros(4, dtype=D)), EntryMax()).value
    worst = torch.tensor([[1.0, -1.0, -1.0, -1.0]], dtype=D)
    assert bound == pytest.approx(float(Center()(worst).abs().max()), rel=1e-12)
    near = Radii(worst, torch.tensor([0.1], dtype=D))
    assert deviation(Center(), near, EntryMax()).value == pytest.approx(0.1, rel=1e-9)


def test_deviations_are_moves_and_never_more_than_the_ball():
    points = normal(generator(4), 3, 2)
    radii = torch.tensor([0.1, 50.0, 0.0], dtype=D)
    assert deviation(IntoBall(0.7), Radii(points, radii), TokenMax()).value == pytest.approx(1.4, rel=1e-9)
    assert deviation(IntoBall(0.7), Radii(points, radii), TokenSum()).value == pytest.approx(1.5, rel=1e-9)
    assert deviation(Center(), Radii(points, radii), TokenSum()).value == pytest.approx(50.1, rel=1e-9)


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_attention_after_it_has_a_constant_on_all_of_space(norm):
    """The constant on the ball, whatever the width, as long as a map says it."""
    w = normal(generator(5), 3, 3)
    attention = r.Attention(r.Dot(scale=0.5))
    map = Compose((Affine(w), IntoBall(1.0), attention))
    found = certify(map, Whole(tokens=4), norm).value
    on_ball = certify(attention, Ball(1.0, torch.zeros(3, dtype=D), 4), norm).value
    assert found == pytest.approx(float(torch.linalg.matrix_norm(w, 2)) * on_ball, rel=1e-9)


def test_attention_after_it_never_exceeds_its_constant():
    w = normal(generator(6), 2, 3, 3)
    map = Compose((IntoBall(1.0), r.Attention(r.Dot(w[0], w[1]))))
    x, y = 10 * normal(generator(7), 300, 4, 3), normal(generator(8), 300, 4, 3)
    for norm in (Frobenius(), TokenMax(), TokenSum()):
        bound = certify(map, Whole(tokens=4), norm).value
        for other in (x + y, x + 1e-4 * y):
            assert float((norm.of(map(x) - map(other)) / norm.of(x - other)).max()) <= bound
    assert image(map, Whole(tokens=4)).radius == pytest.approx(1.0, rel=1e-9)


def test_roundings_of_values():
    """Against 64 bits of mantissa: the error is within the margin, which is no more than a thousand units."""
    x = 1e3 + normal(generator(9), 5, 7)
    long = x.numpy().astype(np.longdouble)
    center = long - long.mean(-1, keepdims=True)
    length = np.sqrt((long**2).sum(-1, keepdims=True))
    smooth = long / np.sqrt(1 + (length / np.longdouble(0.7)) ** 2)
    for map, exact in (
        (Center(), center),
        (IntoBall(0.7), long * (np.longdouble(0.7) / length)),
        (IntoBall(0.7, smooth=True), smooth),
    ):
        value, margin = locate.one(map, Measure(x))
        error = np.sqrt(((value.points.numpy() - exact) ** 2).sum(-1)).max()
        assert error <= float(margin) <= 1e-12 * float(x.norm(dim=-1).max())


def test_a_network_with_centering_has_a_taylor_model():
    g = generator(10)
    map = Compose((Center(), Affine(normal(g, 3, 3)), Pointwise(Tanh())))
    x = normal(g, 4, 3)
    found = deviation(map, Neighborhood(x, 0.05, TokenMax()), TokenMax())
    taylor = [one.value for one in (found, *found.others) if "Taylor" in one.theorem]
    moved = x + 0.05 * torch.nn.functional.normalize(normal(g, 300, 4, 3), dim=-1)
    seen = float(TokenMax().of(map(moved) - map(x)).max())
    assert 0.5 * taylor[0] <= seen <= taylor[0]
