"""Groups of keys, each with one atom that stands for it: what is needed to bound what that changes.

For a group c with anchor x_c, a query, the tilt is θ_c = Aᵀx_c + β and the law of the group p_j ∝ w_j
e^{θ_c·y_j + bias_j}; F_c is the logarithm of its sum. The atom is the mean k of p, with the log-weight F_c -
θ_c·k - bias(k). Everything below holds of the atoms as they are stored: p is the true law, and what rounding
changed in its mean, its sums and the weights is part of each number. Numbers are (k,), one for each group.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import Matrix, computed_lengths, largest_roots
from regard._upper import ELEMENTARY, Upper, exact, relative_error, sizes
from regard.measure import Measure
from regard.proofs.atoms import Atoms, Errors, Given, Groups
from regard.proofs.key_form import KeyForm
from regard.proofs.near.head import value_matrix
from regard.proofs.near.local_scores import rounding_of_logs
from regard.proofs.subject import Head

WIDE = 30_000_000
"""So many entries of covariances are worth their eigenvalues; beyond, traces stand for them."""


class Cells:
    """Keys `context` (n, d), float64 and each with mass, in groups `labels` (n,), with anchors (k, d) or one
    for all (1, d). `dtype`: in what the atoms are stored.
    """

    dtype: torch.dtype = torch.float64

    def __init__(
        self, head: Head, form: KeyForm, context: Measure, labels: Tensor, anchors: Tensor
    ) -> None:
        self.head, self.form, self.labels, self.anchors = head, form, labels, anchors
        self.points, self.log_weights = context.points, context.log_weights
        self.count = int(labels.max()) + 1
        self.crowd = int(torch.bincount(labels).max())

    # The laws

    @cached_property
    def tilts(self) -> Tensor:
        """θ_c (k, d), or (1, d): these numbers are what is meant."""
        return self.form.tilts(self.anchors)

    @cached_property
    def tilt_error(self) -> Upper:
        """At least |θ_c - (Aᵀx_c + β)|."""
        return self.form.tilt_error(self.anchors)

    @cached_property
    def logs(self) -> Tensor:
        """log w_j + θ_c·y_j + bias_j, (n,)."""
        tilts = self.tilts
        scores = self.points @ tilts[0] if len(tilts) == 1 else (self.points * tilts[self.labels]).sum(-1)
        bias = self.form.bias(self.points)
        scores = scores if bias is None else scores + bias
        return scores if self.log_weights is None else scores + self.log_weights

    @cached_property
    def log_error(self) -> Upper:
        """How far any of them is from the true one."""
        width = self.points.shape[-1]
        steep = computed_lengths(self.tilts).amax()
        kept = self.logs[self.logs > -math.inf]
        largest = sizes(kept).amax()
        found = relative_error(width + 4) * (steep * self.reach + largest)
        return found + self.form.bias_error(self.reach)

    @cached_property
    def reach(self) -> Upper:
        """At least |y_j|."""
        return computed_lengths(self.points).amax()

    @cached_property
    def log_sums(self) -> Tensor:
        """F_c, (k,)."""
        return self._tops + self._sums.log()

    @cached_property
    def _tops(self) -> Tensor:
        return largest_in(self.logs, self.labels, self.count)

    @cached_property
    def _exponentials(self) -> Tensor:
        return (self.logs - self._tops[self.labels]).exp()

    @cached_property
    def _sums(self) -> Tensor:
        return sums_in(self._exponentials, self.labels, self.count)

    @cached_property
    def masses(self) -> Tensor:
        """p_j, (n,)."""
        return self._exponentials / self._sums[self.labels]

    @cached_property
    def mass_error(self) -> Upper:
        """At least |log p_j - log of the computed one|; what vanished is nothing beside the rest."""
        return 2 * self.log_error + relative_error(self.crowd + 2 * ELEMENTARY + 4)

    # The atoms

    @cached_property
    def means(self) -> Tensor:
        """k (k, d), as stored."""
        return self._means.to(self.dtype).double()

    @cached_property
    def _means(self) -> Tensor:
        return sums_in(self.masses.unsqueeze(-1) * self.points, self.labels, self.count)

    @cached_property
    def log_atoms(self) -> Tensor:
        """Log-weights (k,), before they are stored."""
        bias = self.form.bias(self.means)
        found = self.log_sums - (self.tilts * self.means).sum(-1)
        return found if bias is None else found - bias

    @cached_property
    def log_mass(self) -> Tensor:
        """The logarithm of the sum of all weights."""
        return self.log_atoms.logsumexp(-1)

    @cached_property
    def measure(self) -> Measure:
        """The atoms, as stored."""
        return Measure(self.means.to(self.dtype), self.log_atoms.to(self.dtype))

    @cached_property
    def mean_error(self) -> Upper:
        """At least how far a mean is from the true mean of p."""
        inexact = self.mass_error.expm1()
        largest = self.reach + self.spans.amax()
        stored = computed_lengths(self.means - self._means).amax()
        return stored + relative_error(self.crowd + 4) * self.reach + inexact * (largest + largest)

    @cached_property
    def weight_error(self) -> Upper:
        """At least how far a log-weight as stored is from F_c - θ_c·k - bias(k), up to one number for all."""
        width = self.points.shape[-1]
        steep = computed_lengths(self.tilts).amax() * (self.reach + self.mean_error)
        sums = self.log_error + relative_error(self.crowd + 2 * ELEMENTARY + 4)
        logs = rounding_of_logs(torch.cat([self.log_sums, self._tops, self.log_atoms]), 1)
        bias = self.form.bias_error(self.reach + self.mean_error)
        kept = self.measure.log_masses().double()
        stored = sizes(kept + self.log_mass - self.log_atoms).amax()
        stored = stored + Upper(2 * torch.finfo(self.dtype).eps) * (1 + sizes(kept).amax())
        return sums + logs + stored + relative_error(width + 6) * steep + 2 * bias

    # How wide the groups are

    @cached_property
    def _away(self) -> Tensor:
        return self.points - self.means[self.labels]

    @cached_property
    def spans(self) -> Upper:
        """At least |y_j - k|, (k,)."""
        return Upper(*self._longest(self._away))

    @cached_property
    def reaches(self) -> Upper:
        """At least |A(y_j - m)|, m the true mean: no query a unit away changes scores more."""
        moved = Upper(*self._longest(self._scores_away))
        return moved + self._score_error * self.spans + self.form.form.norm * self.mean_error

    @cached_property
    def spreads(self) -> Upper:
        """At least the root of |A Cov_p Aᵀ|."""
        return self._deviation(self._scores_away) + self._score_error * self.spans

    @cached_property
    def value_reaches(self) -> Upper:
        """At least |V_j - V(m)|."""
        moved = Upper(*self._longest(self._values_away))
        return moved + self._value_error * self.spans + self.head.w * self.mean_error

    @cached_property
    def value_spreads(self) -> Upper:
        """At least the root of |Cov_p(V)|."""
        return self._deviation(self._values_away) + self._value_error * self.spans

    @cached_property
    def _scores_away(self) -> Tensor:
        return self._away @ self.form.a.mT

    @cached_property
    def _score_error(self) -> Upper:
        length = computed_lengths(self.form.a.flatten())
        return relative_error(self.points.shape[-1] + 3) * length + self.form.form.error

    @cached_property
    def _value_matrix(self) -> Matrix:
        return value_matrix(self.head, self.points.shape[-1])

    @cached_property
    def _values_away(self) -> Tensor:
        return self._away @ self._value_matrix.center if self.head.factors else self._away

    @cached_property
    def _value_error(self) -> Upper:
        matrix = self._value_matrix
        return relative_error(self.points.shape[-1] + 3) * matrix.length + matrix.error

    def _longest(self, vectors: Tensor) -> tuple[Tensor, int]:
        found = computed_lengths(vectors)
        return largest_in(found.value, self.labels, self.count, 0.0), found.roundings

    def _deviation(self, vectors: Tensor) -> Upper:
        """The root of the largest eigenvalue of Σ p_j v_j v_jᵀ: p is at most e^error times the computed."""
        width = vectors.shape[-1]
        inflated = self.mass_error.halved().exp()
        if self.count * width * width > WIDE:
            squares = sums_in(self.masses * vectors.square().sum(-1), self.labels, self.count)
            return Upper(squares.clamp_min(1e-290), self.crowd + width + 4).sqrt() * inflated
        gram = covariances(self.masses, vectors, self.labels, self.count)
        return largest_roots(gram, self.crowd + 2) * inflated


    def atoms(self) -> Atoms:
        """What bounds need of them, without the keys."""
        return Atoms(
            self.head,
            self.form,
            self.measure.points.double(),
            self.measure.log_masses().double(),
            self.anchors,
            Groups(self.reaches, self.spreads, self.spans + self.mean_error, self.value_reaches, self.value_spreads),
            Errors(self.tilt_error, self.mean_error, self.weight_error),
            Given(self.reach, len(self.points)),
        )


def sums_in(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Σ over each group, (n, …) to (k, …)."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, labels, values)


def largest_in(values: Tensor, labels: Tensor, count: int, none: float = -math.inf) -> Tensor:
    """The largest of each group, (n,) to (k,)."""
    return values.new_full((count,), none).scatter_reduce(0, labels, values, "amax")


def covariances(masses: Tensor, vectors: Tensor, labels: Tensor, count: int) -> Tensor:
    """Σ p_j v_j v_jᵀ over each group, (k, d, d)."""
    scaled = masses.unsqueeze(-1) * vectors
    rows = [sums_in(scaled * vectors[:, i : i + 1], labels, count) for i in range(vectors.shape[-1])]
    return torch.stack(rows, -2)
