"""Tokens that are joined, cut and mixed."""

import math

import pytest
import torch

from regard.domains import Ball, Neighborhood, Radii, Whole
from regard.errors import ArgumentError
from regard.maps import Compose, Residual
from regard.measure import Measure
from regard.nonexpansive import Flatten, MixTokens, Pool, Unflatten
from regard.norms import EntryMax, Frobenius, OwnToken, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, falsify, image
from regard.transport import wasserstein
from tests.theorems.exact import generator, normal

D = torch.float64
SEQUENCES = [Frobenius(), TokenMax(), TokenSum(), EntryMax()]
MIX = MixTokens(
    torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.5, -1.0], [2.0, 0.0, -0.5], [0.0, 3.0, 1.0]], dtype=D)
)
CASES = [(Pool(), 3), (Flatten(), 3), (Unflatten(3), 1), (MIX, 3)]


@pytest.mark.parametrize("norm", SEQUENCES, ids=repr)
@pytest.mark.parametrize(("map", "tokens"), CASES, ids=lambda case: type(case).__name__)
def test_attained_and_never_exceeded(map, tokens, norm):
    """The attack finds the worst direction of a linear map; 1,000 random ones are no worse."""
    bound = certify(map, Whole(tokens=tokens), norm).value
    found = falsify(map, Whole(tokens=tokens), norm, steps=2, restarts=6, width=6).value
    assert found == pytest.approx(bound, rel=1e-6)
    d = (
        normal(generator(0), 1000, tokens, 6)
        * torch.rand(1000, tokens, 1, generator=generator(1), dtype=D) ** 4
    )
    assert float((norm.of(map(d)) / norm.of(d)).max()) <= bound


def test_numbers():
    values = {
        type(map): [certify(map, Whole(tokens=n), norm).value for norm in SEQUENCES] for map, n in CASES
    }
    root = math.sqrt(3)
    assert values[Pool] == pytest.approx([1, root, 1 / root, root], rel=1e-12)
    assert values[Flatten] == pytest.approx([1, root, 1, 1], rel=1e-12)
    assert values[Unflatten] == pytest.approx([1, 1, root, 1], rel=1e-12)
    top = float(torch.linalg.matrix_norm(MIX.w, 2))
    assert values[MixTokens] == pytest.approx([top, 4.0, 6.5, 4.0], rel=1e-9)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_laws(p):
    """Pooling shifts with all tokens; a token that is cut moves all pieces, or one."""
    norm = Wasserstein(p)
    assert certify(Pool(), Whole(tokens=3), norm).value == pytest.approx(math.sqrt(3), rel=1e-12)
    bound = certify(Unflatten(4), Whole(tokens=1), norm).value
    x = 100 * normal(generator(2), 1, 8)
    all_pieces, one_piece = torch.ones(1, 8, dtype=D), torch.zeros(1, 8, dtype=D)
    one_piece[0, 0] = 1.0
    seen = []
    for step in (all_pieces, one_piece):
        moved = wasserstein(Measure(Unflatten(4)(x)), Measure(Unflatten(4)(x + step)), p)
        seen.append(float(moved) / float(step.norm()))
    assert max(seen) == pytest.approx(bound, rel=1e-6)
    for map in (Flatten(), MIX):
        refused = certify(map, Whole(tokens=3), norm)
        assert math.isinf(refused.value)
        assert any("order of tokens counts" in sentence for sentence in refused.refused)


def test_own_tokens():
    square = MixTokens(normal(generator(3), 4, 4))
    assert certify(square, Whole(), OwnToken()).value == pytest.approx(float(square.w.diagonal().abs().max()))
    for map, tokens in CASES:
        refused = certify(map, Whole(tokens=tokens), OwnToken())
        assert math.isinf(refused.value)
        assert any("no token is its own" in sentence for sentence in refused.refused)


