"""Residual connections."""

import math

import pytest
import torch

from regard.attention import Attention
from regard.domains import Ball, Neighborhood, Whole, one_token
from regard.lookups import Linear
from regard.maps import Affine, Compose, Normalize, Residual
from regard.norms import Frobenius, TokenMax, TokenSum, Wasserstein
from regard.potentials import Dot
from regard.proofs import Refusal, certify, deviation, falsify
from regard.proofs.falsification import falsify_deviation
from regard.supports import Causal
from regard.transport import wasserstein

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _attention(seed: int = 0) -> Attention:
    return Attention(
        Dot(_t(3, 2, seed=seed), _t(3, 2, seed=seed + 1), b_q=_t(2, seed=seed + 2)),
        Linear(_t(3, 3, seed=seed + 3), _t(3, seed=seed + 4)),
    )


def test_worked_example():
    """x + 2x attains 1 + 2."""
    map = Residual(Affine(2 * torch.eye(3, dtype=D)))
    for norm in (TokenMax(), Frobenius(), TokenSum(), Wasserstein(1.0), Wasserstein(3.0)):
        assert certify(map, Whole(), norm).value == pytest.approx(3.0)
    assert falsify(map, Whole(2), TokenMax(), width=3, steps=3).value == pytest.approx(3.0)


@pytest.mark.parametrize(
    "norm",
    [
        TokenMax(),
        Frobenius(),
        TokenSum(),
        Wasserstein(1.0),
        Wasserstein(2.0),
        Wasserstein(3.0),
        Wasserstein(math.inf),
    ],
)
@pytest.mark.parametrize("seed", [50])
def test_never_exceeded(norm, seed):
    map, domain = Residual(_attention(seed)), Ball(0.5, 0.5 * _t(3, seed=seed + 9), tokens=4)
    bound = certify(map, domain, norm).value
    found = falsify(map, domain, norm, steps=8, restarts=1).value
    assert 0.03 * bound <= found <= bound


def test_deviations_never_exceeded():
    map, x = Residual(_attention().replace(support=Causal())), _t(4, 3, seed=9)
    for domain in (Neighborhood(x, 0.05), Neighborhood(x, 0.05, TokenMax()), one_token(x, 0, 0.1)):
        for norm in (TokenMax(), Frobenius()):
            bound = deviation(map, domain, norm).value
            assert 0.02 * bound <= falsify_deviation(map, domain, norm, steps=10, restarts=1).value <= bound


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_measures_need_a_coupling(p):
    """(id + T_μ)_# is not bounded by a constant of T_μ# alone,
    but `wasserstein` and `energy` bound T_μ(X) - T_ν(Y) for every coupling.
    """
    inner, domain = _attention(), Ball(0.5, tokens=4)
    found = certify(Residual(inner), domain, Wasserstein(p))
    named = "self-attention as a map of measures", "softmax attention by the energy of its scores"
    assert found.parts[0].theorem.startswith(named[math.isfinite(p)])
    rungs = (alone := certify(inner, domain, Wasserstein(p)), *alone.others)
    coupled = min(rung.value for rung in rungs if rung.theorem.startswith(named))
    assert found.value == pytest.approx(1 + coupled, rel=1e-12)


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, math.inf])
def test_measures_attain_it(p):
    """Scores that see nothing give every token the mean:
    a law that is moved as a whole moves twice as far.
    """
    map, x = Residual(Attention(Dot(scale=1e-9))), 0.4 * _t(4, 3) / _t(4, 3).norm(dim=-1, keepdim=True)
    moved = x + torch.tensor([0.1, 0.0, 0.0], dtype=D)
    seen = float(wasserstein(map(x), map(moved), p) / wasserstein(x, moved, p))
    assert certify(map, Ball(1.0, torch.zeros(3, dtype=D)), Wasserstein(p)).value == pytest.approx(
        seen, rel=1e-6
    )


