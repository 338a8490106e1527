"""Rows near a law: the dual is attained where one atom may go to one word, and never below what laws do."""

import copy
import itertools
import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import Ball, NearbyLaws, Neighborhood, Tube, Vocabulary
from regard.errors import ArgumentError
from regard.lookups import Linear
from regard.measure import Measure
from regard.normalizers import Sparsemax
from regard.norms import OwnToken, TokenMax, Wasserstein
from regard.potentials import Bilinear, Dot, Gaussian
from regard.proofs import certify, deviation
from regard.proofs.law_rows import LawRows
from regard.proofs.subject import subject_of
from regard.proofs.theorems.measure_deviation import closed_form
from regard.proofs.theorems.measure_dual import dual
from regard.supports import Causal
from tests.theorems.exact import D, generator, normal
from tests.theorems.laws_nearby import another, ball_of, law


def _rows(attention: Attention, domain: NearbyLaws) -> LawRows:
    return LawRows(subject_of(attention).separate[0], domain)


def _head(seed: int, width: int, size: float = 0.5) -> Attention:
    g = generator(seed)
    return Attention(Bilinear(size * normal(g, width, width)), Linear(normal(g, width, width)))


def _moved(attention: Attention, domain: NearbyLaws, other: Measure) -> torch.Tensor:
    """How far the rows of the given tokens are from their rows over another law."""
    given = domain.measure
    rows = [attention(Measure(given.points), context=keys) for keys in (given, other)]
    return (rows[0].points - rows[1].points).norm(dim=-1)


