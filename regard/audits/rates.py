"""Rates with their 95 % limit: k of n cases, and the largest rate that these still allow for."""

from __future__ import annotations

import math

CONFIDENCE = 0.95


def upper_limit(count: int, cases: int) -> float:
    """Return the one-sided 95 % upper limit of Clopper and Pearson on a rate: the largest rate for which
    `count` or fewer of `cases` still have a probability of 5 %.

    The cases are taken as independent. 0 of 10 gives 0.26.
    """
    if count >= cases:
        return 1.0
    low, high = count / cases, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, cases, middle) > 1 - CONFIDENCE else (low, middle)
    return high


def _at_most(count: int, cases: int, rate: float) -> float:
    """Return the probability of `count` or fewer of n cases, Σ_{k ≤ count} C(n, k) r^k (1 − r)^(n − k)."""
    if rate >= 1.0:
        return 0.0
    logs = (
        math.lgamma(cases + 1) - math.lgamma(k + 1) - math.lgamma(cases - k + 1)
        + (k * math.log(rate) if k else 0.0) + (cases - k) * math.log1p(-rate)
        for k in range(count + 1)
    )  # fmt: skip
    return math.fsum(map(math.exp, logs))


def shown_rate(count: int, cases: int) -> str:
    """Return a rate as it is printed: 3 of 92, at most 8 %."""
    return f"{count:,} of {cases:,}, at most {math.ceil(100 * upper_limit(count, cases)):d} %"
