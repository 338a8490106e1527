"""Branch and bound over hulls: parts cover the whole, nothing false is proved, and cuts are counted."""

import math
from fractions import Fraction

import pytest
import torch

import regard as r
from regard.errors import ArgumentError
from regard.maps import Affine, Compose, Relu, feed_forward
from regard.nonexpansive import MixTokens
from regard.proofs.subdivision import Piece, least_lead
from regard.proofs.theorem import Refusal
from tests.ball_model.networks import D, drawn, network, sequence


def piece(corners):
    domain = r.Hull(corners[:1], 0, corners[1:])
    return Piece(domain, domain.corners, r._upper.Upper(0.0))


def is_in(point, corners):
    """Whether it is a mixture of affinely independent corners, but for rounding."""
    system = torch.cat([corners.mT, torch.ones(1, len(corners), dtype=D)])
    weights = torch.linalg.lstsq(system, torch.cat([point, torch.ones(1, dtype=D)])).solution
    return bool((weights > -1e-9).all())


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_halves_of_a_hull_cover_it(count):
    generator = torch.Generator().manual_seed(count)
    corners = torch.randn(count, 6, generator=generator, dtype=D)
    first, second = piece(corners).halves()
    mixtures = torch.rand(200, count, generator=generator, dtype=D)
    inside = [
        (is_in(point, first.corners), is_in(point, second.corners))
        for point in (mixtures / mixtures.sum(-1, keepdim=True)) @ corners
    ]
    assert all(one or other for one, other in inside)
    assert any(not one for one, _ in inside)
    assert any(not other for _, other in inside)


def test_the_longest_edge_is_cut():
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]], dtype=D)
    first, second = piece(corners).halves()
    middle = torch.tensor([0.5, 1.5], dtype=D)
    assert bool((first.corners == torch.stack([corners[0], middle, corners[2]])).all())
    assert bool((second.corners == torch.stack([corners[0], corners[1], middle])).all())


def test_what_rounding_does_to_a_middle_is_counted():
    """Against exact numbers, at every cut; and it goes on into parts of parts, and into their states."""
    corners = torch.tensor([[1.0 / 3], [1e8 + 1.0 / 7]], dtype=D)
    one, exact = piece(corners), [Fraction(float(corner)) for corner in corners]
    for _ in range(30):
        one = one.halves()[0]
        exact[0] = (exact[0] + exact[1]) / 2
        away = abs(Fraction(float(one.corners[0])) - exact[0])
        assert away <= Fraction(float(one.off))
    assert away > 0
    assert float(one.state.shape.diagonal(dim1=-2, dim2=-1).sqrt().max()) >= float(one.off)


def both_ways(lowest):
    """Leads by |t| + lowest for the one coordinate t."""
    eye = torch.tensor([[1.0, -1.0]], dtype=D)
    hidden = feed_forward(Relu(), eye, torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=D))
    bias = torch.tensor([lowest, 0.0], dtype=D)
    return Compose((hidden, Affine(torch.eye(2, dtype=D), bias)))


def test_an_answer_that_changes_between_the_corners_is_never_proved():
    x, other = torch.tensor([[-1.0]], dtype=D), torch.tensor([[1.0]], dtype=D)
    for pieces in (1, 2, 12):
        found = r.decide(both_ways(-0.01), x, r.Hull(x, 0, other), pieces=pieces)
        assert found.holds is None
        assert found.least_margin <= -0.01
        assert "more pieces" in str(found)
    found = r.decide(both_ways(0.01), x, r.Hull(x, 0, other), pieces=24)
    assert found.holds is True
    assert 0 < found.least_margin <= 0.01


def test_cuts_prove_what_one_bound_does_not():
    first = torch.eye(4, dtype=D)[:1]
    model = Compose((network(1), MixTokens(first)))
    readout = Affine(drawn(torch.Generator().manual_seed(1), 8, 3))
    x = sequence(1)
    towards = x[1] + 0.1 * torch.randn(2, 8, generator=torch.Generator().manual_seed(4), dtype=D)
    hull = r.Hull(x, 1, towards)
    plain = r.decide(model, x, hull, readout=readout)
    cut = r.decide(model, x, hull, readout=readout, pieces=24)
    assert plain.holds is None
    assert cut.holds is True
    assert "cut into parts" in str(cut)
    few = r.decide(model, x, hull, readout=readout, pieces=2)
    assert plain.least_margin <= few.least_margin <= cut.least_margin
    weights = torch.rand(60, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    for point in (weights / weights.sum(-1, keepdim=True)) @ hull.corners:
        moved = x.clone()
        moved[1] = point
        logits = readout(model(moved))[0]
        others = logits.index_fill(-1, torch.tensor(cut.label), -math.inf)
        assert float(logits[cut.label[0]] - others.max()) >= cut.least_margin


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_no_more_bounds_than_pieces(pieces):
    asked = []
    domain = r.Hull(torch.zeros(1, 2), 0, torch.eye(2))

    def never(state):
        asked.append(state)
        return -1.0, 1

    assert least_lead(domain, never, pieces) == ((-1.0, 1), pieces)
    assert len(asked) == pieces


def test_parts_that_are_not_asked_about_have_what_is_known_of_the_whole():
    domain, leads = r.Hull(torch.zeros(1, 2), 0, torch.eye(2)), iter([-3.0, 2.0])
    assert least_lead(domain, lambda state: (next(leads), 1), 2) == ((-3.0, 1), 2)


def test_a_refusal_of_the_whole_does_not_end_it():
    domain, answers = r.Hull(torch.zeros(1, 2), 0, torch.eye(2)), iter([None, 2.0, 3.0])

    def ask(state):
        lead = next(answers)
        if lead is None:
            raise Refusal("too large")
        return lead, 1

    assert least_lead(domain, ask, 3) == ((2.0, 1), 3)
    answers = iter([None, 2.0])
    with pytest.raises(Refusal, match="too large"):
        least_lead(domain, ask, 2)


@pytest.mark.parametrize(("pieces", "match"), [(0, "at least 1"), (True, "at least 1"), (2.0, "at least 1")])
def test_wrong_numbers_of_pieces_are_named(pieces, match):
    x = torch.ones(1, 2, dtype=D)
    with pytest.raises(ArgumentError, match=match):
        r.decide(Affine(torch.eye(2, dtype=D)), x, r.Hull(x, 0, x), pieces=pieces)


def test_only_hulls_are_cut():
    x = torch.ones(1, 2, dtype=D)
    with pytest.raises(ArgumentError, match=r"Radii.*Hull"):
        r.decide(Affine(torch.eye(2, dtype=D)), x, r.one_token(x, 0, 0.1), pieces=2)
