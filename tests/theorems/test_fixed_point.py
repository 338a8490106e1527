"""Fixed points of contractions."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.costs import Sizes, cost
from regard.domains import Ball, Neighborhood, Whole
from regard.errors import ArgumentError
from regard.fixed_point import FixedPoint
from regard.lookups import Linear
from regard.maps import Affine, Compose, Residual
from regard.nonexpansive import IntoBall
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.potentials import Dot
from regard.proofs import certify, deviation, image
from regard.proofs.falsification import falsify_deviation
from regard.testing import check_map

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _layer(constant: float, g: float = 0.3) -> Compose:
    """Attention behind a projection, with this constant in TokenMax norm everywhere."""
    w = constant / (math.sqrt(1 + g * g) + g)
    values = w * torch.linalg.qr(_t(3, 3))[0]
    return Compose((IntoBall(1.0), Attention(Dot(scale=g), Linear(values))))


@pytest.mark.parametrize("norm", [TokenMax(), Frobenius(), TokenSum()])
@pytest.mark.parametrize("constant", [0.0, 0.25, 0.5])
def test_multiples_of_the_identity_attain_it(norm, constant):
    map = FixedPoint(Affine(constant * torch.eye(3, dtype=D)), steps=40)
    bound = certify(map, Whole(), norm).value
    assert bound == pytest.approx(1 / (1 - constant), rel=1e-9)
    x = _t(2, 3)
    found = float(norm.of(map(x) - map(0 * x)) / norm.of(x))
    assert found == pytest.approx(bound, rel=1e-6)
    assert found <= bound


@pytest.mark.parametrize("norm", [TokenMax(), Frobenius()])
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_never_exceeded(norm, steps):
    """A thousand pairs of points, near each other and far apart."""
    map, center = FixedPoint(_layer(0.6), steps), 0.3 * _t(3)
    x = center + IntoBall(0.7)(_t(1000, 4, 3))
    size = torch.logspace(-3, 0, 1000, dtype=D)[:, None, None]
    y = center + IntoBall(0.7)(x - center + size * _t(1000, 4, 3, seed=1))
    seen = float((norm.of(map(x) - map(y)) / norm.of(x - y)).max())
    for domain in (Whole(4), Ball(0.7, center, tokens=4)):
        bound = certify(map, domain, norm).value
        assert 0.3 * bound <= seen <= bound


def test_a_smaller_ball_is_where_iterates_are():
    """Tokens u in B(c, r) and values in B(0, w): scores are those of the ball of radius r + |c| + w."""
    map, g = FixedPoint(_layer(0.6), 20), 0.3
    w = 0.6 / (math.sqrt(1 + g * g) + g)
    assert certify(map, Whole(), TokenMax()).value == pytest.approx(2.5)
    center = torch.tensor([0.0, 0.1, 0.0], dtype=D)
    for domain, length in ((Ball(0.1), 0.1), (Ball(0.1, center), 0.2)):
        near, here = certify(map, domain, TokenMax()), g * (length + w) ** 2
        constant = w * (math.sqrt(1 + here * here) + here)
        assert near.value == pytest.approx(1 / (1 - constant), rel=1e-9)
        assert "contraction" in str(near.hypotheses)
        assert image(map, domain).radius == pytest.approx(length + w, rel=1e-9)


def test_what_does_not_contract_is_refused():
    for map in (Affine(torch.eye(3, dtype=D)), Residual(Affine(0.1 * torch.eye(3, dtype=D)))):
        found = certify(FixedPoint(map), Whole(), TokenMax())
        assert found.value == math.inf
        assert any("not a contraction; multiply it by a number below" in why for why in found.refused)


def test_deviations_and_images():
    map, x = FixedPoint(_layer(0.6), 3), 0.3 * _t(4, 3)
    near = Neighborhood(x, 0.05, TokenMax())
    bound = deviation(map, near, TokenMax()).value
    assert 0.1 * bound <= falsify_deviation(map, near, TokenMax(), steps=1, restarts=1).value <= bound
    held = image(map, Ball(0.5, tokens=4))
    assert isinstance(held, Ball)
    for seed in range(20):
        value = map(IntoBall(0.5)(_t(4, 3, seed=seed)))
        assert float(value.norm(dim=-1).max()) <= held.radius
    assert isinstance(image(map, Whole()), Whole)


def test_wrong_arguments():
    with pytest.raises(ArgumentError, match="steps"):
        FixedPoint(Affine(torch.eye(2)), 0)
    with pytest.raises(ArgumentError, match="map"):
        FixedPoint(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="keeps the shape"):
        FixedPoint(Affine(torch.ones(2, 1)))(torch.ones(3, 2))
    with pytest.raises(ArgumentError, match="width"):
        certify(FixedPoint(Affine(torch.ones(2, 3))), Whole(), TokenMax())


def test_laws_of_maps():
    check_map(
        FixedPoint(
            Compose((IntoBall(0.8), Attention(Dot(scale=0.1), Linear(0.4 * torch.eye(4, dtype=D))))), 5
        )
    )


def test_cost():
    """Every step costs, and its parameters are there once."""
    once, often = (cost(map, Sizes(5, width=3)) for map in (_layer(0.6), FixedPoint(_layer(0.6), 7)))
    assert often.forward == 7 * once.forward > 0
    assert often.parameters == once.parameters > 0
