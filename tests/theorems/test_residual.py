"""Residual connections."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.certify import certify, deviation, falsify
from regard.certify.falsification import falsify_deviation
from regard.domains import Ball, Neighborhood, Whole, one_token
from regard.lookups import Linear
from regard.maps import Affine, Residual
from regard.norms import Frobenius, TokenMax, TokenSum, Wasserstein
from regard.potentials import Dot
from regard.supports import Causal

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _attention(seed: int = 0) -> Attention:
    return Attention(
        Dot(_t(3, 2, seed=seed), _t(3, 2, seed=seed + 1), b_q=_t(2, seed=seed + 2)), Linear(_t(3, 3, seed=seed + 3), _t(3, seed=seed + 4))
    )


def test_worked_example():
    """x + 2x attains 1 + 2."""
    map = Residual(Affine(2 * torch.eye(3, dtype=D)))
    for norm in (TokenMax(), Frobenius(), TokenSum(), Wasserstein(1.0), Wasserstein(3.0)):
        assert certify(map, Whole(), norm).value == pytest.approx(3.0)
    assert falsify(map, Whole(2), TokenMax(), width=3, steps=3).value == pytest.approx(3.0)


@pytest.mark.parametrize("norm", [TokenMax(), Frobenius(), TokenSum(), Wasserstein(2.0), Wasserstein(math.inf)])
@pytest.mark.parametrize("seed", [50])
def test_never_exceeded(norm, seed):
    map, domain = Residual(_attention(seed)), Ball(0.5, 0.5 * _t(3, seed=seed + 9), tokens=4)
    bound = certify(map, domain, norm).value
    found = falsify(map, domain, norm, steps=8, restarts=1).value
    assert 0.1 * bound <= found <= bound


def test_deviations_never_exceeded():
    map, x = Residual(_attention().replace(support=Causal())), _t(4, 3, seed=9)
    for domain in (Neighborhood(x, 0.05), Neighborhood(x, 0.05, TokenMax()), one_token(x, 0, 0.1)):
        for norm in (TokenMax(), Frobenius()):
            bound = deviation(map, domain, norm).value
            assert 0.02 * bound <= falsify_deviation(map, domain, norm, steps=10, restarts=1).value <= bound


def test_measures_need_a_coupling():
    """(id + T_μ)_# is not bounded by a constant of T_μ# alone."""
    map = Residual(_attention())
    refused = certify(map, Ball(0.5, tokens=4), Wasserstein(1.0))
    assert math.isinf(refused.value)
    assert "does not hold coupling by coupling" in str(refused)
    two = certify(map, Ball(0.5, tokens=4), Wasserstein(2.0))
    assert two.parts[0].theorem.startswith("self-attention as a map of measures")


def test_reason_of_the_inside_is_kept():
    refused = certify(Residual(_attention()), Whole(), TokenMax())
    assert math.isinf(refused.value)
    assert "what it goes around has no finite bound" in str(refused)
