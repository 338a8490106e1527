"""What sweeps found, kept: each case once broke a certificate or an attack."""

import pytest
import torch

import regard as r
from benchmarks.falsify import Tally, attack, drawn

D = torch.float64


@pytest.mark.parametrize("case", [783, 784, 723, 5292, 9311, 9570, 50000418, 90000414, 90000420])
def test_cases_that_once_broke(case):
    """Shares in float32, weights that underflow, infinite matrices, strided outputs, a radius in float32, slopes whose squares vanish,
    values so much larger than their moves that rounding shows."""
    tally = Tally()
    attack(drawn(case), tally, ascend=True)
    assert tally.violations == []


def test_the_radius_of_an_image_keeps_its_digits():
    layer = r.Normalize(1e-2, centered=False)
    x = torch.tensor([[-1.4e-5]], dtype=D)
    near = r.Neighborhood(x, 6.257009331068166e-06, r.TokenMax())
    assert r.image(layer, near).radius >= r.deviation(layer, near, r.TokenMax()).value


def test_an_attack_stays_where_it_may_go():
    attention = r.Attention(r.Dot(scale=1.0))
    x = 200 * torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=D)
    for norm in (r.TokenSum(), r.TokenMax(), r.Frobenius()):
        for domain in (r.Neighborhood(x, 9.6), r.Neighborhood(x, 9.6, r.TokenMax()), r.one_token(x, 1, 9.6)):
            witness = r.falsify_deviation(attention, domain, norm, restarts=2, steps=10)
            assert float((witness.point - x).norm(dim=-1).max()) <= 9.6