@pytest.mark.parametrize("radius", [1e-3, 0.1, 0.6])
@pytest.mark.parametrize("slope", [0.3, 2.0, -2.0])
def test_one_atom_and_one_word_is_attained(radius, slope):
    """ν = (1 - q) δ_x + q δ_y, q = ρ/|y - x|: T_ν - T_μ = q k/(1 - q + q k) (y - x), k = e^{s(y) - s(x)}."""
    x, y = torch.tensor([[0.5, 0.0]], dtype=D), torch.tensor([[0.5, 1.0]], dtype=D)
    query_slope = torch.tensor([[0.0, 2 * slope], [0.0, 0.0]], dtype=D)  # θ = Aᵀx = (0, slope)
    attention = Attention(Bilinear(query_slope))
    (bound,) = dual(_rows(attention, NearbyLaws(x, radius, Vocabulary(y)))).bound.tolist()
    odds = radius * math.exp(slope)
    truth = odds / (1 - radius + odds)
    assert truth <= bound <= truth * (1 + 1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_never_below_what_laws_do(seed):
    g = generator(seed)
    width, size = 2 + seed % 2, 1.5
    attention, given = _head(seed, width), law(g, 3, width, size, weighted=seed % 2 == 1)
    for radius in (0.02, 0.3):
        places = (Ball(size), Vocabulary(normal(g, 12, width)), Tube(0.2 + seed / 4, jumps=seed == 1))
        for domain in (NearbyLaws(given, radius, place) for place in places):
            rows = _rows(attention, domain)
            closed, best = closed_form(rows).bound, dual(rows).bound
            found = torch.stack([_moved(attention, domain, another(g, domain)) for _ in range(80)]).amax(0)
            assert bool((found <= best).all())
            assert bool((best <= closed).all())
            assert bool((best <= rows.farthest.bound * (1 + 1e-12)).all())
            assert bool((found >= 0.08 * best).all())


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize(("slope", "radius"), [(1.5, 0.1), (1.5, 0.4), (-0.7, 0.2)])
def test_one_atom_in_a_tube_is_attained(slope, radius, jumps):
    """q = ρ/t of the mass goes by t ≤ r along the slope: the row moves by q k t/(1 - q + q k), k = e^{αt}."""
    tube = 0.8
    attention = Attention(Bilinear(torch.tensor([[2 * slope]], dtype=D)))
    given = torch.tensor([[0.5]], dtype=D)  # θ = α
    (bound,) = dual(_rows(attention, NearbyLaws(given, radius, Tube(tube, jumps)))).bound.tolist()
    t = torch.linspace(radius, tube, 4001, dtype=D)
    t = torch.cat([t, -t])
    odds = radius / t.abs() * torch.exp(slope * t)
    truth = float((odds * t.abs() / (1 - radius / t.abs() + odds)).amax())
    assert truth <= bound <= 1.015 * truth


def test_tubes_are_between_words_and_balls():
    """As the radius falls, a tube becomes its atoms; a tube without jumps is less than one with them, and
    both are less than a ball that holds them.
    """
    attention, given = _head(3, 2), law(generator(3), 2, 2, 1.0, weighted=True)
    places = (Vocabulary(given.points), Tube(1e-7), Tube(0.2, jumps=False), Tube(0.2), Ball(1.2))
    bounds = [dual(_rows(attention, NearbyLaws(given, 0.1, place))).bound for place in places]
    torch.testing.assert_close(bounds[1], bounds[0], rtol=1e-3, atol=0)
    for less, more in itertools.pairwise(bounds[2:]):
        assert bool((less <= 1.001 * more).all())
    small = dual(_rows(attention, NearbyLaws(given, 0.1, Tube(1e-3, jumps=False)))).bound
    assert bool((small < 0.1 * bounds[0]).all())


def test_monotone_and_saturating():
    attention, given = _head(0, 2), law(generator(0), 4, 2, 1.0, weighted=False)
    bounds = [dual(_rows(attention, ball_of(given, radius, 1.0))).bound for radius in (0.0, 0.02, 0.2, 50.0)]
    assert float(bounds[0].max()) < 1e-6
    for less, more in itertools.pairwise(bounds):
        assert bool((less <= more * (1 + 1e-6)).all())
    rows = _rows(attention, ball_of(given, 50.0, 1.0))
    assert bool((bounds[-1] <= rows.farthest.bound * (1 + 1e-12)).all())


def test_splitting_an_atom_changes_nothing():
    attention, given = _head(1, 2), law(generator(1), 2, 2, 1.0, weighted=False)
    split = Measure(given.points[[0, 0, 1]], torch.tensor([0.5, 0.5, 1.0], dtype=D).log())
    words = Vocabulary(normal(generator(2), 8, 2))
    for within in (Ball(1.0), words, Tube(0.3, jumps=False), Tube(0.3)):
        whole = dual(_rows(attention, NearbyLaws(given, 0.1, within))).bound
        torch.testing.assert_close(
            dual(_rows(attention, NearbyLaws(split, 0.1, within))).bound[1:], whole, rtol=1e-5, atol=0
        )


def test_refusals_say_why():
    given = law(generator(0), 3, 2, 1.0, weighted=False)
    domain = ball_of(given, 0.1, 1.0)
    for attention, what in (
        (Attention(Gaussian(bandwidth=1.0)), "bilinear"),
        (Attention(Dot(), support=Causal()), "positions"),
        (Attention(Dot(), normalizer=Sparsemax()), "softmax"),
    ):
        refused = deviation(attention, domain, TokenMax())
        assert math.isinf(refused.value)
        assert any(what in why for why in refused.refused)
    with pytest.raises(ArgumentError, match="Wasserstein"):
        certify(Attention(Dot()), domain, TokenMax())


def test_bad_arguments():
    x = torch.zeros(2, 3, dtype=D) + 1.0
    with pytest.raises(ArgumentError, match="larger ball"):
        NearbyLaws(x, 0.1, Ball(1.0))
    with pytest.raises(ArgumentError, match="width 2"):
        NearbyLaws(x, 0.1, Vocabulary(torch.zeros(1, 2, dtype=D)))
    with pytest.raises(ArgumentError, match="radius"):
        NearbyLaws(x, -0.1, Ball(2.0))
    with pytest.raises(ArgumentError, match="Vocabulary"):
        NearbyLaws(x, 0.1, x)
    with pytest.raises(ArgumentError, match="say where mass may go"):
        Neighborhood(Measure(x), 0.1, norm=Wasserstein(1.0))
    with pytest.raises(ArgumentError, match="leave it out"):
        Neighborhood(x, 0.1, norm=TokenMax(), within=Ball(9.0))
    with pytest.raises(ArgumentError, match="norm: is OwnToken"):
        Neighborhood(x, 0.1, norm=OwnToken())
    for bad in ((-1.0, True), (1.0, 2), (math.inf, True)):
        with pytest.raises(ArgumentError, match=r"radius|jumps"):
            Tube(*bad)
    with pytest.raises(ArgumentError, match="p: is"):
        NearbyLaws(x, 0.1, Ball(9.0), p=0.5)


def test_a_neighborhood_of_laws():
    """In a Wasserstein norm it is NearbyLaws; copies of plain neighborhoods are what they were."""
    x = normal(generator(0), 3, 2)
    for p, within in ((1.0, Ball(9.0)), (2.0, Tube(0.5)), (1.0, Vocabulary(x))):
        assert Neighborhood(x, 0.1, norm=Wasserstein(p), within=within) == NearbyLaws(x, 0.1, within, p)
    tube = Tube(0.1, jumps=False)
    assert Neighborhood(Measure(x), 0.1, Wasserstein(math.inf)) == NearbyLaws(Measure(x), 0.1, tube, math.inf)
    plain = Neighborhood(x, 0.1, TokenMax())
    assert copy.deepcopy(plain) == plain == plain.replace(radius=0.1)
    assert isinstance(plain, Neighborhood)
