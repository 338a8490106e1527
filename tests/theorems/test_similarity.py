"""How far embeddings turn: proved from below, attacked from above."""

import math

import pytest
import torch
from torch import nn

import regard as r
from regard._upper import Upper
from regard.errors import ArgumentError
from regard.maps import Affine, Compose
from regard.nonexpansive import MixTokens, Pool
from regard.proofs.classifier import Classifier
from regard.proofs.similarity import cosine_distance
from tests.ball_model.networks import D, drawn, network, sequence


def embedder(seed=0, **options):
    return Compose((network(seed, layers=1, **options), Pool()))


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("radius", [1e-3, 0.02])
def test_no_input_turns_farther(pre, radius):
    x = sequence(3)
    found = r.certified_cosine(embedder(3, pre=pre), x, r.one_token(x, 1, radius))
    assert 0.5 < found.cosine <= found.attack.value < 1
    gap = (1 - found.cosine) / (1 - found.attack.value)
    assert gap < (1.1 if radius == 1e-3 else 2.0)


def test_a_linear_map_attains_it():
    """One token, read as it is: the sine of the largest angle is radius / length."""
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]], dtype=D)
    model = Compose((Affine(torch.eye(4, dtype=D)), MixTokens(torch.ones(1, 1, dtype=D))))
    found = r.certified_cosine(model, x, r.one_token(x, 0, 0.5))
    exactly = math.sqrt(1 - 0.1**2)
    loose = 1 / math.sqrt(1 + (0.1 / 0.9) ** 2)  # along and across are bounded apart
    assert loose - 1e-9 <= found.cosine <= exactly + 1e-12
    assert found.attack.value >= exactly - 1e-9


def test_distance_of_a_slope():
    for slope in (1e-9, 1e-3, 0.5, 10.0):
        exactly = 1 - 1 / math.sqrt(1 + slope**2) if slope > 1e-3 else slope**2 / 2
        assert float(cosine_distance(Upper(slope))) == pytest.approx(exactly, rel=1e-6)
        assert float(cosine_distance(Upper(slope))) >= exactly * (1 - 1e-6)


def test_far_away_it_is_open_and_says_why():
    x = sequence(1)
    found = r.certified_cosine(embedder(1), x, r.one_token(x, 1, 50.0))
    assert found.cosine == -1.0
    assert "say nothing about it" in found.reason
    assert "open" in str(found)


def module(seed, kind):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(kind)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_embeddings_turn_no_farther_in_the_dtype_of_the_model(kind):
    """Moves of a few last digits: rounding turns an embedding as far as they do."""
    for seed in range(12):
        x = (sequence(seed)[:3, :4]).to(kind)
        radius = 4 * float(torch.finfo(kind).eps)
        found = r.certified_cosine(
            module(seed, kind), x, r.one_token(x.double(), 0, radius), readout=Pool(), steps=4
        )
        assert 0.9 < found.cosine <= found.attack.value


def test_rounding_is_no_part_of_the_bound_in_float64_and_a_small_one_in_float32():
    x = sequence(0)[:3, :4].float().double()
    near = r.one_token(x, 0, 0.01)
    exact = r.certified_cosine(r.declare(module(0, torch.float32)), x, near, readout=Pool())
    half = r.certified_cosine(module(0, torch.float32).double(), x, near, readout=Pool())
    single = r.certified_cosine(module(0, torch.float32), x.float(), near, readout=Pool())
    assert half.distance.value == exact.distance.value < single.distance.value
    assert single.distance.value == pytest.approx(exact.distance.value, rel=1e-3)


def test_both_embeddings_may_be_rounded(monkeypatch):
    """Two vectors of length 5 that each move by 0.1, 0.05 in every coordinate, turn by 2 asin(0.1/5) at most,
    and do where both turn apart.
    """
    monkeypatch.setattr(Classifier, "rounding", lambda self, points: torch.tensor(0.05, dtype=D))
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]], dtype=D)
    model = Compose((Affine(torch.eye(4, dtype=D)), MixTokens(torch.ones(1, 1, dtype=D))))
    found = r.certified_cosine(model, x, r.one_token(x, 0, 1e-12))
    exactly = 1 - math.cos(2 * math.asin(0.1 / 5))
    assert exactly <= 1 - found.cosine <= 1.1 * exactly


def test_an_embedding_that_is_rounding_alone_has_no_bound():
    """A bias that takes the mean token away leaves the last digits of its coordinates."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), sequence(0)[:3, :4].float()
    with torch.no_grad():
        layer.bias.copy_(-(x @ layer.weight.mT).mean(0))
    found = r.certified_cosine(layer, x, r.one_token(x.double(), 0, 1e-12), readout=Pool())
    assert found.cosine == -1.0
    assert "rounding may change the embedding" in found.reason


def test_a_hull_and_its_printout():
    x = sequence(2)
    near = x[1] + 0.01 * drawn(torch.Generator().manual_seed(0), 3, x.shape[-1])
    found = r.certified_cosine(embedder(2), x, r.Hull(x, 1, near))
    assert "stays above" in str(found)
    assert found.cosine <= found.attack.value


def test_what_is_no_embedding_is_said():
    x = sequence(0)
    with pytest.raises(ArgumentError, match=r"a cosine is of one token.*readout"):
        r.certified_cosine(network(0, layers=1), x, r.one_token(x, 0, 0.1))
    with pytest.raises(ArgumentError, match="a different sequence"):
        r.certified_cosine(embedder(0), x, r.one_token(x + 1, 0, 0.1))
    with pytest.raises(ArgumentError, match="steps"):
        r.certified_cosine(embedder(0), x, r.one_token(x, 0, 0.1), steps=0)
