"""What the Fourier engine reads from data and proves of it, where the answers are exact."""

import math
from dataclasses import dataclass

import mpmath
import pytest
import torch

import regard as r
from regard._upper import UNIT
from regard.compute.fourier.facts import Facts, _least_share, look
from regard.compute.fourier.form import form_of
from regard.compute.fourier.plan import FourierPlan
from regard.compute.fourier.processes import Processes, Summed
from regard.compute.fourier.series import Series
from regard.compute.fourier.transforms import Transform
from regard.compute.tensors import pose_tensors
from regard.engines import Fourier, Separable

D = torch.float64


def numbers(*rows, dtype=D):
    return torch.tensor(rows, dtype=dtype)


def posed(queries, keys, values, bandwidth=1.0, log_weights=None):
    potential = r.Gaussian(bandwidth=bandwidth)
    return pose_tensors(queries, keys, values, potential, r.Softmax(), r.Full(), log_weights)


def looked(*given, **more):
    problem = posed(*given, **more)
    return look(problem, form_of(problem))


def test_what_is_read_from_points():
    """Two heads of one box: the smaller bandwidth has the larger reach, the larger one the shorter values."""
    queries, keys = numbers([-1.0, 0.0], [2.0, 1.0]), numbers([0.0, -3.0], [1.0, 4.0], [0.5, 1.0])
    values = numbers([0.0, 2.0], [4.0, -1.0], [1.0, 1.0])
    facts = looked(queries, keys, values, torch.tensor([0.5, 2.0], dtype=D))
    assert torch.equal(facts.center, numbers([[0.5, 0.5]]).expand(2, 1, 2))
    assert torch.equal(facts.values_center, numbers([[2.0, 0.5]]).expand(2, 1, 2))
    assert 14 < facts.reach == pytest.approx(14, rel=1e-12, abs=0)
    assert facts.radius.flatten().tolist() == [2.5, 2.5]
    assert 1.25 > facts.length == pytest.approx(1.25, rel=1e-11, abs=0)
    assert facts.dimension == 2
    assert facts.slack == 0.0
    assert not facts.drift


def test_keys_reach_as_far_as_queries():
    """Each side of the box in turn is that of a query, and of a key."""
    near, far = numbers([0.0], [1.0]), numbers([-2.0], [5.0])
    for queries, keys in ((near, far), (far, near)):
        facts = looked(queries, keys, keys)
        assert facts.reach == pytest.approx(7, rel=1e-12, abs=0)
        assert facts.center.item() == 1.5


def test_the_radius_of_values_is_from_the_center_as_it_is_rounded():
    """Between 2⁵³ and 2⁵³ + 2 there is no number, so that the center is one of them."""
    values = 2.0**53 + numbers([0.0], [2.0])
    assert looked(numbers([0.0], [1.0]), numbers([0.0], [1.0]), values).radius.item() == 2.0


def test_values_that_are_the_keys_need_one_density():
    for spread, drift in ((0.6, True), (0.4, False)):
        keys = spread * numbers([-1.0], [1.0])
        assert looked(keys, keys, keys).drift is drift
        assert not looked(keys, keys, keys.clone()).drift


def test_what_cannot_be_read_is_refused():
    keys = numbers([0.0], [1.0])
    for logs in ([0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]):
        assert "finite" in looked(keys, keys, keys, log_weights=numbers(*logs)).why
    assert isinstance(looked(keys, keys, keys, log_weights=numbers(0.0, -math.inf)), Facts)
    assert isinstance(looked(7e5 * keys, 7e5 * keys, keys), Facts)
    assert "1.5e+06 bandwidths" in looked(1.5e6 * keys, 1.5e6 * keys, keys).why


def test_weights_are_known_to_the_rounding_of_their_logarithms():
    keys = numbers([0.0], [1.0])
    small, large = (
        looked(keys, keys, keys, log_weights=numbers(0.0, least)).slack for least in (-1.0, -700.0)
    )
    assert 19 * UNIT < small < 40 * UNIT
    assert 2100 * UNIT < large < 2200 * UNIT


# How much of the mass every query sees


def share(queries, keys, weights):
    queries, keys = numbers(*queries), numbers(*keys)
    given = numbers(*weights).log()
    problem = posed(queries, keys, keys.clone(), log_weights=given)
    form = form_of(problem)
    facts = look(problem, form)
    apart = torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")
    seen = ((-0.5 * apart.square()).exp() @ numbers(*weights)) / sum(weights)
    assert facts.share <= float(seen.min())
    assert facts.share == _least_share(form, facts.center, facts.reach, len(keys))
    return facts.share / (1 - 1e-6)


