"""What sweeps found, kept: each case once broke a certificate or an attack."""

import pytest
import torch

import regard as r
from benchmarks.falsify import Tally, attack
from benchmarks.families import itself

D = torch.float64


@pytest.mark.parametrize("case", [783, 784, 723, 5292, 9311, 9570, 50000418, 90000414, 90000420])
def test_cases_that_once_broke(case):
    """Shares in float32, weights that underflow, infinite matrices, strided outputs, a radius in float32,
    slopes whose squares vanish, values so much larger than their moves that rounding shows."""
    tally = Tally()
    attack(itself(case), tally, ascend=True)
    assert tally.violations == []


def test_the_radius_of_an_image_keeps_its_digits():
    layer = r.maps.Normalize(1e-2, centered=False)
    x = torch.tensor([[-1.4e-5]], dtype=D)
    near = r.Neighborhood(x, 6.257009331068166e-06, r.TokenMax())
    assert r.image(layer, near).radius >= r.deviation(layer, near, r.TokenMax()).value


def test_an_attack_stays_where_it_may_go():
    attention = r.Attention(r.Dot(scale=1.0))
    x = 200 * torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=D)
    for norm in (r.TokenSum(), r.TokenMax(), r.Frobenius()):
        for domain in (r.Neighborhood(x, 9.6), r.Neighborhood(x, 9.6, r.TokenMax()), r.one_token(x, 1, 9.6)):
            witness = r.falsify_deviation(attention, domain, norm, restarts=2, steps=10)
            assert float((witness.point - x).norm(dim=-1).max()) <= 9.6


def test_a_query_that_sees_nothing_gives_zero():
    """A context whose keys come later than the queries: the image of the attention holds zero."""
    context = r.Measure(5 + 0.1 * torch.randn(3, 2, dtype=D), None, torch.tensor([5, 6, 7]))
    layer = r.maps.Residual(r.maps.ToContext(r.Attention(r.Dot(), support=r.Causal()), context))
    map = r.maps.Compose((layer, r.maps.Normalize(1e-6, centered=False)))
    x = torch.full((3, 2), 1e-4, dtype=D)
    seen = float(torch.linalg.matrix_norm(r.linearize(map, x).dense(), 2))
    assert seen > 900
    assert r.certify(map, r.Ball(1.0, torch.zeros(2, dtype=D), tokens=3), r.Frobenius()).value >= seen


@pytest.mark.parametrize(
    "make",
    [lambda a: r.maps.Compose((a, r.maps.Normalize(1e-6, centered=False))), r.maps.Residual],
    ids=["compose", "residual"],
)
def test_heads_that_are_not_mixed_have_no_taylor_model(make):
    attention = r.Attention(
        r.Dot(torch.randn(2, 2, 2, dtype=D), torch.randn(2, 2, 2, dtype=D)),
        r.Linear(torch.randn(2, 2, 2, dtype=D)),
    )
    near = r.Neighborhood(torch.randn(3, 2, dtype=D), 1e-9)
    for certificate in (
        r.certify(make(attention), near, r.Frobenius()),
        r.deviation(make(attention), near, r.Frobenius()),
    ):
        assert certificate.value == float("inf")
        assert any("mix them with Heads" in why for why in certificate.refused)


def test_nothing_broadcasts_in_silence():
    wide = torch.ones(3, 1, dtype=D)
    with pytest.raises(r.errors.ArgumentError, match="b: has shape"):
        r.maps.Affine(wide, torch.zeros(4, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="b: has shape"):
        r.maps.Affine(torch.eye(2, dtype=D), torch.zeros(2, 2, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="b_v: has width 6"):
        r.Linear(wide, torch.zeros(6, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="b_o: has shape"):
        r.maps.Heads(r.Attention(r.Dot()), torch.ones(1, 3, 1, dtype=D), torch.zeros(6, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="w_gate: has shape"):
        r.maps.Gated(r.maps.Tanh(), wide, torch.ones(3, 8, dtype=D), torch.eye(8, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="keeps the shape"):
        r.maps.Residual(r.maps.Affine(wide))(torch.ones(2, 3, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="weight: has width 1"):
        r.maps.Normalize(weight=torch.ones(1, dtype=D))(torch.ones(2, 3, dtype=D))


def test_parameters_of_a_function_are_not_heads():
    theta = torch.full((50,), 0.1, dtype=D)
    attention = r.Attention(r.Potential.of(lambda q, k, t: t.sum() * (q * k).sum(-1), theta))
    x = torch.randn(4, 3, dtype=D)
    law = torch.softmax(0.1 * x @ x.mT, -1)
    assert r.proofs.approximation_error(attention, law, x).value >= float(
        (law @ x - attention(x)).norm(dim=-1).max()
    )


def test_a_norm_layer_without_digits_is_refused():
    map = r.maps.Compose((r.maps.Normalize(1e-5), r.maps.Affine(torch.eye(3, dtype=D))))
    far = r.Neighborhood(3e15 + torch.randn(1, 3, dtype=D), 0.0)
    rungs = r.certify(map, far, r.Frobenius())
    assert not [rung for rung in (rungs, *rungs.others) if rung.theorem.startswith("the Taylor model")]


def test_very_small_moves_do_not_vanish():
    small = r.Radii(torch.zeros(8, 8, dtype=D), torch.full((8,), 1e-170, dtype=D))
    assert r.deviation(r.maps.Affine(torch.eye(8, dtype=D)), small, r.Frobenius()).value >= 2.8e-170


def test_float32_maps_are_bounded_in_float64():
    attention = r.Attention(r.Dot(), r.Linear(torch.randn(3, 3)))
    near = r.Neighborhood(torch.randn(4, 3), 1e-3)
    assert r.certify(r.maps.Residual(attention), near, r.Frobenius()).value < float("inf")


@pytest.mark.parametrize("norm", [r.Frobenius(), r.TokenMax()])
@pytest.mark.parametrize("centered", [True, False])
def test_an_attack_on_a_shell_stays_in_it(norm, centered):
    """A shell says from where it measures, and a witness is inside."""
    g = torch.Generator().manual_seed(0)
    w = 3 * torch.randn(3, 3, generator=g, dtype=torch.float64)
    layer = r.maps.Normalize(1.0, torch.ones(3, dtype=torch.float64), centered=centered)
    map = r.maps.Compose((layer, r.Attention(r.Dot(w, w), r.Linear(w))))
    domain = r.Shell(0.0, 0.1, tokens=4, centered=centered)
    witness = r.falsify(map, domain, norm, width=3, steps=10, restarts=2)
    assert 0 < witness.value <= r.certify(map, domain, norm).value
    away = witness.point - witness.point.mean(-1, keepdim=True) if centered else witness.point
    assert float(away.square().mean(-1).sqrt().max()) <= 0.1
