"""The published bound for measures: its worked value, its refusals, and that it is never below ours."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball
from regard.norms import Wasserstein
from regard.proofs import certify
from tests.theorems.exact import D, bilinear_attention, generator, normal, token_max_norm, worked
from tests.theorems.test_castin_general import rung


def test_worked_example():
    x, a, w = worked()
    found = certify(
        r.Attention(r.Bilinear(a), r.Linear(w)), Ball(float(x.norm(dim=-1).max())), Wasserstein(1)
    )
    assert rung(found, "as published").value == pytest.approx(364.5396791059198, rel=1e-9)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("seed", range(4))
def test_never_below_ours(seed, p):
    g = generator(seed)
    attention = bilinear_attention(g, 3, 2, scale=0.05 * 4**seed, bias=False)
    found = certify(attention, Ball(0.7, normal(g, 3) if seed % 2 else None), Wasserstein(p))
    assert found.value <= rung(found, "as published").value


def test_tightness():
    attention = r.Attention(r.Bilinear(torch.tensor([[0.05]], dtype=D)))
    published = rung(certify(attention, Ball(1.0), Wasserstein(math.inf)), "as published").value
    rows = [torch.tensor([[1.0], [1.0], [1.0], [float(y)]], dtype=D) for y in torch.linspace(-1, 1, 9)]
    assert 0.7 * published < max(token_max_norm(attention, x) for x in rows) <= published


def test_refusals():
    causal = certify(
        bilinear_attention(generator(0), 3, 2, r.Causal(), bias=False), Ball(1.0, tokens=4), Wasserstein(1)
    )
    assert math.isinf(causal.value)
    assert any("as published" in why and "not functions of the law" in why for why in causal.refused)
