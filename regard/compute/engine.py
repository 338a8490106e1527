"""Engine and Plan: a way to compute problems, and what it decided for one of them.

`Engine.plan(problem)` decides everything that can be decided before a run (form of the scores, precision,
tile sizes) and gives it as a Plan, or a Refused with a sentence. A plan runs as it stands: nothing is decided
twice.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard._object import Object
from regard._refused import Refused
from regard._types import over_rows
from regard.compute.problem import Problem
from regard.normalizers import Softmax

Marks = tuple[Tensor | None, Tensor | None]
"""Marks of queries and keys; None means 0, 1, 2, ... in order."""

_engines: list[type[Engine]] = []


@dataclass(frozen=True)
class Prediction:
    """What a run would take: operations, bytes beyond inputs and output, and how it is done.

    Examples:
        >>> found = regard.explain(regard.Attention(regard.Laplace()), torch.randn(64, 4)).prediction
        >>> found.flops > 0, found.bytes > 0
        (True, True)
    """

    flops: float
    bytes: float
    how: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Object):
    """Abstract: a problem and what an engine decided about it, ready to run.

    Examples:
        >>> plan = regard.explain(regard.Attention(regard.Dot()), torch.randn(8, 4)).plan
        >>> plan.engine.name, plan.run().shape
        ('sdpa', torch.Size([8, 4]))
    """

    engine: Engine
    problem: Problem

    @abstractmethod
    def run(self) -> Tensor:
        """The outputs (..., m, e), in the dtype of the problem."""

    @abstractmethod
    def free_energy(self) -> Tensor:
        """The maximum of the variational objective relative to counts, (..., m): one number a query.

        Values are not used.
        """

    def run_with_free_energy(self) -> tuple[Tensor, Tensor]:
        """Both of these, in one pass where a plan has both at once."""
        return self.run(), self.free_energy()

    def run_with_level(self, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """Outputs, and log-sum-exps (..., m) of scores over temperature of a softmax, with these digits."""
        assert isinstance(self.problem.normalizer, Softmax)
        temperature = self.problem.normalizer.temperature
        out, energy = self.run_with_free_energy()
        seen = energy > -math.inf
        level = torch.where(seen, energy, torch.zeros_like(energy)) / over_rows(temperature)
        return out, level.to(kind).masked_fill(~seen, -math.inf)

    def pull_part(
        self, whole: tuple[Tensor, Tensor], cotangents: tuple[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Tensors of the plan with their gradients, where its keys are some of those that its rows see; None
        where that is not at hand.

        whole: outputs and log-sum-exps (of scores over temperature) of all keys; cotangents: of these.
        """
        return None

    def all_keys(self) -> Problem:
        """The problem with all of its keys, for moments that need rows of weights."""
        return self.problem

    @abstractmethod
    def predict(self) -> Prediction:
        """Flops and extra bytes of a run."""

    def pays(self) -> bool:
        """Whether it is worth running where another engine may run instead."""
        return True


class Engine(Object):
    """Abstract: a way to compute problems. Engines differ in speed, never in meaning.

    `rank` orders the engines: the lowest is asked first.

    Examples:
        >>> from regard.engines import ReferenceEngine, Sdpa
        >>> x = torch.randn(6, 4)
        >>> exact = regard.apply(regard.Attention(regard.Dot()), x, engine=ReferenceEngine())
        >>> torch.allclose(regard.apply(regard.Attention(regard.Dot()), x, engine=Sdpa()), exact, atol=1e-6)
        True
    """

    name: ClassVar[str]
    rank: ClassVar[int]
    tolerant: ClassVar[bool] = False
    """Whether it errs by a declared tolerance, so that any other engine may stand in for it."""

    @abstractmethod
    def plan(self, problem: Problem) -> Plan | Refused:
        """How this engine would run the problem, or why it cannot."""

    def offer(self, problem: Problem) -> Plan | Refused:
        """The plan for a caller who named no engine; some engines must be asked for by name."""
        return self.plan(problem)

    @contextmanager
    def posing(self, queries: Tensor, keys: Tensor) -> Iterator[Marks]:
        """Marks for tokens that come without, while a problem is posed of them for this engine."""
        yield None, None

    @property
    def over_processes(self) -> bool:
        """Whether other processes compute with this one, each with tokens of its own."""
        return False

    def instead(self) -> Engine | None:
        """The engine that stands in for a tolerant one; None for those that are offered unasked."""
        return None

    def largest(self, value: float) -> float:
        """The largest of the numbers of all processes that compute together; here it is one."""
        return value


def register(engine: type[Engine]) -> type[Engine]:
    """Class decorator: make an engine known.

    Examples:
        >>> from regard.engines import Sdpa, register
        >>> register(Sdpa)  # a decorator of classes; every name once
        Traceback (most recent call last):
            ...
        ValueError: an engine named 'sdpa' is registered already
    """
    if any(known.name == engine.name for known in _engines):
        raise ValueError(f"an engine named {engine.name!r} is registered already")
    _engines.append(engine)
    _engines.sort(key=lambda known: known.rank)
    return engine


def all_engines() -> Iterator[Engine]:
    """All engines, the fastest first, the reference last.

    Examples:
        >>> [engine.name for engine in regard.compute.all_engines()][-1]
        'reference'
    """
    return (engine() for engine in _engines)


def count_pairs(problem: Problem) -> float:
    """How many pairs of query and key there are, batch included."""
    return float(math.prod(problem.batch_shape) * problem.query_count * problem.key_count)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a problem of this dtype is computed in: half precisions in float32."""
    return torch.promote_types(dtype, torch.float32)


def find_empty_rows(problem: Problem, rows: slice = slice(None)) -> Tensor:
    """True for queries that see no key with mass, (..., m)."""
    allowed = problem.support.allows(problem.rows()[..., rows], problem.columns())
    if problem.log_counts is not None:
        allowed = allowed & (problem.log_counts > -math.inf).unsqueeze(-2)
    return ~allowed.any(-1).expand(*allowed.shape[:-2], problem.rows()[..., rows].shape[-1])
