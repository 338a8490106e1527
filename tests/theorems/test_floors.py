"""Floors: what a theorem made of parts cannot be below, so that one that cannot win is not asked."""

from itertools import product

import pytest
import torch

from regard import Attention, Dot, Linear, Neighborhood, certify, deviation
from regard.domains import Radii
from regard.maps import (
    Affine,
    Compose,
    Gelu,
    Heads,
    Normalize,
    Relu,
    Residual,
    feed_forward,
    post_norm,
    pre_norm,
)
from regard.norms import Frobenius, TokenMax, Wasserstein
from regard.proofs import floors, theorem
from regard.proofs.question import question
from regard.proofs.theorem import Claim, Refusal, constants, deviations

D = torch.float64
NORMS = (Frobenius(), TokenMax())


def _block(seed: int, kind=pre_norm, tokens: int = 3, scale: float = 1.0) -> tuple[Compose, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=D) / shape[-2] ** 0.5

    inner = Attention(Dot(drawn(2, 4, 2), drawn(2, 4, 2)), Linear(drawn(2, 4, 2)))
    heads = Heads(inner, drawn(2, 2, 4))
    first, second = (Normalize(1e-2, 1 + 0.3 * drawn(4, 4)[0], drawn(4, 4)[1]) for _ in range(2))
    hidden = feed_forward(Gelu() if seed % 2 else Relu(), drawn(4, 8), drawn(8, 4))
    points = torch.randn(tokens, 4, generator=generator, dtype=D)
    return kind(heads, hidden, first, second), points


def _inside(map) -> list:
    """What a map is made of of which theorems are made of parts, too; itself first."""
    parts = map.maps if isinstance(map, Compose) else (map.map,) if isinstance(map, Residual) else ()
    return [map, *(inner for part in parts for inner in _inside(part))] if parts else []


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@pytest.mark.parametrize("radius", [1e-3, 0.5])
@pytest.mark.parametrize("kind", [pre_norm, post_norm], ids=["pre", "post"])
def test_no_theorem_is_below_its_floor(kind, radius, norm):
    compared = 0
    map, points = _block(int(kind is pre_norm), kind)
    domain = Neighborhood(points, radius, TokenMax() if kind is pre_norm else Frobenius())
    with question():
        for inner, quantity in product(_inside(map), (constants, deviations)):
            for claim in quantity.all(type(inner), type(domain), type(norm)):
                compared += _above_its_floor(claim, inner, domain, norm)
    assert compared >= 8


def _above_its_floor(claim: Claim, map, domain, norm) -> int:
    if claim.floor is None or (claim.about is not None and not claim.about(map, domain, norm)):
        return 0
    try:
        found = [float(bound.value) for bound in claim(map, domain, norm)]
        least = claim.least(map, domain, norm)
    except Refusal:
        return 0
    assert least <= min(found) * (1 + 1e-6), claim.theorem.name
    return int(least > 0)


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@pytest.mark.parametrize("radius", [1e-3, 0.3])
@pytest.mark.parametrize("ask", [certify, deviation])
def test_what_is_left_out_changes_no_bound(monkeypatch, ask, radius, norm):
    map, points = _block(int(radius < 0.1), pre_norm if radius < 0.1 else post_norm)
    found = ask(map, Neighborhood(points, radius), norm)
    monkeypatch.setattr(theorem, "asked_by_theorem", lambda: False)
    whole = ask(map, Neighborhood(points, radius), norm)
    assert found.value == pytest.approx(whole.value, rel=1e-12)
    assert [rung.theorem for rung in found.others] == [rung.theorem for rung in whole.others]


def _counted(patch, ask):
    """The answer, and how many theorems were asked for it."""
    asked = []
    call = Claim.__call__
    patch.setattr(Claim, "__call__", lambda self, *arguments: asked.append(self) or call(self, *arguments))
    found = ask()
    patch.setattr(Claim, "__call__", call)
    return found, len(asked)


def test_most_of_what_cannot_win_is_not_asked(monkeypatch):
    map, points = _block(0, tokens=4)
    domain = Neighborhood(points, 1e-2)
    _, asked = _counted(monkeypatch, lambda: deviation(map, domain, TokenMax()))
    monkeypatch.setattr(theorem, "asked_by_theorem", lambda: False)
    _, all_of_them = _counted(monkeypatch, lambda: deviation(map, domain, TokenMax()))
    assert asked < all_of_them / 3


def test_slopes_are_those_of_the_derivative():
    map, points = _block(3)
    domain = Neighborhood(points, 1e-3)
    jacobian = torch.func.jacrev(map)(points)
    spectral = float(torch.linalg.matrix_norm(jacobian.reshape(12, 12), 2))
    assert floors.slope_near(map, domain, Frobenius()) == pytest.approx(spectral, rel=1e-6)
    above = float(torch.linalg.matrix_norm(jacobian.permute(0, 2, 1, 3), 2).sum(-1).max())
    found = floors.slope_near(map, domain, TokenMax())
    assert 0.7 * above < found <= above * (1 + 1e-6)


def test_a_linear_map_attains_its_floors():
    w = torch.diag(torch.tensor([3.0, 1.0, 0.5], dtype=D))
    points = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 4.0]], dtype=D)
    twice = (Affine(w), Affine(2 * w))
    for norm in NORMS:
        assert floors.slope_near(twice[0], Neighborhood(points, 0.5), norm) == pytest.approx(3)
        assert floors.product_floor(twice, Neighborhood(points, 0.5), norm) == pytest.approx(18)
        for held in NORMS:
            domain = Neighborhood(points, 0.5, held)
            most = 9.0 * 2**0.5 if norm == Frobenius() and held == TokenMax() else 9.0
            assert 9.0 * (1 - 1e-9) <= floors.move_floor(twice, domain, norm) <= most * (1 + 1e-9)
    assert floors.spread(twice[0], Neighborhood(points, 0.5)) == pytest.approx(40.25**0.5)


def test_where_nothing_is_known_the_floor_is_zero():
    map, points = _block(1)
    still = torch.tensor([0.1, 0.1, 0.0], dtype=D)
    for domain, norm in (
        (Radii(points, still), TokenMax()),
        (Neighborhood(points, 0.0), TokenMax()),
        (Neighborhood(points, 0.1), Wasserstein(2.0)),
        (Neighborhood(torch.randn(129, 4, dtype=D), 0.1), TokenMax()),
    ):
        assert floors.product_floor((map,), domain, norm) == 0
        assert floors.constant_floor(map, domain, norm) == 0
        assert floors.deviation_floor(map, domain, norm) == 0
    assert floors.slope_near(object(), Neighborhood(points, 0.1), TokenMax()) == 0


def test_a_floor_that_refuses_hides_no_theorem():
    def refuses(map, domain, norm):
        raise Refusal("nothing is known; ask the theorem")

    claim = Claim(theorem.THEOREMS["composition"], lambda *arguments: [], None, refuses)
    assert claim.least(None, None, None) == 0
