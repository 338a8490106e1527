"""Groups of keys, each with one atom that stands for it: what is needed to bound what that changes.

For a group c with anchor x_c, a query, the tilt is θ_c = Aᵀx_c + β and the law of the group p_j ∝ w_j
e^{θ_c·y_j + bias_j}; F_c is the logarithm of its sum. The atom is the mean k of p, with the log-weight F_c -
θ_c·k - bias(k). Everything below holds of the atoms as they are stored: p is the true law, and what rounding
changed in its mean, its sums and the weights is part of each number. Numbers are (k,), one for each group.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import Matrix, computed_lengths, largest_roots, spectral_norms
from regard._groups import (
    FEW,
    away_from,
    columns_of,
    covariances,
    largest_in,
    means_in,
    spread_out,
    squares,
    sums_in,
)
from regard._upper import ELEMENTARY, Upper, relative_error, sizes
from regard.measure import Measure
from regard.proofs.atoms import Atoms, Errors, Given, Groups
from regard.proofs.key_form import KeyForm
from regard.proofs.near.head import value_matrix
from regard.proofs.near.local_scores import rounding_of_logs
from regard.proofs.subject import Head

MANY = 20_000
"""Beyond so many groups of wide keys traces stand for their largest eigenvalues."""


class Cells:
    """Keys `context` (n, d), float64 and each with mass, in groups `labels` (n,), with anchors (k, d) or one
    for all (1, d); the atoms are stored in `dtype`. columns (d, n): the keys, where they are at hand.
    """

    def __init__(
        self,
        head: Head,
        form: KeyForm,
        context: Measure,
        labels: Tensor,
        anchors: Tensor,
        dtype: torch.dtype = torch.float64,
        columns: Tensor | None = None,
    ) -> None:
        self.head, self.form, self.labels, self.anchors, self.dtype = head, form, labels, anchors, dtype
        self.points, self.log_weights = context.points, context.log_weights
        self.sizes = torch.bincount(labels)
        self.count, self.crowd = len(self.sizes), int(self.sizes.max())
        self.width = self.points.shape[-1]
        self._given_columns = columns

    @cached_property
    def _columns(self) -> Tensor:
        return columns_of(self.points) if self._given_columns is None else self._given_columns

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
    def _alike(self) -> bool:
        """Whether all keys count the same: neither tilts nor biases nor weights."""
        return self.log_weights is None and not self.form.factor and not bool(self.tilts.any())

    @cached_property
    def logs(self) -> Tensor:
        """log w_j + θ_c·y_j + bias_j, (n,)."""
        tilts = self.tilts
        if self._alike:
            return self.points.new_zeros(1).expand(len(self.points))
        scores = tilts[0] @ self._columns if len(tilts) == 1 else (self.points * tilts[self.labels]).sum(-1)
        bias = self.form.bias(self.points)
        scores = scores if bias is None else scores + bias
        return scores if self.log_weights is None else scores + self.log_weights

    @cached_property
    def log_error(self) -> Upper:
        """How far any of them is from the true one."""
        steep = computed_lengths(self.tilts).amax()
        found = relative_error(self.width + 4) * (steep * self.reach + Upper(self.logs.abs().amax()))
        return found + self.form.bias_error(self.reach)

    @cached_property
    def reach(self) -> Upper:
        """At least |y_j|."""
        return _length(squares(self._columns).amax(), self.width)

    @cached_property
    def log_sums(self) -> Tensor:
        """F_c, (k,)."""
        return self._tops + self._sums.log()

    @cached_property
    def _tops(self) -> Tensor:
        if self._alike:
            return self.points.new_zeros(self.count)
        return largest_in(self.logs, self.labels, self.count)

    @cached_property
    def _exponentials(self) -> Tensor:
        return (self.logs - spread_out(self._tops, self.labels)).exp_()

    @cached_property
    def _sums(self) -> Tensor:
        if self._alike:
            return self.sizes.double()
        return sums_in(self._exponentials, self.labels, self.count)

    @cached_property
    def masses(self) -> Tensor:
        """p_j, (n,)."""
        if self._alike:
            return spread_out(1 / self._sums, self.labels)
        return self._exponentials / spread_out(self._sums, self.labels)

    @property
    def _given_masses(self) -> Tensor | None:
        """p_j, None where all of a group are the same: sums are over their number then."""
        return None if self._alike else self.masses

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
        return means_in(self._given_masses, self._columns, self.labels, self.sizes).mT.contiguous()

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
        steep = computed_lengths(self.tilts).amax() * (self.reach + self.mean_error)
        sums = self.log_error + relative_error(self.crowd + 2 * ELEMENTARY + 4)
        logs = rounding_of_logs(torch.cat([self.log_sums, self._tops, self.log_atoms]), 1)
        bias = self.form.bias_error(self.reach + self.mean_error)
        kept = self.measure.log_masses().double()
        stored = sizes(kept + self.log_mass - self.log_atoms).amax()
        stored = stored + Upper(2 * torch.finfo(self.dtype).eps) * (1 + sizes(kept).amax())
        return sums + logs + stored + relative_error(self.width + 6) * steep + 2 * bias

    # How wide the groups are

    @cached_property
    def _away(self) -> Tensor:
        return away_from(self.means.mT.contiguous(), self._columns, self.labels)

    @cached_property
    def spans(self) -> Upper:
        """At least |y_j - k|, (k,)."""
        return self._longest(self._away)

    @cached_property
    def _deviations(self) -> Upper:
        return self._deviation(self._away)

    @cached_property
    def reaches(self) -> Upper:
        """At least |A(y_j - m)|, m the true mean: no query a unit away changes scores more."""
        moved = (
            self._scaled(self.spans) if self.form.multiple is not None else self._longest(self._scores_away)
        )
        return moved + self._score_error * self.spans + self.form.form.norm * self.mean_error

    @cached_property
    def spreads(self) -> Upper:
        """At least the root of |A Cov_p Aᵀ|."""
        alike = self.form.multiple is not None
        found = self._scaled(self._deviations) if alike else self._deviation(self._scores_away)
        return found + self._score_error * self.spans

    @cached_property
    def value_reaches(self) -> Upper:
        """At least |V_j - V(m)|."""
        moved = self._longest(self._values_away) if self.head.factors else self.spans
        return moved + self._value_error * self.spans + self.head.w * self.mean_error

    @cached_property
    def value_spreads(self) -> Upper:
        """At least the root of |Cov_p(V)|."""
        found = self._deviation(self._values_away) if self.head.factors else self._deviations
        return found + self._value_error * self.spans

    def _scaled(self, sizes: Upper) -> Upper:
        return Upper(self.form.a[0, 0].abs()) * sizes

    @cached_property
    def _scores_away(self) -> Tensor:
        return self.form.a @ self._away

    @cached_property
    def _score_error(self) -> Upper:
        length = computed_lengths(self.form.a.flatten())
        return relative_error(self.width + 3) * length + self.form.form.error

    @cached_property
    def _value_matrix(self) -> Matrix:
        return value_matrix(self.head, self.width)

    @cached_property
    def _values_away(self) -> Tensor:
        return self._value_matrix.center.mT @ self._away

    @cached_property
    def _value_error(self) -> Upper:
        if not self.head.factors:
            return relative_error(1)
        matrix = self._value_matrix
        return relative_error(self.width + 3) * matrix.length + matrix.error

    def _longest(self, columns: Tensor) -> Upper:
        return _length(largest_in(squares(columns), self.labels, self.count, 0.0), len(columns))

    def _deviation(self, columns: Tensor) -> Upper:
        """The root of the largest eigenvalue of Σ p_j v_j v_jᵀ: p is at most e^error times the computed."""
        inflated = self.mass_error.halved().exp()
        if len(columns) <= FEW:
            gram = covariances(self._given_masses, columns, self.labels, self.sizes)
            return largest_roots(gram, self.crowd + 2) * inflated
        if self.count > MANY:
            traces = sums_in(self.masses * squares(columns), self.labels, self.count)
            return Upper(traces.clamp_min(1e-290), self.crowd + len(columns) + 4).sqrt() * inflated
        order = self.labels.argsort(stable=True)
        scaled = (columns * self.masses.sqrt())[:, order].split(self.sizes.tolist(), -1)
        norms = [spectral_norms(part) for part in scaled]
        most = max(norm.roundings for norm in norms) + 4
        return Upper(torch.stack([norm.value for norm in norms]), most) * inflated

    def atoms(self) -> Atoms:
        """What bounds need of them, without the keys."""
        spans = self.spans + self.mean_error
        values = self.value_reaches, self.value_spreads
        return Atoms(
            self.head,
            self.form,
            self.means,
            self.measure.log_masses().double(),
            self.anchors,
            Groups(self.reaches, self.spreads, spans, *values),
            Errors(self.tilt_error, self.mean_error, self.weight_error),
            Given(self.reach, len(self.points)),
        )


def _length(square: Tensor, width: int) -> Upper:
    """At least the root of computed sums of squares; squares that vanished are paid for."""
    return Upper(square + width * 1e-305 * (square < 1e-280).double(), width + 2).sqrt()
