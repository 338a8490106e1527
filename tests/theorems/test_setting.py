"""Where tokens are: how many queries can crowd one key, balls that hold tokens, how heads together move.

Each where it is attained.
"""

import math

import pytest
import torch

import regard as r
from regard._upper import exact, relative_error
from regard.domains import Ball, Neighborhood, Radii, Shell
from regard.maps import Heads
from regard.norms import Frobenius, TokenMax
from regard.proofs import certify
from regard.proofs.counts import seen_counts
from regard.proofs.setting import balls_of, bias_error, crowding, pair_bias
from regard.proofs.subject import Head, subject_of
from regard.proofs.terms import moving_term
from regard.proofs.theorem import Refusal
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
    assert (
        seen * (1 - 1e-15)
        <= float(crowding(head(), Ball(1.0, tokens=tokens), exact(osc)))
        <= seen * (1 + 1e-13)
    )
    assert float(crowding(head(), Ball(1.0, tokens=tokens), exact(osc), queries=3)) == pytest.approx(
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
    assert (
        max(columns) * (1 - 1e-12) <= float(crowding(one, domain, exact(osc))) <= max(columns) * (1 + 1e-12)
    )


def test_biases_are_known_to_sixty_four_roundings_of_the_largest_and_of_one():
    for entries in ([0.0, 0.0], [-3.0, 2.0], [-math.inf, 1e6]):
        bias = torch.tensor([entries], dtype=D)
        largest = max(abs(entry) for entry in entries if entry > -math.inf)
        stated = float(relative_error(64)) * (1 + largest)
        assert float(bias_error(bias)) == pytest.approx(stated, rel=1e-12, abs=0)


@pytest.mark.parametrize("level", [-800.0, 0.0, 800.0])
def test_crowding_is_that_of_differences_of_biases(level):
    """A bias that all pairs share changes nothing, also where its exponential is no number."""
    table = torch.tensor([0.3, 0.0, 0.9], dtype=D)
    found = [
        float(
            crowding(head(None, r.Dot() + r.RelativeBias(given, r.potentials.Clipped(1))), domain, exact(0.5))
        )
        for given, domain in ((table, Ball(1.0, tokens=4)), (table + level, Ball(1.0, tokens=4)))
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-9, abs=0)


def test_crowding_without_a_bound_of_scores_is_all_queries():
    for queries, most in ((None, 7), (4, 4)):
        found = float(crowding(head(), Ball(1.0, tokens=7), exact(math.inf), queries))
        assert most <= found <= most * (1 + 1e-14)


def test_weights_are_counted_in_the_bias_and_in_the_rows():
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=D).log()
    domain = Neighborhood(r.Measure(normal(generator(0), 3, 2), weights), 0.1, Frobenius())
    one = head(r.Causal())
    assert torch.allclose(pair_bias(one, domain)[2], (3 * weights.exp()).log(), atol=1e-14)
    placed = pair_bias(head(r.Causal(), r.Dot() + r.Alibi(0.4)), domain)[2]
    away = torch.tensor([0.8, 0.4, 0.0], dtype=D)
    assert torch.allclose(placed, (3 * weights.exp()).log() - away, atol=1e-14)
    expected = torch.tensor([[1.5, 0.0, 0.0], [1.5, 0.75, 0.0], [1.5, 0.75, 0.75]], dtype=D)
    counts = seen_counts(one, domain).bound
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
    assert float(subject.combined([exact(0.5)] * 64, None)) == pytest.approx(0.5 * 8, rel=1e-9, abs=0)
    # one token: every head returns it, so 64 outputs move with it
    seen = float(torch.func.jacrev(attention)(torch.ones(1, 1, dtype=D)).norm())
    assert seen == pytest.approx(8.0)
    for norm in (Frobenius(), TokenMax()):
        found = certify(attention, Ball(1.0, tokens=1), norm).value
        assert 8.0 <= found <= 8.0 * (1 + 1e-6)


def uppers(*numbers):
    return [exact(number) for number in numbers]


def test_heads_that_are_mixed_are_the_smaller_of_two_forms():
    """|W_O| √Σb² where heads are equal, Σb' where one of them does all."""
    heads, g = 4, generator(1)
    attention = r.Attention(
        r.Dot(normal(g, heads, 2, 2), normal(g, heads, 2, 2)), r.Linear(normal(g, heads, 2, 2))
    )
    mixed = subject_of(Heads(attention, torch.eye(8, dtype=D).reshape(heads, 2, 8)))
    assert float(mixed.mixing) == pytest.approx(1.0, rel=1e-9, abs=0)
    assert float(mixed.combined(uppers(3, 4, 0, 12), uppers(9, 9, 9, 9))) == pytest.approx(
        13.0, rel=1e-9, abs=0
    )
    assert float(mixed.combined(uppers(3, 4, 0, 12), uppers(1, 2, 3, 4))) == pytest.approx(
        10.0, rel=1e-9, abs=0
    )


def test_a_temperature_divides_the_scores():
    for normalizer in (r.Softmax, lambda temperature: r.SinkSoftmax(0.5, temperature)):
        for temperature in (0.25, 0.5, 2.0):
            assert float(head(normalizer=normalizer(temperature)).potential.factor) == 1 / temperature
    assert isinstance(head(normalizer=r.Softmax(temperature=1.0)).potential, r.Dot)


def test_grouped_heads_are_repeated_in_their_order():
    """Four queries on two keys: heads 0, 1 share the first key and heads 2, 3 the second."""
    keys = torch.stack([torch.full((2, 2), float(h), dtype=D) for h in range(2)])
    queries = torch.stack([torch.full((2, 2), float(h), dtype=D) for h in range(4)])
    subject = subject_of(r.Attention(r.Dot(queries, keys), r.Linear(keys)))
    assert [float(part.potential.w_q[0, 0]) for part in subject.separate] == [0.0, 1.0, 2.0, 3.0]
    assert [float(part.potential.w_k[0, 0]) for part in subject.separate] == [0.0, 0.0, 1.0, 1.0]
    assert [float(part.lookup.w_v[0, 0]) for part in subject.separate] == [0.0, 0.0, 1.0, 1.0]


def test_a_shell_about_zero_is_in_a_ball_of_its_outer_side():
    """A root mean square of at most s is a length of at most √d s; about their means tokens are anywhere."""
    (found,) = balls_of(Shell(0.1, 0.5, centered=False), 4)
    assert (float(found.radius), float(found.reach)) == pytest.approx((1.0, 1.0), rel=1e-9, abs=0)
    (found,) = balls_of(Shell(0.1, 0.5), 4)
    assert float(found.radius) == math.inf


def test_the_term_that_looks_at_tokens():
    """Position biases are left out, with their factors, unless there is nothing else; two have no theorem."""
    dot, alibi, scaled = r.Dot(), r.Alibi(0.3), r.potentials.base.Scaled
    assert moving_term(dot) == (dot, 1.0)
    assert moving_term(alibi) == (alibi, 1.0)
    assert moving_term(dot + alibi) == (dot, 1.0)
    assert moving_term(scaled(dot + alibi, -2.0)) == (dot, -2.0)
    assert moving_term(alibi + scaled(dot, 0.5) + alibi) == (dot, 0.5)
    for several in (dot + r.Gaussian(bandwidth=1.0), alibi + alibi, dot + alibi + r.Gaussian(bandwidth=1.0)):
        with pytest.raises(Refusal, match="keep one term beside position biases"):
            moving_term(several)
