"""Numbers on one side of true ones: every operation against exact rationals, its counter of roundings,
and where it underflows.
"""

import math
from fractions import Fraction

import mpmath
import pytest
import torch

from regard._enclosed import (
    Matrix,
    Numbers,
    Vectors,
    computed_lengths,
    distances,
    exact_matrix,
    half_diameters,
    largest_roots,
    length,
    lengths,
    lengths_below,
    product_norm,
    root_of_squares,
    spectral_norms,
)
from regard._upper import (
    ELEMENTARY,
    TINY,
    UNIT,
    Lower,
    Upper,
    exact,
    exact_lower,
    largest,
    least,
    product,
    relative_error,
    root,
    sizes,
    stack,
    total,
)
from tests.nouns import D

U = Fraction(1, 2**53)
G = torch.Generator().manual_seed(4)


def numbers(*shape):
    return torch.rand(*shape, generator=G, dtype=D) * 10.0 ** torch.randint(-3, 4, shape, generator=G)


def fractions(tensor):
    return [Fraction(v) for v in tensor.flatten().tolist()]


@pytest.mark.parametrize("roundings", [0, 1, 7, 1000, 10**9])
def test_the_bound_pays_for_every_rounding(roundings):
    """value (1 - u)^{∓k}, to two units more."""
    with mpmath.workdps(60):
        factor = (1 - mpmath.mpf(2) ** -53) ** -roundings
        above, below = float(Upper(3.0, roundings)), float(Lower(3.0, roundings))
        room = 1 + 6 * UNIT + 2 * (roundings * UNIT) ** 2
        assert 3 * factor <= above <= 3 * factor * room
        assert 3 / factor / room <= below <= 3 / factor


def test_the_bound_pays_for_itself_once():
    """k + 1 roundings, to the unit: with u = 2⁻⁵³ numbers above one are 2u apart, those below one u."""
    u = UNIT
    assert [float(Upper(1.0, k)) for k in (3, 4)] == [1 + 6 * u, 1 + 8 * u]
    assert [float(Lower(1.0, k)) for k in (1, 3, 4)] == [1 - 2 * u, 1 - 4 * u, 1 - 5 * u]
    assert [float(relative_error(k)) for k in (0, 4, 6)] == [2 * u, 6 * u, 8 * u]
    with mpmath.workdps(40):
        for k in (2**40, 2**50, 2**51 + 2**50):
            units = k * mpmath.mpf(u)
            assert float(Upper(1.0, k - 1)) == pytest.approx(float(1 + units / (1 - 2 * units)), rel=1e-15)
    assert repr(Upper(2.0, 3)) == "Upper(2.0, 3 roundings)"
    assert repr(Lower(torch.ones(2, 3, dtype=D))) == "Lower([2, 3], 0 roundings)"


def test_sums_and_maxima_of_nothing():
    none = Upper(torch.zeros(0, dtype=D), 7)
    assert (float(none.sum().value), none.sum().roundings) == (0.0, 7)
    assert Upper(torch.ones(1, dtype=D), 7).sum().roundings == 7
    assert Upper(torch.ones(2, dtype=D), 7).sum().roundings == 8
    assert float(none.amax()) == 0
    assert Upper(torch.zeros(0, 3, dtype=D)).amax(-1).value.shape == (0,)
    assert float(Upper(torch.tensor([[1.0, 3.0], [2.0, 0.0]], dtype=D)).amax()) == 3


def test_the_bound_of_nothing_known():
    assert float(Upper(math.nan)) == float(Upper(math.nan, 3)) == math.inf
    assert float(Lower(math.nan, 3)) == 0
    assert float(Upper(1.0, 2**53)) == math.inf
    assert float(Upper(1.0, 2**52)) == math.inf


