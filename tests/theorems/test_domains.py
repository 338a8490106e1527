"""Domains: what they hold, what they refuse, and that an attack stays inside."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Radii, Shell, Whole, one_token
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.proofs.places import farthest, project
from regard.proofs.setting import balls_of, moves_of, tokens_of, width_of
from tests.theorems.exact import D, generator, normal


def test_balls_hold_every_token():
    g = generator(0)
    x = normal(g, 5, 3) + 4.0
    domain = Radii(x, torch.rand(5, generator=g, dtype=D))
    for ball in balls_of(domain, 3):
        for _ in range(20):
            step = normal(g, 5, 3)
            y = x + domain.radii.unsqueeze(-1) * step / step.norm(dim=-1, keepdim=True) * (1 - 1e-12)
            assert float((y - ball.center).norm(dim=-1).max()) <= float(ball.radius)
            assert float(y.norm(dim=-1).max()) <= float(ball.reach)


def test_sizes():
    x = normal(generator(1), 4, 2)
    assert (tokens_of(Whole(3)), tokens_of(Ball(1.0)), tokens_of(Neighborhood(x, 0.1))) == (3, None, 4)
    assert (width_of(Whole()), width_of(Ball(1.0, torch.zeros(5))), width_of(Neighborhood(x, 0.1))) == (
        None,
        5,
        2,
    )
    assert moves_of(Neighborhood(x, 0.5)).tolist() == [0.5] * 4
    assert one_token(x, -1, 0.3).radii.tolist() == [0.0, 0.0, 0.0, 0.3]


def test_a_measure_keeps_its_weights_and_marks():
    x, weights = normal(generator(2), 3, 2).float(), torch.tensor([0.0, 1.0, 2.0])
    measure = Neighborhood(r.Measure(x, weights, torch.tensor([5, 7, 9])), 0.1).measure
    assert measure.points.dtype == measure.log_weights.dtype == D
    assert measure.positions().tolist() == [5, 7, 9]


@pytest.mark.parametrize("index", range(6))
def test_projections_and_farthest_points_stay_inside(index):
    g = generator(index)
    x, center = normal(g, 4, 3), normal(g, 3)
    radii = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=D)
    inside = {
        0: (Ball(0.7, center), lambda y: float((y - center).norm(dim=-1).max()) <= 0.7),
        1: (Neighborhood(x, 0.7), lambda y: float((y - x).norm()) <= 0.7),
        2: (Neighborhood(x, 0.7, TokenMax()), lambda y: float((y - x).norm(dim=-1).max()) <= 0.7),
        3: (Radii(x, radii), lambda y: bool(((y - x).norm(dim=-1) <= radii).all())),
        4: (
            Shell(0.5, 2.0),
            lambda y: (
                0.5 <= float(y.std(-1, correction=0).min()) <= float(y.std(-1, correction=0).max()) <= 2
            ),
        ),
        5: (
            Shell(0.5, 2.0, centered=False),
            lambda y: bool(((y.square().mean(-1) >= 0.25) & (y.square().mean(-1) <= 4)).all()),
        ),
    }
    domain, holds = inside[index]
    for scale in (1e-3, 1.0, 1e3):
        assert holds(project.one(domain, normal(g, 4, 3, scale=scale)))
        assert index < 4 or holds(project.one(domain, torch.full((4, 3), 0.0, dtype=D)))
        if index < 4:
            assert holds(farthest.one(domain, normal(g, 4, 3, scale=scale)))


@pytest.mark.parametrize(
    ("make", "argument", "remedy"),
    [
        (lambda: Ball(-1.0), "radius", "not negative"),
        (lambda: Ball(math.nan), "radius", "not negative"),
        (lambda: Ball(math.inf), "radius", r"Whole\(\)"),
        (lambda: Neighborhood(torch.zeros(2, 2), math.inf), "radius", r"Whole\(tokens=n\)"),
        (lambda: Neighborhood(torch.zeros(2, 2), math.nan), "radius", "not negative"),
        (lambda: one_token(torch.zeros(2, 2), 0, math.inf), "radius", "finite number"),
        (lambda: one_token(torch.zeros(2, 2), 0, math.nan), "radius", "not negative"),
        (lambda: Ball(True), "radius", "not negative"),
        (lambda: Ball(1.0, torch.zeros(2, 2)), "center", r"one point \(d,\)"),
        (lambda: Ball(1.0, tokens=0), "tokens", "one or more"),
        (lambda: Ball(1.0, tokens=2.0), "tokens", "one or more"),
        (lambda: Whole(-3), "tokens", "one or more"),
        (lambda: Shell(2.0, 1.0), "inner and outer", "0 <= inner <= outer"),
        (lambda: Shell(math.inf), "inner and outer", "inner finite"),
        (lambda: Shell(0.1, centered=None), "centered", "from zero"),
        (lambda: Neighborhood(torch.zeros(2), 0.1), "points", r"one sequence \(n, d\)"),
        (lambda: Neighborhood(torch.zeros(0, 2), 0.1), "points", "at least one token"),
        (lambda: Neighborhood(torch.zeros(2, 3, 2), 0.1), "points", "batches one by one"),
        (lambda: Neighborhood(torch.tensor([[math.nan]]), 0.1), "points", "finite"),
        (lambda: Neighborhood(torch.zeros(2, 2, dtype=torch.long), 0.1), "points", "float"),
        (lambda: Neighborhood(torch.zeros(2, 2), -0.1), "radius", "not negative"),
        (lambda: Neighborhood(torch.zeros(2, 2), 0.1, TokenSum()), "norm", r"Frobenius\(\) or TokenMax\(\)"),
        (lambda: Radii(torch.zeros(2, 2), torch.zeros(3)), "radii", "2 finite numbers"),
        (lambda: Radii(torch.zeros(2, 2), torch.tensor([0.0, -1.0])), "radii", "not negative"),
        (lambda: Radii(torch.zeros(2, 2), torch.tensor([0.0, math.inf])), "radii", "finite"),
        (lambda: one_token(torch.zeros(2, 2), 2, 0.1), "index", "there are 2 tokens"),
    ],
)
def test_bad_arguments_are_named(make, argument, remedy):
    with pytest.raises(r.errors.ArgumentError, match=remedy) as caught:
        make()
    assert str(caught.value).startswith(argument)


def test_a_frobenius_ball_is_inside_the_token_ball():
    x = normal(generator(3), 3, 2)
    y = project.one(Neighborhood(x, 0.5, Frobenius()), x + 10.0)
    assert torch.equal(project.one(Neighborhood(x, 0.5, TokenMax()), y), y)
