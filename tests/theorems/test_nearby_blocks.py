"""Blocks of attention on laws near a given one: attained where maps are linear, and under attack."""

import math

import pytest
import torch

from regard._upper import exact
from regard.attention import Attention
from regard.domains import Ball, NearbyLaws, Tube
from regard.dynamics.drifts import drift
from regard.lookups import Linear
from regard.maps import Added, Affine, Compose, Gelu, Heads, Normalize, Pointwise, Residual
from regard.measure import Measure
from regard.norms import Wasserstein
from regard.potentials import Bilinear, Dot
from regard.proofs import deviation
from regard.proofs.theorems.nearby_blocks import _Carried, _moved
from regard.supports import Causal
from regard.transport import wasserstein
from tests.theorems.exact import D, generator, normal
from tests.theorems.laws_nearby import another, law


def _block(seed: int, norm: bool = False) -> Compose:
    """Two heads and a feed-forward layer, each with its residual connection."""
    g = generator(seed)
    heads = Heads(Attention(Dot(normal(g, 2, 2, 2), normal(g, 2, 2, 2))), 0.5 * normal(g, 2, 2, 2))
    hidden = Compose(
        (
            Affine(normal(g, 2, 4), normal(g, 4)),
            Pointwise(Gelu()),
            Affine(0.5 * normal(g, 4, 2), normal(g, 2)),
        )
    )
    inner = Compose((Normalize(0.5), heads)) if norm else heads
    return Compose((Residual(inner), Residual(hidden)))


BLOCKS = {"heads and feed-forward": _block(1), "with a norm layer": _block(2, norm=True)}
PLACES = {"ball": Ball(1.0), "tube": Tube(0.1), "own tube": Tube(0.1, jumps=False)}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("heads and feed-forward", "ball"),
        ("heads and feed-forward", "own tube"),
        ("with a norm layer", "tube"),
    ],
)
def test_never_below_what_laws_do(name, place):
    """W₁ of the outputs by exact transport, for laws whose W₁ to the given one is at most the radius."""
    block, g = BLOCKS[name], generator(7)
    domain = NearbyLaws(law(g, 2, 2, 0.9, weighted=True), 0.04, PLACES[place])
    bound = deviation(block, domain, Wasserstein(1.0)).value
    seen = []
    for _ in range(25):
        laws = [domain.measure, another(g, domain)]
        images = [Measure(drift(block, one, None), one.log_weights) for one in laws]
        seen.append(float(wasserstein(*images, 1.0)))
    assert max(seen) <= bound <= 60 * max(seen)


@pytest.mark.parametrize("p", [1.0, math.inf])
def test_attained_where_all_is_linear(p):
    """One atom, no scores, values 3y, then 2y: a law that is moved as a whole goes (1 + 3) · 2 · ρ."""
    attention = Attention(Bilinear(torch.zeros(2, 2, dtype=D)), Linear(3 * torch.eye(2, dtype=D)))
    twice, x = Affine(2 * torch.eye(2, dtype=D)), torch.tensor([[0.2, 0.1]], dtype=D)
    domain = NearbyLaws(x, 0.1, Tube(0.1, jumps=False), p)
    expected = {
        Compose((Residual(attention), twice)): 0.8,
        Compose((twice, attention)): 0.6,
        Residual(Compose((twice, attention))): 0.7,
        Added((attention, twice)): 0.5,
        twice: 0.2,
    }
    for map, value in expected.items():
        assert deviation(map, domain, Wasserstein(p)).value == pytest.approx(value, rel=1e-6)


def test_what_is_not_known_of_the_tokens_is_counted_twice():
    """Values 3y of one atom that is known up to m: laws are ρ + m from what is known, and its own value is 3m
    off, so that 3(ρ + m) + 3m is the least that this proof can say.
    """
    attention = Attention(Bilinear(torch.zeros(2, 2, dtype=D)), Linear(3 * torch.eye(2, dtype=D)))
    known, margin, near = Measure(torch.tensor([[0.2, 0.1]], dtype=D)), exact(0.01), exact(0.1)
    for tube in (None, near):
        state = _Carried(known, margin, Ball(1.0), 1.0, near, tube)
        assert float(_moved(attention, state, 1.0)) == pytest.approx(0.36, rel=1e-6)


def test_refusals_say_why():
    domain = NearbyLaws(0.3 * normal(generator(0), 2, 2), 0.01, Ball(1.0))
    masked = Compose((Attention(Dot(), support=Causal()), Affine(torch.eye(2, dtype=D))))
    found = deviation(masked, domain, Wasserstein(1.0))
    assert math.isinf(found.value)
    assert any("positions" in why for why in found.refused)
    larger = deviation(BLOCKS["heads and feed-forward"], domain, Wasserstein(2.0))
    assert math.isinf(larger.value)
    assert any("Wasserstein(1)" in why for why in larger.refused)
