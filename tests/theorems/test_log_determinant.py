"""The log-determinant of x + f(x): exact means over all signs, the remainder attacked, control variates."""

import itertools
import math

import pytest
import torch

import regard as r
from regard._upper import Upper
from regard.maps import Affine, Compose
from regard.nn import Invertible, Roulette, Series, Truncated
from regard.nn.contraction import Contraction
from regard.nn.kronecker import kronecker
from regard.nn.log_determinant import _pull
from regard.nonexpansive import IntoBall
from regard.proofs.theorems.log_determinant import series_remainder
from tests.theorems.exact import generator, normal

D = torch.float64
BALL = r.Ball(1.0)


def attention(g, w=0.5, width=2, seed=0):
    """Dot products of size g on the unit ball, values of norm w."""
    matrix = normal(generator(seed), width, width)
    return r.Attention(r.Dot(scale=g), r.Linear(w * matrix / torch.linalg.matrix_norm(matrix, 2)))


def inside(*shape, seed=1):
    return IntoBall(0.999)(normal(generator(seed), *shape))


def every_sign(tokens, width):
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=tokens * width)), dtype=D)
    return signs.reshape(-1, tokens, width)


def jacobian_of(f, x):
    return torch.func.jacrev(f)(x).reshape(x.numel(), x.numel())


def traces(matrix, terms):
    """Σ_{k≤K} (-1)^{k+1} tr J^k/k, by powers."""
    powers = [torch.linalg.matrix_power(matrix, k).trace() for k in range(1, terms + 1)]
    return sum((-1) ** (k + 1) / k * power for k, power in enumerate(powers, 1))


def truncated(matrix, terms):
    return float(traces(matrix, terms))


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_the_mean_over_all_signs_is_the_sum_of_traces(terms):
    """No draws: 64 vectors of signs, each once. With control, what is left of the series of J₀."""
    x, signs, map = inside(3, 2), every_sign(3, 2), attention(0.6)
    contraction = Contraction(map, r.TokenMax(), BALL, "")
    many = x.expand(len(signs), 3, 2).clone().requires_grad_()
    ones = torch.ones(terms, len(signs), dtype=D)
    series = Series(control=True)
    each = series._series(_pull(contraction(many), many), signs, ones, False)
    whole = jacobian_of(map, x)
    assert float(each.mean()) == pytest.approx(truncated(whole, terms), abs=1e-13)
    controlled = each + series._controlled(contraction, x, signs, ones, False)
    rows, matrix = kronecker.one(map, x)
    still = torch.kron(rows.contiguous(), matrix.mT.contiguous())
    left = float(torch.linalg.slogdet(torch.eye(6, dtype=D) + still)[1]) - truncated(still, terms)
    assert float(controlled.mean()) == pytest.approx(truncated(whole, terms) + left, abs=1e-13)
    assert float(controlled.var()) < 0.5 * float(each.var())
    exact, v = torch.linalg.slogdet(torch.eye(6, dtype=D) + still)[1], signs.flatten(1)
    powers = [torch.linalg.matrix_power(still, k) for k in range(1, terms + 1)]
    forms = sum((-1) ** (k + 1) / k * ((v @ power) * v).sum(-1) for k, power in enumerate(powers, 1))
    torch.testing.assert_close(controlled - each, exact - forms, atol=1e-13, rtol=0)


def test_without_scores_nothing_is_left_to_chance():
    """J = J₀: every vector of signs and every number of terms gives the determinant itself."""
    x = inside(4, 3)
    flow = Invertible(
        attention(0.0, 0.8, 3),
        domain=BALL,
        log_determinant=Series(50, Roulette(1, 0.4), control=True, seed=0),
    )
    found = flow.measure(x)
    assert float(found.standard_error) < 1e-13
    exact = torch.linalg.slogdet(torch.eye(12, dtype=D) + jacobian_of(flow.contraction, x))[1]
    assert float(found.log_det) == pytest.approx(float(exact), abs=1e-12)


