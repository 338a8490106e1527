"""No constant on the whole space: tokens whose derivative grows like the square of their size,
and the sentences that help.
"""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Whole
from regard.norms import Frobenius, TokenMax, Wasserstein
from regard.proofs import certify
from regard.proofs.scores import bilinear
from regard.proofs.theorems.dot_whole import growing_witness
from tests.theorems.exact import D, bilinear_attention, frobenius_norm, generator, normal


def antisymmetric():
    return r.Attention(r.Bilinear(torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=D)))


def apart():
    """Values that are zero on every direction that scores see in keys."""
    a = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=D)
    return r.Attention(r.Bilinear(a), r.Linear(torch.tensor([[0.0], [1.0]], dtype=D)))


CASES = {
    "one dimension": lambda: r.Attention(r.Bilinear(torch.ones(1, 1, dtype=D))),
    "biases": lambda: bilinear_attention(generator(0), 4, 3),
    "causal": lambda: bilinear_attention(generator(1), 4, 3, r.Causal()),
    "narrow": lambda: r.Attention(
        r.Dot(normal(generator(2), 4, 1), normal(generator(3), 4, 1), b_q=torch.ones(1, dtype=D))
    ),
    "antisymmetric": antisymmetric,
    "a bias that no query takes away": lambda: r.Attention(
        r.Dot(
            torch.tensor([[1.0, 0.0], [0.5, 0.0]], dtype=D),
            torch.eye(2, dtype=D),
            b_q=torch.tensor([1.0, 2.0], dtype=D),
        )
    ),
    "apart": apart,
}


@pytest.mark.parametrize("case", CASES)
def test_derivatives_grow_like_the_square(case):
    attention = CASES[case]()
    norms = [frobenius_norm(attention, growing_witness(attention, radius)) for radius in (1e2, 1e3)]
    assert norms[1] / norms[0] == pytest.approx(100, rel=0.05)
    assert math.isinf(certify(attention, Whole(tokens=3), Frobenius()).value)


def test_worked_example():
    attention = CASES["one dimension"]()
    x = growing_witness(attention, 10.0)
    assert sorted(x.flatten().tolist()) == [-10.0, 0.0, 10.0]
    assert float(torch.func.jacrev(attention)(x)[2, 0, 2, 0]) == pytest.approx(1 / 3 + 200 / 3, rel=1e-9)


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), r.TokenSum(), Wasserstein(2)], ids=repr)
def test_infinity_comes_with_reasons_and_help(norm):
    found = certify(bilinear_attention(generator(0), 4, 3), Whole(), norm)
    text = str(found)
    assert math.isinf(found.value)
    assert "not Lipschitz on the whole space" in text
    for word in ("Ball(radius", "Compose((Normalize(), attention))", "Gaussian()"):
        assert word in text
    assert math.isfinite(
        certify(bilinear_attention(generator(0), 4, 3), Ball(1.0, tokens=3), TokenMax()).value
    )


def test_help_for_gaussian_scores_says_what_is_missing():
    g = generator(0)
    found = certify(
        r.Attention(r.Gaussian(normal(g, 2, 2), normal(g, 2, 2), bandwidth=1.0)), Whole(tokens=3), TokenMax()
    )
    assert any("Factored(w, u)" in why and "tie" in why for why in found.refused)


def test_it_says_nothing_where_it_does_not_hold():
    zero = r.Attention(r.Bilinear(torch.zeros(2, 2, dtype=D)))
    alone = bilinear_attention(generator(0), 2, 2, r.Window(0, 0))
    for attention, domain in (
        (zero, Whole()),
        (alone, Whole(tokens=3)),
        (bilinear_attention(generator(0), 2, 2), Whole(tokens=1)),
    ):
        assert "not Lipschitz" not in certify(attention, domain, Frobenius()).theorem


@pytest.mark.parametrize("case", CASES)
def test_the_witness_is_where_the_proof_says(case):
    """x_* makes |Aᵀx + β| least, and y of length one is orthogonal to what is left of it."""
    attention = CASES[case]()
    first, second, start = growing_witness(attention, 7.0)
    assert torch.allclose(first, -second, rtol=0, atol=1e-12)
    assert float(first.norm()) == pytest.approx(7.0, rel=1e-12)
    form = bilinear.one(attention.potential, len(start))
    rest = start @ form.a + form.beta
    assert float((form.a @ rest).norm()) <= 1e-9 * (1 + float(form.beta.norm()))
    assert abs(float(rest @ first)) <= 1e-9 * (1 + float(form.beta.norm()))
    assert float((form.a @ first).norm()) > 1e-3
    values = attention.lookup.values(torch.stack([first, second]), None)
    assert float((values[0] - values[1]).norm()) > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_values_along_a_bias_that_no_query_takes_away_have_no_witness(seed):
    """Scores (x·u)(y·v) + w·y and values w·y, w orthogonal to v: no y orthogonal to w has a value, and
    what rounding leaves of w is no direction.
    """
    g = generator(seed)
    u, v, w = normal(g, 4, 1), normal(g, 4, 1), normal(g, 4, 1)
    w = w - (w * v).sum() / v.square().sum() * v
    b_q = torch.tensor([0.0, 1.0], dtype=D)
    potential = r.Dot(torch.cat([u, 0 * u], -1), torch.cat([v, w], -1), scale=1.0, b_q=b_q)
    found = certify(r.Attention(potential, r.Linear(w)), Whole(tokens=3), Frobenius())
    assert any("in a common direction" in why for why in found.refused)


def test_rows_that_see_one_key_have_a_constant():
    plain = CASES["one dimension"]()
    for attention, tokens, infinite in (
        (plain, 1, False),
        (plain, 2, True),
        (plain.replace(support=r.Window(0, 0)), 3, False),
        (plain.replace(support=r.Window(1, 0)), 3, True),
    ):
        found = certify(attention, Whole(tokens=tokens), Frobenius())
        proved = any(
            "not Lipschitz on the whole space" in f"{rung.theorem}" for rung in (found, *found.others)
        )
        assert proved == infinite, (attention, tokens)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_whether_a_direction_is_common_does_not_depend_on_the_unit(size):
    scores = r.Bilinear(size * torch.tensor([[1.0, 0.3], [0.2, 0.5]], dtype=D))
    found = certify(r.Attention(scores, r.Linear(size * torch.eye(2, dtype=D))), Whole(), TokenMax())
    assert math.isinf(found.value)
    assert "common direction" not in " ".join(found.refused)
    assert found.theorem != "no theorem"
