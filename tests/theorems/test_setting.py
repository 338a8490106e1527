"""Where tokens are: how many queries can crowd one key, balls that hold tokens, how heads together move.

Each where it is attained.
"""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Radii
from regard.maps import Heads
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify
from regard.proofs.counts import seen_counts
from regard.proofs.setting import balls_of, crowding, pair_bias
from regard.proofs.subject import Head, subject_of
from tests.theorems.exact import D, generator, normal


def head(support=None, potential=None, normalizer=None):
    return Head(
        r.Attention(potential or r.Dot(), support=support or r.Full(), normalizer=normalizer or r.Softmax())
    )


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("osc", [0.0, 0.7, 4.0])
def test_crowding_is_attained_by_one_key_above_all_others(tokens, osc):
    """Every row scores key 0 by `osc` more than the others: its column of the softmax adds up to N."""
    scores = torch.zeros(tokens, tokens, dtype=D)
    scores[:, 0] = osc
    seen = float(scores.softmax(-1)[:, 0].sum())
    assert seen <= crowding(head(), Ball(1.0, tokens=tokens), osc) <= seen * (1 + 1e-9)
    assert crowding(head(), Ball(1.0, tokens=tokens), osc, queries=3) == pytest.approx(
        seen * 3 / tokens, rel=1e-9, abs=0
    )


@pytest.mark.parametrize("osc", [0.0, 0.7, 4.0, math.inf])
@pytest.mark.parametrize("support", [r.Causal(), r.Window(1, 1)], ids=repr)
def test_crowding_with_masks_and_biases_is_attained(support, osc):
    """The same with a fixed bias of pairs: every row raises one key by `osc`,
    and the key is the one that gains most.
    """
    potential = r.Dot() + r.Alibi(0.4)
    one, domain = head(support, potential), Ball(1.0, tokens=5)
    bias = pair_bias(one, domain)
    marks = torch.arange(5)
    expected = (-0.4 * (marks[:, None] - marks).abs().double()).masked_fill(
        ~support.allows(marks, marks), -math.inf
    )
    assert torch.equal(bias, expected)
    columns = []
    for key in range(5):
        raised = bias.clone()
        raised[:, key] += 1e3 if math.isinf(osc) else osc
        columns.append(float(raised.softmax(-1)[:, key].sum()))
    assert max(columns) * (1 - 1e-12) <= crowding(one, domain, osc) <= max(columns) * (1 + 1e-9)


def test_crowding_without_a_bound_of_scores_is_all_queries():
    assert crowding(head(), Ball(1.0, tokens=7), math.inf) == 7
    assert crowding(head(), Ball(1.0, tokens=7), math.inf, queries=4) == 4


def test_crowding_with_scores_that_differ_a_little_more_than_is_said():
    """`osc` is a rounded bound: what it may lack is added."""
    osc = 1e4
    with_room = 5 / (1 + 4 * math.exp(-(osc * (1 + 1e-12))))
    assert crowding(head(), Ball(1.0, tokens=5), osc) >= with_room
    exact = 5 / (1 + 4 * math.exp(-1.0))
    assert crowding(head(), Ball(1.0, tokens=5), 1.0) >= exact * (1 + 3e-13)


def test_weights_are_counted_in_the_bias_and_in_the_rows():
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=D).log()
    domain = Neighborhood(r.Measure(normal(generator(0), 3, 2), weights), 0.1, Frobenius())
    one = head(r.Causal())
    assert torch.allclose(pair_bias(one, domain)[2], (3 * weights.exp()).log(), atol=1e-14)
    expected = torch.tensor([[1.5, 0.0, 0.0], [1.5, 0.75, 0.0], [1.5, 0.75, 0.75]], dtype=D)
    counts = seen_counts(one, domain)
    assert bool((counts >= expected).all())
    assert torch.allclose(counts, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("far", [0.0, 3.0])
def test_balls_hold_the_tokens_and_touch_them(far):
    """About zero, about the mean and about the middle of the box: each has a token on its boundary,
    and so has `reach`.
    """
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 4.0]], dtype=D) + far
    radii = torch.tensor([0.5, 0.0, 0.25], dtype=D)
    found = balls_of(Radii(points, radii), 2)
    centers = [torch.zeros(2, dtype=D), points.mean(0), torch.tensor([0.5, 2.0], dtype=D) + far]
    for ball, center in zip(found, centers, strict=True):
        assert torch.allclose(ball.center, center, atol=1e-14)
        least = float(((points - center).norm(dim=-1) + radii).max())
        assert least <= float(ball.radius) <= least * (1 + 1e-9)
        length = float((points.norm(dim=-1) + radii).max())
        assert length <= float(ball.reach) <= length * (1 + 1e-9)


