"""Rows whose scores are off: two atoms attain the bound, and no row, mask, weight or head breaks it."""

import math

import pytest
import torch

import regard as r
from regard._upper import exact
from regard.compression.candidates import quantize
from regard.proofs import ratio_errors, row_errors
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.bounded_ratio import ratio_bound
from tests.theorems.test_approximation import CASES, draw, measured

D = torch.float64


def _perturbed(weights, generator, size):
    """Rows of scores that are off, with mass where attention has it."""
    logs = weights.log() + size * draw(generator, *weights.shape)
    return logs.softmax(-1)


@pytest.mark.parametrize("size", [1e-6, 0.01, 0.3, 2.0, 20.0])
@pytest.mark.parametrize("name", CASES)
def test_proved_above_measured(name, size):
    generator = torch.Generator().manual_seed(len(name))
    for _ in range(5):
        attention, x = CASES[name](generator), draw(generator, 7, 3)
        law = _perturbed(attention.weights(x, x), generator, size)
        rows = ratio_errors(attention, law, x)
        total = rows.square() if rows.ndim == 1 else rows.square().sum(0)
        assert bool((total.sqrt() >= measured(attention, law, x).sqrt()).all())


@pytest.mark.parametrize("off", [1e-4, 1e-3, 0.05])
def test_two_atoms_attain_it_to_first_order(off):
    """Equal masses at ±1, scores apart by o: Pv = tanh(o/2), proved ½(e^o - 1)."""
    attention, keys = r.Attention(r.Dot(scale=1.0)), torch.tensor([[1.0], [-1.0]], dtype=D)
    x = torch.tensor([[off / 2]], dtype=D)
    found = float(ratio_errors(attention, torch.full((1, 2), 0.5, dtype=D), x, keys))
    true = math.tanh(off / 2)
    assert true <= found <= 0.5 * math.expm1(off) * (1 + 1e-9) + 1e-12
    assert found <= true * (1 + off)


def test_the_other_form_is_attained_where_scores_are_far_off():
    """Two atoms of masses θ and 1 - θ, θ = 1/(1 + e^{o/2}): the mass moved is tanh(o/4)."""
    off = 3.0
    attention, keys = r.Attention(r.Dot(scale=1.0)), torch.tensor([[1.0], [-1.0]], dtype=D)
    small = 1 / (1 + math.exp(off / 2))
    law = torch.tensor([[small, 1 - small]], dtype=D)
    x = torch.tensor([[0.5 * (math.log(small / (1 - small)) + off)]], dtype=D)
    moved = float(measured(attention, law, x, keys).sqrt())
    found = float(ratio_errors(attention, law, x, keys))
    assert moved <= found <= moved * (1 + 1e-9)
    assert math.isclose(moved, 2 * math.tanh(off / 4), rel_tol=1e-9)


@pytest.mark.parametrize(("off", "spread", "radius"), [(0.1, 2.0, 5.0), (4.0, 2.0, 1.0), (0.0, 1.0, 1.0)])
def test_the_formula(off, spread, radius):
    found = float(ratio_bound(exact(off), exact(spread), exact(radius)))
    true = min(0.5 * math.expm1(off) * spread, 2 * radius * math.tanh(off / 4))
    assert true <= found <= true * (1 + 1e-12) + 1e-300


def test_rounded_keys():
    """Eight bits: o is at most twice the largest error of a score, and some rows have less by divergence."""
    generator = torch.Generator().manual_seed(0)
    keys, x = draw(generator, 40, 6), draw(generator, 20, 6)
    attention = r.Attention(r.Dot(scale=0.5), r.Linear(draw(generator, 6, 4)))
    stored = quantize(keys.mT, 8).mT
    law = (0.5 * x @ stored.mT).softmax(-1)
    found, other = ratio_errors(attention, law, x, keys), row_errors(attention, law, x, keys)
    true = measured(attention, law, x, keys).sqrt()
    assert bool((found >= true).all())
    assert float((found / other).min()) < 0.8  # neither is the smaller one in every row
    assert float((found / other).max()) > 1
    off = 2 * (0.5 * x @ (stored - keys).mT).abs().amax(-1)
    values = attention.lookup.values(keys, None)
    spread = (law.unsqueeze(-1) * (values - (law @ values).unsqueeze(1))).norm(dim=-1).sum(-1)
    assert bool((found <= 0.5 * torch.expm1(off) * spread * (1 + 1e-6) + 1e-9).all())


