"""The L2 bound for the largest entry: worked value, attacks, refusals."""

import math

import pytest
import torch

import regard as r
from regard._upper import relative_error
from regard.domains import Ball, Whole
from regard.norms import EntryMax
from regard.proofs import certify
from regard.proofs.gaussian_rows import lambert_bound
from regard.proofs.theorems.kim_infinity_norm import column_sum_bound
from tests.theorems.exact import SUPPORTS, D, entry_max_norm, generator, normal
from tests.theorems.test_kim_two_norm import l2_attention


def test_worked_example():
    attention = l2_attention(2 * torch.eye(4, dtype=D), torch.eye(4, dtype=D))
    phi = float(lambert_bound(math.log(15) - 1))
    assert certify(attention, Whole(tokens=16), EntryMax()).value == pytest.approx(
        0.5 * 4 * (1 + 8 * phi), rel=1e-9
    )


@pytest.mark.parametrize("support", SUPPORTS, ids=repr)
@pytest.mark.parametrize("seed", range(4))
def test_attacks_stay_below(seed, support):
    g = generator(seed)
    attention = l2_attention(normal(g, 3, 1 + seed), normal(g, 3, 2), support)
    bound = certify(attention, Whole(tokens=6), EntryMax()).value
    best = max(
        entry_max_norm(attention, normal(g, 6, 3, scale=10 ** float(0.5 * normal(g, 1)))) for _ in range(20)
    )
    assert 0.01 * bound < best <= bound


def test_tightness():
    n = 33
    attention = r.Attention(r.Gaussian(bandwidth=1.0))
    bound = certify(attention, Ball(1e9, torch.zeros(1, dtype=D), tokens=n), EntryMax()).value
    x = math.sqrt(2 * (1 + (bound - 1) / 4)) * torch.tensor(
        [0.0] + [1.0, -1.0] * (n // 2), dtype=D
    ).unsqueeze(-1)
    assert 0.45 * bound < entry_max_norm(attention, x) <= bound


def test_column_sums_of_products():
    g = generator(5)
    a, b = normal(g, 4, 3), normal(g, 3, 5)
    exact = float((a @ b).abs().sum(0).max())
    assert exact <= float(column_sum_bound(a, b)) <= exact * (1 + 1e-11)
    assert float(column_sum_bound()) == 1


def test_untied_projections_are_refused():
    g = generator(0)
    found = certify(
        r.Attention(r.Gaussian(normal(g, 2, 2), normal(g, 2, 2), bandwidth=1.0)), Whole(tokens=3), EntryMax()
    )
    assert math.isinf(found.value)
    assert any("w_q and w_k tied" in why for why in found.refused)


def test_columns_that_cancel_leave_their_rounding():
    """γ(2k + 4) times the column sums of |A||B|, k the widths that are summed over."""
    a, b = torch.tensor([[3.0, -3.0]], dtype=D), torch.ones(2, 1, dtype=D)
    assert float(column_sum_bound(a, b)) == pytest.approx(
        float(relative_error(2 * 2 + 4)) * 6, rel=1e-6, abs=0
    )
    wide = torch.ones(1, 4, dtype=D)
    assert float(column_sum_bound(a, b, wide)) == pytest.approx(
        float(relative_error(2 * 3 + 4)) * 6, rel=1e-6, abs=0
    )