def test_terms_are_drawn_as_often_as_their_chance_says():
    way = Roulette(2, 0.7)
    drawn = torch.tensor(way.draw(200_000, 0.5, torch.Generator().manual_seed(0)))
    for k in range(1, 9):
        chance = way.chance(k, 0.5)
        error = math.sqrt(chance * (1 - chance) / 200_000)
        assert abs(float((drawn >= k).double().mean()) - chance) <= 4 * error + 1e-12


def test_no_thousand_maps_leave_more():
    """The remainder, for matrices with any eigenvalues of modulus up to L."""
    g = generator(2)
    for size in (1, 2, 5):
        matrices = normal(g, 350, size, size)
        matrices[::5] = torch.linalg.qr(matrices[::5])[0]
        matrices[1::5] = torch.eye(size, dtype=D)
        lengths = torch.rand(350, generator=g, dtype=D)
        sign = torch.where(torch.rand(350, generator=g) < 0.5, -1.0, 1.0)
        scaled = matrices / torch.linalg.matrix_norm(matrices, 2)[:, None, None] * lengths[:, None, None]
        scaled = scaled * sign[:, None, None]
        exact = torch.linalg.slogdet(torch.eye(size, dtype=D) + scaled)
        assert bool((exact.sign > 0).all())
        for terms in (1, 4):
            for matrix, length, value in zip(scaled, lengths, exact.logabsdet, strict=True):
                bound = float(series_remainder(Upper(float(length)), size, terms))
                assert abs(float(value) - truncated(matrix, terms)) <= bound + 1e-13


def test_the_remainder_is_nearly_attained():
    """-L times the identity, whose terms all have one sign; L small: the first term that is left out."""
    for size, length, terms in ((3, 0.01, 1), (2, 0.02, 2)):
        matrix = -length * torch.eye(size, dtype=D)
        left = abs(
            float(torch.linalg.slogdet(torch.eye(size, dtype=D) + matrix)[1]) - truncated(matrix, terms)
        )
        bound = Truncated(terms).remainder(length, size)
        assert 0.97 * bound < left <= bound
        assert bound == pytest.approx(size * length ** (terms + 1) / (terms + 1) / (1 - length), rel=1e-12)


def test_a_thousand_derivatives_differ_by_their_scores():
    """|J - J₀| ≤ 2|M||A|R² in TokenMax norm: largest sums over rows of blocks."""
    count, worst = 0, 0.0
    for seed in range(10):
        for g in (0.1, 1.0, 5.0):
            map, points = attention(g, 0.7, 2, seed), inside(34, 4, 2, seed=seed)
            points[::2] /= points[::2].norm(dim=-1, keepdim=True)
            rows, matrix = kronecker.one(map, points)
            found = torch.func.vmap(torch.func.jacrev(map))(points)  # (b, i, e, j, c)
            still = rows[:, :, None, :, None] * matrix.mT[None, None, :, None, :]
            blocks = (found - still).transpose(2, 3).flatten(0, 2)
            sums = torch.linalg.matrix_norm(blocks, 2).reshape(len(points), 4, 4).sum(-1)
            d = torch.nn.functional.normalize(normal(generator(seed), 20, len(points), 4, 2), dim=-1)
            moved = torch.einsum("biejc,sbjc->sbie", found - still, d).norm(dim=-1).amax()
            bound = 2 * 0.7 * g
            assert float(moved) <= bound * (1 + 1e-12)
            assert float(moved) <= float(sums.max()) * (1 + 1e-12)
            count, worst = count + 20 * len(points), max(worst, float(moved) / bound)
    assert count > 1000
    assert worst > 0.2