def test_counters_of_roundings():
    """One for a sum, a product, a quotient or a root, on top of those of what goes in; halves are exact."""
    a, b, low = Upper(numbers(4), 3), Upper(numbers(4), 5), Lower(numbers(4), 6)
    counted = {
        6: a + b,
        9: a * b,
        4: a + 2,
        7: a.square(),
        3: a.sqrt(),
        2: Upper(numbers(4), 2).sqrt(),
        10: a / low,
        5: b.halved(),
        13: Upper(numbers(3, 4), 3) @ Upper(numbers(4, 2), 5),
    }
    for roundings, found in counted.items():
        assert found.roundings == roundings
    assert a.sum().roundings == 3 + 3
    assert a.norm().roundings == (7 + 3 + 1) // 2 + 1
    assert a.sums_of_others().roundings == 3 + 4
    assert (Lower(numbers(3, 4), 3) @ Lower(numbers(4, 2), 5)).roundings == 13
    assert (low / a).roundings == (low / 2).roundings + 3 == 10
    assert (a - low).roundings == (low - a).roundings == 1
    assert (
        a.exp().roundings
        == a.expm1().roundings
        == a.tanh().roundings
        == a.sinh().roundings
        == ELEMENTARY
        == 16
    )
    assert [
        part.roundings
        for part in (a.amax(-1), a[0], a.unsqueeze(0), a.where(a.value > 0), a.minimum(b), stack([a, b]))
    ] == [3] * 4 + [5] * 2


@pytest.mark.parametrize("seed", range(8))
def test_operations_against_rationals(seed):
    """Bounds of sums, products, quotients, roots and norms of numbers that are exact: on their side,
    and within a few units.
    """
    g = torch.Generator().manual_seed(seed)
    x, y = (
        torch.rand(5, generator=g, dtype=D) * 10.0 ** torch.randint(-3, 4, (5,), generator=g)
        for _ in range(2)
    )
    fx, fy = fractions(x), fractions(y)
    pairs = list(zip(fx, fy, strict=True))
    above, below = (exact(x), exact(y)), (exact_lower(x), exact_lower(y))
    cases = [
        (above[0] + above[1], below[0] + below[1], [a + b for a, b in pairs]),
        (above[0] * above[1], below[0] * below[1], [a * b for a, b in pairs]),
        (above[0] / below[1], below[0] / above[1], [a / b for a, b in pairs]),
        (above[0] / 3, below[0] / 3, [a / 3 for a in fx]),
        (above[0].square(), below[0].square(), [a * a for a in fx]),
        (above[0].sum(), below[0].sum(), [sum(fx)]),
        (above[0].halved(), below[0].halved(), [a / 2 for a in fx]),
        (above[0].norm().square(), below[0].norm().square(), [sum(a * a for a in fx)]),
        (
            above[0].unsqueeze(0) @ above[1].unsqueeze(-1),
            below[0].unsqueeze(0) @ below[1].unsqueeze(-1),
            [sum(a * b for a, b in pairs)],
        ),
        (above[0].minimum(above[1]), below[0].minimum(below[1]), [min(p) for p in pairs]),
        (above[0].maximum(above[1]), below[0].maximum(below[1]), [max(p) for p in pairs]),
        (above[0].amax(-1), below[0].amax(-1), [max(fx)]),
        (
            total([above[0], above[1], above[0]]),
            below[0] + below[1] + below[0],
            [2 * a + b for a, b in pairs],
        ),
    ]
    for high, low, truths in cases:
        for top, bottom, truth in zip(fractions(high.bound), fractions(low.bound), truths, strict=True):
            assert bottom <= truth <= top
            assert truth * (1 - 40 * U) <= bottom
            assert top <= truth * (1 + 40 * U)