def test_how_many_tokens_there_are_must_be_known():
    for map, norm in ((Pool(), TokenMax()), (Pool(), TokenSum()), (Flatten(), TokenMax())):
        refused = certify(map, Whole(), norm)
        assert any("number of tokens" in sentence for sentence in refused.refused)
        assert math.isinf(refused.value)
    assert certify(Pool(), Whole(), Frobenius()).value == 1.0
    assert math.isinf(certify(MIX, Whole(tokens=4), Frobenius()).value)
    assert math.isinf(certify(Unflatten(3), Whole(tokens=2), Frobenius()).value)
    assert certify(Unflatten(3), Whole(), Frobenius()).value == 1.0


@pytest.mark.parametrize(("map", "tokens"), CASES, ids=lambda case: type(case).__name__)
def test_images_hold_the_values(map, tokens):
    """Of balls about zero and another point, and of neighborhoods; there are as many tokens as come out."""
    g = generator(4)
    for center in (torch.zeros(6, dtype=D), normal(g, 6), torch.ones(6, dtype=D)):
        steps = torch.nn.functional.normalize(normal(g, 300, tokens, 6), dim=-1)
        held = image(map, Ball(0.5, center, tokens))
        values = map(center + 0.5 * steps)
        assert held.tokens == values.shape[-2]
        assert len(held.center) == values.shape[-1]
        assert float((values - held.center).norm(dim=-1).max()) <= held.radius
        x = center + steps[0]
        for near in (Radii(x, torch.full((tokens,), 0.1, dtype=D)), Neighborhood(x, 0.1, TokenMax())):
            around = image(map, near)
            torch.testing.assert_close(around.measure.points, map(x))
            moved = (map(x + 0.1 * steps) - map(x)).norm(dim=-1).amax(0)
            assert bool((moved <= (around.radii if isinstance(around, Radii) else around.radius)).all())
    assert image(map, Whole(tokens=tokens)) == Whole(tokens=map(x).shape[-2])


def test_images_need_what_they_need():
    for map in (Pool(), Flatten()):  # of any number of tokens
        assert image(map, Ball(1.0)) == Whole(tokens=1)
    assert image(Unflatten(2), Ball(0.5)).radius == 0.5
    assert image(Unflatten(2), Ball(0.5, torch.ones(6, dtype=D))).radius == pytest.approx(0.5, rel=1e-9)
    assert image(Flatten(), Ball(0.5, tokens=4)).radius == pytest.approx(1.0, rel=1e-9)
    assert image(MIX, Ball(0.5)).radius == pytest.approx(2.0, rel=1e-9)
    measure = Measure(normal(generator(5), 3, 6), torch.tensor([0.5, 0.25, 0.25], dtype=D).log())
    with pytest.raises(Exception, match=r"forgets weights|lose weights"):
        image(Pool(), Neighborhood(measure, 0.1))


def test_compositions_count_tokens():
    """A sequence that is flattened and cut again, and then pooled."""
    map = Compose((Flatten(), Unflatten(3), Pool()))
    x = normal(generator(6), 3, 4)
    torch.testing.assert_close(map(x), Pool()(x))
    assert certify(map, Whole(tokens=3), Frobenius()).value == pytest.approx(1.0, rel=1e-9)
    found = deviation(map, Neighborhood(x, 0.1), Frobenius()).value
    assert found == pytest.approx(0.1, rel=1e-9)
    refused = certify(Residual(Pool()), Whole(tokens=3), Frobenius())
    assert any("a different number of tokens" in sentence for sentence in refused.refused)
    square = certify(Residual(MixTokens(torch.eye(3, dtype=D))), Whole(tokens=3), Frobenius())
    assert square.value == pytest.approx(2.0, rel=1e-9)


def test_widths():
    with pytest.raises(ArgumentError, match="divisor of the width"):
        certify(Unflatten(4), Ball(1.0, torch.zeros(6, dtype=D), 1), Frobenius())