def test_a_control_whose_series_does_not_add_up_is_refused():
    """An eigenvalue of P ⊗ M above one would make the mean wrong."""
    x = inside(3, 2)
    contraction = Contraction(Affine(0.5 * torch.eye(2, dtype=D)), r.TokenMax(), BALL, "")
    contraction.f = r.nn.Declared(Affine(1.5 * torch.eye(2, dtype=D)))
    ones = torch.ones(2, 1, dtype=D)
    with pytest.raises(r.errors.ArgumentError, match=r"eigenvalue of modulus 1\.5; its series"):
        Series(control=True)._controlled(contraction, x, torch.ones(1, 3, 2, dtype=D), ones, False)


def test_eigenvalues_stay_below_the_constant():
    """ρ(J₀) ≤ |M| ≤ L, also behind a projection, so that no certified map is refused."""
    for seed in range(20):
        map = Compose((IntoBall(1.0), attention(0.4, 0.6, 2, seed)))
        constant = r.certify(map, r.Whole(), r.TokenMax()).value
        rows, matrix = kronecker.one(map, 3 * normal(generator(seed), 4, 2))
        products = torch.linalg.eigvals(rows).unsqueeze(-1) * torch.linalg.eigvals(matrix)
        assert float(products.abs().max()) <= constant


@pytest.mark.parametrize("neumann", [True, False])
def test_the_mean_of_gradients_over_all_signs_is_that_of_the_traces(neumann):
    """∂ Σ_{k≤K} (-1)^{k+1} tr J^k/k, and with control what is left of the series of J₀, whose gradient is not
    dropped.
    """
    layer, terms = r.nn.Declared(attention(0.6).replace(lookup=r.Linear(_learned(2)))), 3
    weight, x, signs = next(layer.parameters()), inside(2, 2).requires_grad_(), every_sign(2, 2)
    contraction = Contraction(layer, r.TokenMax(), BALL, "")
    series, ones = Series(control=True, neumann=neumann), torch.ones(terms, len(signs), dtype=D)
    many = x.expand(len(signs), 2, 2)
    each = series._series(_pull(contraction(many), many), signs, ones, True)
    controlled = each + series._controlled(contraction, x, signs, ones, True)
    whole = torch.func.jacrev(contraction)(x).reshape(4, 4)
    rows, matrix = kronecker.one(layer.value(), x)
    still = torch.kron(rows.contiguous(), matrix.mT.contiguous())
    left = torch.linalg.slogdet(torch.eye(4, dtype=D) + still)[1] - traces(still, terms)
    for found, wanted in ((each, traces(whole, terms)), (controlled, traces(whole, terms) + left)):
        one = torch.autograd.grad(found.mean(), (x, weight), retain_graph=True)
        other = torch.autograd.grad(wanted, (x, weight), retain_graph=True)
        for first, second in zip(one, other, strict=True):
            torch.testing.assert_close(first, second, atol=1e-13, rtol=1e-12)


def test_control_takes_the_chance_out_of_gradients():
    """The spread of the gradient over sixty draws, with and without it; and there is a gradient."""
    layer, x = r.nn.Declared(attention(0.3).replace(lookup=r.Linear(_learned(2)))), inside(4, 2)
    weight, spread, flow = next(layer.parameters()), {}, Invertible(layer, domain=BALL)
    exact = torch.autograd.grad(flow(x)[1], weight)[0]
    for control in (False, True):
        slopes = []
        for seed in range(60):
            way = Series(1, Roulette(3, 0.5), control=control, seed=seed)
            slopes.append(torch.autograd.grad(way.of(flow.contraction, x, 0.9).log_det, weight)[0])
        found = torch.stack(slopes)
        error = found.std(0) / math.sqrt(len(slopes))
        assert bool(((found.mean(0) - exact).abs() <= 4 * error + 1e-12).all())
        spread[control] = float(found.var(0).sum())
    assert spread[False] > 3 * spread[True]


def _learned(width):
    return torch.nn.Parameter(0.5 * torch.linalg.qr(normal(generator(4), width, width))[0])