def test_a_query_that_is_a_key_sees_itself():
    points = [[0.0], [10.0], [20.0]]
    assert share(points, points, [1.0, 2.0, 7.0]) == pytest.approx(0.1, rel=1e-9, abs=0)


def test_keys_of_the_same_cell_are_at_most_a_diagonal_away():
    """Cells of side one from the least coordinates on: both queries see what shares theirs."""
    keys = [[0.3, 0.6], [50.2, 30.9], [50.3, 30.8], [0.0, 30.0]]
    queries = [[0.8, 0.0], [50.4, 30.4]]
    found = share(queries, keys, [3.0, 2.0, 4.0, 7.0])
    assert found == pytest.approx(3 / 16 * math.exp(-1), rel=1e-9, abs=0)
    found = share(queries[::-1], [[0.3, 0.6], [50.2, 30.9], [0.0, 30.0]], [5.0, 4.0, 3.0])
    assert found == pytest.approx(4 / 12 * math.exp(-1), rel=1e-9, abs=0)


def test_a_query_apart_from_all_keys_sees_them_by_their_mean():
    """Jensen's inequality; keys in one place attain it."""
    mean, spread = 0.1 * (3 - 1) / 4, 0.01 - 0.05**2
    found = share([[3.0]], [[-0.1], [0.1]], [1.0, 3.0])
    assert found == pytest.approx(math.exp(-0.5 * ((3 - mean) ** 2 + spread)), rel=1e-8, abs=0)
    exact = math.exp(-0.5 * (2.5**2 + 1.5**2))
    assert share([[2.5, 1.5]], [[0.0, 0.0]] * 3, [1.0, 1.0, 1.0]) == pytest.approx(exact, rel=1e-8, abs=0)


def test_the_rounding_of_the_mean_grows_with_the_keys():
    """A million keys in one place of a plane: what is paid is the statement's number, and no less."""
    n = 1 << 20
    keys = torch.zeros(n, 2, dtype=D)
    facts = looked(numbers([4.0, 3.0]), keys, keys.clone())
    paid = math.log(math.exp(-12.5) * (1 - 1e-6) / facts.share)
    assert paid == pytest.approx(1e-9 + 8 * n * UNIT * 2 * 16, rel=1e-3, abs=0)
    few = looked(numbers([4.0, 3.0]), keys[:2], keys[:2].clone())
    assert 0.9e-9 < math.log(math.exp(-12.5) * (1 - 1e-6) / few.share) < 1.1e-9


# What is proved before the run


@dataclass(frozen=True, eq=False, repr=False)
class Claimed(Transform):
    """Separable(), which adds what is given to sums D and N, or to D and ∇D, and claims an error."""

    error: float = 0.0
    gradient: float = 0.0
    added: tuple = ()

    def _err(self, sums):
        return sums if not self.added else sums + numbers(*self.added).expand_as(sums)

    def grid(self, points, strengths, series):
        return Separable().grid(points, strengths, series)

    def values(self, points, grid, columns, series):
        return self._err(Separable().values(points, grid, columns, series))

    def slopes(self, points, grid, series):
        return self._err(Separable().slopes(points, grid, series))

    def rounding(self, series, keys):
        return self.error, self.gradient

    def seconds(self, *given):
        return 0.0

    def bytes(self, *given):
        return 0.0

    def hypotheses(self, series):
        return (r.certificate.Hypothesis("it is as it claims", False),)


def facts_of(share=0.25, slack=0.0, drift=False, dimension=2, reach=5.0, length=2.0):
    none = torch.zeros(1, 1, dimension, dtype=D)
    radius = torch.ones(1, 1, dtype=D)
    return Facts(none, none, reach, dimension, share, radius, length, slack, drift, 10, 10, 10)


EXACT = Series.of(13.0, 5.0, 2)
"""What it leaves out is far below rounding."""


def test_errors_of_sums_are_those_of_series_transform_and_bandwidth():
    error, gradient = facts_of().errors(EXACT, Claimed(), 10)
    assert (float(error), float(gradient)) == pytest.approx((3 * UNIT, 6 * UNIT), rel=1e-9, abs=0)
    assert error.roundings >= 2
    assert gradient.roundings >= 2
    error, gradient = facts_of().errors(EXACT, Claimed(1e-3, 1e-2), 10)
    assert (float(error), float(gradient)) == pytest.approx((1e-3, 1e-2), rel=1e-9, abs=0)
    series = Series.of(4.0, 5.0, 2)
    error, gradient = facts_of().errors(series, Claimed(), 10)
    assert (float(error), float(gradient)) == pytest.approx(series.errors(), rel=1e-9, abs=0)


