"""Self-attention in TokenMax norm: the worked constant, violated hypotheses,
attacks on tokens and weights.
"""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Neighborhood, Whole
from regard.norms import TokenMax
from regard.proofs import certify, falsify
from regard.proofs.theorems.token_max import THEOREM
from tests.theorems.exact import (
    SUPPORTS,
    D,
    bilinear_attention,
    generator,
    in_ball,
    normal,
    token_max_norm,
    worked,
)


def rung(attention, domain):
    found = certify(attention, domain, TokenMax())
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


def test_worked_example():
    x, a, w = worked()
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    radius = float(x.norm(dim=-1).max())
    assert radius == pytest.approx(1.2585109767586948, rel=1e-14)
    assert rung(attention, Ball(radius)) == pytest.approx(7.213668468701022, rel=1e-9)
    assert rung(attention, Ball(radius, tokens=4)) >= token_max_norm(attention, x)


@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_attacks_stay_below(seed, support):
    g = generator(seed)
    d, e, n = 2 + seed, 4 - seed, 4
    attention = bilinear_attention(g, d, e, support)
    center = normal(g, d)
    domain = Ball(1.5, center, n)
    bound = rung(attention, domain)
    assert falsify(attention, domain, TokenMax(), steps=6, restarts=2, generator=g).value <= bound
    for _ in range(5):
        assert token_max_norm(attention, in_ball(g, n, d, 1.5, center)) <= bound


def test_weights_that_climb_stay_below():
    """The ascent moves A and W too, within spectral norms 2 and 1."""
    g = generator(5)
    x, a, w = normal(g, 6, 2), normal(g, 2, 2), normal(g, 2, 2)
    best = 0.0
    for _ in range(60):
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(1.0)
        a, w = 2 * a / torch.linalg.matrix_norm(a, 2), w / torch.linalg.matrix_norm(w, 2)
        leaves = [t.detach().requires_grad_() for t in (x, a, w)]
        block = torch.func.jacrev(lambda y, a=leaves[1], w=leaves[2]: (y @ a @ y.mT).softmax(-1) @ y @ w)(
            leaves[0]
        )
        sizes = torch.linalg.svdvals(block.permute(0, 2, 1, 3))[..., 0].sum(
            -1
        )  # at least the norm of each row
        slopes = torch.autograd.grad(sizes.max(), leaves)
        best = max(
            best, token_max_norm(r.Attention(r.Bilinear(a.detach()), r.Linear(w.detach())), x.detach())
        )
        x, a, w = (
            t.detach() + 0.1 * s / s.norm().clamp_min(1e-300) for t, s in zip(leaves, slopes, strict=True)
        )
    bound = rung(r.Attention(r.Bilinear(2 * torch.eye(2, dtype=D))), Ball(1.0))
    assert bound == pytest.approx(math.sqrt(5) + 2, rel=1e-9)
    assert 0.5 * bound < best <= bound


def test_tight_for_weak_scores():
    """Tokens that all move alike move every mean alike."""
    attention, x = r.Attention(r.Dot(scale=0.05)), in_ball(generator(0), 8, 2, 1.0)
    assert 0.95 < token_max_norm(attention, x) / rung(attention, Ball(1.0, torch.zeros(2, dtype=D), 8)) <= 1


def test_one_token_and_zero_scores_are_exact():
    g = generator(1)
    w = normal(g, 3, 2)
    still = r.Attention(r.Bilinear(torch.zeros(3, 3, dtype=D)), r.Linear(w))
    assert rung(still, Ball(5.0)) == pytest.approx(float(torch.linalg.matrix_norm(w, 2)), rel=1e-9)
    assert (
        rung(r.Attention(r.Bilinear(normal(g, 3, 3)), r.Linear(torch.zeros(3, 2, dtype=D))), Ball(5.0))
        < 1e-300
    )
    assert rung(r.Attention(r.Bilinear(normal(g, 3, 3)), r.Linear(w)), Ball(0.0)) == pytest.approx(
        rung(still, Ball(0.0)), rel=1e-9
    )


def test_centers_and_biases_enter():
    """Shifting all tokens by c is a query bias Aᵀc: both certificates agree."""
    g = generator(2)
    w_q, w_k, c = normal(g, 3, 3), normal(g, 3, 3), normal(g, 3)
    moved = rung(r.Attention(r.Dot(w_q, w_k, 1.0)), Ball(0.7, c))
    biased = rung(r.Attention(r.Dot(w_q, w_k, 1.0, b_q=c @ w_q)), Ball(0.7))
    assert moved == pytest.approx(biased, rel=1e-9)
    assert moved > rung(r.Attention(r.Dot(w_q, w_k, 1.0)), Ball(0.7))


@pytest.mark.parametrize("radius", [1e100, 1e200, 1e308])
def test_radii_that_leave_the_range_give_infinity(radius):
    found = certify(r.Attention(r.Bilinear(torch.eye(2, dtype=D))), Ball(radius, tokens=3), TokenMax())
    assert found.value == math.inf or found.value >= radius


@pytest.mark.parametrize(
    ("attention", "domain", "sentence"),
    [
        (r.Attention(r.Bilinear(torch.eye(2, dtype=D))), Whole(), "tokens are not bounded; use Ball"),
        (
            r.Attention(r.Dot(), normalizer=r.Sparsemax()),
            Ball(1.0, torch.zeros(2, dtype=D), 3),
            "rows of Sparsemax are not Gibbs laws",
        ),
        (r.Attention(r.Dot()), Ball(1.0), "the width of a token is not known"),
        (
            r.Attention(r.Dot(), r.Table(torch.ones(3, 2, dtype=D))),
            Ball(1.0, torch.zeros(2, dtype=D), 3),
            "values by Table have no known",
        ),
        (
            r.Attention(r.Potential.of(lambda x, y: (x - y).abs().sum(-1))),
            Ball(1.0, torch.zeros(2, dtype=D)),
            "nothing is known about the slopes",
        ),
    ],
    ids=["whole", "sparsemax", "width", "table", "function"],
)
def test_violated_hypotheses(attention, domain, sentence):
    found = certify(attention, domain, TokenMax())
    assert any(why.startswith(THEOREM.title) and sentence in why for why in found.refused), found.refused


def test_rows_that_see_nothing_are_refused():
    attention = r.Attention(r.Dot(), support=r.Where(torch.tensor([[True, True], [False, False]])))
    found = certify(attention, Neighborhood(torch.ones(2, 2, dtype=D), 0.1), TokenMax())
    assert math.isinf(found.value)
    assert any("some query sees no key" in why for why in found.refused)
