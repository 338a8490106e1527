"""Several heads: both combinations, where each is valid, head counts and grouped queries."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Whole
from regard.maps import Heads
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum
from regard.proofs import certify, falsify
from regard.proofs.subject import single_heads
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.heads import THEOREM
from tests.theorems.exact import D, frobenius_norm, generator, in_ball, normal, token_max_norm


def several(g, heads, groups, d=3, c=2, e=2):
    potential = r.Dot(normal(g, heads, d, c), normal(g, groups, d, c), b_q=normal(g, heads, c))
    return r.Attention(potential, r.Linear(normal(g, groups, d, e), normal(g, groups, e)))


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (4, 1), (8, 8)])
def test_attacks_stay_below(heads, groups):
    g = generator(heads + groups)
    attention = several(g, heads, groups)
    mixed = Heads(attention, normal(g, heads, 2, 3, scale=0.5), normal(g, 3))
    domain = Ball(0.7, normal(g, 3), 4)
    for norm, exact in ((Frobenius(), frobenius_norm), (TokenMax(), token_max_norm)):
        bound = certify(mixed, domain, norm)
        assert bound.theorem.startswith(THEOREM.title)
        assert len(bound.parts) == heads
        assert falsify(mixed, domain, norm, steps=3, restarts=1, generator=g).value <= bound.value
        for _ in range(3):
            assert exact(mixed, in_ball(g, 4, 3, 0.7, domain.center)) <= bound.value


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_queries_are_repeated_heads(groups):
    g = generator(groups)
    attention = several(g, 4, groups)
    repeated = r.Attention(
        r.Dot(
            attention.potential.w_q,
            attention.potential.w_k.repeat_interleave(4 // groups, 0),
            b_q=attention.potential.b_q,
        ),
        r.Linear(attention.lookup.w_v.repeat_interleave(4 // groups, 0)),
    )
    w_o, domain = normal(g, 4, 2, 3), Ball(1.0, tokens=3)
    one, other = (certify(Heads(a, w_o), domain, Frobenius()).value for a in (attention, repeated))
    assert one == pytest.approx(other, rel=1e-12)


def test_the_smaller_form_wins():
    """Heads that write to different outputs add in squares; heads with one strong mixer are better summed."""
    still = torch.zeros(2, 3, 3, dtype=D)
    attention = r.Attention(r.Bilinear(still), r.Linear(torch.stack([torch.eye(3, dtype=D)] * 2)))
    apart = torch.zeros(2, 3, 6, dtype=D)
    apart[0, :, :3], apart[1, :, 3:] = torch.eye(3, dtype=D), torch.eye(3, dtype=D)
    assert certify(Heads(attention, apart), Ball(1.0), TokenMax()).value == pytest.approx(
        math.sqrt(2), rel=1e-9
    )
    uneven = torch.stack([5 * torch.eye(3, dtype=D), 0 * torch.eye(3, dtype=D)])
    assert certify(Heads(attention, uneven), Ball(1.0), TokenMax()).value == pytest.approx(5.0, rel=1e-9)


def test_heads_side_by_side():
    g = generator(3)
    attention = several(g, 2, 2)
    domain = Ball(0.5, tokens=3)
    joined = certify(attention, domain, Frobenius()).value
    alone = [
        certify(
            r.Attention(r.Dot(p.w_q[h], p.w_k[h], b_q=p.b_q[h]), r.Linear(attention.lookup.w_v[h])),
            domain,
            Frobenius(),
        ).value
        for p in [attention.potential]
        for h in range(2)
    ]
    assert joined == pytest.approx(math.hypot(*alone), rel=1e-9)
    total = certify(attention, domain, TokenSum())
    assert total.value == pytest.approx(sum(part.value for part in total.parts), rel=1e-9)


def test_one_head_is_no_combination():
    found = certify(r.Attention(r.Bilinear(torch.eye(2, dtype=D))), Ball(1.0), TokenMax())
    assert not any(rung.theorem.startswith(THEOREM.title) for rung in (found, *found.others))


def test_a_head_without_a_bound_makes_all_infinite():
    attention = r.Attention(
        r.Bilinear(torch.zeros(2, 2, 2, dtype=D)), r.Linear(normal(generator(1), 2, 2, 2)), r.Sigmoid()
    )
    found = certify(Heads(attention, normal(generator(2), 2, 2, 2)), Ball(1.0), Frobenius())
    assert math.isinf(found.value)


def test_near_a_sequence_heads_are_seen_together():
    """Two heads that cancel: the Jacobian of both together is zero, their bounds are not."""
    w = normal(generator(4), 2, 2)
    a = normal(generator(5), 2, 2)
    attention = r.Attention(r.Bilinear(torch.stack([a, a])), r.Linear(torch.stack([w, w])))
    opposite = Heads(attention, torch.stack([torch.eye(2, dtype=D), -torch.eye(2, dtype=D)]))
    found = certify(opposite, Neighborhood(normal(generator(6), 3, 2), 0.0), Frobenius())
    assert found.value < 1e-8
    assert max(rung.value for rung in found.others) > 1


@pytest.mark.parametrize(("given", "needed"), [(3, 2), (2, 4)])
def test_a_wrong_number_of_mixing_heads_is_a_sentence(given, needed):
    """Never an index error, never a certificate of something that cannot run."""
    mixed = Heads(several(generator(7), needed, needed), normal(generator(8), given, 2, 3))
    try:
        found = certify(mixed, Ball(1.0, tokens=3), TokenMax())
    except r.errors.ArgumentError as error:
        assert "heads" in str(error)  # noqa: PT017
    else:
        assert math.isinf(found.value)
        assert any("heads" in why for why in found.refused)


def test_one_mixer_serves_all_heads():
    """w_o (1, e, d) is the same mixer for every head: that of the attention with copies of it."""
    attention = several(generator(7), 3, 3)
    one = normal(generator(9), 1, 2, 3)
    for norm in (Frobenius(), TokenMax()):
        shared, copied = (
            certify(Heads(attention, w_o), Ball(0.5, tokens=3), norm).value
            for w_o in (one, one.expand(3, -1, -1).contiguous())
        )
        assert shared == pytest.approx(copied, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("p", "apart", "uneven"), [(1.0, 2.0, 5.0), (1.5, 2.0, 5.0), (2.0, None, 5.0), (3.0, None, 5.0)]
)
def test_heads_of_laws(p, apart, uneven):
    """From p = 2 on heads that write to different outputs add in squares; below they are summed."""
    eye, still = torch.eye(3, dtype=D), torch.zeros(2, 3, 3, dtype=D)
    attention = r.Attention(r.Bilinear(still), r.Linear(torch.stack([eye] * 2)))
    outputs = torch.zeros(2, 3, 6, dtype=D)
    outputs[0, :, :3], outputs[1, :, 3:] = eye, eye
    stated = math.sqrt(2) if apart is None else apart
    domain, norm = Ball(1.0), r.Wasserstein(p)
    assert certify(Heads(attention, outputs), domain, norm).value == pytest.approx(stated, rel=1e-9)
    assert certify(attention, domain, norm).value == pytest.approx(stated, rel=1e-9)  # side by side
    mixed = Heads(attention, torch.stack([5 * eye, 0 * eye]))
    assert certify(mixed, domain, norm).value == pytest.approx(uneven, rel=1e-9)


def test_heads_side_by_side_entry_by_entry():
    """An entry of the output belongs to one head: the largest."""
    eye = torch.eye(3, dtype=D)
    values = [1.0, 3.0, 2.0]
    heads = r.Attention(r.Gaussian(bandwidth=1.0), r.Linear(torch.stack([value * eye for value in values])))
    alone = [
        certify(
            r.Attention(r.Gaussian(bandwidth=1.0), r.Linear(value * eye)), Whole(tokens=4), EntryMax()
        ).value
        for value in values
    ]
    assert certify(heads, Whole(tokens=4), EntryMax()).value == pytest.approx(max(alone), rel=1e-12)
    assert alone[1] == pytest.approx(3 * alone[0], rel=1e-9)


def test_which_dimensions_are_heads():
    """One dimension that is larger than one; what is given once serves every head."""
    g = generator(5)
    for lead, count in (((), 1), ((1,), 1), ((3,), 3), ((1, 3), 3), ((3, 1), 3)):
        assert len(single_heads(r.Attention(r.Dot(normal(g, *lead, 2, 2), normal(g, 2, 2))))) == count
    assert len(single_heads(r.Attention(r.Dot()))) == 1
    with pytest.raises(Refusal, match="bounds are for one sequence with heads"):
        single_heads(r.Attention(r.Dot(normal(g, 2, 2, 2, 2), normal(g, 2, 2))))
