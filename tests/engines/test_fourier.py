"""The engine by Fourier series: what it is proved to lose holds, its derivatives are those of the reference,
and it refuses with the number that failed.
"""

import functools
import math

import mpmath
import pytest
import torch

import regard as r
from regard.certificate import Hypothesis
from regard.compute import Refused
from regard.compute.application import problem_of
from regard.compute.fourier.nonuniform import has_finufft
from regard.compute.fourier.series import Series
from regard.compute.fourier.sums import gauss_fields, gauss_transform
from regard.compute.tensors import pose_tensors
from regard.engines import Finufft, Fourier, ReferenceEngine, Separable

D = torch.float64
TRANSFORMS = [Separable(), *([Finufft(1e-14)] if has_finufft() else [])]


def plan_of(x, y, values, potential, log_weights=None, engine=None, support=None, normalizer=None):
    problem = pose_tensors(
        x, y, values, potential, normalizer or r.Softmax(), support or r.Full(), log_weights
    )
    return (engine or Fourier()).plan(problem), problem


def drawn(seed):
    """Points in a box of 1 to 200 bandwidths: spread, clusters, loners, weights of six decades."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * float(torch.rand((), generator=g))

    d = 1 + seed % 3
    n = int(uniform(1, 50))
    largest = 200.0 if d < 3 else 12.0
    reach = math.exp(uniform(0, math.log(largest)))
    kind = seed // 3 % 4
    x = torch.rand(n, d, generator=g, dtype=D) * reach
    if kind:  # clusters, tight or wide, and for two kinds some loners
        homes = torch.rand(3, d, generator=g, dtype=D) * reach
        loners = x[: n // 5]
        width = 10 ** uniform(-9, 0)
        x = homes[torch.randint(3, (n,), generator=g)] + width * torch.randn(n, d, generator=g, dtype=D)
        if kind > 1:
            x[: n // 5] = loners
    bandwidth = 10 ** uniform(-3, 3)
    x = bandwidth * (x + 10 ** uniform(0, 4))  # far from the origin
    logs = None if seed % 2 else math.log(1e6) * torch.rand(n, generator=g, dtype=D)
    values = x if kind != 2 else torch.randn(n, 2, generator=g, dtype=D).exp()
    return x, values, r.Gaussian(bandwidth=bandwidth), logs


def check(seed, transform, tolerance):
    """Whether the engine accepts; if so, error found ≤ bound of its row ≤ tolerance."""
    x, values, potential, logs = drawn(seed)
    engine = Fourier(tolerance, transform)
    plan, problem = plan_of(x, x, values, potential, logs, engine)
    if isinstance(plan, Refused):
        assert plan.why.endswith(".")
        assert "modes" in plan.why or "rounding alone" in plan.why
        return False
    expected = ReferenceEngine().plan(problem).run()
    result = plan.certify()
    error = torch.linalg.vector_norm(result.outputs - expected, dim=-1)
    own = 1e-13 * torch.linalg.vector_norm(values - plan.facts.values_center[0], dim=-1).max()
    own = own + 4e-16 * expected.abs().amax()  # the reference rounds too
    assert (error <= result.bounds + own).all(), (seed, float((error / result.bounds).max()))
    radius = float(plan.facts.radius.max())
    assert plan.bound <= tolerance
    rounded = 20 * torch.finfo(D).eps * float(expected.abs().amax())
    assert float(result.bounds.max()) <= tolerance * radius * (1 + 1e-9) + rounded
    assert torch.equal(plan.run(), result.outputs)
    return True


@pytest.mark.parametrize("block", range(10))
def test_error_certificate_tolerance(block):
    """200 cases with every rounding counted."""
    accepted = sum(check(20 * block + i, Separable(), 1e-6) for i in range(20))
    assert accepted >= 10


@pytest.mark.skipif(not has_finufft(), reason="finufft is not installed")
def test_error_certificate_tolerance_with_finufft():
    assert sum(check(i, Finufft(1e-14), 1e-5) for i in range(0, 200, 5)) >= 20


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-10])
def test_other_tolerances(tolerance):
    assert sum(check(i, Separable(), tolerance) for i in range(1, 40)) >= 10


def test_a_tighter_tolerance_has_more_modes():
    x = 5 * torch.rand(50, 2, dtype=D)
    modes = [
        plan_of(x, x, x, r.Gaussian(bandwidth=1.0), engine=Fourier(t))[0].series.count
        for t in (1e-2, 1e-5, 1e-9)
    ]
    assert modes[0] < modes[1] < modes[2]


@pytest.mark.parametrize(("gap", "reach"), [(3.0, 0.5), (4.0, 7.0), (6.0, 20.0)])
def test_the_error_of_the_series_is_bounded_and_nearly_attained(gap, reach):
    """On one axis, in fifty digits: at z = 0 and z = reach the bound is met up to a factor of a few."""
    series = Series.of(gap, reach, 1)
    error, slope = series.axis_errors()
    with mpmath.workdps(50):
        a = mpmath.mpf(series.step)
        g = [
            a / mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(-((a * k) ** 2) / 2) for k in range(series.modes + 1)
        ]
        found, steepest = mpmath.mpf(0), mpmath.mpf(0)
        for i in range(101):
            z = mpmath.mpf(reach) * i / 100
            cut = g[0] + 2 * sum(g[k] * mpmath.cos(a * k * z) for k in range(1, series.modes + 1))
            tilt = -2 * sum(g[k] * a * k * mpmath.sin(a * k * z) for k in range(1, series.modes + 1))
            kernel = mpmath.exp(-(z**2) / 2)
            found = max(found, abs(cut - kernel))
            steepest = max(steepest, abs(tilt + z * kernel))
        assert found <= error <= 6 * found
        assert steepest <= slope <= 6 * steepest


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_rounding_is_below_what_is_counted(dimension):
    """The same series with strengths of both signs in fifty digits: only rounding is left."""
    series = Series.of(5.0, 4.0, dimension)
    x, y = (4 * torch.rand(1, n, dimension, dtype=D) - 2 for n in (3, 40))
    f = torch.randn(1, 40, 1, dtype=D)
    found = gauss_transform(x, y, f, Separable(), series)[0, :, 0]
    fields = gauss_fields(x, y, f[..., 0], Separable(), series)[0]
    rounding, steeper = Separable().rounding(series, 40)
    total = float(f.abs().sum())
    with mpmath.workdps(40):
        a = mpmath.mpf(series.step)
        g = [
            a / mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(-((a * k) ** 2) / 2) for k in range(series.modes + 1)
        ]

        def factor(z):
            cosines = g[0] + 2 * sum(g[k] * mpmath.cos(a * k * z) for k in range(1, series.modes + 1))
            return cosines, -2 * sum(g[k] * a * k * mpmath.sin(a * k * z) for k in range(1, series.modes + 1))

        for i in range(3):
            exact, slope = mpmath.mpf(0), mpmath.mpf(0)
            for j in range(40):
                axes = [
                    factor(mpmath.mpf(float(s)) - mpmath.mpf(float(t)))
                    for s, t in zip(x[0, i], y[0, j], strict=True)
                ]
                weight = mpmath.mpf(float(f[0, j, 0]))
                exact += weight * mpmath.fprod(axis[0] for axis in axes)
                slope += weight * axes[0][1] * mpmath.fprod(axis[0] for axis in axes[1:])
            assert abs(exact - float(found[i])) <= rounding * total
            assert abs(exact - float(fields[i, 0])) <= rounding * total
            assert abs(slope - float(fields[i, 1])) <= steeper * total
    assert rounding < 1e-12


def declarations():
    w = torch.tensor([[1.0, 0.2], [0.1, -1.0], [0.5, 0.3], [-0.2, 0.8]], dtype=D)
    return {
        "gaussian": (r.Gaussian(bandwidth=1.0), r.Softmax(), 2),
        "bandwidth": (r.Gaussian(bandwidth=torch.tensor(1.1, dtype=D)), r.Softmax(), 3),
        "heads": (r.Gaussian(bandwidth=torch.tensor([0.5, 1.5], dtype=D)), r.Softmax(), 1),
        "projections": (r.Gaussian(w, w, 0.8), r.Softmax(), 4),
        "two projections": (r.Gaussian(w, 0.5 * w, 0.8), r.Softmax(), 4),
        "temperature": (r.Gaussian(bandwidth=1.0), r.Softmax(torch.tensor(0.5, dtype=D)), 2),
        "dot": (r.Dot(), r.Softmax(), 3),
        "dot with heads": (r.Dot(scale=torch.tensor([0.5, 2.0], dtype=D)), r.Softmax(2.0), 2),
        "projected dot": (r.Dot(w, -w, 0.3), r.Softmax(), 4),
    }


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("name", declarations())
def test_equals_the_reference(name, transform):
    """Outputs, gradients of everything and free energies, on every declaration it accepts."""
    potential, normalizer, width = declarations()[name]
    leaves = [
        t for t in (*vars(potential).values(), *vars(normalizer).values()) if isinstance(t, torch.Tensor)
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    q, k = (torch.randn(2, n, width, dtype=D).clamp(-1.5, 1.5).requires_grad_() for n in (5, 7))
    v, logs = torch.randn(2, 7, 3, dtype=D).requires_grad_(), torch.randn(7, dtype=D).requires_grad_()
    moving = list(dict.fromkeys([q, k, v, logs, *leaves]))
    given = {"potential": potential, "normalizer": normalizer, "log_weights": logs}
    expected = r.attend(q, k, v, engine=ReferenceEngine(), **given)
    found = r.attend(q, k, v, engine=Fourier(1e-9, transform), **given)
    assert torch.allclose(found, expected, atol=1e-8)
    upstream = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, moving, upstream),
        torch.autograd.grad(expected, moving, upstream),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, atol=1e-6)
    plan, problem = plan_of(q, k, v, potential, logs, Fourier(1e-9, transform), normalizer=normalizer)
    assert torch.allclose(plan.free_energy(), ReferenceEngine().plan(problem).free_energy(), atol=1e-8)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_values_that_are_the_points(dimension, transform):
    """One density is enough, and its derivatives of the first and second order are those of the reference."""
    x = torch.randn(5, dimension, dtype=D)
    plan = Fourier(1e-9, transform).plan(problem_of(r.Attention(r.Gaussian(bandwidth=1.0)), x, None))
    assert plan.facts.drift
    assert plan.form.same

    def run(z, engine):
        return r.apply(r.Attention(r.Gaussian(bandwidth=1.0)), z, engine=engine)

    def energy(z, engine):
        return run(z, engine).square().sum()

    def compare(call, transformed):
        mine, theirs = (
            transformed(functools.partial(call, engine=engine))(x)
            for engine in (Fourier(1e-9, transform), ReferenceEngine())
        )
        assert torch.allclose(mine, theirs, atol=1e-6)

    compare(run, lambda function: function)
    compare(run, torch.func.jacrev)
    compare(run, torch.func.jacfwd)
    if dimension < 3:
        compare(energy, torch.func.hessian)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: type(t).__name__)
def test_derivatives_of_the_sums(transform):
    series = Series.of(8.0, 3.0, 2)
    x, y = (torch.randn(1, n, 2, dtype=D).clamp(-1.5, 1.5).requires_grad_() for n in (2, 3))
    f, w = (torch.randn(*shape, dtype=D).requires_grad_() for shape in ((1, 3, 2), (1, 3)))
    for function, strengths in ((gauss_transform, f), (gauss_fields, w)):

        def call(a, b, c, function=function):
            return function(a, b, c, transform, series)

        assert torch.autograd.gradcheck(call, (x, y, strengths), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, (x, y, strengths))


def test_long_sums_are_cut_into_chunks():
    """More keys than one product of matrices takes, and more chunks than one group."""
    x = 4 * torch.rand(2000, 2, dtype=D)
    plan, problem = plan_of(x[:50], x, x.sin(), r.Gaussian(bandwidth=1.0), engine=Fourier(1e-8, Separable()))
    assert torch.allclose(plan.run(), ReferenceEngine().plan(problem).run(), atol=1e-8)


def test_the_sphere_and_dot_products():
    """On a sphere a dot product is a Gaussian without weights, and needs no query among the keys."""
    x, y = (torch.nn.functional.normalize(torch.randn(n, 3, dtype=D), dim=-1) for n in (9, 30))
    plan, problem = plan_of(x, y, y, r.Dot(scale=4.0))
    assert plan.facts.reach <= 4.0 + 1e-9
    weights = plan.form.weights()[0]
    assert torch.allclose(weights, torch.ones_like(weights), atol=1e-14)
    assert torch.allclose(plan.run(), ReferenceEngine().plan(problem).run(), atol=1e-6)


def test_float32_and_half_are_computed_in_float64():
    x = 3 * torch.randn(40, 2)
    for dtype in (torch.float32, torch.bfloat16):
        plan, _ = plan_of(*[x.to(dtype)] * 3, r.Gaussian(bandwidth=1.0))
        result = plan.certify()
        exact = r.attend(
            *[x.to(dtype).double()] * 3, potential=r.Gaussian(bandwidth=1.0), engine=ReferenceEngine()
        )
        assert plan.run().dtype == dtype
        error = torch.linalg.vector_norm(result.outputs.double() - exact, dim=-1)
        assert (error <= result.bounds).all()


def test_one_particle_and_particles_in_one_place():
    one = torch.tensor([[1e3, -7.0]], dtype=D)
    for x in (one, one.expand(5, 2)):
        plan, _ = plan_of(x, x, x, r.Gaussian(bandwidth=1.0))
        assert torch.allclose(plan.run(), x, atol=1e-12)
        assert torch.isfinite(plan.certify().bounds).all()


def test_the_certificate_says_what_it_rests_on():
    x = 3 * torch.randn(20, 2, dtype=D)
    result = plan_of(x, x, x, r.Gaussian(bandwidth=1.0), engine=Fourier(1e-6, Separable()))[0].certify()
    certificate = result.certificate()
    assert certificate.value == float(result.bounds.max()) == float(result.upper().amax())
    assert certificate.quantity == "error"
    assert [h.checked for h in certificate.hypotheses] == [True, False]
    assert r.Certificate.from_json(certificate.to_json()).value == certificate.value


@pytest.mark.skipif(not has_finufft(), reason="finufft is not installed")
def test_an_assumption_is_compared_with_rows(monkeypatch):
    x = 3 * torch.randn(30, 2, dtype=D)
    plan = plan_of(x, x, x, r.Gaussian(bandwidth=1.0), engine=Fourier(1e-6, Finufft(1e-12)))[0]
    hypotheses = plan.certify(sample=10).hypotheses
    assert [h.checked for h in hypotheses] == [True, False, True]
    assert "finufft" in hypotheses[1].statement
    assert "10 rows" in hypotheses[2].statement
    broken = plan.replace(series=Series.of(2.0, plan.facts.reach / 3, 2))  # a series of too short a period
    monkeypatch.setattr(type(plan.facts), "errors", errors_of_a_better_series(plan.facts))
    with pytest.raises(r.errors.RefusalError, match="times its bound"):
        broken.certify()


def errors_of_a_better_series(facts):
    errors = type(facts).errors
    return lambda self, series, transform, keys: errors(self, Series.of(8.0, facts.reach, 2), transform, keys)


def refused(*given, **more):
    found = plan_of(*given, **more)[0]
    assert isinstance(found, Refused), found
    return found.why


def test_refusals():
    x = 3 * torch.randn(12, 2, dtype=D)
    wide = torch.randn(12, 5, dtype=D)
    assert "points have 5 features" in refused(wide, wide, wide, r.Gaussian(bandwidth=1.0))
    assert "Laplace scores" in refused(x, x, x, r.Laplace())
    assert "Causal masks pairs" in refused(x, x, x, r.Gaussian(bandwidth=1.0), support=r.Causal())
    assert "not those of Sparsemax" in refused(x, x, x, r.Gaussian(bandwidth=1.0), normalizer=r.Sparsemax())
    assert "scale is positive" in refused(x, x, x, r.Dot(scale=-1.0))
    assert "nothing to sum" in refused(x[:0], x, x, r.Gaussian(bandwidth=1.0))
    assert "nothing to sum" in refused(x, x[:0], x[:0], r.Gaussian(bandwidth=1.0))
    assert "finite" in refused(x / 0.0, x, x, r.Gaussian(bandwidth=1.0))
    assert "finite" in refused(x, x, x * torch.nan, r.Gaussian(bandwidth=1.0))
    assert "mass" in refused(
        x, x, x, r.Gaussian(bandwidth=1.0), log_weights=torch.full((12,), -torch.inf, dtype=D)
    )


def test_a_huge_box_is_refused_with_its_size():
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=D)
    why = refused(x, x, x, r.Gaussian(bandwidth=1e-4))
    assert "a box of 1e+04 bandwidths needs" in why
    assert "modes" in why
    assert "1e+140 bandwidths" in refused(x, x, x, r.Gaussian(bandwidth=1e-140))
    with pytest.raises(r.errors.ArgumentError, match="bandwidth"):
        r.Gaussian(bandwidth=0.0)


def test_a_query_far_from_all_keys_is_refused_with_what_it_sees():
    x, y = torch.zeros(1, 2, dtype=D), torch.full((4, 2), 8.0, dtype=D)
    why = refused(x, y, y, r.Gaussian(bandwidth=1.0))
    assert "rounding alone may be" in why
    assert f"see {math.exp(-64):.1e}"[:6] in why
    plan = plan_of(x + 7, y, y, r.Gaussian(bandwidth=1.0))[0]
    assert not isinstance(plan, Refused)


def test_loners_of_little_weight_are_refused():
    x = torch.tensor([[0.0], [0.1], [40.0]], dtype=D)
    logs = torch.tensor([0.0, 0.0, -30.0], dtype=D)
    assert "of the mass" in refused(x, x, x, r.Gaussian(bandwidth=1.0), log_weights=logs)
    assert not isinstance(
        plan_of(x, x, x, r.Gaussian(bandwidth=1.0), logs + torch.tensor([0, 0, 20.0]))[0], Refused
    )


def test_keys_without_mass_do_not_count():
    x = 3 * torch.randn(10, 2, dtype=D)
    logs = torch.zeros(10, dtype=D)
    logs[3] = -torch.inf
    found = r.attend(x[:3], x, x, potential=r.Gaussian(bandwidth=3.0), log_weights=logs, engine=Fourier(1e-8))
    rest = torch.cat([x[:3], x[4:]])
    expected = r.attend(x[:3], rest, rest, potential=r.Gaussian(bandwidth=3.0), engine=ReferenceEngine())
    assert torch.allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1e-3, math.nan, True])
def test_a_tolerance_lies_between_zero_and_one(tolerance):
    with pytest.raises(r.errors.ArgumentError, match="tolerance"):
        Fourier(tolerance)


def test_it_is_not_chosen_unasked():
    """Other engines are accurate row by row; this one relative to the spread of all values."""
    x = 3 * torch.randn(30, 2, dtype=D)
    attention = r.Attention(r.Gaussian(bandwidth=1.0))
    assert "engine=Fourier(tolerance)" in r.explain(attention, x).refusals["fourier"]
    asked = r.explain(attention, x, engine=Fourier())
    assert asked.engine.name == "fourier"
    for word in ("modes", "error ≤", "bandwidths", " s on one core"):
        assert word in str(asked)
    assert not asked.plan.pays()
    many = 20 * torch.rand(20000, 2)
    assert r.explain(attention, many, engine=Fourier()).plan.pays()


def test_values_cannot_be_read_under_vmap():
    x = torch.randn(3, 5, 2, dtype=D)
    with pytest.raises(r.errors.RefusalError, match="must be read before the run"):
        torch.func.vmap(lambda z: r.attend(z, z, z, potential=r.Gaussian(bandwidth=1.0), engine=Fourier()))(x)


def test_without_finufft(monkeypatch):
    """Products of matrices stand in for it; by name it is refused with the line that installs it."""
    monkeypatch.setattr("regard.compute.engines.fourier.has_finufft", lambda: False)
    x = 20 * torch.rand(2000, 2, dtype=D)
    plan, _ = plan_of(x, x, x, r.Gaussian(bandwidth=1.0))
    assert isinstance(plan.transform, Separable)
    assert "regard[fast]" in refused(x, x, x, r.Gaussian(bandwidth=1.0), engine=Fourier(1e-6, Finufft()))
    with pytest.raises(r.errors.ArgumentError, match="transform"):
        Fourier(1e-6, "separable")


@pytest.mark.skipif(not has_finufft(), reason="finufft is not installed")
def test_the_faster_transform_is_taken():
    x = 20 * torch.rand(2000, 2, dtype=D)
    few, many = (plan_of(z, z, z, r.Gaussian(bandwidth=1.0))[0] for z in (x[:20] / 10, x))
    assert isinstance(few.transform, Separable)
    assert isinstance(many.transform, Finufft)
    assert torch.allclose(many.run(), r.attend(x, x, x, potential=r.Gaussian(bandwidth=1.0)), atol=1e-5)


def test_hypotheses_are_plain():
    assert all(isinstance(h, Hypothesis) for t in TRANSFORMS for h in t.hypotheses(Series.of(5.0, 1.0, 1)))
