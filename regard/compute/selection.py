"""select and explain_problem: ask the engines in order, take the first plan, keep the sentences."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from regard._refused import Refused
from regard._transforms import is_recorded
from regard.compute.engine import Engine, Plan, Prediction, all_engines, count_pairs
from regard.compute.problem import Problem
from regard.errors import ArgumentError, PerformanceWarning, RefusalError

LARGE = 1 << 26
"""Pairs above which a fall back to the m × n matrix is worth a warning."""


@dataclass(frozen=True)
class Explanation:
    """The plan that runs, and one sentence for each engine that was asked before it and refused.

    Examples:
        >>> found = regard.explain(regard.Attention(regard.Laplace()), torch.randn(8, 4))
        >>> found.engine.name, sorted(found.refusals)  # what runs, and who refused before it
        ('tiled', ['flex', 'fourier', 'linear', 'sdpa'])
    """

    plan: Plan
    refusals: dict[str, str]

    @property
    def engine(self) -> Engine:
        """The engine that made the plan."""
        return self.plan.engine

    @property
    def prediction(self) -> Prediction:
        """What the run would take."""
        return self.plan.predict()

    def __str__(self) -> str:
        predicted = self.prediction
        mebibytes = predicted.bytes / 2**20
        cost = f"about {predicted.flops:.3g} flops and {mebibytes:.3g} MiB beyond inputs and output"
        lines = [f"{self.engine.name}: {cost}"]
        lines += [f"  {predicted.how}"] if predicted.how else []
        lines += [f"{name} refuses: {why}" for name, why in self.refusals.items()]
        return "\n".join(lines)

    __repr__ = __str__


def explain_problem(problem: Problem, engine: Engine | None = None) -> Explanation:
    """The plan of the named engine, or the first that an engine offers; RefusalError where there is none."""
    if engine is not None and not isinstance(engine, Engine):
        raise ArgumentError(
            "engine", f"is {engine!r}", "give an engine value, e.g. engine=regard.engines.Sdpa()"
        )
    refusals: dict[str, str] = {}
    for candidate in all_engines() if engine is None else [engine]:
        plan = candidate.offer(problem) if engine is None else candidate.plan(problem)
        if not isinstance(plan, Refused):
            return Explanation(plan, refusals)
        refusals[candidate.name] = plan.why
    raise RefusalError(f"engine {next(iter(refusals))}", list(refusals.values()))


def select_within(problem: Problem, engine: Engine | None = None) -> Plan:
    """The plan of one step of many: an engine that errs by a declared tolerance runs where it can and where
    it pays, and others in its place; any other engine as `select` takes it.
    """
    if engine is None or not engine.tolerant:
        return select(problem, engine)
    plan = engine.plan(problem)
    if isinstance(plan, Refused):
        return _others(problem, plan.why, engine.instead())
    return plan if plan.pays() else _others(problem, "", engine.instead())


def _others(problem: Problem, why: str, named: Engine | None) -> Plan:
    """A plan of the named engine or of those without tolerance; a warning where that is many pairs."""
    if why and count_pairs(problem) > LARGE:
        message = f"all {count_pairs(problem):.2g} pairs are summed, because {why}"
        warnings.warn(message, PerformanceWarning, stacklevel=3)
    if named is not None:
        return select(problem, named)
    plans = (candidate.offer(problem) for candidate in all_engines() if not candidate.tolerant)
    return next(plan for plan in plans if not isinstance(plan, Refused))


def select(problem: Problem, engine: Engine | None = None) -> Plan:
    """The plan that runs: that of the named engine, if it can; else the first that an engine offers."""
    plan = explain_problem(problem, engine).plan
    if engine is not None or plan.engine.name != "reference" or is_recorded(problem.values):
        return plan
    if count_pairs(problem) > LARGE:
        held = f"the reference engine holds {count_pairs(problem):.2g} scores at once"
        message = f"{held}; explain(...) says why no other engine runs"
        warnings.warn(message, PerformanceWarning, stacklevel=3)
    return plan
