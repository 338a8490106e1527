"""Rows near a law: the dual is attained where one atom may go to one word, and never below what laws do."""

import itertools
import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import Ball, NearbyLaws, Neighborhood, Vocabulary
from regard.errors import ArgumentError
from regard.lookups import Linear
from regard.measure import Measure
from regard.normalizers import Sparsemax
from regard.norms import TokenMax, Wasserstein
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
    attention, given = _head(seed, width), law(g, 4, width, size, weighted=seed % 2 == 1)
    for radius in (0.02, 0.3):
        domains = (ball_of(given, radius, size), NearbyLaws(given, radius, Vocabulary(normal(g, 12, width))))
        for domain in domains:
            rows = _rows(attention, domain)
            closed, best = closed_form(rows).bound, dual(rows).bound
            found = torch.stack([_moved(attention, domain, another(g, domain)) for _ in range(80)]).amax(0)
            assert bool((found <= best).all())
            assert bool((best <= closed).all())
            assert bool((best <= rows.farthest.bound * (1 + 1e-12)).all())
            assert bool((found >= 0.08 * best).all())


def test_monotone_and_saturating():
    attention, given = _head(0, 2), law(generator(0), 4, 2, 1.0, weighted=False)
    bounds = [dual(_rows(attention, ball_of(given, radius, 1.0))).bound for radius in (0.0, 0.02, 0.2, 50.0)]
    assert float(bounds[0].max()) < 1e-6
    for less, more in itertools.pairwise(bounds):
        assert bool((less <= more * (1 + 1e-6)).all())
    rows = _rows(attention, ball_of(given, 50.0, 1.0))
    assert bool((bounds[-1] <= rows.farthest.bound * (1 + 1e-12)).all())


def test_splitting_an_atom_changes_nothing():
    attention, given = _head(1, 2), law(generator(1), 3, 2, 1.0, weighted=False)
    split = Measure(given.points[[0, 0, 1, 2]], torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=D).log())
    words = Vocabulary(normal(generator(2), 8, 2))
    for within in (Ball(1.0), words):
        whole = dual(_rows(attention, NearbyLaws(given, 0.1, within))).bound
        torch.testing.assert_close(
            dual(_rows(attention, NearbyLaws(split, 0.1, within))).bound[1:], whole, rtol=1e-5, atol=0
        )


def test_refusals_say_why():
    given = law(generator(0), 3, 2, 1.0, weighted=False)
    domain = ball_of(given, 0.1, 1.0)
    for attention, what in (
        (Attention(Gaussian()), "bilinear"),
        (Attention(Dot(), support=Causal()), "positions"),
        (Attention(Dot(), normalizer=Sparsemax()), "softmax"),
    ):
        refused = deviation(attention, domain, TokenMax())
        assert math.isinf(refused.value)
        assert any(what in why for why in refused.refused)
    with pytest.raises(ArgumentError, match="deviation"):
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
    with pytest.raises(ArgumentError, match="NearbyLaws"):
        Neighborhood(Measure(x), 0.1, norm=Wasserstein(1.0))
