"""The published bound on a ball: its worked value, its refusals, and that it is never below ours."""

import pytest
import torch

import regard as r
from regard.domains import Ball
from regard.norms import Frobenius
from regard.proofs import certify, falsify
from tests.theorems.exact import SUPPORTS, D, bilinear_attention, frobenius_norm, generator, normal, worked


def rung(certificate, words):
    return next(c for c in (certificate, *certificate.others) if words in c.theorem)


def test_worked_example():
    x, a, w = worked()
    found = certify(
        r.Attention(r.Bilinear(a), r.Linear(w)), Ball(float(x.norm(dim=-1).max()), tokens=4), Frobenius()
    )
    assert rung(found, "as published").value == pytest.approx(24.80673954745604, rel=1e-9)
    assert found.value < 11


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_never_below_ours_and_never_below_an_attack(seed, support, biased):
    g = generator(seed)
    attention = bilinear_attention(g, 3, 2, support, scale=0.1 * 6**seed, bias=biased)
    domain = Ball(1.5, normal(g, 3) if seed % 2 else None, tokens=5)
    found = certify(attention, domain, Frobenius())
    published = rung(found, "as published").value
    assert published >= rung(found, "in Frobenius norm").value
    witness = falsify(attention, domain, Frobenius(), restarts=1, steps=6, width=3, generator=g)
    assert 0 < witness.value <= published


def test_tightness():
    attention = r.Attention(r.Bilinear(torch.tensor([[0.05]], dtype=D)))
    published = rung(certify(attention, Ball(1.0, tokens=2), Frobenius()), "as published").value
    pairs = [torch.tensor([[1.0], [float(y)]], dtype=D) for y in torch.linspace(-1, 1, 9)]
    assert 0.4 * published < max(frobenius_norm(attention, pair) for pair in pairs) <= published


def test_refusals():
    g = generator(0)
    gaussian = certify(
        r.Attention(r.Gaussian(bandwidth=1.0), r.Linear(normal(g, 3, 3))), Ball(1.0, tokens=4), Frobenius()
    )
    assert any("one bilinear form" in why for why in gaussian.refused)
    uncounted = certify(bilinear_attention(g, 3, 2, bias=False), Ball(1.0), Frobenius())
    assert any("say how many there are" in why for why in uncounted.refused)
