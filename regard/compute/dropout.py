"""Dropout of attention weights, as torch does it in training: not a law, and so no part of a declaration.

Each weight is zero with the probability `share`, and else 1/(1 - share) times itself; a row sums to one in
the mean only. The weights are dropped as F.scaled_dot_product_attention drops them, with the same random
numbers for the same seed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from regard.compute.engine import count_pairs
from regard.compute.precision import with_enough_digits
from regard.compute.problem import Problem
from regard.compute.selection import LARGE
from regard.errors import ArgumentError, PerformanceWarning


def check_share(name: str, share: Any) -> None:
    """A share of weights that is dropped, from 0 to 1."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ArgumentError(name, f"is {share!r}", "give the share of weights that is dropped, from 0 to 1")


def dropped_weights(problem: Problem, share: float) -> Tensor:
    """All weights (..., m, n) of a problem, some of them dropped; one draw for each pair of the batch."""
    exact = with_enough_digits(problem)
    weights = exact.normalizer.weights(exact.potential.pair(exact.queries, exact.keys), exact.reference())
    every = weights.expand(*exact.batch_shape, exact.query_count, exact.key_count)
    return F.dropout(every, share)


def attend_with_dropout(problem: Problem, share: float) -> Tensor:
    """Outputs (..., m, e) of weights of which some are dropped; the m × n matrix is held, as in torch."""
    if count_pairs(problem) > LARGE:
        message = f"dropout holds {count_pairs(problem):.2g} weights at once, as torch's does on a CPU"
        warnings.warn(message, PerformanceWarning, stacklevel=4)
    weights = dropped_weights(problem, share)
    return (weights @ problem.values.to(weights.dtype)).to(problem.dtype)