def test_differences_against_rationals():
    """Only what is at most the true number is taken from an Upper: it stays above, and never below zero."""
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        x, y = (torch.rand(5, generator=g, dtype=D) for _ in range(2))
        for high, low, a, b in zip(
            (exact(x) - exact_lower(y)).bound.tolist(),
            (exact_lower(x) - exact(y)).bound.tolist(),
            fractions(x),
            fractions(y),
            strict=True,
        ):
            truth = max(a - b, Fraction(0))
            assert Fraction(low) <= truth <= Fraction(high) <= truth * (1 + 8 * U)
            assert truth * (1 - 8 * U) <= Fraction(low)
        for high, low, a in zip(
            (1 - exact_lower(x)).bound.tolist(), (1 - exact(x)).bound.tolist(), fractions(x), strict=True
        ):
            assert Fraction(low) <= 1 - a <= Fraction(high) <= (1 - a) * (1 + 8 * U)


def test_sums_of_others_keep_what_is_small():
    x = torch.tensor([1.0, 1e-20, 2e-20], dtype=D)
    found = fractions(exact(x).sums_of_others().bound)
    for here, k in zip(found, range(3), strict=True):
        truth = sum(Fraction(float(v)) for i, v in enumerate(x) if i != k)
        assert truth <= here <= truth * (1 + 12 * U)
    infinite = exact(torch.tensor([math.inf, 1.0], dtype=D)).sums_of_others().bound
    assert infinite.tolist()[1] == math.inf
    unknown = Upper(torch.tensor([math.nan, 1.0, 1e305], dtype=D)).sums_of_others().bound.tolist()
    assert unknown[1:] == [math.inf] * 2
    assert unknown[0] == pytest.approx(1e305)
    assert 1 <= infinite.tolist()[0] < 1.1


def test_products_that_underflow_do_not_vanish():
    """TINY in an Upper, zero in a Lower; what is no number is no bound."""
    small = 1e-200
    assert (exact(small) * exact(small)).value == exact(small).square().value == TINY
    assert (exact_lower(small) * exact_lower(small)).value == exact_lower(small).square().value == 0
    assert exact(5e-324).halved().value == TINY
    assert exact_lower(5e-324).halved().value == 0
    assert (
        float(exact(0.0) * exact(math.inf))
        == float(exact(1.0) / Lower(0.0))
        == float(exact(0.0) / Lower(0.0))
        == math.inf
    )
    assert float(exact(0.0) * exact(1.0)) <= 2 * TINY
    assert (exact(1e-300) / exact_lower(1e100)).value == TINY
    assert float(exact_lower(0.0) / exact(0.0)) == float(exact_lower(1.0) / exact(math.inf)) == 0
    lost = exact(torch.full((1, 2), small, dtype=D)) @ exact(torch.full((2, 1), small, dtype=D))
    assert float(lost) >= 2 * Fraction(small) ** 2
    nothing = Upper(math.nan)
    assert nothing.minimum(exact(2.0)).value == exact(2.0).minimum(nothing).value == 2
    assert float(nothing.maximum(exact(2.0))) == float(exact(2.0).maximum(nothing)) == math.inf
    assert Lower(math.nan).maximum(exact_lower(2.0)).value == 2


def test_elementary_functions_against_sixty_digits():
    """Of the bound, and eight units in the last place for the function."""
    with mpmath.workdps(60):
        for value in (1e-9, 0.3, 2.0, 30.0):
            for name, function in (
                ("exp", mpmath.exp),
                ("expm1", mpmath.expm1),
                ("sinh", mpmath.sinh),
                ("tanh", mpmath.tanh),
            ):
                truth = function(mpmath.mpf(value))
                assert (
                    truth * (1 + 14 * UNIT) <= float(getattr(exact(value), name)()) <= truth * (1 + 40 * UNIT)
                )
    assert float(exact(1000.0).exp()) == math.inf


def test_what_may_not_be_mixed():
    for wrong in (
        lambda: exact(1.0) + 0.5,
        lambda: exact(1.0) + exact_lower(1.0),
        lambda: exact(1.0) * -1,
        lambda: exact(1.0) - exact(1.0),
        lambda: exact_lower(1.0) - exact_lower(1.0),
        lambda: exact(1.0) / exact(1.0),
        lambda: exact(1.0) / 0,
        lambda: exact(1.0) / 0.5,
        lambda: exact_lower(1.0) / exact_lower(1.0),
        lambda: exact_lower(1.0) / 0,
        lambda: exact(1.0).minimum(exact_lower(1.0)),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="not negative"):
        exact(-1.0)
    assert float((0 + exact(2.0)).value) == 2.0
    assert float((exact(2.0) / 1).value) == float((exact_lower(2.0) / 1).value) == 2.0


