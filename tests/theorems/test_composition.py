"""Compositions, and norm layers folded into the attention after them."""

import math

import pytest
import torch

import regard.proofs.modules  # noqa: F401 (registers how modules are declared)
from regard._upper import relative_error
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
from regard.proofs import certify, declare, deviation, falsify, image
from regard.proofs.falsification import falsify_deviation
from regard.proofs.locating import locate
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
        fold(_layer(), Attention(Gaussian(bandwidth=1.0)))
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


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("where", ["whole", "shell", "near", "far"])
def test_the_folded_constant_is_that_of_both_parts(where, centered):
    """L(attention'; where x̂ is) · L(x ↦ x̂), and a millionth for the rounding of folded matrices."""
    layer, x = _layer(3, centered), 2 * _t(3, 4, seed=5)
    attention = Attention(Dot(_t(4, 3), _t(4, 3, seed=1), b_q=_t(3, seed=2)), Linear(_t(4, 2, seed=3)))
    domain = {
        "whole": Whole(3),
        "shell": Shell(0.1, 0.2, tokens=3, centered=centered),
        "near": Neighborhood(x, 0.01, TokenMax()),
        "far": Neighborhood(x, 1e3, TokenMax()),
    }[where]
    plain = Normalize(layer.eps, centered=centered)
    full, origin = 2.0, torch.zeros(4, dtype=D)
    if where == "shell":
        held = Ball(full * 0.2 / math.sqrt(0.04 + layer.eps), origin, 3)
    elif where == "near":
        hats = plain(x)
        moved = certify(plain, domain, TokenMax()).value * 0.01
        centers = (origin, hats.mean(0), 0.5 * (hats.amax(0) + hats.amin(0)))
        radii = [float((hats - center).norm(dim=-1).max()) + moved for center in centers]
        best = min(range(3), key=radii.__getitem__)
        held = Ball(radii[best], centers[best], 3)
        assert held.radius < full
    else:
        held = Ball(full, origin, 3)
    for norm in (TokenMax(), Frobenius()):
        found = certify(Compose((layer, attention)), domain, norm)
        (folded,) = (rung for rung in (found, *found.others) if "folded" in rung.theorem)
        first = certify(plain, domain, norm).value
        second = certify(fold(layer, attention), held, norm).value
        assert folded.value == pytest.approx(first * second * (1 + 1e-6), rel=1e-8, abs=0)


def test_norm_layers_meet_the_attention_after_them():
    """Each pair of a norm layer and attention is one step, wherever it stands."""
    layer, heads, dense = _layer(3), _heads(1), Affine(_t(4, 4))
    found = certify(Compose((dense, layer, heads, dense)), Ball(0.1, _t(4), tokens=3), TokenMax())
    parts = next(rung for rung in (found, *found.others) if len(rung.parts) == 3).parts
    assert math.prod(part.value for part in parts) == pytest.approx(
        next(rung for rung in (found, *found.others) if len(rung.parts) == 3).value, rel=1e-9
    )
    pair = certify(Compose((layer, heads)), parts[1].domain, TokenMax())
    assert parts[1].value == pytest.approx(pair.value, rel=1e-12)


FOUR = 0.5 * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=D).unsqueeze(
    -1
)  # a column of length one and mean zero


def _thin(t: float) -> torch.Tensor:
    """A column that is constant up to t; with weights 2 before it, Γw is one and t."""
    return 0.5 * (1 + t * FOUR)


@pytest.mark.parametrize("kind", ["linear", "factored", "queries", "keys"])
@pytest.mark.parametrize("biased", [True, False])
def test_folding_stops_where_rounding_is_a_billionth(kind, biased):
    """What is left of constant columns is at least 4·10⁹ γ(2d + 16) times what was rounded:
    √d |Γw|_F + |β||w|_F + |b| for each projection.
    """
    weight, bias = torch.full((4,), 2.0, dtype=D), 1.5 * torch.ones(4, dtype=D) if biased else None
    layer, u, b = Normalize(0.01, weight, bias), torch.tensor([[3.0]], dtype=D), torch.tensor([7.0], dtype=D)
    good = 2 * FOUR  # nothing is lost of it
    sizes = {  # of a thin column, and of a good one
        "thin": 2 * 2.0 + (3.0 * 1.0 if biased else 0.0) + (7.0 if kind == "keys" else 0.0),
        "good": 2 * 4.0 + (3.0 * 2.0 if biased else 0.0) + (7.0 if kind == "queries" else 0.0),
    }
    unit = 4e9 * float(relative_error(2 * 4 + 16))
    if kind in ("linear", "factored"):
        edge = unit * sizes["thin"] / 2  # √d t against it
    else:
        edge = unit * sizes["thin"] * sizes["good"] / (4 * 4)  # d |A'|, where the good column gives 4
    for share, enough in ((0.85, False), (1.15, True)):
        thin = _thin(share * edge)
        potential, lookup = Dot(good, good, scale=1.0), Linear(good)
        if kind == "linear":
            lookup = Linear(thin)
        elif kind == "factored":
            lookup = Factored(thin, u)
        elif kind == "keys":
            potential = Dot(good, thin, scale=1.0, b_k=b)
        else:
            potential = Dot(thin, good, scale=1.0, b_k=b)
        if enough:
            fold(layer, Attention(potential, lookup))
        else:
            with pytest.raises(Refusal, match="leaves little but rounding"):
                fold(layer, Attention(potential, lookup))


def test_what_is_not_known_of_the_value_inside_is_carried_on():
    """Nothing moves: the image of the first map is known to its margin, and the last map carries that, and
    the margin once more for the center, √n and n times in Frobenius and TokenSum norm.
    """
    first, last, x = Affine(_t(4, 4)), Affine(_t(4, 3, seed=1)), 1e3 * _t(5, 4, seed=2)
    size = float(torch.linalg.matrix_norm(last.w, 2))
    margin = float(locate.one(first, Measure(x))[1])
    for norm, factor in ((TokenMax(), 1.0), (Frobenius(), math.sqrt(5)), (TokenSum(), 5.0)):
        for domain in (Neighborhood(x, 0.0, TokenMax()), Neighborhood(x, 0.0, Frobenius())):
            held = image(first, domain)
            part = deviation(last, held, norm).value
            found = deviation(Compose((first, last)), domain, norm)
            seen = [rung.value for rung in (found, *found.others) if rung.theorem == "composition"]
            assert seen == [pytest.approx(part + factor * size * margin, rel=1e-6, abs=0)]
            assert part >= size * margin
