"""Blocks and depth by the Taylor model: attacked, compared with products of constants,
and honest where it is vacuous.
"""

import math
from fractions import Fraction

import mpmath
import pytest
import torch

import regard as r
from regard._round import spectral_norm_bound
from regard.proofs.near import taylor
from regard.proofs.near.stages import curvature_of
from regard.proofs.near.taylor import start, step
from regard.proofs.places import project
from regard.proofs.setting import moves_of

D = torch.float64


def block(seed, pre=True, activation=r.maps.Gelu(), width=8, heads=2):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=D) / math.sqrt(shape[-2])

    narrow = width // heads
    dot = r.Dot(
        drawn(heads, width, narrow), drawn(heads, width, narrow), b_q=0.1 * drawn(1, heads, narrow)[0]
    )
    attention = r.maps.Heads(
        r.Attention(dot, r.Linear(drawn(heads, width, narrow))), drawn(heads, narrow, width)
    )
    hidden = r.maps.feed_forward(activation, drawn(width, 12), drawn(12, width), 0.1 * drawn(1, 12)[0])
    gamma = 1 + 0.2 * drawn(1, width)[0]
    layer = r.maps.Normalize(weight=gamma, bias=0.1 * gamma)
    return (r.maps.pre_norm if pre else r.maps.post_norm)(
        attention, hidden, layer, r.maps.Normalize(centered=False)
    )


def tokens(seed, count=5, width=8):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(100 + seed), dtype=D)


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize(
    "activation", [r.maps.Gelu(), r.maps.Gelu(True), r.maps.Silu(), r.maps.Tanh(), r.maps.Relu()], ids=repr
)
def test_no_attack_exceeds_the_deviation(pre, activation):
    map, x = block(0, pre, activation), tokens(0)
    for radius in (1e-4, 1e-2, 0.3, 5.0):
        for domain, norm in (
            (r.Neighborhood(x, radius, r.TokenMax()), r.TokenMax()),
            (r.one_token(x, 1, radius), r.Frobenius()),
        ):
            state = step(map, start(x, moves_of(domain)))
            found = r.falsify_deviation(map, domain, norm, restarts=1, steps=6).value
            bound = float(state.deviation(norm))
            assert found <= bound
            if radius == 1e-4 and not isinstance(activation, r.maps.Relu):
                assert bound <= 1.3 * found


def test_every_token_stays_within_its_own_bound():
    map, x = r.maps.Compose(block(1).maps + block(2, False).maps), tokens(1)
    generator = torch.Generator().manual_seed(0)
    for radius in (1e-3, 0.1):
        radii = radius * torch.rand(5, generator=generator, dtype=D)
        bound = step(map, start(x, radii)).moves().bound
        for _ in range(50):
            direction = torch.randn(5, 8, generator=generator, dtype=D)
            other = x + radii.unsqueeze(-1) * direction / direction.norm(dim=-1, keepdim=True)
            assert bool(((map(other) - map(x)).norm(dim=-1) <= bound).all())


def test_the_linear_part_is_the_jacobian_of_the_network():
    map, x = block(3), tokens(3)
    state = step(map, start(x, torch.ones(5, dtype=D)))
    matrix = state.columns[0].blocks.permute(0, 2, 1, 3).reshape(40, 40)
    torch.testing.assert_close(matrix, r.linearize(map, x).dense(), rtol=1e-10, atol=1e-10)


