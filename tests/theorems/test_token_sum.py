"""Self-attention in TokenSum norm."""

import pytest
import torch

import regard as r
from regard.domains import Ball
from regard.norms import TokenSum
from regard.proofs import certify, falsify
from regard.proofs.theorems.token_sum import THEOREM
from tests.theorems.exact import SUPPORTS, D, bilinear_attention, generator, in_ball, jacobian, normal, worked


def rung(attention, domain):
    found = certify(attention, domain, TokenSum())
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


def column_norm(function, x):
    """From below: max over tokens j and directions e of Σ_i |J_ij e|."""
    best, block = 0.0, jacobian(function, x)
    for column in block.permute(2, 0, 1, 3):  # (n, e, d)
        for e in torch.cat(
            [torch.eye(column.shape[-1], dtype=D), torch.linalg.svd(column.flatten(0, 1)).Vh[:1]]
        ):
            best = max(best, float((column @ e).norm(dim=-1).sum()))
    return best


def test_worked_example():
    x, a, w = worked()
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    bound = rung(attention, Ball(float(x.norm(dim=-1).max()), tokens=4))
    assert bound == pytest.approx(34.79837202232707, rel=1e-9)
    assert column_norm(attention, x) <= bound


@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_attacks_stay_below(seed, support):
    g = generator(20 + seed)
    attention, center = bilinear_attention(g, 2, 3, support, scale=0.5), normal(g, 2)
    domain = Ball(0.8, center, 5)
    bound = rung(attention, domain)
    assert falsify(attention, domain, TokenSum(), steps=6, restarts=2, generator=g).value <= bound
    for _ in range(6):
        assert column_norm(attention, in_ball(g, 5, 2, 0.8, center)) <= bound


def test_attained_by_rows_that_look_at_one_token():
    """Every row puts its weight on token 0, which then moves n outputs."""
    bias = torch.zeros(9, dtype=D)
    bias[4:] = -100.0
    attention = r.Attention(
        r.RelativeBias(bias, r.potentials.Clipped(4)),
        support=r.Where(torch.eye(5, dtype=torch.bool) | (torch.arange(5) == 0)),
    )
    x = normal(generator(1), 5, 2)
    bound = certify(attention, Ball(3.0, torch.zeros(2, dtype=D), 5), TokenSum()).value
    assert column_norm(attention, x) == pytest.approx(5.0, rel=1e-9)
    assert 5.0 - 1e-9 <= bound == pytest.approx(5.0, rel=1e-6)


def test_number_of_tokens_is_needed():
    found = certify(r.Attention(r.Bilinear(torch.eye(2, dtype=D))), Ball(1.0), TokenSum())
    assert not any(rung.theorem.startswith(THEOREM.title) for rung in (found, *found.others))
    assert any(why.startswith(THEOREM.title) and "say how many there are" in why for why in found.refused)
