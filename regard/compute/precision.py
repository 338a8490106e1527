"""How many digits a problem needs: accuracy is part of the meaning of a declaration."""

from __future__ import annotations

import torch

from regard import _check
from regard._refused import Refused
from regard.compute.problem import Problem
from regard.potentials.reductions import Reduction, reduce

CANCELLATION = 4e-6
"""Above this expected error of a score, eps · (range / bandwidth)², scores are computed in float64."""


def with_enough_digits(problem: Problem) -> Problem:
    """The problem in the dtype it is computed in: float32, or float64 where float32 would lose the answer.

    That is where the terms of a score cancel, or are so large that their rounding shows (a Gaussian much
    narrower than the points are spread), and where weights are not Lipschitz in the scores. The first needs a
    look at the data, which is not possible under torch.compile and vmap; there the dtype of the inputs
    decides.
    """
    return problem.to(
        needed_dtype(problem, reduce.one(problem.potential, problem.queries, problem.keys, False))
    )


def needed_dtype(problem: Problem, reduction: Reduction | Refused) -> torch.dtype:
    """That dtype, for a problem whose scores have this reduction."""
    kind = torch.promote_types(problem.dtype, torch.float32)
    if kind == torch.float32 and (problem.normalizer.sharp() or loses_digits(reduction)):
        return torch.float64
    return kind


def loses_digits(reduction: Reduction | Refused) -> bool:
    """Whether float32 scores would be off by more than the tolerance, because their terms cancel."""
    if isinstance(reduction, Refused) or reduction.amplitude is None:
        return False
    if isinstance(reduction.amplitude, float):
        return reduction.amplitude * torch.finfo(torch.float32).eps > CANCELLATION
    return bool(_check.holds(reduction.amplitude * torch.finfo(torch.float32).eps > CANCELLATION))