def test_relative_errors_and_roots():
    with mpmath.workdps(60):
        for count in (1, 100, 10**6):
            truth = (1 - mpmath.mpf(2) ** -53) ** -count - 1
            assert truth <= float(relative_error(count)) <= truth * (1 + 8 / mpmath.mpf(count))
        assert mpmath.sqrt(3) <= float(root(3)) <= mpmath.sqrt(3) * (1 + 8 * UNIT)
    assert (root(2.0).roundings, sizes(torch.tensor([-2.0, 3.0], dtype=D)).value.tolist()) == (1, [2.0, 3.0])


# Signed numbers with their errors


@pytest.mark.parametrize("center", [-600.0, -3.0, 0.0, 0.4, 30.0])
def test_enclosed_numbers(center):
    """largest and smallest, e^x and σ(x), with the error and with more: on their side,
    and no farther than it takes.
    """
    given = Numbers(torch.tensor([center, -math.inf], dtype=D), exact(1e-3))
    with mpmath.workdps(60):
        low, high = mpmath.mpf(center) - mpmath.mpf(1e-3), mpmath.mpf(center) + mpmath.mpf(1e-3)
        more = mpmath.mpf(0.25)
        close = 1 + 1e-12
        assert high <= float(given.largest()[0]) <= high + 1e-12
        assert high + more <= float(given.largest(exact(0.25))[0]) <= high + more + 1e-12
        assert low - 1e-12 <= float(given.smallest()[0]) <= low
        assert low - more - 1e-12 <= float(given.smallest(exact(0.25))[0]) <= low - more

        def logistic(x):
            return 1 / (1 + mpmath.exp(-x))

        for above, below, function in (
            (given.exp, given.exp_low, mpmath.exp),
            (given.logistic, given.logistic_low, logistic),
        ):
            for extra, by in ((None, mpmath.mpf(0)), (exact(0.25), more)):
                assert function(high + by) <= above(extra).bound[0].item() <= function(high + by) * close
                assert function(low - by) / close <= below(extra).bound[0].item() <= function(low - by)
                assert above(extra).bound[1].item() == below(extra).bound[1].item() == 0
    assert 1.0 <= given.logistic(exact(1e9)).bound[0].item() <= 1 + 40 * UNIT


def test_exponentials_that_leave_the_range():
    """Never zero where the true one is not, from above; never more than it, from below."""
    with mpmath.workdps(30):
        for center in (-760.0, -744.6, -742.3, -741.7, -740.0, -739.1, -700.0, -660.0):
            given, truth = Numbers(torch.tensor([center], dtype=D), exact(0.0)), mpmath.exp(center)
            for above, below in ((given.exp(), given.exp_low()), (given.logistic(), given.logistic_low())):
                assert truth * (1 - truth) <= mpmath.mpf(float(above)) <= max(truth * (1 + 1e-12), 2e-300)
                assert mpmath.mpf(float(below)) <= truth
                assert (float(below) > 0) == (center == -660.0)
    assert [part.roundings for part in (given.exp(), given.exp_low())] == [ELEMENTARY] * 2
    assert [part.roundings for part in (given.logistic(), given.logistic_low())] == [ELEMENTARY] * 2


def test_lengths_of_vectors():
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-160, 0.0]], dtype=D)
    found = Vectors(vectors, exact(0.5)).lengths().bound.tolist()
    assert 5.5 <= found[0] <= 5.5 * (1 + 1e-14)
    assert 0.5 <= found[1] <= 0.5 * (1 + 1e-14)
    assert computed_lengths(vectors).bound[2] >= 1e-160
    assert computed_lengths(torch.ones(7, dtype=D)).roundings == (7 + 3) // 2 + 1


