"""The engine by Fourier series where nobody named it: every row has the digits of its dtype, pairs that are
cheaper are taken, and a flow chooses anew at each step.
"""

import math
import warnings

import pytest
import torch

import regard as r
from regard.compute.fourier.nonuniform import has_finufft
from regard.compute.fourier.plan import FourierPlan
from regard.compute.fourier.rowwise import RowwisePlan
from regard.compute.selection import explain_problem, select_within
from regard.compute.tensors import pose_tensors
from regard.dynamics import DormandPrince, Energy, Euler, Sphere
from regard.engines import Finufft, Fourier, ReferenceEngine, Sdpa, Separable
from regard.errors import PerformanceWarning

D = torch.float64
TRANSFORMS = [Separable(), *([Finufft(1e-12)] if has_finufft() else [])]


def pose(x, y, values, potential=None, log_weights=None):
    given = (potential or r.Gaussian(bandwidth=1.0), r.Softmax(), r.Full(), log_weights)
    return pose_tensors(x, y, values, *given)


def cloud(seed, n=2500):
    """float32 points: a crowd around the origin, a tight cluster and loners, boxes of 3 to 60 bandwidths."""
    g = torch.Generator().manual_seed(seed)
    side = 3.0 * 20.0 ** (seed % 4 / 3)
    x = side * (torch.rand(n, 2 if side < 15 else 1, generator=g, dtype=D) - 0.5)
    x[: n // 2] *= 10.0 ** -(seed % 5)
    x[n // 2 : n // 2 + 300] = x[0] + 1e-3 * x[n // 2 : n // 2 + 300]
    logs = None if seed % 3 else 5 * torch.randn(n, generator=g)
    return x.float(), logs


@pytest.mark.parametrize("seed", range(8))
def test_every_row_has_the_digits_of_float32(seed):
    x, logs = cloud(seed)
    problem = pose(x, x, x if seed % 2 else torch.cat([x, x.square()], -1), log_weights=logs)
    explained = explain_problem(problem)
    assert isinstance(explained.plan, RowwisePlan)
    assert "summed over pairs" in str(explained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # many rows may be poor, and are summed
        found = explained.plan.run()
    exact = ReferenceEngine().plan(problem.to(D)).run()
    poor = explained.plan._poor(explained.plan.series.certify())
    error = torch.linalg.vector_norm(found.double() - exact, dim=-1)
    proved = 2 * torch.finfo(torch.float32).eps * torch.linalg.vector_norm(found.double(), dim=-1)
    assert found.dtype == torch.float32
    assert (error[~poor] <= proved[~poor]).all()
    direct = Sdpa().plan(problem).run()
    assert torch.equal(found[poor], direct[poor]) or torch.allclose(found[poor], direct[poor], rtol=1e-5)
    assert poor.float().mean() < 1


def test_rows_that_lack_digits_are_summed_over_pairs():
    """A value at zero, far from all others: relative to its own size no series has digits there."""
    x = 30 * torch.rand(3000, 1) + 10
    x[0] = 0.0
    values = 1e6 + x
    values[0] = 1e-6
    problem = pose(x, x, values)
    plan = explain_problem(problem).plan
    poor = plan._poor(plan.series.certify())
    assert 0 in poor.nonzero().squeeze(-1)
    assert poor.sum() < 100
    assert float(plan.run()[0]) == pytest.approx(1e-6, rel=1e-6)
    assert (
        abs(float(plan.series.run()[0]) - 1e-6) > 1e-9
    )  # the series alone is right relative to all values only


def test_what_is_refused_unasked():
    x = 20 * torch.rand(3000, 2)
    attention = r.Attention(r.Gaussian(bandwidth=1.0))

    def why(*given):
        return r.explain(attention, *given).refusals["fourier"]

    assert "float64 has" in why(x.double())
    assert "as fast as a series" in why(x[:500])
    assert "not of gradients" in why(x.clone().requires_grad_())
    assert "it has to take at most half" in why(x[:2100] * 60)
    assert r.explain(attention, x).engine.name == "fourier"
    assert "modes for" in why(x * 1e4)


def test_a_broken_transform_falls_back_to_pairs_with_a_warning(monkeypatch):
    if not has_finufft():
        pytest.skip("finufft is not installed")
    x = 20 * torch.rand(3000, 2)
    problem = pose(x, x, x)
    plan = explain_problem(problem).plan
    assert isinstance(plan.series.transform, Finufft)
    right = Finufft.slopes
    monkeypatch.setattr(Finufft, "slopes", lambda *given: 1.001 * right(*given) + 1e-3)
    with pytest.warns(PerformanceWarning, match="all rows"):
        found = plan.run()
    assert torch.equal(found, Sdpa().plan(problem).run())


@pytest.mark.parametrize("size", [1e-12, 1e12])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: type(t).__name__)
def test_the_unit_of_values_does_not_matter(size, transform):
    """A transform errs by a part of all strengths, so values are scaled before they share one with masses."""
    x = 6 * torch.rand(200, 2, dtype=D)
    values = size * torch.randn(200, 3, dtype=D)
    problem = pose(x, x, values)
    plan = Fourier(1e-6, transform).plan(problem)
    error = torch.linalg.vector_norm(plan.run() - ReferenceEngine().plan(problem).run(), dim=-1)
    assert (error <= plan.certify().bounds).all()
    assert float(error.max()) <= 1e-10 * float(plan.facts.radius.max())


def test_a_tolerance_is_a_permission_in_a_flow():
    """The series where it pays; pairs where they are cheaper or the box is too large, with a warning if they
    are many.
    """
    few, many = 5 * torch.rand(100, 2, dtype=D), 20 * torch.rand(3000, 2, dtype=D)
    engine = Fourier(1e-6)
    assert not isinstance(select_within(pose(few, few, few), engine), FourierPlan)
    assert isinstance(select_within(pose(many, many, many), engine), FourierPlan)
    assert not isinstance(select_within(pose(many, many, many), Sdpa()), FourierPlan)
    wide = 1e5 * torch.rand(9000, 2, dtype=D)
    with pytest.warns(PerformanceWarning, match="bandwidths needs"):
        select_within(pose(wide, wide, wide), engine)
    with pytest.raises(r.errors.RefusalError):
        select_within(pose(few, few, few).replace(normalizer=r.Sparsemax()), Sdpa())


def test_a_flow_that_spreads_hands_over(monkeypatch):
    """x' = Px drives particles apart; the engine changes on the way, and the end is that of pairs."""
    monkeypatch.setattr(FourierPlan, "pays", lambda plan: True)
    monkeypatch.setattr("regard.compute.engines.fourier.MODES", 200)
    x = 0.5 * torch.randn(60, 1, dtype=D)
    field = r.Attention(r.Gaussian(bandwidth=0.3))
    sizes, run = [], FourierPlan.run
    monkeypatch.setattr(FourierPlan, "run", lambda plan: sizes.append(plan.series.count) or run(plan))
    ends = [r.flow(field, x, Euler(0.5), 3.0, engine=e).at(3.0) for e in (Fourier(1e-9), ReferenceEngine())]
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
    assert 0 < len(sizes) < 6  # of six steps the first ones
    assert sizes == sorted(sizes)  # each with more modes than the one before


def test_a_scheme_with_a_tolerance_chooses_the_series(monkeypatch):
    """DormandPrince declares one, and Euler does not."""
    used = []
    run = FourierPlan.run
    monkeypatch.setattr(FourierPlan, "run", lambda plan: used.append(plan.engine.tolerance) or run(plan))
    x = torch.nn.functional.normalize(torch.randn(3000, 2, dtype=D), dim=-1)
    attention = r.Attention(r.Dot(scale=4.0))
    end = r.flow(attention, x, DormandPrince(1e-4), 0.2, space=Sphere()).at(0.2)
    assert used
    assert max(used) <= 1e-4 / 16
    count = len(used)
    direct = r.flow(attention, x, DormandPrince(1e-4), 0.2, space=Sphere(), engine=Sdpa()).at(0.2)
    torch.testing.assert_close(end, direct, rtol=0, atol=1e-5)
    r.flow(attention, x, Euler(0.1), 0.1, space=Sphere()).at(0.1)
    assert len(used) == count


@pytest.mark.parametrize("dimension", [2, 3, 5])
def test_energies_of_many_particles(dimension):
    """By a series or by pairs: the same number as the double sum, weighted too."""
    x = torch.nn.functional.normalize(torch.randn(2200, dimension, dtype=D), dim=-1)
    for measure in (r.Measure(x), r.Measure(x, torch.randn(2200, dtype=D))):
        masses = measure.masses()
        expected = float(masses @ (2.0 * x @ x.mT).exp() @ masses) / 4
        assert Energy(2.0).number(measure, measure) == pytest.approx(expected, rel=1e-9)


def test_a_batch_is_proved_row_by_row():
    x = torch.stack([10 * torch.rand(2500, 2), torch.rand(2500, 2) - 0.5])
    problem = pose(x, x, x)
    plan = explain_problem(problem).plan
    assert isinstance(plan, RowwisePlan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        found = plan.run()
    expected = ReferenceEngine().plan(problem.to(D)).run()
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert math.isfinite(float(found.sum()))
