"""Gaussian softmax attention of points on a line, in a plane or in space, in O(m + n), with a proved error.

With D(x) = Σ_j w_j e^{-|x - y_j|²/2s²} the mean of the keys is x + s² ∇log D(x), a score; the mean of any
values is a quotient of two such sums. A Fourier series of the kernel takes them in linear time
(kernel/fourier.py). Let κ bound the error of a sum for strengths of total size one, W = Σ_j w_j, and c any
center of the values v_j. Then

    |out - out^| ≤ κ W (max_j |v_j - c| + |out^ - c|) / (D^ - κ W) ,

because N^ - N and D^ - D are at most κ W max_j |v_j - c| and κ W. Where D ≥ share · W is known before, as it
is for a query that is one of the keys, the error is at most 2κ/(share - κ) times the radius of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._refused import Refused
from regard._upper import ELEMENTARY, UNIT, Lower, Upper, sizes
from regard.certificate import Certificate, Hypothesis
from regard.compute.engine import Engine, Plan, Prediction, count_pairs, register
from regard.compute.kernel.fourier import (
    NUFFT_FLOOR,
    Finufft,
    Separable,
    Series,
    Transform,
    gauss_fields,
    gauss_transform,
    has_finufft,
)
from regard.compute.problem import Problem
from regard.errors import ArgumentError, RefusalError
from regard.normalizers import Softmax
from regard.norms import TokenMax
from regard.potentials import Dot, Gaussian
from regard.supports import Full

MODES = 1 << 25
"""Coefficients of the series that are held at most, over all sums: 256 MiB."""
CELLS = 1 << 24
"""Cells in which keys are counted at most."""
PAIR = 8.6e-9
"""Seconds that the other engines take for a pair of query and key, on one core."""
WIDEST_GAP = 13.0
"""Bandwidths to the next image: beyond, e^{-gap²/2} is far below rounding."""


@register
@dataclass(frozen=True, eq=False, repr=False)
class Fourier(Engine):
    """Gaussian scores of at most three features, and dot products that are Gaussian, by Fourier series.

    The error of every output, before it is rounded to its dtype, is at most `tolerance` times the radius of
    the values, proved before it runs; that radius is half of the diagonal of their box. `transform` is how
    sums are taken: `Separable()`, `Finufft()`, or None for the one that is predicted to be faster.
    """

    tolerance: float = 1e-6
    transform: Transform | None = None
    name: ClassVar[str] = "fourier"
    rank: ClassVar[int] = 7

    def __post_init__(self) -> None:
        if isinstance(self.tolerance, bool):
            raise ArgumentError("tolerance", f"is {self.tolerance}", "give a number between 0 and 1")
        _check.between("tolerance", self.tolerance, 0.0, 1.0)
        if self.transform is not None and not isinstance(self.transform, Transform):
            raise ArgumentError(
                "transform", f"is {self.transform!r}", "give Separable(), Finufft(), or None for the faster"
            )

    def plan(self, problem: Problem) -> FourierPlan | Refused:
        """The series, with what it is proved to lose, or the number that is too large."""
        if not isinstance(problem.normalizer, Softmax):
            return Refused(
                f"sums of Gaussians give softmax rows, not those of {type(problem.normalizer).__name__}."
            )
        if not isinstance(problem.support, Full):
            return Refused(
                f"{type(problem.support).__name__} masks pairs, so sums over keys differ from query to query."
            )
        if 0 in (problem.query_count, problem.key_count, *problem.batch_shape):
            return Refused("there is nothing to sum.")
        if problem.device.type == "mps":
            return Refused("there is no float64 on this device, and a series needs it.")
        if isinstance(self.transform, Finufft) and not (has_finufft() and problem.device.type == "cpu"):
            return Refused(
                "finufft runs on a CPU where it is installed: pip install 'regard[fast]', or Separable()."
            )
        form = _form(problem)
        return form if isinstance(form, Refused) else self._fit(problem, form)

    def offer(self, problem: Problem) -> Refused:
        """Only a caller who asks for it by name gets it: other engines are accurate row by row."""
        return Refused(
            "its error is relative to the spread of all values, not of those that a row sees; "
            "ask for it with engine=Fourier(tolerance)."
        )

    def _fit(self, problem: Problem, form: Form) -> FourierPlan | Refused:
        """The shortest series that keeps the tolerance."""
        facts = _look(problem, form)
        if isinstance(facts, Refused):
            return facts
        columns = facts.dimension + 1 if facts.drift else problem.values.shape[-1] + 1
        size = (problem.batch_shape.numel(), problem.query_count, problem.key_count, columns)
        fitted = [self._shorten(transform, facts, size) for transform in self._transforms(problem, facts)]
        found = [one for one in fitted if not isinstance(one, Refused)]
        if not found:
            return next(one for one in fitted if isinstance(one, Refused))
        series, transform, bound = min(found, key=lambda one: one[1].seconds(one[0], *size[1:], facts.drift))
        return FourierPlan(self, problem, form, facts, series, transform, bound)

    def _transforms(self, problem: Problem, facts: Facts) -> list[Transform]:
        """The one that was asked for, or those that are at hand; finufft with the digits that are needed."""
        if self.transform is not None:
            return [self.transform]
        needed = max(NUFFT_FLOOR, self.tolerance * facts.share / 64)
        fast = problem.device.type == "cpu" and has_finufft()
        return [Separable(), Finufft(needed)] if fast else [Separable()]

    def _shorten(
        self, transform: Transform, facts: Facts, size: tuple[int, int, int, int]
    ) -> tuple[Series, Transform, float] | Refused:
        """The first series of growing length whose bound is below the tolerance."""
        aim = max(self.tolerance * facts.share / 4, 1e-30)
        gap = max(2.0, math.sqrt(2 * math.log(1 / aim)) - 1)
        best = math.inf
        while gap <= WIDEST_GAP:
            series = Series.of(gap, facts.reach, facts.dimension)
            held = size[0] * size[3] * float(series.count) ** facts.dimension
            if held > MODES:
                return Refused(
                    f"a box of {facts.reach:.3g} bandwidths needs {series.count}^{facts.dimension} modes for "
                    f"{size[3]} sums, more than the {MODES:.2g} that are held at most; "
                    "take a larger bandwidth or another engine."
                )
            bound = facts.bound(series, transform, size[2])
            if bound <= self.tolerance:
                return series, transform, bound
            best, gap = min(best, bound), gap + 0.1
        return Refused(
            f"rounding alone may be {best:.1e} of the radius of the values, above the tolerance "
            f"{self.tolerance:.1e}: some query is only known to see {facts.share:.1e} of "
            "the mass of the keys; give a larger tolerance or another engine."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Form(Object):
    """Scores with log-counts as -|q_i - k_j|²/2s² + log w_j + row_i, temperature included, in float64.

    queries (b, m, d), keys (b, n, d), values (b, n, e), bandwidth s (b, 1), log_weights (b, n) or None.
    `size`: how large the terms of log w are, for their rounding. `same`: queries are the keys themselves.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    bandwidth: Tensor
    log_weights: Tensor | None
    row: Callable[[], Tensor] | None
    size: float
    same: bool

    def points(self, center: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys around a center, in bandwidths."""
        scale = self.bandwidth.unsqueeze(-1)
        keys = (self.keys - center) / scale
        return (keys if self.same else (self.queries - center) / scale), keys

    def weights(self) -> tuple[Tensor, Tensor]:
        """w_j over the largest of them (b, n), and the logarithm of that (b, 1)."""
        if self.log_weights is None:
            none = self.keys.new_zeros(self.keys.shape[0], 1)
            return self.keys.new_ones(()).expand(self.keys.shape[:-1]), none
        level = self.log_weights.detach().amax(-1, keepdim=True)
        return (self.log_weights - level).exp(), level


@dataclass(frozen=True, eq=False, repr=False)
class Facts(Object):
    """What was read from the data before the run.

    center: of queries and keys. reach: the largest |x - y| on an axis, in bandwidths. share: at least
    D(x_i)/W for every query. radius (b, 1): of the values around their center; length: the least, in
    bandwidths.
    slack: the relative error of weights. drift: values are the keys, so that one density is enough.
    """

    center: Tensor
    values_center: Tensor
    reach: float
    dimension: int
    share: float
    radius: Tensor
    length: float
    slack: float
    drift: bool

    def errors(self, series: Series, transform: Transform, keys: int) -> tuple[Upper, Upper]:
        """κ of a sum and of the length of a gradient, for strengths of total size one.

        Units more for the bandwidth, which is rounded three times: |∂k/∂log s| ≤ 2/e and |∂∇k/∂log s| ≤ 3/2.
        """
        kernel, gradient = series.errors()
        rounding, steeper = transform.rounding(series, keys)
        return Upper(kernel + rounding + 3 * UNIT, 2), Upper(gradient + steeper + 6 * UNIT, 2)

    def bound(self, series: Series, transform: Transform, keys: int) -> float:
        """At least the error of every output, relative to the radius of the values, before the run."""
        error, gradient = self.errors(series, transform, keys)
        left = Lower(self.share) - error
        if float(left) <= 0.5 * self.share:
            return math.inf
        lost, quotient = 4 * Upper(self.slack), Upper(8 * UNIT)
        if not self.drift:
            return float(2 * error / left + lost + quotient)
        diagonal = Upper(self.reach * math.sqrt(self.dimension), 2)
        return float(((gradient + diagonal * error) / left + diagonal * quotient) / Lower(self.length) + lost)


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
    radius of the values (`bound`).
    """

    form: Form
    facts: Facts
    series: Series
    transform: Transform
    bound: float

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
        problem, series, facts = self.problem, self.series, self.facts
        sizes_ = (problem.query_count, problem.key_count, self._columns())
        batch = problem.batch_shape.numel()
        flops = 4.0 * batch * sum(sizes_[:2]) * sizes_[2] * float(series.count) ** series.dimension
        if not isinstance(self.transform, Separable):
            flops = 2.0 * batch * sum(sizes_[:2]) * sizes_[2] * 10.0**series.dimension
        modes = "×".join([str(series.count)] * series.dimension)
        how = (
            f"{modes} modes by {type(self.transform).__name__} for a box of {facts.reach:.3g} bandwidths, "
            f"error ≤ {self.bound:.1e} of the radius of the values, about {self.seconds():.2g} s on one core "
            f"where pairs would take {PAIR * count_pairs(problem):.2g} s"
        )
        return Prediction(flops, batch * self.transform.bytes(series, *sizes_), how)

    def seconds(self) -> float:
        """What a run is predicted to take on one core; an estimate."""
        sizes_ = (self.problem.query_count, self.problem.key_count, self._columns())
        return self.problem.batch_shape.numel() * self.transform.seconds(
            self.series, *sizes_, self.facts.drift
        )

    def pays(self) -> bool:
        """Whether it is predicted to be at least twice as fast as a sum over all pairs."""
        return 2 * self.seconds() <= PAIR * count_pairs(self.problem)

    def certify(self, sample: int = 100) -> RowErrors:
        """The outputs, with a bound of the error of each row.

        Where the transform's own error is assumed, so many rows are compared with sums over all pairs; one
        that errs by more than its bound is a RefusalError.
        """
        with torch.no_grad():
            outputs, mass = self._outputs()
            moved = outputs - (self.form.queries if self.facts.drift else self.facts.values_center)
            weights, keys = self.form.weights()[0], self.problem.key_count
            error, gradient = self.facts.errors(self.series, self.transform, keys)
            total = Upper(weights.sum(-1, keepdim=True), keys)
            left = Lower(mass) - total * error
            spread = (
                sizes(moved).norm() + Upper(2 * UNIT) * sizes(outputs).norm()
            )  # what is moved was rounded
            radius = Upper(self.facts.radius, outputs.shape[-1] + 4)
            if self.facts.drift:
                found = total * gradient * Upper(self.form.bandwidth, 4) + total * error * spread
            else:
                found = total * error * (radius + spread)
            found = found / left + 4 * Upper(self.facts.slack) * radius
            shown = sizes(outputs).norm()
            center = sizes(self.facts.values_center).norm()
            rounded = torch.finfo(self.problem.dtype).eps + 8 * UNIT
            found = found + Upper(rounded) * (shown + spread + center)
            bounds = self._unfold(torch.where(left.bound > 0, found.bound, math.inf))
            hypotheses = (
                Hypothesis(f"{self.series.count} modes an axis lose ≤ {float(error):.1e} of the mass", True),
                *self.transform.hypotheses(self.series),
            )
            result = RowErrors(self._unfold(outputs).to(self.problem.dtype), bounds, hypotheses)
            return result if isinstance(self.transform, Separable) else self._compare(result, sample)

    def _compare(self, result: RowErrors, sample: int) -> RowErrors:
        """The same, after some rows were computed from all pairs."""
        count = self.problem.query_count
        rows = torch.linspace(0, count - 1, min(sample, count), device=self.problem.device).round().long()
        direct = self._direct(rows)
        found = torch.linalg.vector_norm(result.outputs.double().index_select(-2, rows) - direct, dim=-1)
        bounds = result.bounds.index_select(-1, rows)
        worst = float((found / bounds).max())
        if not worst <= 1:
            assumed = self.transform.hypotheses(self.series)[0].statement
            why = f"a row errs by {worst:.2g} times its bound, so it is not true that {assumed}."
            raise RefusalError("engine fourier", [why])
        checked = Hypothesis(
            f"{len(rows)} rows, summed over all pairs, err by ≤ {worst:.1e} of their bounds", True
        )
        return result.replace(hypotheses=(*result.hypotheses, checked))

    def _direct(self, rows: Tensor) -> Tensor:
        """Outputs of some rows from all pairs, in float64."""
        (x, y), (weights, _) = self.form.points(self.facts.center), self.form.weights()
        values, parts = self.form.values - self.facts.values_center, []
        for some in rows.split(16):
            apart = torch.cdist(x[:, some], y, compute_mode="donot_use_mm_for_euclid_dist")
            law = (weights.log().unsqueeze(-2) - 0.5 * apart.square()).softmax(-1)
            parts.append(law @ values)
        return self._unfold(torch.cat(parts, -2) + self.facts.values_center)

    def _outputs(self) -> tuple[Tensor, Tensor]:
        """Outputs (b, m, e) in float64, and the masses D (b, m)."""
        form, center = self.form, self.facts.values_center
        if self.facts.drift:
            sums = self._sums()
            slope = sums[..., 1:] * (form.bandwidth.unsqueeze(-1) / sums[..., :1])
            return form.queries + slope, sums[..., 0]
        sums = self._sums()
        return sums[..., 1:] / sums[..., :1] + center, sums[..., 0]

    def _sums(self) -> Tensor:
        """D and ∇D (b, m, 1 + d), or D and the sums of values around their center (b, m, 1 + e)."""
        form = self.form
        (x, y), (weights, _) = form.points(self.facts.center), form.weights()
        if self.facts.drift:
            return gauss_fields(x, y, weights, self.transform, self.series)
        values = form.values - self.facts.values_center
        strengths = weights.unsqueeze(-1) * torch.cat([torch.ones_like(values[..., :1]), values], -1)
        return gauss_transform(x, y, strengths, self.transform, self.series)

    def _columns(self) -> int:
        return (self.series.dimension if self.facts.drift else self.problem.values.shape[-1]) + 1

    def _unfold(self, tensor: Tensor) -> Tensor:
        """(b, ...) in the caller's batch shape."""
        return tensor.reshape(*self.problem.batch_shape, *tensor.shape[1:])


def _form(problem: Problem) -> Form | Refused:
    """Scores as Gaussians: a Gaussian is one, and q·k = -|q - k|²/2 + |k|²/2 + |q|²/2 is one with weights."""
    potential = problem.potential
    if not isinstance(potential, (Gaussian, Dot)):
        return Refused(f"{type(potential).__name__} scores are no Gaussian of a distance, nor a dot product.")
    width = problem.keys.shape[-1]
    if not 1 <= width <= 3:
        return Refused(f"points have {width} features, and a series is short for at most three.")
    wide = problem.to(torch.float64)
    potential, normalizer, batch = wide.potential, wide.normalizer, wide.batch_shape
    assert isinstance(normalizer, Softmax)
    temperature = torch.as_tensor(normalizer.temperature, dtype=torch.float64, device=problem.device)
    queries, keys, values = (
        t.expand(*batch, *t.shape[-2:]).flatten(0, -3) if batch else t.unsqueeze(0)
        for t in (wide.queries, wide.keys, wide.values)
    )
    logs, size = wide.log_counts, 0.0
    row: Callable[[], Tensor] | None = None
    if isinstance(potential, Gaussian):
        scale = torch.as_tensor(potential.bandwidth, dtype=torch.float64, device=problem.device)
        scale = scale * temperature.sqrt()
    else:
        assert isinstance(potential, Dot)
        factor = torch.as_tensor(potential.factor(width), dtype=torch.float64, device=problem.device)
        factor = (factor / temperature).unsqueeze(-1)
        if _check.holds((factor > 0).all()) is not True:
            return Refused(
                "a dot product is a Gaussian where its scale is positive, and known before the run."
            )
        bias = 0.5 * factor * wide.keys.square().sum(-1)
        size = _number(bias.detach().abs().amax())
        scale, logs = 1 / factor.squeeze(-1).sqrt(), bias if logs is None else bias + logs
        row = lambda: 0.5 * factor * wide.queries.square().sum(-1)  # noqa: E731
    scale = scale.expand(batch).reshape(-1, 1)
    logs = None if logs is None else logs.expand(*batch, -1).reshape(len(scale), -1)
    return Form(queries, keys, values, scale, logs, row, size, problem.queries is problem.keys)


def _look(problem: Problem, form: Form) -> Facts | Refused:
    """What the data say before a run."""
    parts = [t.detach() for t in (form.queries, form.keys, form.values, form.bandwidth)]
    logs = form.log_weights
    finite = torch.stack([torch.isfinite(part).all() for part in parts]).all()
    if logs is not None:
        finite = finite & ~(logs.detach().isnan() | (logs.detach() == math.inf)).any()
        finite = finite & (logs.detach().amax(-1) > -math.inf).all()
    known = _check.holds(finite)
    if known is None:
        return Refused(
            "the box of the points must be read before the run, and here it cannot (compile, vmap)."
        )
    if not known:
        return Refused("points, values and weights must be finite, and some key must have mass.")
    queries, keys, values, scale = parts
    low, high = torch.minimum(queries.amin(-2), keys.amin(-2)), torch.maximum(queries.amax(-2), keys.amax(-2))
    center, sides = (0.5 * low + 0.5 * high).unsqueeze(-2), ((high - low) / scale).amax(-1)
    reach = _number(sides.amax()) * (1 + 1e-13)
    if not reach < 1e6:
        return Refused(f"a box of {reach:.3g} bandwidths needs too many modes; take a larger bandwidth.")
    bottom, top = values.amin(-2, keepdim=True), values.amax(-2, keepdim=True)
    middle = 0.5 * bottom + 0.5 * top
    far = torch.maximum(top - middle, middle - bottom)
    radius = torch.linalg.vector_norm(far, dim=-1)
    slack = 0.0
    if logs is not None:
        largest = _number(torch.nan_to_num(logs.detach(), neginf=0.0).abs().amax())
        slack = (ELEMENTARY + 4 + 3 * largest + (keys.shape[-1] + 8) * form.size) * UNIT
    with torch.no_grad():
        share = _least_share(form, center, reach)
    length = _number((radius / scale).amin()) * (1 - 1e-12)
    drift = problem.values is problem.keys and length >= 0.5  # closer together, values lose less than ∇D
    return Facts(center, middle, reach, keys.shape[-1], share, radius, length, slack, drift)


def _least_share(form: Form, center: Tensor, reach: float) -> float:
    """At most D(x_i)/W, for every query: the largest of three bounds from below.

    Its own weight, where queries are the keys. The keys in its cell of a grid of side one, which are at most
    √d away. And e^{-Σ_j w_j |x - y_j|²/2W}, by Jensen's inequality.
    """
    x, y = form.points(center)
    weights, dimension = form.weights()[0], y.shape[-1]
    total = weights.sum(-1, keepdim=True)
    mean = weights.unsqueeze(-2) @ y / total.unsqueeze(-1)
    spread = (
        sum((w * (z - mean).square().sum(-1)).sum(-1, keepdim=True) for z, w in _rows(y, weights)) / total
    )
    rounding = 1e-9 + 8 * y.shape[1] * UNIT * dimension * reach**2  # of the mean, and of the spread
    own = form.same or (x.shape == y.shape and torch.equal(x, y))
    side = math.floor(reach) + 2
    masses = None
    if side**dimension * len(x) <= CELLS:
        low = torch.minimum(x.amin(-2, keepdim=True), y.amin(-2, keepdim=True))
        masses = y.new_zeros(len(y), side**dimension)
        for z, w in _rows(y, weights):
            masses.scatter_add_(-1, _cells(z - low, side), w)
    least = math.inf
    for z, w in _rows(x, weights if own else x[..., 0]):
        apart = (z - mean).square().sum(-1) + spread
        share = torch.exp(-0.5 * apart - rounding)
        if own:
            share = torch.maximum(share, w / total)
        if masses is not None:
            near = masses.gather(-1, _cells(z - low, side)) / total * math.exp(-0.5 * dimension)
            share = torch.maximum(share, near)
        least = min(least, _number(share.amin()))
    return least * (1 - 1e-6)  # sums of as many masses as there are keys


def _rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each (b, n, ...) at a time, so that what is made of them stays small."""
    for start in range(0, tensors[0].shape[1], 1 << 16):
        yield tuple(t[:, start : start + (1 << 16)] for t in tensors)


def _cells(offsets: Tensor, side: int) -> Tensor:
    """The number of the cell of side one that each point is in."""
    places = offsets.floor().long().clamp_(0, side - 1)
    found = places[..., 0]
    for axis in range(1, places.shape[-1]):
        found = found * side + places[..., axis]
    return found


def _number(value: Tensor) -> float:
    return float(value.detach())
