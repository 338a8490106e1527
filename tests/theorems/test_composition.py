"""Compositions, and norm layers folded into the attention after them."""

import math

import pytest
import torch

import regard.proofs.modules  # noqa: F401 (registers how modules are declared)
from regard.attention import Attention
from regard.domains import Ball, Neighborhood, Shell, Whole, one_token
from regard.lookups import Factored, Linear
from regard.maps import (
    Affine,
    Compose,
    Gelu,
    Heads,
    Normalize,
    Pointwise,
    Relu,
    feed_forward,
    post_norm,
    pre_norm,
)
from regard.measure import Measure
from regard.norms import Frobenius, TokenMax, TokenSum, Wasserstein
from regard.potentials import Alibi, Dot, Gaussian, Rotary
from regard.proofs import certify, declare, deviation, falsify
from regard.proofs.falsification import falsify_deviation
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.composition import fold
from regard.supports import Causal

D = torch.float64


def _t(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def _heads(seed: int = 0, support=None) -> Heads:
    potential = Dot(
        _t(2, 4, 2, seed=seed),
        _t(2, 4, 2, seed=seed + 1),
        b_q=_t(2, 2, seed=seed + 2),
        b_k=_t(2, 2, seed=seed + 3),
    )
    inner = Attention(potential, Linear(_t(2, 4, 2, seed=seed + 4), _t(2, 2, seed=seed + 5)))
    inner = inner if support is None else inner.replace(support=support)
    return Heads(inner, 0.3 * _t(2, 2, 4, seed=seed + 6), _t(4, seed=seed + 7))


def _layer(seed: int = 0, centered: bool = True) -> Normalize:
    return Normalize(1e-2, 1 + 0.5 * _t(4, seed=seed), _t(4, seed=seed + 1), centered)


def _block(kind, seed: int = 0):
    hidden = feed_forward(
        Gelu(),
        0.4 * _t(4, 6, seed=seed + 30),
        0.4 * _t(6, 4, seed=seed + 31),
        _t(6, seed=seed + 32),
        _t(4, seed=seed + 33),
    )
    return kind(_heads(seed), hidden, _layer(seed + 40), _layer(seed + 50))


def test_worked_example():
    """A product of spectral norms; attained when the singular vectors meet."""
    map = Compose(
        (
            Affine(torch.diag(torch.tensor([3.0, 1.0], dtype=D))),
            Pointwise(Relu()),
            Affine(torch.diag(torch.tensor([2.0, 1.0], dtype=D))),
        )
    )
    found = certify(map, Ball(1.0, tokens=2), TokenMax())
    assert found.value == pytest.approx(6.0)
    assert [part.value for part in found.parts] == pytest.approx([3.0, 1.0, 2.0])
    assert falsify(map, Ball(1.0, tokens=2), TokenMax(), width=2).value >= 5.9


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(
    "potential",
    [
        Dot(_t(4, 3), _t(4, 3, seed=1), b_q=_t(3, seed=2)),
        Dot(),
        Rotary(Dot(_t(4, 2), _t(4, 2, seed=1))) + Alibi(0.3),
    ],
    ids=["dot", "bare", "rotary"],
)
def test_folding_is_an_identity(centered, potential):
    layer, x = _layer(centered=centered), _t(5, 4, seed=7)
    hats = Normalize(layer.eps, centered=centered)(x)
    for lookup in (
        Linear(_t(4, 3, seed=3), _t(3, seed=4)),
        Factored(_t(4, 2, seed=3), _t(2, 3, seed=4), _t(3, seed=5)),
    ):
        attention = Attention(potential, lookup, support=Causal())
        torch.testing.assert_close(fold(layer, attention)(hats), attention(layer(x)), rtol=1e-12, atol=1e-12)
    heads = _heads()
    torch.testing.assert_close(fold(layer, heads)(hats), heads(layer(x)), rtol=1e-12, atol=1e-12)


def test_folding_is_refused_where_it_is_not_known():
    with pytest.raises(Refusal, match="not into Gaussian"):
        fold(_layer(), Attention(Gaussian()))
    with pytest.raises(Refusal, match="little but rounding"):  # centering leaves nothing of constant columns
        fold(Normalize(), Attention(Dot(_t(4, 2), torch.ones(4, 2, dtype=D)), Linear(_t(4, 2))))


def test_folding_helps():
    """One weight of the norm layer is large where the attention does not look."""
    layer = Normalize(1e-2, torch.tensor([1.0, 1.0, 1.0, 100.0], dtype=D), None, centered=False)
    blind = torch.eye(4, dtype=D)[:, :3].contiguous()
    map = Compose((layer, Attention(Dot(blind, blind), Linear(blind))))
    found = certify(map, Whole(), TokenMax())
    assert "folded" in found.theorem
    assert found.value < 1e-3 * max(rung.value for rung in found.others)
    assert falsify(map, Whole(3), TokenMax(), width=4, steps=6, restarts=2).value <= found.value


@pytest.mark.parametrize(("norm", "centered"), [(TokenMax(), True), (Frobenius(), False)])
def test_norm_layer_and_attention_never_exceeded(norm, centered):
    x = _t(3, 4, seed=5)
    map = Compose((_layer(3, centered), _heads(1)))
    shells = (Shell(0.3, 2.0, tokens=3), Shell(0.3, 2.0, tokens=3, centered=False))
    for domain in (Whole(3), *shells, Ball(1.0, x[0], tokens=3), Neighborhood(x, 0.05, TokenMax())):
        bound = certify(map, domain, norm).value
        assert falsify(map, domain, norm, steps=3, restarts=1, width=4).value <= bound < math.inf


def test_measures():
    map = Compose((_layer(3), _heads(1)))
    for norm in (Wasserstein(2.0), Wasserstein(math.inf)):
        assert (
            falsify(map, Ball(1.0, _t(4), tokens=3), norm, steps=2, restarts=1).value
            <= certify(map, Ball(1.0, _t(4), tokens=3), norm).value
            < math.inf
        )


@pytest.mark.parametrize("kind", [pre_norm, post_norm])
@pytest.mark.parametrize("seed", [100])
def test_blocks_near_a_sequence(kind, seed):
    map, x = _block(kind, seed), 2 * _t(3, 4, seed=seed + 5)
    cases = (
        (Neighborhood(x, 1e-3, TokenMax()), TokenMax()),
        (Neighborhood(x, 1e-3), Frobenius()),
        (one_token(x, 1, 1e-3), TokenMax()),
    )
    for domain, norm in cases:
        bound, far = certify(map, domain, norm).value, deviation(map, domain, norm).value
        found = falsify(map, domain, norm, steps=3, restarts=1).value
        moved = falsify_deviation(map, domain, norm, steps=5, restarts=2).value
        assert 1e-4 * bound <= found <= bound < math.inf
        assert 1e-4 * far <= moved <= far


def test_stack_of_two():
    first, second = _block(pre_norm), _block(post_norm, 100)
    stack, x = Compose((first, second)), 2 * _t(3, 4, seed=5)
    domain = Neighborhood(x, 1e-5, TokenMax())
    bound = certify(stack, domain, TokenMax())
    assert falsify(stack, domain, TokenMax(), steps=5, restarts=1).value <= bound.value < math.inf
    product = next(rung for rung in (bound, *bound.others) if rung.theorem == "composition")
    assert bound.value <= product.value
    assert (
        falsify_deviation(stack, domain, TokenMax(), steps=5, restarts=1).value
        <= deviation(stack, domain, TokenMax()).value
    )


def test_large_neighborhoods_fall_back_on_balls():
    map, x = _block(pre_norm), 2 * _t(3, 4, seed=5)
    near, ball = (
        certify(map, Neighborhood(x, 50.0, TokenMax()), TokenMax()),
        certify(map, Whole(3), TokenMax()),
    )
    assert near.value <= ball.value < math.inf


def test_encoder_layer_of_torch():
    torch.manual_seed(0)
    for first, norm in ((True, TokenMax()), (False, TokenMax()), (False, Frobenius())):
        layer = (
            torch.nn.TransformerEncoderLayer(6, 2, 8, norm_first=first, activation="gelu", batch_first=True)
            .double()
            .eval()
        )
        domain = Ball(2.0, tokens=3)
        found = falsify(declare.one(layer), domain, norm, width=6, steps=3, restarts=1).value
        assert found <= certify(layer, domain, norm).value < math.inf


def test_weights_travel_along():
    """A measure keeps its weights and marks through token maps; the attention after them sees them."""
    measure = Measure(_t(3, 4), torch.tensor([0.2, 0.3, 0.5], dtype=D).log(), torch.tensor([4, 2, 9]))
    map = Compose((_layer(), _heads(support=Causal())))
    bound = certify(map, Neighborhood(measure, 0.01, TokenMax()), TokenMax())
    assert math.isfinite(bound.value)
    assert bound.parts[1].domain.measure.marks.tolist() == [4, 2, 9]


def test_refusals_carry_the_reason():
    infinite = certify(Compose((Affine(_t(4, 4)), Attention(Dot()))), Whole(), TokenMax())
    assert math.isinf(infinite.value)
    assert "Attention has no finite bound on" in str(infinite)
    several = certify(Compose((_heads().attention, Affine(_t(2, 2)))), Ball(1.0), TokenMax())
    assert "mix them with Heads" in str(several)
    assert math.isfinite(certify(_block(pre_norm), Whole(3), Wasserstein(1.0)).value)
    assert math.isfinite(certify(_block(pre_norm), Whole(3), TokenSum()).value)
