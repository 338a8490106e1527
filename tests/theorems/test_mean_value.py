"""Constant times radius."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import Neighborhood, Radii
from regard.maps import Affine, Compose, Pointwise, Residual, Tanh
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.potentials import Dot
from regard.proofs import certify, deviation
from regard.proofs.falsification import falsify_deviation
from regard.proofs.theorems.mean_value import THEOREM, radius_in

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _rung(map, domain, norm):
    best = deviation(map, domain, norm)
    (found,) = [rung for rung in (best, *best.others) if rung.theorem.startswith(THEOREM.title)]
    return found.value


def test_radii_between_norms():
    x = _t(4, 3)
    radii = torch.tensor([0.0, 0.3, 0.4, 0.0], dtype=D)
    assert float(radius_in(Radii(x, radii), Frobenius())) == pytest.approx(0.5)
    assert float(radius_in(Radii(x, radii), TokenSum())) == pytest.approx(0.7)
    assert float(radius_in(Radii(x, radii), TokenMax())) == pytest.approx(0.4)
    assert float(radius_in(Neighborhood(x, 0.1), TokenSum())) == pytest.approx(0.2)
    assert float(radius_in(Neighborhood(x, 0.1, TokenMax()), Frobenius())) == pytest.approx(0.2)


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum()])
def test_never_exceeded(norm):
    x = _t(4, 3)
    for map in (Residual(Attention(Dot())), Compose((Affine(_t(3, 3, seed=1)), Pointwise(Tanh())))):
        for domain in (
            Neighborhood(x, 0.1),
            Neighborhood(x, 0.1, TokenMax()),
            Radii(x, torch.tensor([0.0, 0.2, 0.0, 0.1], dtype=D)),
        ):
            bound = _rung(map, domain, norm)
            found = falsify_deviation(map, domain, norm, restarts=5, steps=6).value
            assert 0.05 * bound <= found <= bound * (1 + 1e-9)
            assert bound >= certify(map, domain, norm).value * float(radius_in(domain, norm)) * (1 - 1e-14)


def test_no_constant_is_refused():
    from regard.maps import Normalize

    near = Neighborhood(torch.ones(2, 3, dtype=D), 0.1, TokenMax())
    refused = deviation(Normalize(0.0), near, TokenMax())
    assert math.isinf(refused.value)  # it has no value at a constant token
    assert any("the constant has no finite bound" in why and "jumps" in why for why in refused.refused)
