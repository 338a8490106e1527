"""FourierPlan: sums of a series as a plan, with a bound of the error of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._object import Object
from regard._transforms import moves
from regard._upper import UNIT, Lower, Upper, sizes
from regard.certificate import Certificate, Hypothesis
from regard.compute.engine import Plan, Prediction
from regard.compute.fourier.facts import Facts
from regard.compute.fourier.form import Form
from regard.compute.fourier.processes import OneProcess, Processes, Summed
from regard.compute.fourier.separable import Separable
from regard.compute.fourier.series import Series
from regard.compute.fourier.sums import gauss_fields, gauss_transform
from regard.compute.fourier.transforms import Transform
from regard.errors import RefusalError
from regard.normalizers import Softmax
from regard.norms import TokenMax

PAIR = 4.8e-9
"""Seconds that the other engines take for a pair of query and key, on one core."""


@dataclass(frozen=True, eq=False, repr=False)
class RowErrors(Object):
    """Outputs (..., m, e), and for each row a number (..., m) that its error |out - out^| does not exceed."""

    outputs: Tensor
    bounds: Tensor
    hypotheses: tuple[Hypothesis, ...]

    def upper(self) -> Upper:
        """The bounds as numbers that are at least the true ones."""
        return Upper(self.bounds)

    def certificate(self) -> Certificate:
        """The largest of them."""
        return Certificate(
            float(self.bounds.max()),
            "these queries and keys",
            TokenMax(),
            "the error of a cut-off Fourier series, a posteriori",
            self.hypotheses,
            quantity="error",
        )


@dataclass(frozen=True, eq=False, repr=False)
class FourierPlan(Plan):
    """Sums of a series.

    What is decided here: the scores as Gaussians (`form`), what was read from the data (`facts`), the series,
    how its sums are taken (`transform`), and the error of outputs that is proved of them, relative to the
    radius of the values (`bound`). Points and values may lie over several `processes`.
    """

    form: Form
    facts: Facts
    series: Series
    transform: Transform
    bound: float
    processes: Processes = OneProcess()

    def run(self) -> Tensor:
        return self._unfold(self._outputs()[0]).to(self.problem.dtype)

    def free_energy(self) -> Tensor:
        assert isinstance(self.problem.normalizer, Softmax)
        (x, y), (weights, level) = self.form.points(self.facts.center), self.form.weights()
        mass = gauss_transform(x, y, weights.unsqueeze(-1), self.transform, self.series).squeeze(-1)
        energy = self._unfold(mass.log() + level)
        if self.form.row is not None:
            energy = energy + self.form.row()
        temperature = self.problem.normalizer.temperature
        return energy * (
            temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
        )

    def predict(self) -> Prediction:
        problem, series = self.problem, self.series
        sizes_ = (self.facts.queries, self.facts.own_keys, self._columns())
        batch = problem.batch_shape.numel()
        flops = 4.0 * batch * sum(sizes_[:2]) * sizes_[2] * float(series.count) ** series.dimension
        if not self._counts_roundings():
            flops = 2.0 * batch * sum(sizes_[:2]) * sizes_[2] * 10.0**series.dimension
        return Prediction(flops, batch * self.transform.bytes(series, *sizes_), self._how())

    def _how(self) -> str:
        modes = "×".join([str(self.series.count)] * self.series.dimension)
        taken = self.transform.transform if isinstance(self.transform, Summed) else self.transform
        how = f"{modes} modes by {type(taken).__name__}"
        if self.processes.count > 1:
            how = f"{how}, grids of {self.processes.count} processes added,"
        return (
            f"{how} for a box of {self.facts.reach:.3g} bandwidths, error "
            f"≤ {self.bound:.1e} of the radius of the values, about {self.seconds():.2g} s on one core "
            f"where pairs would take {PAIR * self.pairs():.2g} s"
        )

    def seconds(self) -> float:
        """What a run is predicted to take on one core; an estimate."""
        sizes_ = (self.facts.queries, self.facts.own_keys, self._columns())
        return self.problem.batch_shape.numel() * self.transform.seconds(
            self.series, *sizes_, self.facts.drift
        )

    def pairs(self) -> float:
        """The most pairs that a process would sum."""
        return float(self.problem.batch_shape.numel()) * self.facts.queries * self.facts.keys

    def pays(self) -> bool:
        """Whether it is predicted to be at least twice as fast as a sum over all pairs."""
        return 2 * self.seconds() <= PAIR * self.pairs()

    def slow(self) -> str:
        """Why it does not pay."""
        pairs = PAIR * self.pairs()
        taken = f"{self.seconds():.2g} s are predicted, and {pairs:.2g} s for all pairs"
        return f"{taken}; it has to take at most half."

    def certify(self, sample: int = 100) -> RowErrors:
        """The outputs, with a bound of the error of each row.

        Where the transform's own error is assumed, so many rows are compared with sums over all pairs; one
        that errs by more than its bound is a RefusalError.
        """
        with torch.no_grad():
            outputs, mass = self._outputs()
            error = self.facts.errors(self.series, self.transform, self.facts.keys)[0]
            hypotheses = (
                Hypothesis(f"{self.series.count} modes an axis lose ≤ {float(error):.1e} of the mass", True),
                *self.transform.hypotheses(self.series),
            )
            bounds = self._unfold(self._bounds(outputs, mass))
            result = RowErrors(self._unfold(outputs).to(self.problem.dtype), bounds, hypotheses)
            return result if self._counts_roundings() else self._compare(result, sample)

    def _counts_roundings(self) -> bool:
        """Whether every rounding of the transform is counted."""
        taken = self.transform.transform if isinstance(self.transform, Summed) else self.transform
        return isinstance(taken, Separable)

    def _bounds(self, outputs: Tensor, mass: Tensor) -> Tensor:
        """At least |out - out^| for each row, (b, m), the rounding to its dtype included."""
        facts = self.facts
        error, gradient = facts.errors(self.series, self.transform, facts.keys)
        mine = self.form.weights()[0].sum(-1, keepdim=True)
        total = Upper(self.processes.total(mine), facts.keys + self.processes.count)
        left = Lower(mass) - total * error
        shown = sizes(outputs).norm()
        moved = outputs - (self.form.queries if facts.drift else facts.values_center)
        spread = sizes(moved).norm() + Upper(2 * UNIT) * shown  # what is moved was rounded
        radius = Upper(facts.radius, outputs.shape[-1] + 4)
        if facts.drift:
            found = total * gradient * Upper(self.form.bandwidth, 4) + total * error * spread
        else:
            found = total * error * (radius + spread)
        found = found / left + 4 * Upper(facts.slack) * radius
        center = sizes(facts.values_center).norm()
        found = found + Upper(8 * UNIT) * (shown + spread + center) + self._rounding(shown)
        return torch.where(left.bound > 0, found.bound, math.inf)

    def _rounding(self, lengths: Upper) -> Upper:
        """What the dtype of the problem loses of outputs of these lengths; half of it, by rounding once."""
        kind = torch.finfo(self.problem.dtype)
        return Upper(kind.eps) * lengths + Upper(kind.tiny * self.problem.values.shape[-1])

    def _compare(self, result: RowErrors, sample: int) -> RowErrors:
        """The same, after some rows were computed from all pairs."""
        count = self.problem.query_count
        rows = torch.linspace(0, count - 1, min(sample, count), device=self.problem.device).round().long()
        direct = self._direct(rows, sample)
        found = torch.linalg.vector_norm(result.outputs.double().index_select(-2, rows) - direct, dim=-1)
        bounds = result.bounds.index_select(-1, rows)
        worst = self.processes.most(float((found / bounds).max()))
        if not worst <= 1:
            assumed = self.transform.hypotheses(self.series)[0].statement
            why = f"a row errs by {worst:.2g} times its bound, so it is not true that {assumed}."
            raise RefusalError("engine fourier", [why])
        checked = Hypothesis(
            f"{len(rows)} rows, summed over all pairs, err by ≤ {worst:.1e} of their bounds", True
        )
        return result.replace(hypotheses=(*result.hypotheses, checked))

    def _direct(self, rows: Tensor, sample: int) -> Tensor:
        """Outputs of some rows from all pairs, in float64; each process sums over its own keys for all."""
        (x, y), (weights, _) = self.form.points(self.facts.center), self.form.weights()
        values = self.form.values - self.facts.values_center
        values = torch.cat([torch.ones_like(values[..., :1]), values], -1)
        asked = x.new_zeros(len(x), sample, x.shape[-1])
        asked[:, : len(rows)] = x[:, rows]
        sums = [self._sum_pairs(some, y, weights, values) for some in self.processes.stack(asked)]
        mine = self.processes.total(torch.stack(sums))[self.processes.rank, :, : len(rows)]
        return self._unfold(mine[..., 1:] / mine[..., :1] + self.facts.values_center)

    def _sum_pairs(self, x: Tensor, y: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        """Σ_j w_j e^{-|x_i - y_j|²/2} v_j over own keys."""
        parts = []
        for some in x.split(16, -2):
            apart = torch.cdist(some, y, compute_mode="donot_use_mm_for_euclid_dist")
            parts.append((weights.unsqueeze(-2) * (-0.5 * apart.square()).exp()) @ values)
        return torch.cat(parts, -2)

    def _outputs(self) -> tuple[Tensor, Tensor]:
        """Outputs (b, m, e) in float64, and the masses D (b, m)."""
        form, drift = self.form, self.facts.drift
        sums = self._sums()
        mass, others = sums[..., 0], sums[..., 1:]
        factor = (form.bandwidth.unsqueeze(-1) if drift else self._unit()) / sums[..., :1]
        start = form.queries if drift else self.facts.values_center
        if moves(sums) or moves(factor) or moves(start):
            return start + others * factor, mass
        return others.mul_(factor).add_(start).contiguous(), mass  # a million points fill memory soon

    def _sums(self) -> Tensor:
        """D and ∇D (b, m, 1 + d), or D and the sums of values around their center (b, m, 1 + e).

        Values are taken in units of their radius: a transform may err by a part of the size of all
        strengths, and then large values would spoil the mass.
        """
        form = self.form
        (x, y), (weights, _) = form.points(self.facts.center), form.weights()
        if self.facts.drift:
            return gauss_fields(x, y, weights, self.transform, self.series)
        values = (form.values - self.facts.values_center) / self._unit()
        strengths = weights.unsqueeze(-1) * torch.cat([torch.ones_like(values[..., :1]), values], -1)
        return gauss_transform(x, y, strengths, self.transform, self.series)

    def _unit(self) -> Tensor:
        """The radius of the values (b, 1, 1), or one where they are all in one place."""
        radius = self.facts.radius.unsqueeze(-1)
        return torch.where(radius > 0, radius, torch.ones_like(radius))

    def _columns(self) -> int:
        return (self.series.dimension if self.facts.drift else self.problem.values.shape[-1]) + 1

    def _unfold(self, tensor: Tensor) -> Tensor:
        """(b, ...) in the caller's batch shape."""
        return tensor.reshape(*self.problem.batch_shape, *tensor.shape[1:])