@dataclass(frozen=True, eq=False, repr=False)
class Several(Processes):
    """So many processes that all hold the same."""

    count: int = 3
    rank = 0

    def total(self, tensor):
        return self.count * tensor

    def largest(self, tensor):
        return tensor


def test_sums_over_processes_are_rounded_once_more_for_each():
    """Grids are added; what a coefficient or its slope loses by that is at most the size of the series."""
    given, sizes = Claimed(1e-3, 1e-2), (1 + EXACT.axis_errors()[0], EXACT.moments()[2])
    top, slope = sizes[0], math.sqrt(2) * sizes[1]
    for count in (1, 3, 1000):
        error, gradient = Summed(given, Several(count)).rounding(EXACT, 10)
        assert error - 1e-3 == pytest.approx(2 * count * UNIT * top**2, rel=1e-3)
        assert gradient - 1e-2 == pytest.approx(2 * count * UNIT * top * slope, rel=0.1)


def test_facts_of_several_processes():
    """Three that hold the same points have their box and their share, and three times the keys."""
    x = torch.randn(7, 2, dtype=D)
    problem = posed(x, x, x)
    form = form_of(problem)
    one, three = look(problem, form), look(problem, form.over(Several()), Several())
    assert (three.keys, three.own_keys, three.queries) == (21, 7, 7)
    assert (three.reach, three.drift) == (one.reach, one.drift)
    assert three.share <= one.share
    least = float((torch.exp(-0.5 * torch.cdist(x, x).square()).sum(-1) / 7).min())
    assert three.share <= least


def test_quotients_of_sums_attain_what_is_proved_before_the_run():
    """N = R D moves by κR and D by -κ: the quotient by exactly 2κR/(D - κ)."""
    share, kappa = 0.25, 0.02
    moved = (share + kappa) / (share - kappa) - 1
    assert facts_of(share).bound(EXACT, Claimed(kappa), 10) == pytest.approx(moved, rel=1e-9, abs=0)
    slow = facts_of(share, slack=0.01).bound(EXACT, Claimed(kappa), 10)
    assert slow == pytest.approx(moved + 4 * 0.01, rel=1e-9, abs=0)
    rounded = facts_of(1.0).bound(EXACT, Claimed(), 10)
    assert rounded == pytest.approx(2 * 3 * UNIT + 8 * UNIT, rel=1e-6, abs=0)


def test_scores_of_densities_attain_what_is_proved_before_the_run():
    """∇D/D of length L moves by γ/(D - κ) and by L κ/(D - κ); relative to the values, which are keys."""
    share, kappa, gamma = 0.25, 0.02, 0.03
    facts = facts_of(share, drift=True, dimension=3, reach=5.0, length=2.0)
    length = 5 * math.sqrt(3)
    moved = (length * share + gamma) / (share - kappa) - length
    found = facts.bound(EXACT, Claimed(kappa, gamma), 10)
    assert found == pytest.approx(moved / 2, rel=1e-9, abs=0)
    slow = facts.replace(slack=0.01).bound(EXACT, Claimed(kappa, gamma), 10)
    assert slow == pytest.approx(moved / 2 + 0.04, rel=1e-9, abs=0)
    rounded = facts.replace(share=1.0).bound(EXACT, Claimed(), 10)
    assert rounded == pytest.approx((6 + 3 * length + 8 * length) * UNIT / 2, rel=1e-6, abs=0)


