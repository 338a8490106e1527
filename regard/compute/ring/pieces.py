"""Own queries against the keys of one rank: which pairs of pieces see each other, and their union.

Attention over a union of key sets is the average of the parts, weighted by their masses: with outputs o_b and
log-sum-exps l_b it is Σ_b e^{l_b - l} o_b and l = log Σ_b e^{l_b}.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._types import Features
from regard.compute.engine import Plan
from regard.compute.problem import Problem, SupportParts
from regard.supports import Causal, Full

Attended = tuple[Tensor, Tensor]
"""Outputs (..., m, e) and log-sum-exps (..., m)."""


@dataclass(frozen=True)
class Run:
    """Tokens `tokens` of a shard, which stand in a row from place `low` to place `high`."""

    tokens: slice
    low: float
    high: float
    in_a_row: bool


def runs_of(marks: Tensor) -> list[Run]:
    """Marks (n,) cut where they do not go up by one; all at once where they differ within the batch."""
    count = marks.shape[-1]
    if marks.ndim != 1 or marks.dtype.is_floating_point:
        return [Run(slice(0, count), float(marks.min()), float(marks.max()), False)]
    breaks = (1 + (marks.diff() != 1).nonzero().flatten()).tolist()
    if len(breaks) > MOST_RUNS:
        return [Run(slice(0, count), float(marks.min()), float(marks.max()), False)]
    edges = [0, *breaks, count]
    return [
        Run(slice(low, high), float(marks[low]), float(marks[high - 1]), True)
        for low, high in itertools.pairwise(edges)
    ]


MOST_RUNS = 8
"""Shards of more pieces than this are taken as a whole, with their marks."""


@dataclass(frozen=True)
class Piece:
    """Queries `rows` and keys `columns` of a shard, as a problem of their own."""

    problem: Problem
    rows: slice
    columns: slice


def pieces_of(problem: Problem) -> Iterator[Piece]:
    """All pairs that see each other, of own queries and the keys of one rank; a problem with marks."""
    for own in runs_of(problem.rows()):
        yield from _pieces(problem, own)


def attend_piece(plan: Plan) -> Attended:
    """Outputs and, with the digits in which they are joined, log-sum-exps."""
    return plan.run_with_level(joining_dtype(plan.problem))


def joining_dtype(problem: Problem) -> torch.dtype:
    """The dtype of log-sum-exps: one with more digits than outputs have, where the device has one.

    A share e^{l_b - l} is as wrong as l is, so that in float32 rounding l alone would cost what one process
    loses in all.
    """
    if problem.dtype.itemsize < 4 or problem.device.type == "mps":
        return torch.float32
    return torch.float64


@dataclass(frozen=True)
class Union:
    """Outputs (..., m, e) and log-sum-exps (..., m) of the keys that came so far: they are added in place."""

    out: Tensor
    level: Tensor

    @classmethod
    def empty(cls, problem: Problem) -> Union:
        """Rows that have seen no key."""
        shape, kind = (*problem.batch_shape, problem.query_count), joining_dtype(problem)
        width = problem.values.shape[-1]
        wide = torch.promote_types(problem.dtype, torch.float32)
        out = torch.zeros(*shape, width, dtype=wide, device=problem.device)
        return cls(out, torch.full(shape, -math.inf, dtype=kind, device=problem.device))

    def add(self, rows: slice, part: Attended) -> None:
        """More keys for some queries."""
        before, (out, own) = self.level[..., rows], part
        level = torch.logaddexp(before, own)
        mine, others = (share_of(one, level).unsqueeze(-1).to(self.out.dtype) for one in (before, own))
        self.out[..., rows, :].mul_(mine).addcmul_(out.to(self.out.dtype), others)
        before.copy_(level)


def share_of(own: Tensor, level: Tensor) -> Tensor:
    """e^{l_b - l}: which part of its mass a row has in a block; zero where it has none at all."""
    return (own - torch.where(level == -math.inf, torch.zeros_like(level), level)).exp()


def count_pairs_seen(problem: Problem) -> int:
    """How many pairs of a shard are computed."""
    return sum(_count(piece.problem) for piece in pieces_of(problem))


def _count(piece: Problem) -> int:
    past = piece.in_order() and not isinstance(piece.support, Full)
    return piece.query_count * (piece.query_count + 1) // 2 if past else piece.query_count * piece.key_count


def _pieces(problem: Problem, own: Run) -> Iterator[Piece]:
    """Queries of a run against every run of keys that they may see."""
    first, last = problem.support.span(math.floor(own.low), math.ceil(own.high))
    parts = SupportParts.of(problem.support)
    only_past = parts.causal and not parts.padding and not parts.rest
    for run in runs_of(problem.columns()):
        if run.high < first or run.low > last:
            continue
        piece = _piece(problem, own, run)
        if isinstance(problem.support, Full) or (only_past and run.high <= own.low):
            piece = piece.replace(support=Full(), query_marks=None, key_marks=None)
        elif only_past and (own.low, own.high, own.in_a_row, True) == (
            run.low,
            run.high,
            run.in_a_row,
            own.in_a_row,
        ):
            piece = piece.replace(support=Causal(), query_marks=None, key_marks=None)  # as from zero on
        yield Piece(piece, own.tokens, run.tokens)


def _piece(problem: Problem, own: Run, run: Run) -> Problem:
    """The problem of some queries and some keys."""
    rows, columns = problem.rows()[..., own.tokens], problem.columns()[..., run.tokens]
    counts = problem.log_counts
    return problem.replace(
        queries=_some(problem.queries, own.tokens),
        keys=_some(problem.keys, run.tokens),
        values=problem.values[..., run.tokens, :],
        query_count=rows.shape[-1],
        log_counts=None if counts is None else counts[..., run.tokens],
        log_queries=None,
        query_marks=rows,
        key_marks=columns,
    )


def _some(features: Features, tokens: slice) -> Features:
    return pytree.tree_map(lambda t: t[..., tokens, :] if isinstance(t, Tensor) else t, features)
