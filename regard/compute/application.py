"""apply and explain: choose an engine, run the declaration, say why."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import attention as declared
from regard.attention import Attention, as_measure
from regard.compute.engine import Engine, Prediction, engines, pairs, working_dtype
from regard.compute.moments import project
from regard.compute.problem import Problem, Tokens, pose
from regard.errors import ArgumentError, PerformanceWarning, RefusalError
from regard.measure import Measure
from regard.moments import Law, SecondMoment
from regard.normalizers import Softmax

LARGE = 1 << 26
"""Pairs above which a fall back to the m × n matrix is worth a warning."""


@dataclass(frozen=True)
class Explanation:
    """Which engine runs, what it takes, and one sentence for each engine that refuses."""

    engine: Engine
    prediction: Prediction
    refusals: dict[str, str]

    def __str__(self) -> str:
        mebibytes = self.prediction.bytes / 2**20
        lines = [f"{self.engine.name}: about {self.prediction.flops:.3g} flops and {mebibytes:.3g} MiB beyond inputs and output"]
        lines += [f"{name} refuses: {why}" for name, why in self.refusals.items()]
        return "\n".join(lines)

    __repr__ = __str__


def apply(attention: Attention, x: Measure | Tensor, context: Measure | Tensor | None = None, *, engine: Engine | None = None) -> Any:
    """Run a declaration: Tensor in, Tensor out; Measure in, Measure out (the transported measure μ A_μ).

    With the moments Law and SecondMoment the result is the law of each query: a Measure or a GaussianMeasure with batch (..., m).
    """
    problem = problem_of(attention, x, context)
    chosen = select(problem, engine)
    result = project.one(attention.moment, problem, chosen)
    if isinstance(x, Tensor) or isinstance(attention.moment, (Law, SecondMoment)):
        return _mixture(x, result) if isinstance(x, Measure) and isinstance(result, Measure) else result
    return Measure(result, x.log_weights, x.marks)


def explain(
    attention: Attention, x: Measure | Tensor, context: Measure | Tensor | None = None, *, engine: Engine | None = None
) -> Explanation:
    """Which engine would run, one sentence for each that refuses, and the predicted cost."""
    return explain_problem(problem_of(attention, x, context), engine)


def explain_problem(problem: Problem, engine: Engine | None = None) -> Explanation:
    """The same for a posed problem."""
    refusals: dict[str, str] = {}
    for candidate in engines() if engine is None else [engine]:
        why = _refusal(candidate, problem, named=engine is not None)
        if why is None:
            return Explanation(candidate, candidate.predict(problem), refusals)
        refusals[candidate.name] = why
    raise RefusalError(f"engine {next(iter(refusals))}", list(refusals.values()))


def select(problem: Problem, engine: Engine | None) -> Engine:
    """The named engine, if it can; else the first that does not refuse."""
    if engine is not None and not isinstance(engine, Engine):
        raise ArgumentError("engine", f"is {engine!r}", "give an engine value, e.g. engine=regard.Sdpa()")
    for candidate in engines() if engine is None else [engine]:
        why = _refusal(candidate, problem, named=engine is not None)
        if why is None:
            if engine is None and candidate.name == "reference" and pairs(problem) > LARGE:
                message = f"the reference engine holds {pairs(problem):.2g} scores at once; explain(...) says why no other engine runs"
                warnings.warn(message, PerformanceWarning, stacklevel=3)
            return candidate
    raise RefusalError(f"engine {candidate.name}", [str(why)])


def _refusal(candidate: Engine, problem: Problem, named: bool) -> str | None:
    unasked = None if named else candidate.only_by_name(problem)
    return unasked or candidate.refuse(problem)


def problem_of(attention: Attention, x: Measure | Tensor, context: Measure | Tensor | None) -> Problem:
    """The problem that a declaration poses on these measures."""
    source = as_measure("x", x)
    target = source if context is None else as_measure("context", context)
    return pose(
        attention.potential,
        attention.normalizer,
        attention.support,
        Tokens(source.points, source.log_weights, source.marks),
        Tokens(target.points, declared.log_counts(target), target.marks),
        attention.lookup.values(target.points, target.marks),
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
        return torch.full((*problem.batch_shape, problem.query_count), -math.inf, dtype=working_dtype(problem.dtype), device=problem.device)
    energy = select(problem, None).free_energy(problem).to(working_dtype(problem.dtype))
    if not isinstance(problem.normalizer, Softmax):
        return energy
    temperature = problem.normalizer.temperature
    total = torch.tensor(float(problem.key_count)) if problem.log_counts is None else problem.log_counts.logsumexp(-1, keepdim=True)
    return energy - (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature) * (
        total.log() if problem.log_counts is None else total
    ).to(energy)
