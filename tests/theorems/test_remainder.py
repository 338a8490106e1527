"""The move of every row: every subset of tokens, masks, weights, extreme sizes;
never below what moves show.
"""

import itertools
import math

import pytest
import torch

import regard as r
from regard.domains import Neighborhood, Radii
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.proofs import deviation, falsify_deviation
from regard.proofs.subject import subject_of
from regard.proofs.theorems.remainder import THEOREM, row_deviations
from tests.theorems.exact import SUPPORTS, D, bilinear_attention, generator, normal


def rung(map, domain, norm):
    found = deviation(map, domain, norm)
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


def moved(g, x, radii):
    step = normal(g, *x.shape)
    return x + (1 - 1e-12) * radii.unsqueeze(-1) * step / step.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_every_subset_of_tokens(seed, support):
    g = generator(seed)
    attention, x = bilinear_attention(g, 2, 3, support), normal(g, 4, 2)
    here = attention(x)
    for subset in itertools.product((0.0, 1.0), repeat=4):
        radii = 10 ** float(normal(g, 1)) * 0.3 * torch.tensor(subset, dtype=D)
        rows = row_deviations(subject_of(attention), Radii(x, radii)).bound
        for _ in range(6):
            assert bool(
                ((attention(moved(g, x, radii)) - here).norm(dim=-1) <= rows * (1 + 1e-12) + 1e-13).all()
            )


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum()])
def test_ascended_moves_stay_below_and_are_close_for_small_radii(norm):
    g = generator(5)
    attention, x = bilinear_attention(g, 3, 2, scale=0.5), normal(g, 5, 3)
    for radius, share in ((1e-4, 0.75), (0.03, 0.4), (1.0, 0.1), (30.0, 0.1)):
        domain = Neighborhood(x, radius, TokenMax())
        bound = rung(attention, domain, norm)
        seen = falsify_deviation(attention, domain, norm, steps=8, restarts=3, generator=g).value
        assert share * bound < seen <= bound


@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum()])
def test_a_weight_that_underflows_comes_back(norm):
    """Scores ±1000: token 0 walks from 1 to -½, and its row turns to the other token: a move of 2,
    not of 1.5.
    """
    attention = r.Attention(r.Bilinear(torch.tensor([[1000.0]], dtype=D)))
    x, y = torch.tensor([[1.0], [-1.0]], dtype=D), torch.tensor([[-0.5], [-1.0]], dtype=D)
    seen = float(norm.of(attention(y) - attention(x)))
    assert seen == pytest.approx(2.0)
    for domain in (
        Radii(x, torch.tensor([1.5, 0.0], dtype=D)),
        Neighborhood(x, 1.5),
        Neighborhood(x, 1.5, TokenMax()),
    ):
        found = deviation(attention, domain, norm)
        for claim in (found, *found.others):
            assert claim.value >= seen, claim


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_extreme_sizes(size, scale):
    g = generator(8)
    attention = r.Attention(r.Bilinear(scale / size**2 * normal(g, 2, 2)), support=r.Causal())
    x = normal(g, 4, 2, scale=size)
    here = attention(x)
    for share in (1e-3, 0.1, 1.0, 3.0):
        radii = share * size * torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=D)
        rows = row_deviations(subject_of(attention), Radii(x, radii)).bound
        assert not bool(rows.isnan().any())
        for _ in range(20):
            assert bool(((attention(moved(g, x, radii)) - here).norm(dim=-1) <= rows + 1e-9 * size).all())


@pytest.mark.parametrize(
    "potential",
    [
        r.Rotary(
            r.Dot(
                torch.eye(2, dtype=D),
                2 * torch.eye(2, dtype=D),
                b_q=torch.ones(2, dtype=D),
                b_k=torch.ones(1, dtype=D),
            ),
            base=3.0,
        ),
        r.Dot() + r.Alibi(0.5),
        r.Dot() + r.RelativeBias(torch.arange(7, dtype=D), r.potentials.Clipped(3)),
        r.Bilinear(torch.zeros(2, 2, dtype=D)),
        r.Alibi(1.0),
        -1.0 * r.Dot(),
    ],
    ids=["rotary", "alibi", "relative", "zero", "positions alone", "negative"],
)
def test_scores_of_every_kind_with_weights(potential):
    g = generator(9)
    measure = r.Measure(normal(g, 4, 2), torch.tensor([0.0, 3.0, -2.0, -math.inf], dtype=D))
    attention = r.Attention(potential)
    here = attention(measure).points
    for radius in (0.01, 0.5, 5.0):
        radii = radius * torch.tensor([1.0, 0.5, 0.0, 1.0], dtype=D)
        rows = row_deviations(subject_of(attention), Radii(measure, radii)).bound
        for _ in range(15):
            there = attention(measure.replace(points=moved(g, measure.points, radii))).points
            assert bool(((there - here).norm(dim=-1) <= rows * (1 + 1e-12) + 1e-13).all())


def test_no_move_is_no_deviation():
    x = normal(generator(10), 3, 2)
    assert rung(r.Attention(r.Dot()), Radii(x, torch.zeros(3, dtype=D)), TokenMax()) < 1e-9


def test_huge_moves_saturate():
    """Rows are means of values: no row moves farther than the values themselves."""
    x = normal(generator(11), 3, 2)
    for radius in (1e3, 1e6, 1e12):
        bound = deviation(r.Attention(r.Dot()), Neighborhood(x, radius, TokenMax()), TokenMax()).value
        assert radius <= bound <= 10 * radius


def test_what_is_not_bilinear_is_refused():
    found = deviation(
        r.Attention(r.Gaussian(bandwidth=1.0)), Neighborhood(torch.ones(2, 2, dtype=D), 0.1), TokenMax()
    )
    assert any(
        why.startswith(THEOREM.title) and "not bilinear in pairs of tokens" in why for why in found.refused
    )
