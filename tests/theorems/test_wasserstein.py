"""Self-attention as a map of measures: the worked constants, exact transport of laws with different atoms,
what is refused.
"""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball
from regard.norms import TokenMax, Wasserstein
from regard.proofs import certify, falsify
from regard.proofs.theorems.wasserstein import THEOREM
from regard.transport import wasserstein
from tests.theorems.exact import D, bilinear_attention, generator, in_ball, normal, worked


def rung(attention, domain, p):
    found = certify(attention, domain, Wasserstein(p))
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


def test_worked_example():
    x, a, w = worked()
    attention, ball = r.Attention(r.Bilinear(a), r.Linear(w)), Ball(float(x.norm(dim=-1).max()))
    assert rung(attention, ball, 2.0) == pytest.approx(24.700635145660314, rel=1e-9)
    for p in (1.0, 1.5, 3.0):
        assert rung(attention, ball, p) == pytest.approx(266.2134026166739, rel=1e-9)
    assert rung(attention, ball, math.inf) == pytest.approx(
        certify(attention, ball, TokenMax()).value, rel=1e-12
    )


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_laws_with_different_atoms(p):
    g = generator(int(min(p, 9)))
    attention, center = bilinear_attention(g, 2, 2, scale=0.3), normal(g, 2)
    bound = rung(attention, Ball(1.0, center), p)
    for atoms in ((4, 4), (2, 6), (3, 6), (1, 5)):
        first, second = (r.Measure(in_ball(g, n, 2, 1.0, center)) for n in atoms)
        near = r.Measure(first.points.repeat(2, 1) * (1 - 1e-4) + 1e-4 * center)
        for other in (second, near):
            before = float(wasserstein(first, other, p))
            after = float(
                wasserstein(r.Measure(attention(first.points)), r.Measure(attention(other.points)), p)
            )
            assert after <= bound * before * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_attacks_stay_below_and_weak_scores_are_tight(p):
    g = generator(4)
    attention = r.Attention(r.Dot(scale=0.05))
    domain = Ball(1.0, torch.zeros(2, dtype=D), 4)
    found = falsify(attention, domain, Wasserstein(p), steps=4, restarts=2, generator=g).value
    assert 0.6 * rung(attention, domain, p) < found <= rung(attention, domain, p)


@pytest.mark.parametrize(
    "attention",
    [
        r.Attention(r.Dot(), support=r.Causal()),
        r.Attention(r.Dot() + r.Alibi(0.1)),
        r.Attention(r.Rotary(r.Dot())),
        r.Attention(0.5 * r.Rotary(r.Dot()) + r.Gaussian(bandwidth=1.0)),
    ],
    ids=["causal", "alibi", "rotary", "rotary inside"],
)
def test_what_looks_at_positions_is_refused(attention):
    found = certify(attention, Ball(1.0, torch.zeros(2, dtype=D), 4), Wasserstein(2.0))
    assert math.isinf(found.value)
    assert any(
        "are not functions of the law of tokens; use TokenMax() or Frobenius()" in why
        for why in found.refused
    )


def test_large_scores_give_infinity_only_where_there_is_an_exponential():
    attention, domain = r.Attention(r.Bilinear(-1e3 * torch.eye(2, dtype=D))), Ball(1.0)
    first = certify(attention, domain, Wasserstein(1.0))
    assert first.value == math.inf
    assert first.theorem == "no theorem"
    assert any("the bound leaves the range of numbers; use a smaller domain" in why for why in first.refused)
    assert math.isfinite(rung(attention, domain, math.inf))
