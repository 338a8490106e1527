"""apply and explain: choose an engine, run the declaration, say why."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard import attention as declared
from regard._kinds import names_wrong_kinds
from regard._object import rebuild
from regard.attention import Attention, as_measure
from regard.compute.engine import Engine, working_dtype
from regard.compute.moments import project
from regard.compute.problem import Problem, pose
from regard.compute.selection import Explanation, explain_problem, select
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.moments import Law, SecondMoment
from regard.normalizers import Softmax


@names_wrong_kinds
def apply(
    attention: Attention,
    x: Measure | Tensor,
    context: Measure | Tensor | None = None,
    *,
    engine: Engine | None = None,
) -> Any:
    """Run a declaration: Tensor in, Tensor out; Measure in, Measure out (the transported measure μ A_μ).

    With the moments Law and SecondMoment the result is the law of each query: a Measure or a GaussianMeasure
    with batch (..., m).

    Examples:
        >>> from regard.engines import ReferenceEngine
        >>> layer, x = regard.Attention(regard.Gaussian()), torch.randn(5, 3)
        >>> torch.allclose(regard.apply(layer, x, engine=ReferenceEngine()), layer(x), atol=1e-6)
        True
    """
    problem = problem_of(attention, x, context, engine)
    result = project.one(attention.moment, select(problem, engine))
    if isinstance(x, Tensor) or isinstance(attention.moment, (Law, SecondMoment)):
        return _mixture(x, result) if isinstance(x, Measure) and isinstance(result, Measure) else result
    return Measure(result, x.log_weights, x.marks)


@names_wrong_kinds
def explain(
    attention: Attention,
    x: Measure | Tensor,
    context: Measure | Tensor | None = None,
    *,
    engine: Engine | None = None,
) -> Explanation:
    """Which engine would run, one sentence for each that refuses, and the predicted cost.

    Examples:
        >>> regard.explain(regard.Attention(regard.Laplace()), torch.randn(8, 4)).engine.name
        'tiled'
    """
    return explain_problem(problem_of(attention, x, context, engine), engine)


def problem_of(
    attention: Attention,
    x: Measure | Tensor,
    context: Measure | Tensor | None,
    engine: Engine | None = None,
) -> Problem:
    """The problem that a declaration poses on these measures, for an engine where one is named."""
    source = as_measure("x", x)
    target = source if context is None else as_measure("context", context)
    if not isinstance(engine, Engine):
        return _pose(attention, source, target)
    with engine.posing(source.points, target.points) as marks:
        if marks[1] is not None and target.log_weights is not None:
            found = (
                f"has weights that sum to one on each rank, and {engine.name} does not know how ranks compare"
            )
            raise ArgumentError("context", found, "use attend with log_weights, which may have any sum")
        placed = [_placed(measure, mark) for measure, mark in zip((source, target), marks, strict=True)]
        return _pose(attention, *placed)


def _placed(measure: Measure, marks: Tensor | None) -> Measure:
    """A measure with marks, where it has none of its own."""
    if marks is None or measure.marks is not None:
        return measure
    return rebuild(Measure, ("points", "log_weights", "marks"), (measure.points, measure.log_weights, marks))


def _pose(attention: Attention, source: Measure, target: Measure) -> Problem:
    return pose(
        attention.potential,
        attention.normalizer,
        attention.support,
        source.points,
        target.points,
        attention.lookup.values(target.points, target.marks),
        log_counts=declared.log_counts(target),
        log_queries=source.log_weights,
        query_marks=source.marks,
        key_marks=target.marks,
    )


def _mixture(x: Measure, laws: Measure) -> Measure:
    """μK for laws with many atoms: all atoms of all queries."""
    log_weights = x.log_masses().unsqueeze(-1) + laws.log_masses()
    shape = torch.broadcast_shapes(log_weights.shape, laws.points.shape[:-1])
    return Measure(laws.points.expand(*shape, -1).flatten(-3, -2), log_weights.expand(shape).flatten(-2))


@declared.run.rule(Attention)
def _run(attention: Attention, x: Measure | Tensor, context: Measure | Tensor | None) -> Any:
    return apply(attention, x, context)


@declared.free_energy.rule(Attention)
def _free_energy(attention: Attention, x: Measure | Tensor, context: Measure | Tensor | None) -> Tensor:
    problem = problem_of(attention, x, context)
    if problem.key_count == 0:
        return torch.full(
            (*problem.batch_shape, problem.query_count),
            -math.inf,
            dtype=working_dtype(problem.dtype),
            device=problem.device,
        )
    energy = select(problem).free_energy().to(working_dtype(problem.dtype))
    if not isinstance(problem.normalizer, Softmax):
        return energy
    temperature = problem.normalizer.temperature
    counts = problem.log_counts
    total = math.log(problem.key_count) if counts is None else counts.to(energy).logsumexp(-1, keepdim=True)
    return energy - (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature) * total