def test_depth_is_far_below_the_product_of_constants():
    map, x = r.maps.Compose(tuple(inner for seed in range(4) for inner in block(seed).maps)), tokens(4)
    domain = r.Neighborhood(x, 1e-5, r.TokenMax())
    certificate = r.deviation(map, domain, r.TokenMax())
    assert certificate.theorem.startswith("the Taylor model")
    found = r.falsify_deviation(map, domain, r.TokenMax(), restarts=1, steps=4).value
    assert found <= certificate.value <= 1.5 * found
    constant = r.certify(map, domain, r.TokenMax())
    product = next(rung for rung in constant.others if rung.theorem == "composition")
    assert constant.theorem.startswith("the Taylor model")
    assert constant.value < 0.1 * product.value
    assert found / 1e-5 <= constant.value <= 2 * found / 1e-5


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("activation", [r.maps.Gelu(), r.maps.Relu()], ids=repr)
@pytest.mark.parametrize("norm", [r.TokenMax(), r.Frobenius()], ids=repr)
def test_no_derivative_of_the_neighborhood_exceeds_the_constant(pre, activation, norm):
    map, x = block(5, pre, activation), tokens(5)
    generator = torch.Generator().manual_seed(0)
    for radius in (0.0, 1e-4, 1e-2, 0.3):
        domain = r.Neighborhood(x, radius, norm)
        ladder = r.certify(map, domain, norm)
        rungs = [
            rung.value for rung in (ladder, *ladder.others) if rung.theorem.startswith("the Taylor model")
        ]
        if not rungs:  # its remainders are no numbers, and it proves no infinity
            assert radius == 0.3
            assert any(
                why.startswith("the Taylor model") and "use a smaller radius" in why for why in ladder.refused
            )
            continue
        (value,) = rungs
        for _ in range(6):
            other = project.one(domain, x + 2 * radius * torch.randn(5, 8, generator=generator, dtype=D))
            jacobian = r.linearize(map, other)
            if isinstance(norm, r.Frobenius):
                seen = float(torch.linalg.matrix_norm(jacobian.dense(), 2))
            else:
                blocks = jacobian.dense().unflatten(0, (5, 8)).unflatten(-1, (5, 8))
                direction = torch.randn(5, 5, 8, generator=generator, dtype=D)  # one for each row
                for _ in range(20):
                    direction = direction / direction.norm(dim=-1, keepdim=True)
                    moved = torch.einsum("iejd,ijd->ie", blocks, direction)
                    direction = torch.einsum("iejd,ie->ijd", blocks, moved)
                seen = float(moved.norm(dim=-1).max())
            assert seen <= value * (1 + 1e-12)
        if radius <= 1e-4 and not isinstance(activation, r.maps.Relu):
            assert value <= 1.2 * seen


def test_it_says_where_it_is_vacuous():
    map, x = r.maps.Compose(tuple(inner for seed in range(4) for inner in block(seed).maps)), tokens(4)
    certificate = r.deviation(map, r.Neighborhood(x, 0.3, r.TokenMax()), r.TokenMax())
    rung = next(c for c in (certificate, *certificate.others) if c.theorem.startswith("the Taylor model"))
    assert "vacuous" in rung.theorem


def test_merged_remainders_are_bounds_too(monkeypatch):
    map, x = r.maps.Compose(block(1).maps + block(2).maps), tokens(1)
    radii = torch.full((5,), 1e-2, dtype=D)
    whole = step(map, start(x, radii)).moves().bound
    monkeypatch.setattr(taylor, "NUMBERS", 2000)
    merged = step(map, start(x, radii))
    assert len(merged.columns) <= 3
    assert bool((merged.moves().bound >= whole * (1 - 1e-9)).all())


@pytest.mark.parametrize(
    "activation",
    [r.maps.Gelu(), r.maps.Gelu(True), r.maps.Silu(), r.maps.Silu(1.702), r.maps.Tanh()],
    ids=repr,
)
def test_curvatures_are_suprema_rounded_up(activation):
    x = torch.linspace(-10, 10, 400001, dtype=D)
    one = torch.ones_like(x)

    def derivative(function):
        return lambda at: torch.func.jvp(function, (at,), (one,))[1]

    second = derivative(derivative(activation))
    bounds = curvature_of(activation)
    for function, bound in zip((second, derivative(second)), bounds, strict=True):
        top = float(function(x).abs().max())
        assert top <= bound <= 1.0001 * top


def test_weights_of_the_points_are_refused():
    x = r.Measure(tokens(0), torch.zeros(5, dtype=D))
    certificate = r.deviation(block(0), r.Neighborhood(x, 0.1, r.TokenMax()), r.TokenMax())
    assert any("weights and marks" in why for why in certificate.refused)


