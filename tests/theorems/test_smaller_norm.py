"""Deviations in norms that are never larger than another one."""

import math

import pytest
import torch

import regard as r
from regard.domains import Neighborhood, Radii, one_token
from regard.maps import Affine, Compose, Gated, Gelu, Normalize, Residual, Silu, feed_forward, pre_norm
from regard.norms import EntryMax, Frobenius, TokenMax, Wasserstein
from regard.proofs import deviation
from regard.proofs.falsification import falsify_deviation
from regard.proofs.theorems.smaller_norm import THEOREM
from tests.theorems.exact import D, generator, normal

W = normal(generator(1), 3, 3)
ATTENTION = r.Attention(r.Dot(W, W), r.Linear(W))
LAYER = Normalize(0.1, torch.ones(3, dtype=D))
MAPS = {
    "attention": ATTENTION,
    "residual": Residual(ATTENTION),
    "norm": LAYER,
    "gated": Gated(Silu(), W, W, W),
    "folded": Compose((LAYER, ATTENTION)),
    "block": pre_norm(ATTENTION, feed_forward(Gelu(), W, W), LAYER, LAYER),
}
X = normal(generator(2), 4, 3)
DOMAINS = (Neighborhood(X, 0.05), Neighborhood(X, 0.05, TokenMax()), one_token(X, 1, 0.1))


@pytest.mark.parametrize(
    "norm", [EntryMax(), Wasserstein(1.0), Wasserstein(2.0), Wasserstein(3.0), Wasserstein(math.inf)]
)
@pytest.mark.parametrize("name", MAPS)
def test_never_exceeded_and_never_above_the_larger_norm(name, norm):
    map = MAPS[name]
    for domain in DOMAINS:
        bound = deviation(map, domain, norm)
        assert bound.value <= deviation(map, domain, TokenMax()).value * (1 + 1e-12) < math.inf
        found = falsify_deviation(map, domain, norm, restarts=1, steps=6).value
        assert 0 < found <= bound.value * (1 + 1e-9)


def test_equality_cases():
    """A token that moves along one coordinate; all tokens that move alike, for laws."""
    identity, one = Residual(Affine(torch.zeros(3, 3, dtype=D))), torch.tensor([0.0, 0.2, 0.0, 0.0], dtype=D)
    moved = X.clone()
    moved[1, 0] += 0.2
    rung = deviation(identity, Radii(X, one), EntryMax())
    assert rung.value == pytest.approx(float((moved - X).abs().max()), rel=1e-12)
    for p in (1.0, 2.0, 5.0, math.inf):
        everywhere = deviation(identity, Neighborhood(X, 0.01, TokenMax()), Wasserstein(p)).value
        step = 0.01 * torch.tensor([1.0, 0.0, 0.0], dtype=D)
        assert everywhere == pytest.approx(float(r.wasserstein(X, X + step, p)), rel=1e-6)


def test_laws_of_equal_weights_share_a_frobenius_ball():
    """‖d‖_F / √n is half of ‖d‖_F for four tokens; tokens with weights do not share alike."""
    found = deviation(Affine(W), Neighborhood(X, 0.1), Wasserstein(2.0))
    assert found.theorem == f"{THEOREM.title}: of matched tokens, in Frobenius norm over √n"
    assert found.value == pytest.approx(
        deviation(Affine(W), Neighborhood(X, 0.1), Frobenius()).value / 2, rel=1e-12
    )
    weighted = r.Measure(X, torch.tensor([0.0, -9.0, -9.0, -9.0], dtype=D).log_softmax(0))
    assert deviation(Affine(W), Neighborhood(weighted, 0.1), Wasserstein(2.0)).value > 1.9 * found.value


def test_the_reason_of_the_larger_norm_is_kept():
    found = deviation(r.Attention(r.Dot(), moment=r.Mode()), Neighborhood(X, 0.1), EntryMax())
    assert math.isinf(found.value)
    assert any("Mode" in why for why in found.refused)


@pytest.mark.parametrize(
    ("p", "shared"), [(1.0, True), (1.5, True), (2.0, True), (2.5, False), (math.inf, False)]
)
def test_which_laws_share_a_frobenius_ball(p, shared):
    """W_p ≤ W_2 up to p = 2, and no further: one token may take the whole radius."""
    found = deviation(Affine(W), Neighborhood(X, 0.1), Wasserstein(p)).value
    whole = deviation(Affine(W), Neighborhood(X, 0.1), Frobenius()).value
    assert found == pytest.approx(whole / 2 if shared else whole, rel=1e-9)
