"""A plan is all that was decided: what is asked and what runs are one computation; problems hide nothing."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import regard as r
from regard.compute import Plan, Refused
from regard.compute.tensors import pose_tensors
from regard.potentials.reductions import Reduction, reduce
from tests.nouns import D

DECLARED = {
    "dot": {},
    "causal": {"support": r.Causal()},
    "window": {"support": r.Window(2, 1), "potential": r.Dot() + r.Alibi(0.2)},
    "padding": {"support": r.Padding(torch.tensor(4)) & r.Causal()},
    "gaussian": {"potential": r.Gaussian(bandwidth=1.5), "normalizer": r.Softmax(2.0)},
    "weights": {"log_weights": torch.tensor([0.0, 1, -1, 0.5, -torch.inf, 0, 2], dtype=D)},
    "laplace": {"potential": r.Laplace()},
    "softcap": {"potential": r.SoftCap(r.Dot(), 2.0)},
    "entmax": {"normalizer": r.Entmax(1.5)},
    "sinkhorn": {"normalizer": r.Sinkhorn()},
    "elu": {"normalizer": r.LinearKernel(r.normalizers.Elu()), "support": r.Causal()},
}


def cloud(*shape):
    return torch.randn(*shape, dtype=D)


def posed(declared, dtype=D, batch=(2, 3)):
    q, k, v = (cloud(*batch, 7, 4).to(dtype) for _ in range(3))
    given = {
        "potential": r.Dot(),
        "normalizer": r.Softmax(),
        "support": r.Full(),
        "log_weights": None,
        **declared,
    }
    return pose_tensors(
        q, k, v, *(given[name] for name in ("potential", "normalizer", "support", "log_weights"))
    )


@pytest.mark.parametrize("name", DECLARED)
def test_a_plan_or_a_sentence(name):
    """Every engine gives one of the two; all plans agree, run twice, and leave the problem as it was."""
    problem = posed(DECLARED[name])
    answers = {engine.name: engine.plan(problem) for engine in r.engines.all_engines()}
    plans = [plan for plan in answers.values() if isinstance(plan, Plan)]
    assert len(plans) >= 2
    assert all(answer.why.endswith(".") for answer in answers.values() if isinstance(answer, Refused))
    expected = answers["reference"].run()
    for plan in plans:
        if plan.engine.name == "flex":
            continue
        assert torch.allclose(plan.run(), expected, atol=1e-9), plan.engine.name
        assert torch.equal(plan.run(), plan.run())
        prediction = plan.predict()
        assert prediction.flops > 0
        assert prediction.how
    assert set(vars(problem)) == {field.name for field in dataclasses.fields(problem)}


@pytest.mark.parametrize("name", DECLARED)
def test_explain_shows_the_plan_that_runs(name):
    declared = {key: value for key, value in DECLARED[name].items() if key != "log_weights"}
    attention = r.Attention(**{"potential": r.Dot(), **declared})
    x = cloud(7, 4)
    explained = r.explain(attention, x)
    assert torch.equal(explained.plan.run(), r.apply(attention, x))
    assert explained.plan.predict().how in str(explained)


def test_decisions_are_fields_of_the_plan():
    """The dtype, the kernel's causal flag and the blocks of masks can be read before anything runs."""
    far = 1e3 * cloud(9, 4).float()
    narrow, wide = (r.explain(r.Attention(r.Gaussian(bandwidth=b)), far).plan for b in (0.01, 1e5))
    assert narrow.arguments[0].dtype == torch.float64
    assert wide.arguments[0].dtype == torch.float32
    assert narrow.run().dtype == torch.float32
    causal, window = (
        r.explain(r.Attention(r.Dot(), support=s), far).plan.call for s in (r.Causal(), r.Window(2, 0))
    )
    assert causal.causal
    assert causal.tiling is None
    assert not window.causal
    assert window.tiling is not None
    tiled = r.engines.Tiled(pairs=16).plan(posed({"potential": r.Laplace()}, batch=()))
    assert tiled.tiling.rows == 7
    assert tiled.tiling.columns == 64
    rows = r.engines.Tiled(pairs=16).plan(posed({"normalizer": r.Entmax()}, batch=()))
    assert rows.tiling.rows == 2
    assert rows.tiling.columns is None


def test_scores_are_reduced_once():
    """The reduction that an engine looked at when it was asked is the one that runs."""
    count = 0

    @dataclass(frozen=True, eq=False, repr=False)
    class Counted(r.Potential):
        def features(self, x, y, x_marks, y_marks):
            return x, y

        def pair(self, queries, keys):
            return queries @ keys.mT

    @reduce.rule(Counted)
    def _counted(potential, queries, keys, causal):
        nonlocal count
        count += 1
        return Reduction(queries, keys)

    x = cloud(6, 4)
    found = r.attend(x, x, x, potential=Counted())
    assert count == 1
    assert torch.allclose(found, (x @ x.mT).softmax(-1) @ x, atol=1e-12)


def test_rows_that_depend_on_each_other_are_not_cut():
    """A normalizer that couples rows and that no engine knows runs as it is defined."""

    @dataclass(frozen=True, eq=False, repr=False)
    class Balanced(r.normalizers.Normalizer):
        laws: ClassVar[bool] = False
        variational: ClassVar[bool] = False
        rowwise: ClassVar[bool] = False

        def weights(self, scores, reference):
            return torch.softmax(scores.flatten(-2), -1).reshape(scores.shape)

    x = cloud(6, 4)
    attention = r.Attention(r.Dot(scale=1.0), normalizer=Balanced())
    explained = r.explain(attention, x)
    assert explained.engine.name == "reference"
    assert "Balanced depend on each other" in explained.refusals["tiled"]
    expected = torch.softmax((x @ x.mT).flatten(), -1).reshape(6, 6) @ x
    assert torch.allclose(r.apply(attention, x), expected, atol=1e-12)
    with pytest.raises(r.errors.RefusalError, match="depend on each other"):
        r.apply(attention, x, engine=r.engines.Tiled(pairs=12))


@pytest.mark.parametrize("name", ["dot", "causal", "window", "padding", "gaussian", "weights"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 2, 3)])
def test_other_devices_compute_the_same(name, batch):
    """What runs where there is no CPU kernel, run on a CPU: outputs and log-sum-exps."""
    plan = r.engines.Sdpa().plan(posed(DECLARED[name], batch=batch))
    assert torch.allclose(plan.run_elsewhere(), plan.run(), atol=1e-12)
    mine = plan.call.restore_rows(plan.log_sum_exp_elsewhere())
    assert mine.shape == (*batch, 7)
    temperature = plan.problem.normalizer.temperature
    energy = temperature * mine
    energy = energy if plan.reduction.row_bias is None else energy + plan.reduction.row_bias()
    assert torch.allclose(energy, plan.free_energy(), atol=1e-12)


def test_a_plan_is_offered_only_where_it_may_be():
    problem = posed({"potential": r.SoftCap(r.Dot(), 2.0)}, torch.float32)
    assert isinstance(r.engines.Flex().plan(problem), Plan)
    assert isinstance(r.engines.Flex().offer(problem), Refused)
    assert isinstance(r.engines.Tiled().offer(problem), Plan)