def test_published_constants_of_measures_are_no_coupling():
    """The mean-field constant is one of μ ↦ T_μ#μ: it may be on the ladder inside, and is not used."""
    from regard.proofs.theorems.residual import smallest_for_couplings

    inner, norm = _attention(), Wasserstein(1.0)
    best = certify(inner, Ball(0.5, tokens=4), norm)
    (published,) = [rung for rung in best.others if "mean-field" in rung.theorem or "castin" in rung.theorem]
    with pytest.raises(Refusal, match="does not hold coupling by coupling"):
        smallest_for_couplings(inner, published, norm)


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_laws_with_different_atoms(p, seed):
    """Exact transport between laws of other sizes, far apart and close together,
    before and after x + T_μ(x).
    """
    g = torch.Generator().manual_seed(seed)
    map = Residual(Attention(Dot(scale=float(0.1 + seed)), Linear(_t(3, 3, seed=seed))))
    bound = certify(map, Ball(1.0), Wasserstein(p)).value
    for atoms in ((4, 4), (2, 6), (3, 5), (1, 4)):
        first, second = (torch.randn(n, 3, generator=g, dtype=D) for n in atoms)
        first, second = first / first.norm(dim=-1, keepdim=True), second / second.norm(dim=-1, keepdim=True)
        near = (first.repeat(2, 1) * (1 - 1e-3) + 1e-3 * second[:1]) * torch.rand(
            2 * len(first), 1, generator=g, dtype=D
        ) ** 1e-3
        for other in (second, near):
            before, after = (
                float(wasserstein(a, b, p)) for a, b in ((first, other), (map(first), map(other)))
            )
            assert after <= bound * before * (1 + 1e-9) + 1e-12 < math.inf


@pytest.mark.parametrize("p", [1.0, 3.0])
def test_every_coupling(p):
    """‖T_μ(X) - T_ν(Y)‖_p ≤ L ‖X - Y‖_p for couplings that are not optimal: permutations drawn at random."""
    g = torch.Generator().manual_seed(3)
    attention = Attention(Dot(scale=0.7))
    found = certify(attention, Ball(1.0, torch.zeros(2, dtype=D)), Wasserstein(p))
    closest = 0.0
    for _ in range(40):
        x, y = (torch.randn(5, 2, generator=g, dtype=D) for _ in range(2))
        x, y = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
        order = torch.randperm(5, generator=g)
        apart, values = (x - y[order]).norm(dim=-1), (attention(x) - attention(y)[order]).norm(dim=-1)
        before, after = (float(z.pow(p).mean() ** (1 / p)) for z in (apart, values))
        assert after <= found.value * before < math.inf
        closest = max(closest, after / before)
    assert closest > 0.05


def test_reason_of_the_inside_is_kept():
    refused = certify(Residual(_attention()), Whole(), TokenMax())
    assert math.isinf(refused.value)
    assert "what it goes around has no finite bound" in str(refused)


def test_the_smallest_constant_that_holds_for_couplings_is_taken():
    """A composition has two, with its norm layer folded in and without: 1 and the smaller."""
    layer = Normalize(1e-2, torch.tensor([1.0, 1.0, 5.0], dtype=D), None, centered=False)
    blind = torch.eye(3, dtype=D)[:, :2].contiguous()
    inner = Compose((layer, Attention(Dot(blind, blind), Linear(blind @ blind.mT))))
    found = certify(inner, Whole(), Wasserstein(2.0))
    values = [rung.value for rung in (found, *found.others)]
    assert len(values) > 1
    assert max(values) > 2 * min(values)
    assert certify(Residual(inner), Whole(), Wasserstein(2.0)).value == pytest.approx(
        1 + min(values), rel=1e-9
    )


@pytest.mark.parametrize("norm", [TokenMax(), Frobenius()])
def test_a_move_and_what_it_does_add_up(norm):
    """x + 2x of one token that moves by r moves by 3r, and in a residual of two by 9r."""
    around = Residual(Affine(2 * torch.eye(3, dtype=D)))
    domain = one_token(_t(4, 3), 1, 0.1)
    assert deviation(around, domain, norm).value == pytest.approx(0.3, rel=1e-9)
    outer = Residual(Compose((around, Normalize(1e-2), around)))
    inner = deviation(Compose(outer.map.maps), domain, norm).value
    assert deviation(outer, domain, norm).value == pytest.approx(0.1 + inner, rel=1e-9)
