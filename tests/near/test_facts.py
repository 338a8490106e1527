"""Facts that are kept for the next question, and how much scores bend."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import regard as r
from regard._enclosed import largest_roots
from regard._upper import exact
from regard.maps import Heads
from regard.potentials.base import Scaled
from regard.proofs.near import facts as facts_file
from regard.proofs.near import frobenius as frobenius_file
from regard.proofs.near import head as head_file
from regard.proofs.near import linear as linear_file
from regard.proofs.near import own_row as own_row_file
from regard.proofs.near import stages as stages_file
from regard.proofs.near import token as token_file
from regard.proofs.near.curvature import curvature
from regard.proofs.near.facts import local_facts
from regard.proofs.near.frobenius import FrobeniusScores
from regard.proofs.near.heads import LocalHeads
from regard.proofs.subject import subject_of
from tests.near.sequence import D, plain, two
from tests.theorems.exact import generator, normal


def test_how_much_scores_bend():
    """|A| of one form; scale |W_Q||W_K| where rotations stand between; factors multiply and terms add."""
    g = generator(3)
    w_q, w_k, a = normal(g, 4, 2), normal(g, 4, 2), normal(g, 4, 4)
    dot, rotary = r.Dot(w_q, w_k, scale=0.5), r.Rotary(r.Dot(w_q, w_k, scale=0.5))
    stretch = 0.5 * two(w_q) * two(w_k)
    for potential, stated in (
        (dot, 0.5 * two(w_q @ w_k.mT)),
        (r.Bilinear(a), two(a)),
        (dot + r.Alibi(3.0), 0.5 * two(w_q @ w_k.mT)),
        (r.Alibi(3.0), 0.0),
        (rotary, stretch),
        (r.Rotary(Scaled(dot, -3.0)), 3 * stretch),
        (Scaled(rotary, -3.0), 3 * stretch),
        (rotary + rotary, 2 * stretch),
        (rotary + r.Bilinear(a), stretch + two(a)),
    ):
        found = float(curvature.one(potential, 4))
        assert stated * (1 - 1e-15) <= found <= stated * (1 + 1e-10)
    assert curvature.one(r.Gaussian(bandwidth=1.0), 4) is None
    assert curvature.one(rotary + r.Gaussian(bandwidth=1.0), 4) is None
    assert curvature.one(Scaled(r.Gaussian(bandwidth=1.0), 2.0), 4) is None
    assert curvature.one(r.Rotary(r.Gaussian(bandwidth=1.0)), 4) is None
    one = curvature.one(rotary, 4)
    assert curvature.one(rotary + rotary, 4).roundings > one.roundings
    assert curvature.one(Scaled(rotary, -3.0), 4).roundings > one.roundings
    whole = curvature.one(r.Rotary(r.Dot(scale=1.0)), 4)
    assert 1 <= float(whole) <= 1 + 1e-13
    tripled = float(curvature.one(r.Rotary(Scaled(r.Dot(scale=1.0), 3.0)), 4))
    assert 3 * float(whole) <= tripled <= 3 + 1e-12


def test_facts_that_are_forgotten_are_gone():
    """No circle of references keeps matrices of all heads until the garbage is collected, layer after layer;
    a part of the rows knows no parts of the whole.
    """
    g = generator(5)
    w_q, w_k, w_v, w_o = (normal(g, 2, *size) for size in ((4, 2), (4, 2), (4, 2), (2, 4)))
    map = Heads(r.Attention(r.Dot(w_q, w_k), lookup=r.Linear(w_v)), w_o)
    x = normal(g, 5, 4)
    heads = LocalHeads(subject_of(map), r.one_token(x, 1, 0.1))
    part = heads.with_rows(slice(1, 2))
    assert heads.with_rows(slice(1, 2)) is part
    assert part._parts is not heads._parts
    gone = [weakref.ref(heads), weakref.ref(part)]
    gc.disable()
    try:
        del heads, part
        assert [one() for one in gone] == [None, None]
        r.deviation(map, r.one_token(x, 1, 0.1), r.Frobenius())
        made = [weakref.ref(kept.facts.heads) for kept in facts_file._kept]
        facts_file.forget_facts()
        assert made
        assert [one() for one in made] == [None] * len(made)
    finally:
        gc.enable()


def test_facts_are_kept_for_the_same_question(monkeypatch):
    """The same declaration, residual, marks and numbers; two sets of facts, or sixteen small ones."""
    monkeypatch.setattr(facts_file, "_kept", [])
    x = normal(generator(1), 3, 2)
    attentions = [r.Attention(r.Dot(scale=1.0 + k)) for k in range(20)]
    near = r.Neighborhood(x, 0.0)
    first = local_facts(subject_of(attentions[0]), near)
    assert local_facts(subject_of(attentions[0]), r.Neighborhood(x.clone(), 0.5)) is first
    assert local_facts(subject_of(attentions[0], True), near) is not first
    assert local_facts(subject_of(attentions[0]), r.Neighborhood(x + 1e-9, 0.0)) is not first
    marked = r.Neighborhood(r.Measure(x, marks=torch.arange(3) + 1), 0.0)
    assert local_facts(subject_of(attentions[0]), marked) is not first
    assert local_facts(subject_of(attentions[1]), near) is not first
    for size, kept in ((x, 16), (normal(generator(1), 45, 2), 2)):
        for attention in attentions:
            local_facts(subject_of(attention), r.Neighborhood(size, 0.0))
        assert len(facts_file._kept) == kept
    for tokens, kept in ((44, 16), (45, 2)):  # 44² · 2 is less than 4000
        facts_file._kept.clear()
        for attention in attentions[:17]:
            local_facts(subject_of(attention), r.Neighborhood(normal(generator(1), tokens, 2), 0.0))
        assert len(facts_file._kept) == kept


def test_rows_and_columns_are_kept():
    s = plain(seed=3)
    facts = local_facts(subject_of(s.attention), r.Neighborhood(s.x, 0.0))
    moves = torch.tensor([0.1, 0.0, 0.2, 0.0], dtype=D)
    rows = facts.rows(moves)
    assert facts.rows(moves.clone()) is rows
    assert facts.rows(2 * moves) is not rows
    one = facts.row(2, moves)
    assert one.linear.bound.tolist() == pytest.approx([float(rows.linear.bound[2])], rel=1e-9)
    assert facts.own_row(1) is facts.own_row(1)
    assert facts.column(1) is facts.column(1)
    assert float(facts.column(0).whole) != float(facts.column(1).whole)


@pytest.mark.parametrize(
    ("n", "d", "width", "large"),
    [(100, 100, 100, False), (101, 100, 100, True), (1, 200, 200, False), (1, 201, 201, True)],
)
def test_what_is_large(n, d, width, large):
    """Numbers of all rows together, e d max(n, d/8), against a million."""
    heads = SimpleNamespace(n=n, d=d, width=width)
    assert facts_file.LocalFacts(heads, None, None).large == large


def test_every_gram_matrix_says_how_many_products_it_sums(monkeypatch):
    """For the rounding of its entries, wherever a largest root is taken."""
    asked = []

    def spy(gram, terms=0, error=None):
        asked.append(terms)
        return largest_roots(gram, terms, error)

    for file in (frobenius_file, head_file, linear_file, own_row_file, stages_file, token_file):
        monkeypatch.setattr(file, "largest_roots", spy)

    def terms(bound):
        asked.clear()
        bound()
        return list(asked)

    s = plain(n=5, seed=3)
    one = exact(torch.ones(5, dtype=D))
    scores, inner = FrobeniusScores(s.local, 0.1), s.local.own_narrow.shape[-1]
    assert terms(lambda: scores.by_keys(one, s.local.law)) == [5]
    assert terms(lambda: s.values.mixed) == [2 + inner + 8]
    linear = linear_file.LinearMove(s.heads)
    assert terms(lambda: linear(torch.ones(5, dtype=D))) == [5 * 3]
    assert terms(lambda: linear_file.column_reach(torch.ones(2, 4, 3, 7, dtype=D), one[:4])) == [4 * 7]
    assert terms(lambda: own_row_file.OwnRow(s.heads, 1).second_order) == [3 * 3, 2 * 3]
    w_1 = normal(generator(1), 3, 6)
    assert terms(lambda: stages_file._weighted_norm(w_1, exact(torch.ones(6, dtype=D)))) == [6]
    move = token_file.TokenMove(s.values, 1, 0.1)
    assert terms(lambda: token_file.interval_bound(s.heads, [move], exact(0.1))) == [5 * 2 + 5]
    assert terms(lambda: token_file.column_norms(s.heads, 1)) == [5 * 2] * 2
