"""Self-attention in Frobenius norm: the worked constants, crowding under masks, attacks."""

import math

import pytest
import torch

import regard as r
from regard._upper import exact
from regard.domains import Ball, Neighborhood
from regard.norms import Frobenius
from regard.proofs import certify, falsify
from regard.proofs.setting import crowding
from regard.proofs.subject import Head
from regard.proofs.theorems.frobenius import THEOREM
from tests.theorems.exact import (
    SUPPORTS,
    D,
    bilinear_attention,
    frobenius_norm,
    generator,
    in_ball,
    normal,
    worked,
)


def rung(attention, domain):
    found = certify(attention, domain, Frobenius())
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


def test_worked_example():
    x, a, w = worked()
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    domain = Ball(float(x.norm(dim=-1).max()), tokens=4)
    assert rung(attention, domain) == pytest.approx(10.730192125113968, rel=1e-9)
    assert frobenius_norm(attention, x) == pytest.approx(2.8106266806294307, rel=1e-12)
    g = 1.7076532410810032
    assert float(crowding(Head(attention), domain, exact(2 * g))) == pytest.approx(
        3.6410009587074796, rel=1e-9
    )
    causal = r.Attention(r.Bilinear(a), r.Linear(w), support=r.Causal())
    assert float(crowding(Head(causal), domain, exact(2 * g))) == pytest.approx(3.8167513507161237, rel=1e-9)


@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_attacks_stay_below(seed, support):
    g = generator(10 + seed)
    d, e, n = 3 - seed, 2 + seed, 5
    attention = bilinear_attention(g, d, e, support, scale=0.5)
    center = normal(g, d)
    domain = Ball(1.2, center, n)
    bound = rung(attention, domain)
    assert falsify(attention, domain, Frobenius(), steps=6, restarts=2, generator=g).value <= bound
    for _ in range(5):
        assert frobenius_norm(attention, in_ball(g, n, d, 1.2, center)) <= bound


def test_weights_that_climb_stay_below():
    """The ascent moves the tokens and A, within |A| = 1.5."""
    g = generator(7)
    x, a = normal(g, 5, 2), normal(g, 2, 2)
    best = 0.0
    for _ in range(60):
        x, a = (
            (x / x.norm(dim=-1, keepdim=True).clamp_min(1.0)).detach(),
            (1.5 * a / torch.linalg.matrix_norm(a, 2)).detach(),
        )
        leaves = [x.requires_grad_(), a.requires_grad_()]
        block = torch.func.jacrev(lambda y, a=leaves[1]: (y @ a @ y.mT).softmax(-1) @ y)(leaves[0])
        size = torch.linalg.matrix_norm(block.reshape(10, 10), 2)
        slopes = torch.autograd.grad(size, leaves)
        best = max(best, float(size.detach()))
        x, a = (
            t.detach() + 0.1 * s / s.norm().clamp_min(1e-300) for t, s in zip(leaves, slopes, strict=True)
        )
    bound = rung(r.Attention(r.Bilinear(1.5 * torch.eye(2, dtype=D))), Ball(1.0, tokens=5))
    assert 0.35 * bound < best <= bound


def test_tight_for_weak_scores():
    attention, x = r.Attention(r.Dot(scale=0.05)), torch.tensor([[1.0], [0.9]], dtype=D)
    assert 0.92 < frobenius_norm(attention, x) / rung(attention, Ball(1.0, torch.zeros(1, dtype=D), 2)) <= 1


@pytest.mark.parametrize(
    "support", [r.Full(), r.Causal(), r.Window(1, 0), r.Document(torch.tensor([0, 0, 1, 1, 1]))], ids=repr
)
def test_crowding_is_at_least_every_column_sum(support):
    """Scores within `osc` of each other, beside a bias of positions: no column of weights is heavier."""
    g, osc = generator(3), 1.5
    head = Head(r.Attention(r.Alibi(0.4), support=support))
    bound = float(crowding(head, Ball(1.0, tokens=5), exact(osc)))
    marks = torch.arange(5)
    bias = (
        r.Alibi(0.4)
        .scores(torch.zeros(5, 1, dtype=D), torch.zeros(5, 1, dtype=D))
        .masked_fill(~support.allows(marks, marks), -math.inf)
    )
    heaviest = 0.0
    for _ in range(200):
        scores = osc * (torch.rand(5, 5, generator=g, dtype=D) > 0.5)
        heaviest = max(heaviest, float((scores + bias).softmax(-1).sum(0).max()))
    for column in range(5):
        scores = torch.zeros(5, 5, dtype=D).index_fill(1, torch.tensor([column]), osc)
        heaviest = max(heaviest, float((scores + bias).softmax(-1).sum(0).max()))
    assert heaviest <= bound == pytest.approx(heaviest, rel=1e-9)


def test_weights_of_a_measure_count():
    x = normal(generator(4), 3, 2)
    attention = r.Attention(r.Dot())
    plain = rung(attention, Neighborhood(x, 0.5))
    assert rung(attention, Neighborhood(r.Measure(x, torch.zeros(3, dtype=D)), 0.5)) == pytest.approx(
        plain, rel=1e-9
    )
    assert rung(attention, Neighborhood(r.Measure(x, torch.tensor([5.0, 0.0, 0.0], dtype=D)), 0.5)) > plain


def test_number_of_tokens_is_needed():
    found = certify(r.Attention(r.Bilinear(torch.eye(2, dtype=D))), Ball(1.0), Frobenius())
    assert not any(rung.theorem.startswith(THEOREM.title) for rung in (found, *found.others))
    assert any(
        "say how many there are, e.g. Ball(radius, tokens=n), or use TokenMax()" in why
        for why in found.refused
    )


@pytest.mark.parametrize("radius", [1e100, 1e200, 1e308])
def test_radii_that_leave_the_range_give_infinity(radius):
    found = certify(r.Attention(r.Bilinear(torch.eye(2, dtype=D))), Ball(radius, tokens=3), Frobenius())
    assert found.value == math.inf or found.value >= radius


def test_one_token_has_the_norm_of_the_values():
    w = normal(generator(6), 3, 2)
    attention = r.Attention(r.Bilinear(normal(generator(8), 3, 3)), r.Linear(w))
    x = normal(generator(9), 1, 3)
    size = float(torch.linalg.matrix_norm(w, 2))
    assert frobenius_norm(attention, x) == pytest.approx(size, rel=1e-12)
    assert certify(attention, Neighborhood(x, 1e-9), Frobenius()).value == pytest.approx(size, rel=1e-5)
