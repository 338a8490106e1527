"""Two inputs of a map: theorems about inputs near the first, beside constant × distance."""

import math

import pytest
import torch

import regard as r
from regard.domains import Edited, NearbyLaws, Radii
from regard.maps import Residual
from regard.norms import Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, misspecification
from tests.theorems.exact import generator, normal

D = torch.float64


def _five(radius: float, seed: int = 0):
    """Twelve tokens in the ball of a radius in five dimensions, and scores of norm 0.571."""
    g = generator(seed)
    a = normal(g, 5, 5)
    a = 0.571 * a / torch.linalg.matrix_norm(a, 2)
    x = normal(g, 13, 5)
    x = radius * x / x.norm(dim=-1, keepdim=True) * torch.rand(13, 1, generator=g, dtype=D) ** 0.2
    return r.Attention(r.Bilinear(a)), x[:12], x[12:]


def _names(found):
    return [found.bound.theorem, *(one.theorem for one in found.bound.others)]


LAWS = {"all laws as near in W₁", "all laws as near in W₁, on the tokens of both"}


@pytest.mark.parametrize("radius", [0.7, 3.0])
@pytest.mark.parametrize("kind", ["noise", "replaced", "deleted", "inserted", "other"])
def test_bounds_hold_and_are_far_below_the_constant(kind, radius):
    attention, x, new = _five(radius)
    other = {
        "noise": x * (1 - 0.01 * torch.rand(12, 1, generator=generator(3), dtype=D)),
        "replaced": torch.cat([x[:4], new, x[5:]]),
        "deleted": torch.cat([x[:4], x[5:]]),
        "inserted": torch.cat([x[:4], new, x[4:]]),
        "other": x.flip(0)[:7],
    }[kind]
    found = misspecification(attention, x, other)
    for bound in (found.bound, *found.bound.others):
        assert found.distance_out <= bound.value
    times = found.constant.value * found.distance_in
    assert found.bound.value < times / {0.7: 1.5, 3.0: 100}[radius]
    best = {
        "noise": {"tokens that move as far, each in its place", *LAWS},
        "other": LAWS,
    }.get(kind, {"tokens that come and go"})
    assert found.bound.theorem in best or radius < 1
    assert "constant of the map" in str(_names(found))


def test_bounds_are_those_of_the_theorems():
    attention, x, new = _five(1.6)
    shorter = torch.cat([x[:4], x[6:]])
    found = misspecification(attention, x, shorter)
    assert found.bound.domain == Edited(x, (4, 5))
    assert found.bound.value == deviation(attention, Edited(x, (4, 5)), Wasserstein(1.0)).value
    near = [one for one in found.bound.others if isinstance(one.domain, NearbyLaws)]
    laws, words = sorted(near, key=lambda one: one.theorem)
    assert {laws.theorem, words.theorem} == LAWS
    assert torch.equal(words.domain.within.points, shorter)
    assert words.value == deviation(attention, words.domain, Wasserstein(1.0)).value
    assert words.domain.radius == laws.domain.radius
    assert laws.domain.radius == found.distance_in
    assert float((torch.cat([x, shorter]) - laws.domain.within.center).norm(dim=-1).max()) <= (
        laws.domain.within.radius
    )
    replaced = misspecification(attention, x, torch.cat([x[:4], new, x[5:]]))
    assert replaced.bound.domain.removed == (4,)
    assert torch.equal(replaced.bound.domain.within.points, new)


@pytest.mark.parametrize(
    ("norm", "matched", "root"),
    [
        (Wasserstein(1.0), TokenSum(), 12.0),
        (Wasserstein(2.0), Frobenius(), math.sqrt(12.0)),
        (Wasserstein(3.0), TokenMax(), 1.0),
        (Wasserstein(math.inf), TokenMax(), 1.0),
        (TokenMax(), TokenMax(), 1.0),
        (Frobenius(), Frobenius(), 1.0),
    ],
    ids=repr,
)
def test_tokens_in_their_place(norm, matched, root):
    """A mean over the tokens of the outputs, where the norm is one of laws."""
    attention, x, _ = _five(1.0)
    other = x + 0.01 * normal(generator(5), 12, 5)
    radii = (other - x).norm(dim=-1) * (1 + 1e-12)
    found = misspecification(attention, x, other, norm=norm)
    placed = [one for one in (found.bound, *found.bound.others) if isinstance(one.domain, Radii)]
    expected = deviation(attention, Radii(x, radii), matched).value / root
    assert [one.value for one in placed] == pytest.approx([expected], rel=1e-9)
    assert found.distance_out <= placed[0].value


def test_a_mean_over_tokens_is_attained():
    """Without scores the output of every token is the mean, which a common step moves as far."""
    attention, x = r.Attention(r.Bilinear(torch.zeros(2, 2, dtype=D))), normal(generator(6), 4, 2)
    step = torch.tensor([0.3, 0.0], dtype=D)
    found = misspecification(attention, x, x + step, norm=Wasserstein(1.0))
    placed = next(one for one in (found.bound, *found.bound.others) if isinstance(one.domain, Radii))
    assert placed.value == pytest.approx(0.3, rel=1e-6)
    assert found.distance_out == pytest.approx(0.3, rel=1e-12)


def test_nothing_stays_and_nothing_changes():
    attention, x, _ = _five(1.0)
    same = misspecification(attention, x, x)
    assert same.distance_in == 0
    assert same.bound.value < 1e-9
    assert not any(isinstance(one.domain, Edited) for one in (same.bound, *same.bound.others))
    strange = misspecification(attention, x, 0.5 * x[:3])
    assert not any(isinstance(one.domain, Edited) for one in (strange.bound, *strange.bound.others))


def test_weights_are_read_by_laws_alone():
    attention, x, _ = _five(1.0)
    weighted = r.Measure(x, torch.linspace(-1, 1, 12, dtype=D))
    found = misspecification(attention, weighted, r.Measure(0.99 * x, torch.linspace(-1, 1, 12, dtype=D)))
    assert found.distance_out <= found.bound.value
    assert {type(one.domain) for one in (found.bound, *found.bound.others)} <= {NearbyLaws, r.Ball}


def test_masks_know_their_places():
    """A causal mask is no function of the law, and tokens that move in their place do not need it to be."""
    attention, x = r.Attention(r.Dot(), support=r.Causal()), normal(generator(7), 5, 3)
    found = misspecification(attention, x, x + 1e-3)
    assert _names(found)[0] == "tokens that move as far, each in its place"
    assert found.distance_out <= found.bound.value < math.inf
    assert math.isinf(found.constant.value)


def test_a_residual_around_attention():
    attention, x, new = _five(1.0)
    found = misspecification(Residual(attention), x, torch.cat([x[:4], new, x[4:]]))
    assert found.distance_out <= found.bound.value <= found.constant.value * found.distance_in
    assert certify(Residual(attention), found.constant.domain, Wasserstein(1.0)).value == found.constant.value
