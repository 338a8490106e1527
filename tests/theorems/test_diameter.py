"""Diameter of the image."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import Neighborhood, Radii
from regard.maps import Affine, Compose, FromQueries, Normalize, Residual
from regard.measure import Measure
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.potentials import Dot
from regard.proofs import deviation
from regard.proofs.falsification import falsify_deviation
from regard.proofs.theorems.diameter import THEOREM

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _rung(map, domain, norm):
    best = deviation(map, domain, norm)
    return [rung.value for rung in (best, *best.others) if rung.theorem.startswith(THEOREM.title)]


def test_worked_example():
    """x̂ is at most √d long, so a norm layer moves nothing by more than 2√d: opposite tokens attain it."""
    map, x = Normalize(1e-9, centered=False), torch.tensor([[1.0, 2.0, -1.0, 0.5]], dtype=D)
    domain = Neighborhood(x, 5.0, TokenMax())
    (bound,) = _rung(map, domain, TokenMax())
    assert bound == pytest.approx(4.0)
    assert float((map(x) - map(-x)).norm()) == pytest.approx(bound, rel=1e-6)
    assert falsify_deviation(map, domain, TokenMax(), restarts=2).value <= bound


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum()])
def test_never_exceeded(norm):
    x = _t(3, 4)
    attention = Attention(Dot(_t(4, 2, seed=1), _t(4, 2, seed=2)))
    for map in (
        Compose((Normalize(1e-3), attention, Affine(_t(4, 2, seed=3), _t(2, seed=4)))),
        FromQueries(attention, _t(5, 4, seed=6)),
    ):
        for domain in (Neighborhood(x, 20.0, TokenMax()), Radii(x, torch.tensor([0.0, 30.0, 0.0], dtype=D))):
            (bound,) = _rung(map, domain, norm)
            assert falsify_deviation(map, domain, norm, restarts=2, steps=30).value <= bound


def test_unbounded_images_and_weights_are_refused():
    weighted = Neighborhood(Measure(_t(2, 3), torch.tensor([0.3, 0.7], dtype=D).log()), 0.1, TokenMax())
    refused = deviation(Residual(Normalize()), weighted, TokenMax())
    assert math.isfinite(refused.value)
    assert any(why.startswith(THEOREM.title) and "forgets weights" in why for why in refused.refused)