def test_half_of_the_mass_has_to_be_left():
    assert math.isfinite(facts_of(0.25).bound(EXACT, Claimed(0.12), 10))
    assert facts_of(0.25).bound(EXACT, Claimed(0.13), 10) == math.inf


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_products_of_axes_attain_the_error_of_a_series(dimension):
    """k̃ = k + ε on every axis at z = 0, where k is one; slopes by the product rule at their worst."""
    series = Series.of(3.0, 2.0, dimension)
    error, slope = series.axis_errors()
    whole, gradient = series.errors()
    assert whole == pytest.approx((1 + error) ** dimension - 1, rel=1e-9, abs=0)
    each = slope * (1 + error) ** (dimension - 1)
    each += math.exp(-0.5) * ((1 + error) ** (dimension - 1) - 1)
    assert gradient == pytest.approx(math.sqrt(dimension) * each, rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("gap", "reach", "modes"), [(1.5, 0.5, 1), (2.0, 1.0, 2), (3.0, 20.0, 11), (6.0, 8.0, 14)]
)
def test_tails_and_images_are_sums_of_series(gap, reach, modes):
    """Both sums with their geometric bounds, in forty digits."""
    series = Series(2 * math.pi / (reach + gap), modes, reach, 1)
    with mpmath.workdps(40):
        a, sqrt = mpmath.mpf(series.step), mpmath.sqrt(2 * mpmath.pi)
        period = 2 * mpmath.pi / a
        away = period - mpmath.mpf(reach)
        first, after = a * (modes + 1), a * (modes + 2)
        tail = 2 * a / sqrt * mpmath.exp(-(first**2) / 2)
        ratio = mpmath.exp((first**2 - after**2) / 2)
        steeper = ratio * after / first
        image = 2 * mpmath.exp(-(away**2) / 2)
        farther = (away + period) / away * mpmath.exp((away**2 - (away + period) ** 2) / 2)
        error = tail / (1 - ratio) + image / (1 - farther)
        slope = tail * first / (1 - steeper) + away * image / (1 - farther)
        found = series.axis_errors()
        assert error <= found[0] <= error * (1 + 1e-9)
        assert slope <= found[1] <= slope * (1 + 1e-9)


@pytest.mark.parametrize("reach", [3e4, 0.5])
def test_a_period_is_known_up_to_its_rounding(reach):
    """The gap is what is left of two numbers, of which each is off by less than 1e-13 of its size."""
    series = Series.of(6.0, reach, 1)
    with mpmath.workdps(40):
        a = mpmath.mpf(series.step)
        off = mpmath.mpf("0.95e-13")
        away = (2 * mpmath.pi / a - mpmath.mpf(reach)) * (1 - off) - off * mpmath.mpf(reach)
        first = a * (series.modes + 1)
        tail = 2 * a / mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(-(first**2) / 2)
        ratio = mpmath.exp(-(a**2) * (2 * series.modes + 3) / 2)
        least = tail / (1 - ratio) + 2 * mpmath.exp(-(away**2) / 2)
        assert least <= series.axis_errors()[0] <= least * (1 + 1e-6)


def test_series_without_a_bound():
    """Images less than a bandwidth away do not fall everywhere, and terms that hardly fall have no sum."""
    assert Series(2 * math.pi / 2.9, 5, 2.0, 1).axis_errors() == (math.inf, math.inf)
    assert math.isfinite(Series(2 * math.pi / 3.1, 5, 2.0, 1).axis_errors()[0])
    assert Series(2 * math.pi / 16, 1, 2.0, 1).axis_errors() == (math.inf, math.inf)
    assert math.isfinite(Series(2 * math.pi / 15, 1, 2.0, 1).axis_errors()[0])


# What is proved of each row after the run


def plan_of(queries, keys, values, transform, bandwidth=1.0, log_weights=None, **changed):
    """A plan whose series is exact, with another transform and other facts."""
    if isinstance(values, str):
        values = keys
    problem = posed(queries, keys, values, bandwidth, log_weights)
    plan = Fourier(0.5, Separable()).plan(problem)
    assert isinstance(plan, FourierPlan), plan
    series = Series.of(13.0, plan.facts.reach, plan.facts.dimension)
    return plan.replace(series=series, transform=transform, facts=plan.facts.replace(**changed)), problem


def errors_of(plan, exact):
    result = plan.certify()
    return torch.linalg.vector_norm(result.outputs - exact, dim=-1), result.bounds


def test_rows_attain_their_bounds():
    """Queries on two of three keys, far apart; the values of both are at the ends of a line."""
    keys = numbers([0.0], [9.0], [4.5])
    values = numbers([2.0, 1.0], [6.0, 4.0], [4.0, 2.5])
    kappa, total, radius = 1e-6, 3.0, 2.5
    toward = numbers(-0.8, -0.6)  # from the center to the first value
    added = (
        -kappa * total,
        *(kappa * total * toward).tolist(),
    )  # sums of values are in units of their radius
    plan, _ = plan_of(keys[:1], keys, values, Claimed(kappa, added=added))
    exact, _ = plan_of(keys[:1], keys, values, Separable())
    error, bounds = errors_of(plan, exact.run())
    assert 0.99 * 2 * radius * kappa * total < float(error)
    assert (error <= bounds).all()
    assert (bounds <= 1.0002 * error).all()


