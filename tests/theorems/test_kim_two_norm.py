"""The published L2 bound in Frobenius norm: homogeneity, attacks, and that it is never below ours."""

import math

import pytest
import torch

import regard as r
from regard.domains import Whole
from regard.norms import Frobenius
from regard.proofs import certify
from regard.proofs.gaussian_rows import lambert_bound
from tests.theorems.exact import SUPPORTS, D, frobenius_norm, generator, normal
from tests.theorems.test_castin_general import rung


def l2_attention(w_q, w_v, support=None):
    """The paper's head: scores -s|W_Qᵀ(x_i - x_j)|², s = 1/√c, values s W_Vᵀ W_Q W_Qᵀ x."""
    s = 1 / math.sqrt(w_q.shape[-1])
    potential = r.Gaussian(w_q, w_q, bandwidth=math.sqrt(1 / (2 * s)))
    return r.Attention(potential, r.Factored(w_q, s * w_q.mT @ w_v), support=support or r.Full())


def published(attention, n):
    return rung(certify(attention, Whole(tokens=n), Frobenius()), "as published").value


def test_worked_example():
    w_q, n = 2 * torch.eye(4, dtype=D), 16
    expected = math.sqrt(n) / 2 * (4 * float(lambert_bound(math.log(n - 1) - 1)) + 1) * 4
    assert published(l2_attention(w_q, torch.eye(4, dtype=D)), n) == pytest.approx(expected, rel=1e-9)


def test_it_is_quadratic_in_the_projection():
    """A constant that is linear in |W_Q| is broken at c = 16; the certificate is not."""
    g = generator(0)
    n, c = 2, 16.0
    x = normal(g, n, 1) / c
    attention = l2_attention(c * torch.ones(1, 1, dtype=D), torch.ones(1, 1, dtype=D))
    found = max(
        frobenius_norm(attention, step * x / x.abs().max() / c)
        for step in torch.linspace(0.1, 2, 30, dtype=D)
    )
    linear = math.sqrt(n) * (4 * float(lambert_bound(math.log(n - 1) - 1)) + 1) * c
    assert found > 2 * linear
    assert found <= certify(attention, Whole(tokens=n), Frobenius()).value <= published(attention, n)
    assert found > 0.2 * published(attention, n)


@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_never_below_ours_nor_an_attack(seed, support):
    g = generator(seed)
    attention = l2_attention(normal(g, 3, 2 + seed), normal(g, 3, 2), support)
    found = certify(attention, Whole(tokens=6), Frobenius())
    assert rung(found, "whole space").value <= rung(found, "as published").value
    for _ in range(8):
        assert (
            frobenius_norm(attention, normal(g, 6, 3, scale=10 ** float(0.5 * normal(g, 1)))) <= found.value
        )


def test_untied_projections_are_refused():
    g = generator(0)
    found = certify(
        r.Attention(r.Gaussian(normal(g, 2, 2), normal(g, 2, 2), bandwidth=1.0)), Whole(tokens=3), Frobenius()
    )
    assert any("as published" in why and "w_q and w_k tied" in why for why in found.refused)