def test_lengths_from_below_and_norms_of_scaled_vectors():
    """All roundings are counted: (d + 2)/2 and a root of a length, and those of what it is scaled by."""
    vectors = torch.zeros(3, 400, dtype=D)
    vectors[0, :2], vectors[1, 0] = torch.tensor([3.0, 4.0], dtype=D), 1e-150
    low = Vectors(vectors, exact(0.0)).lengths_low()
    count = (400 + 2 + 1) // 2 + 1
    assert 5 * (1 - (count + 2) * U) <= Fraction(float(low.value[0])) <= 5 * (1 - count * U)
    assert low.value[1:].tolist() == [0.0, 0.0]
    assert Vectors(vectors, exact(0.5)).lengths_low().value[0] == pytest.approx(4.5)
    for size, known in ((0.5e-139, False), (2e-139, True)):
        assert bool(Vectors(torch.tensor([size], dtype=D), exact(0.0)).lengths_low().value > 0) == known
    factors = Upper(torch.tensor([2.0, 0.0, 1.0], dtype=D), 7)
    made = Vectors(vectors, exact(0.25)).scaled_norm(factors)
    assert float(made) == pytest.approx(10 + math.sqrt(5) / 4, rel=1e-12)
    one = Vectors(vectors[:1], exact(0.0)).scaled_norm(factors[:1])
    assert one.roundings == count + 7 + 1 + 1


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-160, 1.0, 1e160, 1e300, 1.7e308])
def test_lengths_of_the_smallest_and_the_largest_numbers(size):
    """One entry is its length, however small or large it is."""
    vectors = torch.tensor([[size, 0.0], [0.0, -size]], dtype=D)
    for high in lengths(vectors).bound.tolist():
        assert size <= high <= size * (1 + 1e-14) + 5e-324
    for low in lengths_below(vectors).bound.tolist():
        assert size * (1 - 1e-14) - 5e-324 <= low <= size


def test_products_of_vectors_and_matrices():
    """|M| e_v + |v| e_M + γ |v| |M|_F."""
    g = torch.Generator().manual_seed(5)
    v, m = torch.randn(6, 4, generator=g, dtype=D), torch.randn(4, 3, generator=g, dtype=D)
    longest, size = float(v.norm(dim=-1).max()), float(m.norm())
    norm = float(torch.linalg.matrix_norm(m, 2))
    made = Vectors(v, exact(1e-3)).times(Matrix(m, exact(1e-2), exact(norm)))
    assert torch.equal(made.center, v @ m)
    assert float(made.error) == pytest.approx(norm * 1e-3 + longest * 1e-2, rel=1e-9, abs=0)
    rounded = Vectors(v, exact(0.0)).times(exact_matrix(m))
    assert float(rounded.error) == pytest.approx(float(relative_error(5)) * longest * size, rel=1e-9, abs=0)
    assert float(exact_matrix(m).norm) == pytest.approx(norm, rel=1e-9, abs=0)
    assert float(exact_matrix(m).length) == pytest.approx(size, rel=1e-9, abs=0)


