"""A head in fewer coordinates: the same head, certificates with a margin,
and refused where rounding would move its scores.
"""

import pytest
import torch

from regard import (
    Attention,
    Bilinear,
    Dot,
    Frobenius,
    Linear,
    Measure,
    Neighborhood,
    TokenMax,
    certify,
    falsify,
    linearize,
)
from regard.audits.checks.ladder import observed_ball
from regard.audits.narrowing import AGREEMENT, MARGIN, _agree, narrow_head
from regard.domains import Ball
from regard.potentials import Rotary

D = torch.float64
WIDTH, INNER, TOKENS = 24, 3, 5


def generator(seed):
    return torch.Generator().manual_seed(seed)


def head_of(seed, scale=0.4):
    g = generator(seed)
    w_q, w_k, w_v = (scale * torch.randn(WIDTH, INNER, generator=g, dtype=D) for _ in range(3))
    bias = torch.randn(INNER, generator=g, dtype=D)
    return Attention(Dot(w_q, w_k, b_q=bias), Linear(w_v, bias))


def points_of(seed, tokens=TOKENS):
    return torch.randn(tokens, WIDTH, generator=generator(100 + seed), dtype=D)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_same_head(seed):
    head, x = head_of(seed), points_of(seed)
    found = narrow_head(head, x)
    assert found.margin == MARGIN
    assert found.points.shape == (TOKENS, 3 * INNER)
    assert torch.allclose(found.head(found.points), head(x), rtol=1e-12)
    exact, narrow = (
        float(linearize(*pair).norm(tolerance=1e-9)) for pair in ((head, x), (found.head, found.points))
    )
    assert narrow == pytest.approx(exact, rel=1e-9)


def test_positions_stay():
    g = generator(7)
    w_q, w_k, w_v = (0.4 * torch.randn(WIDTH, 4, generator=g, dtype=D) for _ in range(3))
    head = Attention(Rotary(Dot(w_q, w_k)), Linear(w_v))
    x = Measure(points_of(7), marks=torch.tensor([0, 3, 4, 9, 20]))
    found = narrow_head(head, x)
    assert isinstance(found.source, Measure)
    assert found.points.shape[-1] == 12
    assert torch.equal(found.source.marks, x.marks)
    assert torch.allclose(found.head(found.source).points, head(x).points, rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_agree_and_stay_above_an_attack(seed):
    """At the point and on a ball; on a ball the narrow bound is of what the head reads,
    so it may only be smaller.
    """
    head, x = head_of(seed), points_of(seed)
    found = narrow_head(head, x)
    exact = float(linearize(head, x).norm(tolerance=1e-9))
    wide = certify(head, Neighborhood(x, 0.0), Frobenius()).value
    narrow = found.margin * certify(found.head, Neighborhood(found.points, 0.0), Frobenius()).value
    assert exact <= narrow <= 1.01 * wide
    assert wide <= 1.01 * narrow
    for norm in (Frobenius(), TokenMax()):
        ball = observed_ball(found.points)
        narrow = found.margin * certify(found.head, ball, norm).value
        wide = certify(head, observed_ball(x), norm).value
        seen = falsify(found.head, ball, norm, restarts=3, steps=15, generator=generator(seed)).value
        assert seen <= narrow <= wide * MARGIN
        around = Ball(
            0.9 * ball.radius, x.mean(0), TOKENS
        )  # a full ball that the head reads as a part of the narrow one
        assert falsify(head, around, norm, restarts=3, steps=15, generator=generator(seed)).value <= narrow


def refused(found, head, x):
    return found.head is head and found.source is x and found.margin == 1.0


def test_tokens_far_from_the_origin_are_refused():
    """A change of basis rounds relative to the distance from zero,
    and a score is a difference of what is that large.
    """
    head, x = head_of(0), points_of(0)
    assert not refused(narrow_head(head, x + 10.0), head, x)
    far = x + 1e6
    found = narrow_head(head, far)
    assert refused(found, head, far)
    assert certify(found.head, Neighborhood(far, 0.0), Frobenius()).value >= float(
        linearize(head, far).norm(tolerance=1e-3)
    ) * (1 - 1e-6)


def test_huge_scores_are_refused():
    head, x = head_of(0, scale=3e4), points_of(0)
    assert refused(narrow_head(head, x), head, x)


def test_what_is_no_number_is_refused():
    x = points_of(0)
    x[0, 0] = torch.inf
    head = head_of(0)
    potential = head.potential
    scores = potential.scores(x, x, torch.arange(TOKENS), torch.arange(TOKENS))
    assert not bool(scores.isfinite().all())
    assert not _agree(scores, scores)


def test_what_saves_nothing_is_left():
    g = generator(1)
    square = [torch.randn(WIDTH, WIDTH // 2, generator=g, dtype=D) for _ in range(3)]
    head, x = Attention(Dot(square[0], square[1]), Linear(square[2])), points_of(1)
    assert refused(narrow_head(head, x), head, x)


def test_what_reads_whole_tokens_is_left():
    """Without one of the projections a head reads all of a token, and a basis of the others would lose it."""
    head, x = head_of(0), points_of(0)
    for other in (
        Attention(Dot(), head.lookup),
        Attention(head.potential),
        Attention(Bilinear(torch.eye(WIDTH, dtype=D)), head.lookup),
    ):
        assert refused(narrow_head(other, x), other, x)


def test_agreement_is_relative_and_has_an_end():
    one = torch.tensor([0.0, 10.0, 1e4], dtype=D)
    assert _agree(one, one + AGREEMENT * torch.tensor([0.9, 10.0, 50.0], dtype=D))
    assert not _agree(one, one + AGREEMENT * torch.tensor([1.1, 0.0, 0.0], dtype=D))
    assert not _agree(
        one, one + torch.tensor([0.0, 0.0, 2e-7], dtype=D)
    )  # relative 2e-11, and a weight moves by 2e-7


def test_the_observed_ball_holds_its_tokens():
    for shift in (0.0, 1e3, 1e9):
        points = points_of(3) + shift
        ball = observed_ball(points)
        away = (points.to(torch.float64) - ball.center).norm(dim=-1).max()
        assert float(away) < ball.radius <= float(away) * (1 + 1e-9) + 1e-11 * (1 + shift)
