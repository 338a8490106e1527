"""image: random points of a domain land in it, and it is not much larger than it must be."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import Ball, Near, Neighborhood, Radii, Shell, Whole
from regard.lookups import Factored, Linear
from regard.maps import (
    Affine,
    Compose,
    FromQueries,
    Gated,
    Gelu,
    Heads,
    Joint,
    Normalize,
    Pointwise,
    Relu,
    Residual,
    Silu,
    Tanh,
    ToContext,
)
from regard.measure import Measure
from regard.normalizers import Entmax, Sigmoid, Sparsemax
from regard.norms import Frobenius, TokenMax
from regard.potentials import Dot, Gaussian, Laplace, Rotary
from regard.proofs.imaging import image
from regard.proofs.places import project
from regard.proofs.theorem import Refusal
from regard.supports import Causal, Window

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _attention(**changes) -> Attention:
    made = Attention(
        Dot(_t(4, 2), _t(4, 2, seed=1), b_q=_t(2, seed=2)), Linear(_t(4, 4, seed=3), _t(4, seed=4))
    )
    return made.replace(**changes)


HEADS = Heads(
    Attention(
        Dot(_t(2, 4, 2), _t(2, 4, 2, seed=1)), Linear(_t(2, 4, 3, seed=2), _t(2, 3, seed=3)), support=Causal()
    ),
    _t(2, 3, 4, seed=4),
    _t(4, seed=5),
)
LAYER = Normalize(1e-2, _t(4, seed=6), _t(4, seed=7))
MAPS = {
    "affine": Affine(_t(4, 3), _t(3, seed=1)),
    "relu": Pointwise(Relu()),
    "gelu": Pointwise(Gelu()),
    "tanh": Pointwise(Tanh()),
    "layer norm": LAYER,
    "rms norm": Normalize(1e-2, _t(4, seed=6), None, centered=False),
    "gated": Gated(Silu(), _t(4, 5), _t(4, 5, seed=1), _t(5, 4, seed=2), _t(5, seed=3)),
    "attention": _attention(),
    "sparsemax": _attention(normalizer=Sparsemax()),
    "entmax": _attention(normalizer=Entmax(1.5), lookup=Factored(_t(4, 2), _t(2, 4, seed=1), _t(4, seed=2))),
    "rotary": _attention(potential=Rotary(Dot(_t(4, 2), _t(4, 2, seed=1)))),
    "gaussian": _attention(potential=Gaussian(bandwidth=2.0)),
    "laplace": _attention(potential=Laplace(bandwidth=2.0)),
    "window": _attention(support=Window(0, 0)),
    "heads": HEADS,
    "block": Compose(
        (
            Residual(Compose((LAYER, HEADS))),
            Residual(Compose((LAYER, Affine(_t(4, 6)), Pointwise(Gelu()), Affine(_t(6, 4))))),
        )
    ),
    "to context": ToContext(_attention(), _t(3, 4, seed=8)),
    "from queries": FromQueries(_attention(), _t(3, 4, seed=8)),
    "joint": Joint(_attention(), 2),
}
X = _t(5, 4, seed=11)
DOMAINS = {
    "ball": Ball(1.5, tokens=5),
    "centered ball": Ball(0.5, _t(4, seed=12), tokens=5),
    "near": Neighborhood(X, 0.05, TokenMax()),
    "frobenius": Neighborhood(X, 0.05, Frobenius()),
    "radii": Radii(X, torch.tensor([0.0, 0.1, 0.0, 0.2, 0.3], dtype=D)),
    "far": Neighborhood(X, 30.0, TokenMax()),
}


def _inside(domain, y) -> float:
    """The largest ratio of a distance to the radius that is allowed."""
    if isinstance(domain, Ball):
        center = torch.zeros(y.shape[-1], dtype=D) if domain.center is None else domain.center
        return float((y - center).norm(dim=-1).max()) / domain.radius
    if isinstance(domain, Radii):
        return float(((y - domain.measure.points).norm(dim=-1) / domain.radii).max())
    if isinstance(domain, Neighborhood):
        return float(domain.norm.of(y - domain.measure.points)) / domain.radius
    return 0.0


@pytest.mark.parametrize("where", DOMAINS)
@pytest.mark.parametrize("name", MAPS)
def test_points_land_in_the_image(name, where):
    map, domain = MAPS[name], DOMAINS[where]
    held, best = image(map, domain), 0.0
    for seed in range(12):
        x = project.one(
            domain, (X if isinstance(domain, Near) else 0) + 10.0 ** (seed % 4 - 1) * _t(5, 4, seed=seed)
        )
        best = max(best, _inside(held, map(x)))
    assert 1e-3 <= best <= 1.0


def test_worked_examples():
    ball = image(
        Affine(2 * torch.eye(3, dtype=D), torch.ones(3, dtype=D)), Ball(1.0, torch.ones(3, dtype=D), tokens=4)
    )
    assert ball.radius == pytest.approx(2.0)
    assert ball.center.tolist() == [3.0, 3.0, 3.0]
    assert ball.tokens == 4
    layer = Normalize(1e-5, torch.tensor([1.0, -3.0], dtype=D), torch.tensor([5.0, 6.0], dtype=D))
    held = image(layer, Whole())
    assert held.radius == pytest.approx(3 * math.sqrt(2))
    assert held.center.tolist() == [5.0, 6.0]
    assert image(layer, Shell(0.1, math.inf)).radius == pytest.approx(held.radius)
    assert image(layer, Ball(1e-4)).radius < 0.2 * held.radius
    assert isinstance(image(Affine(torch.eye(2, dtype=D)), Whole(3)), Whole)
    assert isinstance(image(Residual(LAYER), Whole(3)), Whole)
    assert (
        image(FromQueries(Attention(Dot()), _t(7, 2)), Ball(1.0, torch.zeros(2, dtype=D), tokens=3)).tokens
        == 7
    )


def test_a_row_that_sees_nothing_is_zero():
    map = _attention(support=Window(0, 0))
    held = image(map, Ball(0.01, _t(4, seed=12), tokens=5))
    assert float(held.center.norm()) <= held.radius


def test_neighborhoods_keep_their_kind_and_their_marks():
    measure = Measure(X, torch.full((5,), 0.2, dtype=D).log(), torch.arange(5) + 3)
    held = image(MAPS["affine"], Neighborhood(measure, 0.1, TokenMax()))
    assert isinstance(held, Neighborhood)
    assert held.measure.marks.tolist() == [3, 4, 5, 6, 7]
    assert isinstance(image(MAPS["layer norm"], DOMAINS["radii"]), Radii)
    assert isinstance(image(MAPS["heads"], DOMAINS["near"]), Neighborhood)
    still = image(MAPS["layer norm"], DOMAINS["radii"]).radii
    assert float(still[0]) < 1e-10 < float(still[1])


def test_refusals():
    with pytest.raises(Refusal, match="are not laws"):
        image(_attention(normalizer=Sigmoid()), Ball(1.0, tokens=3))
    with pytest.raises(Refusal, match="mix them with Heads"):
        image(HEADS.attention, Ball(1.0))
    with pytest.raises(Refusal, match="width of a token is not known"):
        image(Normalize(), Whole())