def test_a_ball_reaches_as_far_as_its_center_and_its_radius():
    (found,) = balls_of(Ball(0.5, torch.tensor([3.0, 4.0], dtype=D)), 2)
    assert (float(found.radius), float(found.reach)) == pytest.approx((0.5, 5.5), rel=1e-9, abs=0)


def test_equal_heads_side_by_side_move_together():
    """64 equal heads, one vector for each value: √64 times what one of them does,
    attained by a map that copies.
    """
    attention = r.Attention(
        r.Dot(torch.zeros(64, 1, 1, dtype=D), torch.zeros(64, 1, 1, dtype=D)),
        r.Linear(torch.ones(64, 1, 1, dtype=D)),
    )
    subject = subject_of(attention)
    assert float(subject.combined([0.5] * 64, None)) == pytest.approx(0.5 * 8, rel=1e-9, abs=0)
    # one token: every head returns it, so 64 outputs move with it
    seen = float(torch.func.jacrev(attention)(torch.ones(1, 1, dtype=D)).norm())
    assert seen == pytest.approx(8.0)
    for norm in (Frobenius(), TokenMax()):
        found = certify(attention, Ball(1.0, tokens=1), norm).value
        assert 8.0 <= found <= 8.0 * (1 + 1e-6)


def test_heads_that_are_mixed_are_the_smaller_of_two_forms():
    """|W_O| √Σb² where heads are equal, Σb' where one of them does all."""
    heads, g = 4, generator(1)
    attention = r.Attention(
        r.Dot(normal(g, heads, 2, 2), normal(g, heads, 2, 2)), r.Linear(normal(g, heads, 2, 2))
    )
    mixed = subject_of(Heads(attention, torch.eye(8, dtype=D).reshape(heads, 2, 8)))
    assert float(mixed.mixing) == pytest.approx(1.0, rel=1e-9, abs=0)
    assert float(mixed.combined([3.0, 4.0, 0.0, 12.0], [9.0, 9.0, 9.0, 9.0])) == pytest.approx(
        13.0, rel=1e-9, abs=0
    )
    assert float(mixed.combined([3.0, 4.0, 0.0, 12.0], [1.0, 2.0, 3.0, 4.0])) == pytest.approx(
        10.0, rel=1e-9, abs=0
    )


def test_a_temperature_divides_the_scores():
    assert float(head(normalizer=r.Softmax(temperature=0.25)).potential.factor) == 4.0
    assert isinstance(head(normalizer=r.Softmax(temperature=1.0)).potential, r.Dot)


def test_grouped_heads_are_repeated_in_their_order():
    """Four queries on two keys: heads 0, 1 share the first key and heads 2, 3 the second."""
    keys = torch.stack([torch.full((2, 2), float(h), dtype=D) for h in range(2)])
    queries = torch.stack([torch.full((2, 2), float(h), dtype=D) for h in range(4)])
    subject = subject_of(r.Attention(r.Dot(queries, keys), r.Linear(keys)))
    assert [float(part.potential.w_q[0, 0]) for part in subject.separate] == [0.0, 1.0, 2.0, 3.0]
    assert [float(part.potential.w_k[0, 0]) for part in subject.separate] == [0.0, 0.0, 1.0, 1.0]
    assert [float(part.lookup.w_v[0, 0]) for part in subject.separate] == [0.0, 0.0, 1.0, 1.0]
