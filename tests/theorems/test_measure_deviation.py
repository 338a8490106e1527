"""The closed form near a law, by hand and where it is attained; test_measure_dual.py attacks it."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import NearbyLaws
from regard.lookups import Linear
from regard.measure import Measure
from regard.potentials import Bilinear
from regard.proofs.law_rows import LawRows
from regard.proofs.subject import subject_of
from regard.proofs.theorems.measure_deviation import closed_form
from regard.proofs.theorems.measure_dual import dual
from tests.theorems.exact import D
from tests.theorems.laws_nearby import ball_of


def _rows(attention: Attention, domain: NearbyLaws) -> LawRows:
    return LawRows(subject_of(attention).separate[0], domain)


def test_the_slope_at_zero_on_one_atom():
    """One atom: h = e^{α y}(V - u) has the slope w at the atom, and both bounds are w ρ to first order."""
    x = torch.tensor([[0.3, -0.2]], dtype=D)
    attention = Attention(
        Bilinear(torch.zeros(2, 2, dtype=D)), Linear(torch.diag(torch.tensor([2.0, 0.5], dtype=D)))
    )
    for radius in (1e-6, 1e-3, 0.2):
        rows = _rows(attention, ball_of(Measure(x), radius, 1.0))
        for bound in (closed_form(rows), dual(rows)):
            assert float(bound) == pytest.approx(2.0 * radius, rel=1e-6)


def test_the_closed_form_by_its_formula():
    """Two atoms on a line, scores αy: every number by hand."""
    x = torch.tensor([[1.0], [-1.0]], dtype=D)
    attention = Attention(Bilinear(torch.tensor([[0.7]], dtype=D)))
    radius, size = 0.05, 1.5
    rows = _rows(attention, ball_of(Measure(x), radius, size))
    alpha, mean = 0.7, math.cosh(0.7)
    kappa = [math.exp(0.7) / mean, math.exp(-0.7) / mean]  # the first row; the second is its mirror image
    most = math.exp(0.7 * size) / mean
    u = (kappa[0] - kappa[1]) / 2
    slope = 0.0
    for k, point in zip(kappa, (1.0, -1.0), strict=True):
        chord = (most - k) / (math.log(most) - math.log(k))
        slope = max(slope, min(alpha * abs(point - u) * chord + most, alpha * (size + u) * chord + k))
    floor = max(math.exp(-alpha * size) / mean, math.exp(-alpha * radius * max(kappa)))
    expected = min(size + u, radius * slope / floor)
    torch.testing.assert_close(
        closed_form(rows).bound, torch.full((2,), expected, dtype=D), rtol=1e-9, atol=0
    )
