"""RowwisePlan: a series whose rows are all proved to have the digits of their dtype, or are summed again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._refused import Refused
from regard.compute.engine import Plan, Prediction, all_engines
from regard.compute.fourier.plan import FourierPlan, RowErrors
from regard.compute.problem import Problem
from regard.errors import PerformanceWarning, RefusalError

SAMPLE = 8
"""Rows that are compared with sums over all pairs, where the error of a transform is assumed."""


@dataclass(frozen=True, eq=False, repr=False)
class RowwisePlan(Plan):
    """Sums of a series where |out_i - out^_i| ≤ 2 eps |out^_i| is proved of row i, eps that of the dtype, the
    rounding of the result included; all other rows from all pairs, by another engine.
    """

    series: FourierPlan

    def run(self) -> Tensor:
        try:
            result = self.series.certify(SAMPLE)
        except RefusalError as error:
            _warn(f"all rows, since {error}")
            return _plan(self.problem).run()
        rows = self._poor(result).nonzero().squeeze(-1)
        if not len(rows):
            return result.outputs
        if 4 * len(rows) > self.problem.query_count:
            _warn(f"{len(rows)} of {self.problem.query_count} rows, which are not proved to have all digits")
        again = _plan(_rows_of(self.problem, rows)).run()
        return result.outputs.index_copy(-2, rows, again)

    def _poor(self, result: RowErrors) -> Tensor:
        """True for rows (m,) that lack digits in some problem of the batch."""
        lengths = torch.linalg.vector_norm(result.outputs.double(), dim=-1)
        poor = ~(result.bounds <= 2 * torch.finfo(self.problem.dtype).eps * lengths)
        return poor.reshape(-1, poor.shape[-1]).any(0)

    def free_energy(self) -> Tensor:
        return _plan(self.problem).free_energy()

    def predict(self) -> Prediction:
        found = self.series.predict()
        how = f"{found.how}; rows that are not proved to have all digits of their dtype are summed over pairs"
        return Prediction(found.flops, found.bytes, how)


def _warn(what: str) -> None:
    message = f"a Fourier series does not suffice, and pairs are summed for {what}"
    warnings.warn(message, PerformanceWarning, stacklevel=4)


def _plan(problem: Problem) -> Plan:
    """How another engine runs it."""
    plans = (engine.offer(problem) for engine in all_engines() if not engine.tolerant)
    return next(plan for plan in plans if not isinstance(plan, Refused))


def _rows_of(problem: Problem, rows: Tensor) -> Problem:
    """The same problem for some queries."""
    assert isinstance(problem.queries, Tensor)
    return problem.replace(
        queries=problem.queries.index_select(-2, rows),
        query_count=len(rows),
        log_queries=None if problem.log_queries is None else problem.log_queries.index_select(-1, rows),
        query_marks=problem.rows().index_select(-1, rows),
    )
