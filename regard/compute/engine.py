"""Engine: a way to compute a problem. Engines differ in speed, never in meaning; each says in a sentence what it cannot do."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard._object import Object
from regard.compute.problem import Problem

_engines: list[type[Engine]] = []


@dataclass(frozen=True)
class Prediction:
    """What a run would take: floating-point operations, and bytes beyond inputs and output."""

    flops: float
    bytes: float


class Engine(Object):
    """Abstract. `rank` orders the engines; the first that does not refuse runs."""

    name: ClassVar[str]
    rank: ClassVar[int]

    @abstractmethod
    def refuse(self, problem: Problem) -> str | None:
        """Why this engine cannot run the problem, as a sentence; None if it can."""

    def only_by_name(self, problem: Problem) -> str | None:
        """Why this engine should not be chosen unless somebody asks for it; None if it may."""
        return None

    @abstractmethod
    def run(self, problem: Problem) -> Tensor:
        """The outputs (..., m, e)."""

    @abstractmethod
    def free_energy(self, problem: Problem) -> Tensor:
        """The maximum of the variational objective relative to counts, one number a query (..., m); values are not used."""

    @abstractmethod
    def predict(self, problem: Problem) -> Prediction:
        """Flops and extra bytes of a run."""


def register(engine: type[Engine]) -> type[Engine]:
    """Class decorator: make an engine known."""
    if any(known.name == engine.name for known in _engines):
        raise ValueError(f"an engine named {engine.name!r} is registered already")
    _engines.append(engine)
    _engines.sort(key=lambda known: known.rank)
    return engine


def engines() -> list[Engine]:
    """All engines, the fastest first, the reference last."""
    return [engine() for engine in _engines]


def first_willing(problem: Problem) -> Engine:
    """The fastest engine that takes the problem unasked; the reference takes any."""
    return next(e for e in engines() if e.only_by_name(problem) is None and e.refuse(problem) is None)


def pairs(problem: Problem) -> float:
    """How many pairs of query and key there are, batch included."""
    return float(math.prod(problem.batch_shape) * problem.query_count * problem.key_count)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions are computed in float32."""
    return torch.promote_types(dtype, torch.float32)


def row_empty(problem: Problem, rows: slice = slice(None)) -> Tensor:
    """True for queries that see no key with mass, (..., m)."""
    allowed = problem.support.allows(problem.rows()[..., rows], problem.columns())
    if problem.log_counts is not None:
        allowed = allowed & (problem.log_counts > -math.inf).unsqueeze(-2)
    return ~allowed.any(-1).expand(*allowed.shape[:-2], problem.rows()[..., rows].shape[-1])
