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
    found = certify(r.Attention(r.Gaussian(normal(g, 2, 2), normal(g, 2, 2))), Whole(tokens=3), TokenMax())
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