def test_spreads_and_narrow_coordinates():
    """|[√P_k v_k]| and the error; in the span of the vectors nothing is shorter."""
    g = torch.Generator().manual_seed(6)
    flat = torch.randn(2, 5, 2, generator=g, dtype=D) @ torch.randn(2, 7, generator=g, dtype=D)
    law = torch.rand(2, 5, generator=g, dtype=D).softmax(-1)
    exactly = [float(torch.linalg.matrix_norm(law[i].sqrt().unsqueeze(-1) * flat[i], 2)) for i in range(2)]
    found = Vectors(flat, exact(0.25)).spreads(exact(law)).bound.tolist()
    for bound, truth in zip(found, exactly, strict=True):
        assert truth + 0.25 <= bound <= truth * (1 + 1e-9) + 0.25
    narrow = Vectors(flat, exact(0.0)).narrow()
    assert narrow.shape == (2, 5, 2)
    for bound, truth in zip(narrow.spreads(exact(law)).bound.tolist(), exactly, strict=True):
        assert truth <= bound <= truth * (1 + 1e-9)
    lengths, long = narrow.lengths().bound, flat.norm(dim=-1)
    assert bool((long <= lengths).all())
    assert bool((lengths <= long * (1 + 1e-9) + 1e-12).all())
    assert float(narrow.error) <= 1e-12
    counted = Vectors(flat, exact(0.0)).spreads(Upper(law, 40)).roundings
    assert counted == spectral_norms(flat).roundings + 40 // 2 + 3 + 1
    assert float(Vectors(flat, exact(0.5)).narrow().error) == pytest.approx(0.5, rel=1e-9, abs=0)


def test_what_narrow_coordinates_lose():
    """What is outside of them, γ of the sizes of products with a basis, and four units of the result."""
    g = torch.Generator().manual_seed(6)
    flat = torch.randn(10, 2, generator=g, dtype=D) @ torch.randn(2, 7, generator=g, dtype=D)
    longest = float(flat.norm(dim=-1).max())
    made = Vectors(flat.unsqueeze(0), exact(0.0)).narrow()
    rounding = float(relative_error(2 * 7 + 4)) * longest * math.sqrt(2)
    stated = 2 * rounding + 4 * UNIT * longest
    assert stated <= float(made.error) <= stated + 40 * UNIT * longest
    axes = torch.eye(3, dtype=D)[:2].unsqueeze(0)
    for small, width in ((3e-7, 1), (4e-7, 2)):  # squares beside one: 9e-14 and 1.6e-13
        vectors = axes * torch.tensor([1.0, small], dtype=D)[None, :, None]
        found = Vectors(vectors, exact(0.0)).narrow()
        assert found.shape == (1, 2, width)
        stated = float(relative_error(2 * 3 + 4)) * math.sqrt(width) * 2 + 4 * UNIT
        stated += small if width == 1 else 0.0
        assert float(found.error) == pytest.approx(stated, rel=1e-9, abs=0)
        assert bool((found.lengths().bound >= vectors.norm(dim=-1)).all())
    nothing = Vectors(torch.zeros(1, 2, 3, dtype=D), exact(0.5)).narrow()
    assert nothing.lengths().bound[0].tolist() == pytest.approx([0.5, 0.5])


def test_spectral_norms_of_several_matrices():
    g = torch.Generator().manual_seed(7)
    for shape in ((3, 4, 4), (3, 6, 2), (3, 2, 6), (3, 1, 5), (3, 5, 1), (2, 3, 40, 3)):
        matrices = torch.randn(*shape, generator=g, dtype=D)
        truth = torch.linalg.matrix_norm(matrices, 2)
        found = spectral_norms(matrices).bound
        assert bool((truth * (1 - 1e-15) <= found).all())
        assert bool((found <= truth * (1 + 1e-12)).all())


