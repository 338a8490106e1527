"""Norm layers."""

import math

import pytest
import torch

from regard.domains import Ball, Neighborhood, Radii, Shell, Whole
from regard.maps import Added, Affine, Compose, Normalize
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation, falsify, image
from regard.proofs.falsification import falsify_deviation

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _layer(centered: bool, eps: float = 1e-2) -> Normalize:
    return Normalize(eps, torch.tensor([0.5, -2.0, 1.0, 1.5], dtype=D), _t(4), centered)


@pytest.mark.parametrize("centered", [True, False])
def test_worked_example(centered):
    layer = _layer(centered)
    assert certify(layer, Whole(), TokenMax()).value == pytest.approx(2 / 0.1)
    assert certify(layer, Shell(0.3), TokenMax()).value == pytest.approx(2 / math.sqrt(0.09 + 0.01))
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=D)
    near = certify(layer, Neighborhood(x, 0.5, TokenMax()), TokenMax()).value
    assert near == pytest.approx(2 / math.sqrt(0.75**2 + 0.01))


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("norm", [Frobenius(), TokenMax(), TokenSum(), Wasserstein(2.0)])
def test_never_exceeded(centered, norm):
    layer, x = _layer(centered), _t(3, 4, seed=1) + 2
    shells = (Shell(0.2, 3.0, tokens=3), Shell(0.2, 3.0, tokens=3, centered=False))
    for domain in (
        Whole(3),
        *shells,
        Ball(0.7, x[0], tokens=3),
        Neighborhood(x, 0.3, TokenMax()),
        Neighborhood(x, 0.4),
    ):
        bound = certify(layer, domain, norm).value
        assert falsify(layer, domain, norm, steps=4, restarts=1, width=4).value <= bound * (1 + 1e-9)


def test_attained_at_constant_tokens():
    layer = Normalize(1e-2)
    assert (
        falsify(layer, Ball(0.01, tokens=2), TokenMax(), width=4).value
        >= 0.98 * certify(layer, Ball(0.01, tokens=2), TokenMax()).value
    )


def test_pairs_on_both_sides_of_a_shell():
    """The set is not convex: opposite points of the inner sphere are stretched most,
    and attain the constant.
    """
    layer = Normalize(1e-3, centered=False)
    x = torch.tensor([[0.2, 0.2]], dtype=D)
    ratio = float((layer(x) - layer(-x)).norm() / (2 * x).norm())
    assert certify(layer, Shell(0.2, centered=False), TokenMax()).value == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("radius", [1e-3, 0.3, 30.0])
def test_deviations(centered, radius):
    layer, x = _layer(centered), _t(4, 4, seed=3) + 1
    radii = radius * torch.tensor([1.0, 0.0, 0.5, 0.1], dtype=D)
    for domain in (Neighborhood(x, radius), Neighborhood(x, radius, TokenMax()), Radii(x, radii)):
        for norm in (Frobenius(), TokenMax(), TokenSum()):
            bound = deviation(layer, domain, norm).value
            assert falsify_deviation(layer, domain, norm, restarts=1, steps=8).value <= bound * (1 + 1e-9)
            assert bound <= 4 * (2 * 2.0 * math.sqrt(4))


def test_refusals():
    assert "jumps at constant tokens" in str(certify(Normalize(0.0), Whole(), TokenMax()))
    assert math.isfinite(certify(Normalize(0.0), Shell(0.1), TokenMax()).value)
    assert "Shell(inner, centered=False)" in str(certify(Normalize(0.0, centered=False), Whole(), TokenMax()))
    assert "about the mean of each token" in str(
        certify(Normalize(0.0), Shell(0.1, centered=False), TokenMax())
    )
    assert math.isfinite(certify(Normalize(0.0, centered=False), Shell(0.1), TokenMax()).value)
    assert "not entry by entry" in str(certify(Normalize(), Whole(), EntryMax()))


# A shell has one meaning


def _ratio(map: Added | Compose, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((map(x) - map(y)).norm(dim=-1).max() / (x - y).norm(dim=-1).max())


def test_a_shell_about_zero_says_nothing_of_layer_norm():
    """Tokens far from zero and close to constant: LayerNorm is as steep as eps lets it be."""
    both = Added((Normalize(1e-10), Normalize(1e-10, centered=False)))
    domain = Shell(0.01, 1.0, tokens=1, centered=False)
    x = torch.full((1, 4), 0.02, dtype=D)
    y = x + 1e-7 * torch.eye(4, dtype=D)[:1]
    assert 0.01 <= float(y.square().mean().sqrt()) <= 1.0
    assert (
        86_000
        < _ratio(both, x, y)
        <= certify(both, domain, TokenMax()).value
        == pytest.approx(1e5 + 100, rel=1e-6)
    )
    assert certify(Normalize(1e-10, centered=False), domain, TokenMax()).value == pytest.approx(100, rel=1e-5)


def test_a_shell_about_the_mean_is_for_both_norm_layers():
    """|x|² = |x - mean|² + d mean²: both constants hold on Shell(inner),
    and a pair of it attains their sum.
    """
    both = Added((Normalize(1e-10), Normalize(1e-10, centered=False)))
    x = 0.01 * torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=D)
    bound = certify(both, Shell(0.01, tokens=1), TokenMax()).value
    assert _ratio(both, x, -x) == pytest.approx(bound, rel=1e-6)
    assert bound == pytest.approx(2 / math.sqrt(1e-4 + 1e-10))


def test_the_outer_side_of_a_shell_about_the_mean_does_not_hold_rms_tokens():
    """A token with a small deviation and a large mean has full length after RMSNorm:
    the maps after it must count on that.
    """
    layer = Normalize(1.0, torch.ones(2, dtype=D), centered=False)
    far = torch.full((1, 2), 1e3, dtype=D)
    assert 1.4 < float(layer(far).norm()) <= image(layer, Shell(0.0, 0.1, tokens=1)).radius
    assert image(layer, Shell(0.0, 0.1, tokens=1, centered=False)).radius == pytest.approx(
        math.sqrt(2) / math.sqrt(1 + 100)
    )


def test_a_shell_about_zero_is_in_a_ball():
    """√d · outer: attention has constants there, and none about the mean."""
    map = Affine(torch.eye(4, dtype=D))
    assert image(map, Shell(0.0, 0.5, centered=False)).radius == pytest.approx(1.0)
    assert isinstance(image(map, Shell(0.0, 0.5)), Whole)


def test_a_shell_says_its_center():
    assert repr(Shell(0.1)) == "Shell(inner=0.1, outer=inf, centered=True)"
    assert repr(Shell(0.1, 2.0, 3, centered=False)) == "Shell(inner=0.1, outer=2, tokens=3, centered=False)"
