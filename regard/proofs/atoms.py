"""Atoms that stand for groups of keys, with what bounds need of the groups; see `cells` for what they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import Matrix, Numbers, computed_lengths
from regard._upper import ELEMENTARY, UNIT, Upper, exact, relative_error
from regard.measure import Measure
from regard.proofs.key_form import KeyForm
from regard.proofs.near.head import value_matrix
from regard.proofs.near.local_scores import rounding_of_logs
from regard.proofs.subject import Head


@dataclass(frozen=True)
class Groups:
    """For each group, (k,): reaches ≥ |A(y - m)| and spreads ≥ √|A Cov Aᵀ|, m the mean of its law, spans ≥
    |y - m|, and the same two of the values.
    """

    reaches: Upper
    spreads: Upper
    spans: Upper
    value_reaches: Upper
    value_spreads: Upper

    def with_single(self, count: int) -> Groups:
        """And so many groups of one key."""
        parts = (self.reaches, self.spreads, self.spans, self.value_reaches, self.value_spreads)
        return Groups(*(_lengthened(part, count) for part in parts))


@dataclass(frozen=True)
class Errors:
    """What rounding changed: in tilts, in means (lengths), in log-weights up to one number for all."""

    tilt: Upper
    mean: Upper
    weight: Upper


@dataclass(frozen=True)
class Given:
    """The keys that there were: at least their lengths, and how many."""

    reach: Upper
    count: int


@dataclass(frozen=True)
class Atoms:
    """points (k, d) and log_weights (k,) with an anchor for each, (k, d), or one for all, (1, d)."""

    head: Head
    form: KeyForm
    points: Tensor
    log_weights: Tensor
    anchors: Tensor
    groups: Groups
    errors: Errors
    given: Given

    def with_keys(self, keys: Measure, share: float) -> Atoms:
        """And keys that stand for themselves, with this share of the mass of all.

        Any query is the anchor of a group that is one key.
        """
        added, count = keys.points.double(), keys.size
        logs = torch.cat(
            [self.log_weights + _log(1 - share), keys.log_masses().double().expand(count) + _log(share)]
        )
        anchors = self.anchors.expand(len(self.points), -1)
        rounding = rounding_of_logs(logs, 8)
        return replace(
            self,
            points=torch.cat([self.points, added]),
            log_weights=logs,
            anchors=torch.cat([anchors, anchors[:1].expand(count, -1)]),
            groups=self.groups.with_single(count),
            errors=replace(self.errors, weight=self.errors.weight + rounding),
            given=Given(self.given.reach.maximum(computed_lengths(added).amax()), self.given.count + count),
        )

    # Values

    @cached_property
    def matrix(self) -> Matrix:
        return value_matrix(self.head, self.points.shape[-1])

    @cached_property
    def values(self) -> Tensor:
        """The values of the atoms, without the bias of values, (k, e)."""
        return self.points @ self.matrix.center if self.head.factors else self.points

    @cached_property
    def value_error(self) -> Upper:
        """How far these are from the true values of the stored atoms."""
        if not self.head.factors:
            return exact(0.0)
        width = self.points.shape[-1]
        lost = relative_error(width + 3) * self.matrix.length + self.matrix.error
        return lost * (self.given.reach + self.errors.mean)

    @cached_property
    def radius(self) -> Upper:
        """At least the radius of a ball that holds the values of all atoms."""
        return self._about(computed_lengths(self.values - self.middle)).amax()

    @cached_property
    def hull(self) -> Upper:
        """At least the radius of one that holds the values of all keys too."""
        around = self._about(computed_lengths(self.values - self.middle))
        return (around + self.groups.value_reaches).amax() + self.head.w * self.errors.mean

    @cached_property
    def middle(self) -> Tensor:
        """Any vector amid the values."""
        return 0.5 * (self.values.amax(0) + self.values.amin(0))

    def _about(self, lengths: Upper) -> Upper:
        return lengths + self.value_error + Upper(2 * UNIT) * self.longest

    @cached_property
    def longest(self) -> Upper:
        """At least |V(y)| of keys and atoms, with the bias of values."""
        bias = self.head.value_bias
        found = self.head.w * (self.given.reach + self.errors.mean)
        return found if bias is None else found + computed_lengths(bias.detach().double())

    # Rows

    def rows(self, queries: Tensor) -> tuple[Numbers, Tensor, Upper]:
        """log of the weights of the atoms (m, k), the outputs without the bias of values (m, e), and how far
        these may be off.
        """
        scores = queries @ self.form.a @ self.points.mT + self.points @ self.form.form.beta + self.log_weights
        bias = self.form.bias(self.points)
        scores = scores if bias is None else scores + bias
        weights = scores.log_softmax(-1)
        return (
            Numbers(weights, self._log_error(queries, scores)),
            weights.exp() @ self.values,
            self.rounding(computed_lengths(queries).amax(), len(self.points)),
        )

    def _log_error(self, queries: Tensor, scores: Tensor) -> Upper:
        return 2 * self._score_rounding(computed_lengths(queries).amax()) + rounding_of_logs(
            scores, len(self.points)
        )

    def _score_rounding(self, queries: Upper) -> Upper:
        wide = self.form.a.shape[0] + self.points.shape[-1]
        reach = self.given.reach + self.errors.mean
        return relative_error(4 * wide + 32) * self.form.size(queries, reach)

    def rounding(self, queries: Upper, keys: int) -> Upper:
        """How far the output of so many keys, computed in float64, is from the true one, for queries of at
        most this length.
        """
        wide = self.form.a.shape[0] + self.points.shape[-1]
        logs = self._score_rounding(queries) + rounding_of_logs(self.log_weights, keys)
        lost = (2 * logs).expm1() + relative_error(2 * keys + 4 * ELEMENTARY + wide)
        return lost * self.longest

    def moved_by_rounding(self, apart: Upper) -> Upper:
        """At least how far a score of an atom as stored is from that of the true mean, up to one number for
        all, where a query is `apart` from its anchor: |(θ - θ_c)·(k - m)| and the weight.
        """
        return (self.form.form.norm * apart + self.errors.tilt) * self.errors.mean + self.errors.weight


def _lengthened(values: Upper, count: int) -> Upper:
    return values.map(lambda value: torch.cat([value, value.new_zeros(count)]))


def _log(share: float) -> float:
    return torch.tensor(share, dtype=torch.float64).log().item()