def test_largest_roots_count_the_rounding_of_a_gram_matrix():
    """√(λ + (16 a + 2 terms + 2) u · trace), and what else the matrix may be off."""
    gram = torch.diag(torch.tensor([4.0, 1.0, 1.0], dtype=D))
    for terms in (0, 1000, 10**6):
        found = Fraction(float(largest_roots(gram, terms)))
        least = 4 + (16 * 3 + 2 * terms + 2) * U * 6
        assert least <= found**2 <= least * (1 + 30 * U)
    assert float(largest_roots(gram, error=exact(5.0))) == pytest.approx(3.0, rel=1e-12, abs=0)
    assert float(largest_roots(torch.full((2, 2), math.inf, dtype=D))) == math.inf
    assert float(largest_roots(torch.zeros(2, 2, dtype=D))) == 0
    assert 0 < float(largest_roots(torch.zeros(2, 2, dtype=D), 5)) < 1e-150  # of products that vanished
    assert largest_roots(torch.zeros(3, 0, 0, dtype=D)).bound.tolist() == [0.0] * 3
    vanished = Fraction(float(largest_roots(torch.diag(torch.tensor([1e-300, 0.0], dtype=D)), 3))) ** 2
    least = Fraction(1e-300) + (2 * 3 + 1) * Fraction(1e-305)  # squares that vanished, one for each product
    assert least <= vanished <= least * (1 + 200 * U)
    assert largest_roots(gram).roundings == (3 + 4 + 1) // 2 + 1
    tall = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(1), dtype=D)
    exactly = largest_roots(tall.mT @ tall, 50)
    assert torch.equal(spectral_norms(tall).value, exactly.value)
    assert torch.equal(spectral_norms(tall.mT).value, exactly.value)


def test_half_of_a_diameter():
    """Among the points that a row sees alone."""
    points = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [100.0, 0.0]]], dtype=D)
    seen = torch.tensor([[True, True, False], [False, True, False], [True, True, True]])
    found = half_diameters(Vectors(points, exact(0.25)), seen).bound.tolist()
    assert found == pytest.approx([2.75, 0.25, 50.25], rel=1e-12, abs=0)
    assert found[0] >= 2.75
    assert half_diameters(Vectors(points, exact(0.0)), seen).roundings == 2 + 4 + 1


def test_distances_whose_squares_vanish():
    """Of a distance below 1e-162 nothing is left in its square, and a bound is still above it."""
    for size in (1e-200, 1e-165, 3e-162, 1e-155, 1e-149, 1.0):
        ends = torch.tensor([[[0.0] * 9, [size] * 9]], dtype=D)
        found = distances(ends).bound
        assert 3 * size <= float(found[0, 0, 1]) <= max(3 * size * (1 + 1e-14), 1.1e-150)
        half = half_diameters(Vectors(ends, exact(0.0)), torch.ones(1, 2, dtype=torch.bool)).bound
        assert 1.5 * size <= float(half[0]) <= max(1.5 * size * (1 + 1e-14), 1.1e-150)
        matrix = torch.full((1, 3, 3), size, dtype=D)
        assert 3 * size <= float(spectral_norms(matrix).bound[0])


CLOSE = 1e-12
ELEMENTARIES = {
    "log1p": (Upper.log1p, mpmath.log1p),
    "log of more than one": (
        lambda x: exact(1 + float(x)).grow(torch.log),
        lambda x: mpmath.log(1 + float(x)),
    ),
    "exp": (Upper.exp, mpmath.exp),
    "power": (lambda x: x.power(1.7), lambda x: x ** mpmath.mpf(1.7)),
    "small power": (lambda x: x.power(1e-3), lambda x: x ** mpmath.mpf(1e-3)),
    "inverse power": (lambda x: x.inverse_power(0.3), lambda x: x ** (1 / mpmath.mpf(0.3))),
    "inverse power of many": (lambda x: x.inverse_power(7.0), lambda x: x ** (mpmath.mpf(1) / 7)),
}


@pytest.mark.parametrize("name", ELEMENTARIES)
def test_functions_of_sets_against_sixty_digits(name):
    """At least the truth, and within 1e-12 of it."""
    ours, true = ELEMENTARIES[name]
    with mpmath.workdps(60):
        for x in (1e-60, 1e-9, 0.3, 1.0, 7.0, 300.0):
            truth, found = true(mpmath.mpf(x)), float(ours(exact(x)))
            assert truth <= found <= truth * (1 + CLOSE), x