def test_weights_and_rows_that_do_not_sum_to_one():
    generator = torch.Generator().manual_seed(1)
    keys = r.Measure(draw(generator, 9, 3), draw(generator, 9))
    x, attention = draw(generator, 5, 3), r.Attention(r.Dot())
    law = _perturbed(attention.weights(x, keys), generator, 0.1)
    found = ratio_errors(attention, law, x, keys)
    assert bool((found >= measured(attention, law, x, keys).sqrt()).all())
    light = ratio_errors(attention, law * 0.9995, x, keys)
    assert bool((light >= measured(attention, law * 0.9995, x, keys).sqrt()).all())
    assert bool((light > found).all())


def test_a_key_that_is_lost_leaves_the_diameter_and_sinkhorn_is_refused():
    x = torch.tensor([[0.0], [1.0]], dtype=D)
    attention = r.Attention(r.Dot())
    law = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=D)
    found = ratio_errors(attention, law, x)
    assert float(found[0]) >= 1.0  # nothing but the diameter is known of such a row
    assert float(found[1]) < 1.0
    with pytest.raises(Refusal, match="softmax rows"):
        ratio_errors(r.Attention(r.Dot(), normalizer=r.Sparsemax()), law, x)
    outside = ratio_errors(r.Attention(r.Dot(), support=r.Causal()), torch.full((2, 2), 0.5, dtype=D), x)
    assert outside[0] == math.inf
    heavy = r.Measure(x, torch.tensor([0.0, -math.inf], dtype=D))
    assert ratio_errors(attention, torch.full((2, 2), 0.5, dtype=D), x, heavy)[0] == math.inf
    alone = ratio_errors(attention, torch.tensor([[1.0, 0.0]], dtype=D), x[:1], heavy)
    assert float(alone) < 1e-12


def test_exact_rows_cost_rounding_only():
    generator = torch.Generator().manual_seed(2)
    attention, x = CASES["dot"](generator), draw(generator, 30, 3)
    found = ratio_errors(attention, attention.weights(x, x), x)
    assert 0 < float(found.max()) < 1e-10


def test_what_rounding_may_hide_is_paid_for(monkeypatch):
    """Scores that may be off by a quarter each, and values by one: both are in the bound."""
    generator = torch.Generator().manual_seed(3)
    attention, x = r.Attention(r.Dot(), r.Linear(draw(generator, 3, 2))), draw(generator, 8, 3)
    law = attention.weights(x, x)
    values = attention.lookup.values(x, None)
    spread = (law.unsqueeze(-1) * (values - (law @ values).unsqueeze(1))).norm(dim=-1).sum(-1)
    monkeypatch.setattr("regard.proofs.ratios.slack_of", lambda *_: exact(0.5))
    first = ratio_errors(attention, law, x)
    least = torch.minimum(0.5 * math.expm1(0.5) * spread, torch.tensor(math.tanh(0.125), dtype=D))
    assert bool((first >= least).all())
    monkeypatch.setattr("regard.proofs.ratios.value_error", lambda *_: exact(1e-3))
    second = ratio_errors(attention, law, x)
    assert bool((second >= first + 0.5 * math.expm1(0.5) * 2e-3 * (1 - 1e-6)).all())


@pytest.mark.parametrize("x", [0.0, 0.4, -1.1])
def test_weights_of_the_context_are_a_part_of_the_ratio(x):
    """Masses 3/4 and 1/4 at ±1: its own row is not off, equal masses are off by log 3 + 2x."""
    attention, query = r.Attention(r.Dot(scale=1.0)), torch.tensor([[x]], dtype=D)
    keys = r.Measure(torch.tensor([[1.0], [-1.0]], dtype=D), torch.tensor([3.0, 1.0], dtype=D).log())
    own = torch.tensor([[math.log(3) + x, -x]], dtype=D).softmax(-1)
    assert float(ratio_errors(attention, own, query, keys)) < 1e-11
    off = abs(math.log(3) + 2 * x)
    found = float(ratio_errors(attention, torch.full((1, 2), 0.5, dtype=D), query, keys))
    bound = min(0.5 * math.expm1(off), 2 * math.tanh(off / 4))
    assert math.tanh(off / 2) <= bound * (1 + 1e-12)
    assert bound <= found <= bound * (1 + 1e-9)
