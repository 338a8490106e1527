"""Rows of attention and tokens that may join them: what one head says of a candidate before it is there.

For a row i with keys y_1, …, y_n and scores s_i: lse_i = log Σ_k e^{s_i(y_k)}, m_i the mean of its law,
a_i(y) = e^{s_i(y) - lse_i} the odds of a candidate y against all keys together, and z_i(y) = Wᵀ(y - m_i)
where its value is, seen from the mean. A key that joins with odds a has the weight a/(1 + a) and moves the
row by a/(1 + a) z. Scores are xᵀAy + β·y; what rounding may have changed is part of each number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import Matrix, Numbers, Vectors, computed_lengths
from regard._upper import ELEMENTARY, UNIT, Upper, largest, relative_error
from regard.measure import Measure
from regard.proofs.near.head import value_matrix
from regard.proofs.near.local_scores import rounding_of_logs
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal


class Rows:
    """The rows of queries x (m, d) over keys, for one head. keys: a law; a tensor (n, d) counts each of them
    once. `middle`: any vector, which keys and candidates are seen from; `reach`: how far from it a candidate
    is at most.
    """

    def __init__(
        self, head: Head, queries: Tensor, keys: Tensor | Measure, middle: Tensor, reach: Upper
    ) -> None:
        points = keys.points if isinstance(keys, Measure) else keys
        self.log_weights = keys.log_masses() if isinstance(keys, Measure) else None
        form = head.form(points.shape[-1]) if head.softmax else None
        if form is None:
            raise Refusal(
                "the rows are not softmax rows of bilinear scores; use Dot or Bilinear with Softmax"
            )
        self.form, self.head, self.queries = form, head, queries
        self.middle = middle
        self.keys = about(points, self.middle)
        self.reach = reach.maximum(self.keys.lengths().amax())
        self.count, self.width = points.shape

    # Scores

    @cached_property
    def slopes(self) -> Vectors:
        """θ_i = Aᵀx_i + β, (m, d)."""
        form, longest = self.form, computed_lengths(self.queries).amax()
        size = computed_lengths(form.a.flatten()) * longest + computed_lengths(form.beta)
        error = relative_error(self.width + 3) * size + form.error * longest + form.error_beta
        return Vectors(self.queries @ form.a + form.beta, error)

    @cached_property
    def score_error(self) -> Upper:
        """How far any computed θ_i·(y - middle) may be off: the slope, the difference, the product."""
        steep = self.slopes.lengths().amax()
        lost = relative_error(self.width + 2) + Upper(2 * UNIT)
        return self.slopes.error * self.reach + lost * steep * self.reach

    @cached_property
    def _scores(self) -> Tensor:
        """Those of the keys, with the logarithms of their weights; rounded once more there."""
        scores = self.slopes.center @ self.keys.center.mT
        return scores if self.log_weights is None else scores + self.log_weights

    @cached_property
    def log_sums(self) -> Numbers:
        """lse_i, (m,)."""
        found = self._scores.logsumexp(-1)
        if not bool(torch.isfinite(found).all()):
            raise Refusal("scores leave the range of float64; scale the tokens")
        return Numbers(found, self.score_error + rounding_of_logs(self._scores, self.count))

    def log_odds(self, candidates: Vectors) -> Numbers:
        """log a_i(y) of candidates about the middle, (m, N)."""
        scores = self.slopes.center @ candidates.center.mT
        found = scores - self.log_sums.center.unsqueeze(-1)
        rounding = rounding_of_logs(torch.stack([scores.abs().amax(), found.abs().amax()]), 1)
        return Numbers(found, self.score_error + self.log_sums.error + rounding)

    def log_odds_in(self, center: Tensor, radius: Upper) -> Numbers:
        """At most so large is log a_i on a ball: θ·c + |θ|R - lse."""
        at = self.log_odds(self.seen(center.unsqueeze(0)))
        more = (self.slopes.lengths() * radius).bound
        found = at.center[:, 0] + more
        return Numbers(found, at.error + rounding_of_logs(found, 1))

    # Values

    @cached_property
    def means(self) -> Vectors:
        """m_i about the middle, (m, d)."""
        error = 2 * self.score_error + rounding_of_logs(self._scores, self.count)
        roundings = min(2**52, math.ceil(float(error) / UNIT)) + ELEMENTARY
        lost = relative_error(roundings + self.count + 2) * self.keys.lengths().amax()
        return Vectors(self._scores.softmax(-1) @ self.keys.center, self.keys.error + lost)

    @cached_property
    def _value_matrix(self) -> Matrix:
        return value_matrix(self.head, self.width)

    @cached_property
    def mean_values(self) -> Vectors:
        """Wᵀm_i, (m, e)."""
        return self.means.times(self._value_matrix)

    def farthest_in(self, center: Tensor, radius: Upper) -> Upper:
        """At least |z_i(y)| on a ball, (m,): |Wᵀ(c - m_i)| + |W|R."""
        at = self.seen(center.unsqueeze(0))
        away = Vectors(
            at.center - self.means.center, at.error + self.means.error + Upper(2 * UNIT) * self.reach
        )
        return away.times(self._value_matrix).lengths() + self.head.w * radius

    def values(self, candidates: Vectors) -> Vectors:
        """Wᵀy of candidates about the middle, (N, e)."""
        return candidates.times(self._value_matrix)

    def seen(self, points: Tensor) -> Vectors:
        """Points about the middle."""
        return about(points, self.middle)


@dataclass(frozen=True)
class Joined:
    """Candidates as all heads see them: odds log a (m, N, h), values Wᵀy (N, h, e) and Wᵀm (m, h, e), and at
    least how far computed values (N, h) and means (m, h) are off together.
    """

    log_odds: Numbers
    values: Tensor
    means: Tensor
    error: Upper

    @cached_property
    def lengths(self) -> Upper:
        """At least |z_h|, (m, N, h): the lengths of both parts, where that is enough."""
        return computed_lengths(self.means).unsqueeze(1) + computed_lengths(self.values).unsqueeze(0)

    def distances(self) -> Upper:
        """At least |z_h| = |Wᵀ(y - m)|, (m, N, h), each by itself."""
        away = self.values.unsqueeze(0) - self.means.unsqueeze(1)
        rounding = Upper(2 * UNIT) * self.lengths
        return computed_lengths(away) + rounding + self.error

    def moved(self, weights: Tensor, offset: Tensor) -> Upper:
        """At least |offset_i + Σ_h w_h z_h|, (m, N), for weights (m, N, h) that are exact.

        Each product and sum rounds relative to what is added, and z_h is off by `error`.
        """
        heads = weights.shape[-1]
        whole = torch.einsum("inh,nhe->ine", weights, self.values)
        whole = whole - torch.einsum("inh,ihe->ine", weights, self.means) + offset.unsqueeze(1)
        terms = (Upper(weights.abs()) * self.lengths).sum(-1) + computed_lengths(offset).unsqueeze(-1)
        inexact = (Upper(weights.abs()) * self.error).sum(-1)
        return computed_lengths(whole) + relative_error(2 * heads + 4) * terms + inexact


def joined(rows: list[Rows], candidates: Tensor) -> Joined:
    """The candidates (N, d) as these heads see them, from one middle."""
    points = rows[0].seen(candidates)
    odds, values = [row.log_odds(points) for row in rows], [row.values(points) for row in rows]
    error = largest([value.error + row.mean_values.error for row, value in zip(rows, values, strict=True)])
    return Joined(
        Numbers(torch.stack([one.center for one in odds], -1), largest([one.error for one in odds])),
        torch.stack([value.center for value in values], 1),
        torch.stack([row.mean_values.center for row in rows], 1),
        error,
    )


def about(points: Tensor, middle: Tensor) -> Vectors:
    """Points, seen from a vector."""
    away = points - middle
    return Vectors(away, Upper(UNIT) * computed_lengths(away).amax())