def test_rows_of_a_density_attain_their_bounds():
    """Values that are the keys: x + s²∇log D, by an error of D and one of ∇D along it."""
    keys = numbers([0.0, 0.0], [2.4, 3.2], [30.0, 0.0])
    bandwidth, total, kappa, gamma = 2.0, 3.0, 1e-6, 3e-6
    exact, _ = plan_of(keys[:1], keys, "keys", Separable(), bandwidth)
    assert exact.facts.drift
    ahead = exact.run() - keys[:1]
    unit = (ahead / ahead.norm())[0]
    added = (-kappa * total, *(gamma * total * unit).tolist())
    plan, _ = plan_of(keys[:1], keys, "keys", Claimed(kappa, gamma, added), bandwidth)
    error, bounds = errors_of(plan, exact.run())
    assert float(error) > 1e-5
    assert (error <= bounds).all()
    assert (bounds <= 1.0001 * error).all()


def test_rows_without_mass_have_no_bound():
    keys = numbers([0.0], [9.0])
    plan, _ = plan_of(keys, keys, numbers([1.0], [2.0]), Claimed(0.6))
    assert torch.isinf(plan.certify().bounds).all()


def test_weights_and_dtypes_are_paid_for():
    """Bounds that are their slack alone, and that are the rounding of outputs alone."""
    keys, values = numbers([0.0], [0.5]), numbers([3.0, 4.0], [3.0, 8.0])
    plan, _ = plan_of(keys, keys, values, Separable(), log_weights=numbers(0.0, 1.0), slack=1e-3)
    assert plan.certify().bounds == pytest.approx(4e-3 * 2.0, rel=1e-6, abs=0)
    single, _ = plan_of(*(t.float() for t in (keys, keys, values)), Separable())
    with torch.no_grad():
        outputs = single._outputs()[0][0]
    size, moved = outputs.norm(dim=-1), (outputs - numbers(3.0, 6.0)).norm(dim=-1)
    stated = torch.finfo(torch.float32).eps * size + 8 * UNIT * (size + moved + math.sqrt(45))
    assert single.certify().bounds == pytest.approx(stated, rel=1e-6, abs=0)


def test_rounding_of_outputs_far_from_the_origin():
    """At 2⁵⁰ what is moved from the center is known to a quarter."""
    keys, values = numbers([0.0], [9.0]), 2.0**50 + numbers([0.0], [64.0])
    kappa = 1e-3
    plan, _ = plan_of(keys, keys, values, Claimed(kappa))
    mass = 1.0 - 2 * kappa  # of the key that a query is, less what the transform may miss
    spread = 32 + 2 * UNIT * 2.0**50
    rounded = torch.finfo(D).eps * 2.0**50 + 8 * UNIT * (2 * 2.0**50 + spread)
    stated = 2 * kappa * (32 + spread) / mass + rounded
    assert plan.certify().bounds == pytest.approx(stated, rel=1e-4, abs=0)


def test_one_row_that_errs_is_found():
    """The first and the last row are compared, and a claim that is half of the truth is not believed."""
    keys = numbers([0.0], [9.0], [18.0], [27.0])
    values = numbers([0.0], [1.0], [2.0], [3.0])
    for row in (0, 3):
        bump = torch.zeros(1, 4, 2, dtype=D)
        bump[0, row, 1] = 1e-3
        plan, _ = plan_of(keys, keys, values, Claimed(1e-9, added=tuple(bump.tolist())))
        with pytest.raises(r.errors.RefusalError, match="times its bound"):
            plan.certify(sample=2)
    kappa = 1e-6
    added = (-kappa * 4, kappa * 4)  # in units of the radius of values
    honest, _ = plan_of(keys[3:], keys, values, Claimed(kappa, added=added))
    assert "1 rows" in honest.certify().hypotheses[-1].statement
    with pytest.raises(r.errors.RefusalError, match="errs by 2 times"):
        plan_of(keys[3:], keys, values, Claimed(kappa / 2, added=added))[0].certify()
    many, _ = plan_of(keys, keys, values, Claimed(1e-9))
    assert "3 rows" in many.certify(sample=3).hypotheses[-1].statement
    more, _ = plan_of(keys.repeat(40, 1), keys, values, Claimed(1e-9))
    assert "100 rows" in more.certify().hypotheses[-1].statement