def test_a_sign_that_is_a_rounding():
    """ReLU of entries whose exact value is positive and whose computed value is negative:
    the slope may be either.
    """
    found = 0
    for seed in range(200):
        draw = torch.Generator().manual_seed(seed)
        w, x = (
            torch.randn(3, 1, generator=draw, dtype=torch.float64),
            1e6 * torch.randn(1, 3, generator=draw, dtype=torch.float64),
        )
        exact = sum(
            (Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x[0], w[:, 0], strict=True)), Fraction(0)
        )
        b = torch.nextafter(-(x @ w)[0], torch.full((1,), -math.inf, dtype=torch.float64))
        true, computed = exact + Fraction(float(b)), float(x @ w + b)
        if not true > 0 > computed:
            continue
        found += 1
        radius = float(min(true, -Fraction(computed))) / float(w.norm()) / 4
        map = r.maps.feed_forward(r.maps.Relu(), w, torch.ones(1, 3, dtype=torch.float64), b)
        claim = r.certify(map, r.Neighborhood(x, radius, r.TokenMax()), r.TokenMax())
        assert all(
            rung.value >= float(w.norm()) * math.sqrt(3) * (1 - 1e-9) for rung in (claim, *claim.others)
        )
    assert found


def test_products_that_cancel_lose_what_their_factors_lose():
    """x ↦ (ax, (a² - 1)x) ↦ a·ax - (a² - 1)x = x in exact numbers; the rounded product is zero."""
    a = 94906267.0
    first = r.maps.Affine(torch.tensor([[a, a * a - 1]], dtype=D))
    second = r.maps.Affine(torch.tensor([[a], [-1.0]], dtype=D))
    assert Fraction(a) * Fraction(a) - Fraction(a * a - 1) == 1
    state = step(r.maps.Compose((first, second)), start(torch.zeros(1, 1, dtype=D), torch.ones(1, dtype=D)))
    assert float(state.moves().bound) >= 1


def test_the_rounding_of_the_jacobian_of_attention_is_counted():
    """Large tokens, three of them nearly equal: what laws lose is more than 1e-11 of the derivative."""
    draw = torch.Generator().manual_seed(6)
    base = 3e3 * torch.randn(1, 2, generator=draw, dtype=D)
    torch.randn(2, 2, generator=draw, dtype=D)
    x = torch.cat([base, base + 2e-4 * torch.randn(2, 2, generator=draw, dtype=D), -base])
    map = r.maps.Compose((r.Attention(r.Bilinear(torch.eye(2, dtype=D))),))
    first, *rest = taylor.slopes(map, start(x, torch.full((4,), 1e-30, dtype=D)))
    matrix = first.blocks.permute(0, 2, 1, 3).reshape(8, 8)
    beyond = sum(float(taylor.norm_of_rows(r.Frobenius(), column.reach())) for column in rest)
    certified = spectral_norm_bound(matrix) * (1 + 1e-11) + beyond
    with mpmath.workdps(50):
        jacobian = _exact_jacobian([[mpmath.mpf(float(value)) for value in row] for row in x])
        direction = mpmath.matrix([1] * 8)
        for _ in range(40):
            direction = jacobian.T * (jacobian * direction)
            direction = direction / mpmath.norm(direction)
        assert mpmath.norm(jacobian * direction) <= certified


def _exact_jacobian(x):
    """Of softmax(x xᵀ) x, in the numbers of mpmath."""
    n, d = len(x), len(x[0])
    found = mpmath.zeros(n * d, n * d)
    for i in range(n):
        scores = [mpmath.fdot(x[i], x[k]) for k in range(n)]
        weights = [mpmath.exp(score - max(scores)) for score in scores]
        law = [weight / sum(weights) for weight in weights]
        mean = [mpmath.fdot(law, [x[k][c] for k in range(n)]) for c in range(d)]
        for j in range(n):
            for a in range(d):
                for b in range(d):
                    value = law[j] * ((a == b) + (x[j][a] - mean[a]) * x[i][b])
                    own = [law[k] * (x[k][a] - mean[a]) * x[k][b] for k in range(n)] if i == j else [0]
                    found[i * d + a, j * d + b] = value + sum(own)
    return found
