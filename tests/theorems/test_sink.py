"""A slot with a fixed logit and the value zero: general forms of the theorems on balls, attacked."""

import pytest
import torch

import regard as r

D = torch.float64


def head(seed, sink=0.3, bias=False, rotary=False):
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k, w_v = (0.5 * torch.randn(4, 4, generator=generator, dtype=D) for _ in range(3))
    b_q = torch.randn(4, generator=generator, dtype=D)
    dot = r.Dot(w_q, w_k, b_q=b_q)
    values = r.Linear(w_v, torch.ones(4, dtype=D)) if bias else r.Linear(w_v)
    return r.Attention(r.Rotary(dot) if rotary else dot, values, r.SinkSoftmax(sink, 1.5))


@pytest.mark.parametrize("norm", [r.TokenMax(), r.Frobenius(), r.TokenSum()])
@pytest.mark.parametrize("rotary", [False, True])
def test_no_attack_exceeds_the_bound(norm, rotary):
    for seed, radius in ((0, 0.3), (1, 1.0), (2, 0.1)):
        attention = head(seed, sink=[-2.0, 0.5, 3.0][seed], rotary=rotary)
        center = torch.randn(4, generator=torch.Generator().manual_seed(9), dtype=D)
        domain = r.Ball(radius, center, tokens=4)
        bound = r.certify(attention, domain, norm).value
        found = r.falsify(attention, domain, norm, restarts=1, steps=6).value
        assert 0.002 * bound < found <= bound


def test_without_scores_the_slot_takes_its_share():
    """Equal scores: each of n keys has the weight 1/(n + e^sink),
    so a common move is scaled by n/(n + e^sink) and the bound by 1.
    """
    attention = r.Attention(r.Bilinear(torch.zeros(3, 3, dtype=D)), normalizer=r.SinkSoftmax(0.0))
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    torch.testing.assert_close(attention(x), (x.sum(0) / 4).expand(3, 3))
    assert r.certify(attention, r.Ball(1.0, tokens=3), r.TokenMax()).value == pytest.approx(1.0)


def test_a_value_bias_is_refused_by_name():
    certificate = r.certify(head(0, bias=True), r.Ball(1.0, tokens=4), r.TokenMax())
    assert certificate.value == float("inf")
    assert "the slot's value is zero" in str(certificate)