def test_powers_from_below_and_what_falls():
    with mpmath.workdps(60):
        for x in (1e-60, 0.3, 1.0, 7.0, 300.0):
            number = mpmath.mpf(x)
            for found, truth in (
                (exact_lower(x).power(1.7), number ** mpmath.mpf(1.7)),
                (exact_lower(x).inverse_power(0.3), number ** (1 / mpmath.mpf(0.3))),
                (exact(x).exp_minus(), mpmath.exp(-number)),
                (exact(x).fall(lambda t: 1 / (1 + t)), 1 / (1 + number)),
            ):
                assert truth * (1 - CLOSE) <= float(found) <= truth
    assert type(exact(1.0).exp_minus()) is type(exact(1.0).fall(torch.reciprocal)) is Lower
    assert float(exact(math.inf).exp_minus()) == float(exact(800.0).exp_minus()) == 0


def test_powers_that_underflow():
    assert exact(1e-200).power(2.0).value == exact(1e-200).inverse_power(0.5).value == TINY
    assert exact_lower(1e-200).power(2.0).value == 0
    assert exact(0.0).power(0.5).value == 0


def test_single_numbers_keep_zero():
    """Zero times a finite number is zero, and so is what is made of it; times ∞ nothing is known."""
    zero = exact(0.0)
    for found in (zero * exact(3.0), 2 * zero, zero.square(), zero.halved(), zero / Lower(2.0), zero / 3):
        assert found.value == 0
    assert float(zero * exact(math.inf)) == math.inf
    assert (exact(torch.zeros(1, dtype=D)) * exact(3.0)).value == TINY


def test_products_and_extremes_of_several():
    a, b, c = Upper(0.1, 2), Upper(0.3, 1), Upper(0.7)
    truth = Fraction(0.1) * Fraction(0.3) * Fraction(0.7)
    assert truth <= Fraction(float(product([a, b, c]))) <= truth * (1 + 20 * U)
    assert product([a, b, c]).roundings == 5
    assert product([]).value == 1
    assert (least([b, a, c]).value, least([b, a, c]).roundings) == (0.1, 2)
    assert (largest([b, a, c]).value, largest([a]).value) == (0.7, 0.1)
    tensor = Upper(numbers(4, 3), 2)
    assert torch.equal(tensor.amin().value, tensor.value.amin())
    assert torch.equal(tensor.amin(-1).value, tensor.value.amin(-1))
    assert tensor.amin().roundings == 2


@pytest.mark.parametrize("scale", [1.0, 2.0**-500, 2.0**500, 2.0**-900, 2.0**900])
def test_lengths_of_rows(scale):
    """From both sides, to a few units, however large or small."""
    rows = (torch.randn(5, 7, generator=torch.Generator().manual_seed(2), dtype=D)) * scale
    rows[3] = 0.0
    squares = [sum(v * v for v in fractions(row)) for row in rows]
    highs = fractions(lengths(rows).bound), fractions(lengths(rows, 5).bound)
    for high, more, low, square in zip(*highs, fractions(lengths_below(rows).bound), squares, strict=True):
        assert low**2 <= square <= high**2 <= square * (1 + 60 * U)
        assert square * (1 - 60 * U) <= low**2
        assert high * (1 + 3 * U) <= more <= high * (1 + 9 * U)
    assert Fraction(float(length(rows[0]))) ** 2 >= squares[0]
    parts = [exact(float(v)) for v in rows[1].abs()]
    assert squares[1] <= Fraction(float(root_of_squares(parts))) ** 2 <= squares[1] * (1 + 60 * U)


def test_lengths_of_nothing_and_of_no_number():
    assert float(lengths(torch.zeros(3, dtype=D))) == float(root_of_squares([exact(0.0)])) == 0
    assert float(lengths(torch.tensor([1.0, math.inf], dtype=D))) == math.inf
    assert float(lengths(torch.tensor([1.0, math.nan], dtype=D))) == math.inf
    assert float(lengths_below(torch.tensor([1.0, math.nan], dtype=D))) == 0
    assert float(product_norm(None)) == 1
    assert float(product_norm(torch.diag(torch.tensor([2.0, 3.0], dtype=D)))) == pytest.approx(3, rel=1e-9)
