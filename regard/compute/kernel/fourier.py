"""Gauss transforms Σ_j e^{-|x_i - y_j|²/2} f_j in O(m + n), by a cut-off Fourier series of the kernel.

On each axis, for |z| ≤ reach, with a = `step` and the period P = 2π/a,

    e^{-z²/2} ≈ Σ_{|k| ≤ modes} a/√(2π) e^{-(ak)²/2} e^{iakz} ,

which separates x from y. What is left out are the images at distances lP (Poisson summation) and the terms
beyond `modes`; both are bounded here before anything runs, and so is rounding. All sums are in float64: a
query far from everyone sees a mass that is small beside the error of float32.
"""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._object import Object
from regard._round import outward
from regard._transforms import forward_rule
from regard._upper import ELEMENTARY, UNIT
from regard.certificate import Hypothesis
from regard.errors import MissingExtraError

CHUNK = 512
"""Points whose sums are one product of matrices; fewer are rounded less often, more are faster."""
PHASE = 13
"""Units by which a phase may be off: centering, scaling and one product, each relative to |phase| ≤ π."""
NUFFT_FLOOR = 1e-14
"""No nonuniform transform is asked for less than this relative error, or believed to have less."""


@dataclass(frozen=True)
class Series:
    """The series on each of `dimension` axes, for |x - y| ≤ reach on each, in units of the bandwidth."""

    step: float
    modes: int
    reach: float
    dimension: int

    @staticmethod
    def of(gap: float, reach: float, dimension: int) -> Series:
        """Images are `gap` away from every pair, and frequencies end at `gap`:
        both leave out about e^{-gap²/2}.
        """
        step = 2 * math.pi / (reach + gap)
        return Series(step, max(1, math.ceil(gap / step)), reach, dimension)

    @property
    def count(self) -> int:
        """Basis functions on one axis: 1, and a cosine and a sine for each frequency."""
        return 2 * self.modes + 1

    def axis_errors(self) -> tuple[float, float]:
        """At least |k - k̃| and |k' - k̃'| on one axis, for all |z| ≤ reach.

        The cut-off terms are largest at z = 0, and are below a geometric series from the first on. Images are
        monotone where they are at least one bandwidth away, so that they are largest at |z| = reach.
        """
        first = self.step * (self.modes + 1)
        ratio = _exp_bound(-0.5 * self.step**2 * (2 * self.modes + 3))
        steeper = ratio * (self.modes + 2) / (self.modes + 1)
        period = 2 * math.pi / self.step
        gap = (period - self.reach) * (1 - 1e-13) - 1e-13 * self.reach
        if gap < 1 or max(ratio, steeper) > 0.999:
            return math.inf, math.inf
        tail = 2 * self.step / math.sqrt(2 * math.pi) * _exp_bound(-0.5 * first**2)
        image = 2 * _exp_bound(-0.5 * gap**2)  # each of the two nearest, and then one period farther
        farther = (1 + period / gap) * _exp_bound(-period * gap - 0.5 * period**2)
        error = tail / (1 - ratio) + image / (1 - farther)
        slope = tail * first / (1 - steeper) + gap * image / (1 - farther)
        return outward(error), outward(slope)

    def errors(self) -> tuple[float, float]:
        """At least |k - k̃| and |∇k - ∇k̃| in all dimensions: products of factors that are at most one."""
        error, slope = self.axis_errors()
        others = outward((1 + error) ** (self.dimension - 1))
        missing = outward(math.expm1((self.dimension - 1) * math.log1p(error)))
        whole = outward(math.expm1(self.dimension * math.log1p(error)))
        gradient = math.sqrt(self.dimension) * (slope * others + math.exp(-0.5) * missing)
        return whole, outward(gradient)

    def coefficients(self) -> Tensor:
        """Of 1, cos(az), ..., sin(az), ...: those of cosines twice, since k and -k are one."""
        k = torch.arange(self.modes + 1, dtype=torch.float64)
        found = self.step / math.sqrt(2 * math.pi) * torch.exp(-0.5 * (self.step * k).square())
        found[1:] *= 2
        return torch.cat([found, found[1:]])

    def moments(self) -> tuple[float, float, float, float]:
        """Σ_k g_k times |k|, (ak)², a|k|, and a|k| · (64|k| + 24 + 3(ak)²): how rounding is weighted."""
        g = self.coefficients()[: self.modes + 1]
        k = torch.arange(self.modes + 1, dtype=torch.float64)
        ak = self.step * k
        weights = (k, ak.square(), ak, ak * (2 * self.power_units() * k + 24 + 3 * ak.square()))
        first, second, slope, steep = (outward(float((g * weight).sum())) for weight in weights)
        return first, second, slope, steep

    @staticmethod
    def power_units() -> int:
        """Units by which e^{iakx} is off for each k: that of its base, of its phase, and one product."""
        return ELEMENTARY + PHASE + 3


def _exp_bound(value: float) -> float:
    """At least e^value for a value ≤ 0 that is rounded a few times."""
    return outward(math.exp(value * (1 - 1e-14))) if value > -690 else 1e-299


class Transform(Object):
    """Abstract: a way to take the sums of a series. Points (b, n, d) are centered, in bandwidths."""

    @abstractmethod
    def convolve(self, x: Tensor, y: Tensor, strengths: Tensor, series: Series) -> Tensor:
        """Σ_j k̃(x_i - y_j) f_j, (b, m, c), for strengths (b, n, c)."""

    @abstractmethod
    def fields(self, x: Tensor, y: Tensor, weights: Tensor, series: Series) -> Tensor:
        """D and ∇D of D(x) = Σ_j w_j k̃(x - y_j) at every query, (b, m, 1 + d)."""

    @abstractmethod
    def rounding(self, series: Series, keys: int) -> tuple[float, float]:
        """By how much a sum, and the length of a gradient, may be off, for strengths of total size one."""

    @abstractmethod
    def seconds(self, series: Series, queries: int, keys: int, columns: int, fields: bool) -> float:
        """What a run would take on one core; an estimate."""

    @abstractmethod
    def bytes(self, series: Series, queries: int, keys: int, columns: int) -> float:
        """What a run would hold beyond inputs and output; an estimate."""

    @abstractmethod
    def hypotheses(self, series: Series) -> tuple[Hypothesis, ...]:
        """What `rounding` rests on."""


@dataclass(frozen=True, eq=False, repr=False)
class Separable(Transform):
    """Products of matrices of cosines and sines, one for each axis: (m + n)(2·modes + 1)^d operations.

    Plain torch on any device, and every rounding is counted.
    """

    def convolve(self, x: Tensor, y: Tensor, strengths: Tensor, series: Series) -> Tensor:
        modes = _spread(y, strengths, series)
        rows = _chunk(series, strengths.shape[-1])
        parts = []
        for low in range(0, x.shape[-2], rows):
            first, *others = _basis(x[:, low : low + rows], series)
            parts.append(_contract(first, others, modes))
        return torch.cat(parts, -2)

    def fields(self, x: Tensor, y: Tensor, weights: Tensor, series: Series) -> Tensor:
        modes = _spread(y, weights.unsqueeze(-1), series)
        rows = _chunk(series, 1)
        found = x.new_empty(*x.shape[:-1], 1 + series.dimension)
        for low in range(0, x.shape[-2], rows):
            some = slice(low, low + rows)
            basis = _basis(x[:, some], series)
            for axis, values in enumerate(_all_fields(basis, modes, series)):
                found[:, some, axis] = values
        return found

    def rounding(self, series: Series, keys: int) -> tuple[float, float]:
        """First order in u = 2⁻⁵³, and one percent for the rest.

        On each axis Σ_k g_k (|cos cos| + |sin sin|) ≤ k̃(0): sums of products lose no more than their depth.
        """
        chunks = math.ceil(keys / CHUNK)
        depth = min(keys, CHUNK) + 2 * math.isqrt(chunks) + 4 + series.dimension * (series.count + 4)
        mean, square, slope, steep = series.moments()
        top = 1 + series.axis_errors()[0]
        axis = 2 * series.power_units() * mean + (24 * top + 3 * square)
        d = series.dimension
        whole = (depth + 4) * top**d + d * axis * top ** (d - 1)
        steepest = (
            (depth + 6) * slope * top ** (d - 1)
            + steep * top ** (d - 1)
            + (d - 1) * slope * axis * top ** max(d - 2, 0)
        )
        return outward(1.01 * UNIT * whole), outward(1.01 * UNIT * math.sqrt(d) * steepest)

    def seconds(self, series: Series, queries: int, keys: int, columns: int, fields: bool) -> float:
        size = series.count**series.dimension
        passes = (keys + 2 * queries) if fields else columns * (keys + queries)
        trigonometry = 12e-9 * series.dimension * series.count * (keys + queries)
        return 4e-3 + 1.2e-10 * passes * size + trigonometry

    def bytes(self, series: Series, queries: int, keys: int, columns: int) -> float:
        block = _chunk(series, columns) * columns * series.count ** max(1, series.dimension - 1)
        return 8.0 * (2 * columns * series.count**series.dimension + 3 * block)

    def hypotheses(self, series: Series) -> tuple[Hypothesis, ...]:
        return (Hypothesis("cos, sin and exp are right to eight units in the last place", False),)


@dataclass(frozen=True, eq=False, repr=False)
class Finufft(Transform):
    """Nonuniform fast Fourier transforms of finufft (barnett2019): O(m + n) and a fast transform of the grid.

    Its authors give the tolerance as an aim, not as a bound, so what it adds is a hypothesis. CPU only.
    """

    tolerance: float = 1e-14

    def convolve(self, x: Tensor, y: Tensor, strengths: Tensor, series: Series) -> Tensor:
        columns = strengths.shape[-1]
        found = x.new_empty(*x.shape[:-1], columns)
        for xs, ys, fs, out in zip(x, y, strengths, found, strict=True):
            grid = self._forward(ys, fs, series) * _gaussian_grid(series)
            for some, sums in self._backward(xs, grid, series):
                out[some, 0::2] = sums.real.mT
                out[some, 1::2] = sums.imag[: columns // 2].mT
        return found

    def fields(self, x: Tensor, y: Tensor, weights: Tensor, series: Series) -> Tensor:
        found = x.new_empty(*x.shape[:-1], 1 + series.dimension)
        k = torch.arange(-series.modes, series.modes + 1, dtype=torch.float64).numpy()
        for xs, ys, ws, out in zip(x, y, weights, found, strict=True):
            grid = self._forward(ys, ws.unsqueeze(-1), series) * _gaussian_grid(series)
            slopes = [grid * _along(1j * series.step * k, axis, series) for axis in range(series.dimension)]
            fields = [grid, *slopes, *([0 * grid] if series.dimension % 2 == 0 else [])]
            pairs = [fields[i] + 1j * fields[i + 1] for i in range(0, len(fields), 2)]
            for some, sums in self._backward(xs, [pair[0] for pair in pairs], series):
                out[some, 0::2] = sums.real.mT[:, : series.dimension // 2 + 1]
                out[some, 1::2] = sums.imag.mT[:, : (series.dimension + 1) // 2]
        return found

    def rounding(self, series: Series, keys: int) -> tuple[float, float]:
        """Assumed: each of the two transforms errs by no more than twice its tolerance, rounding included,
        relative to the total size of strengths.
        """
        top = (1 + series.axis_errors()[0]) ** series.dimension
        error = 4 * max(self.tolerance, NUFFT_FLOOR) * top
        return outward(error), outward(error * math.sqrt(series.dimension))

    def seconds(self, series: Series, queries: int, keys: int, columns: int, fields: bool) -> float:
        point = (6e-8, 3e-7, 2e-6)[series.dimension - 1]
        pairs = math.ceil((1 + series.dimension) / 2) if fields else math.ceil(columns / 2)
        transforms = keys + pairs * queries if fields else pairs * (keys + queries)
        grid = float((2 * series.count) ** series.dimension)
        return 5e-3 + point * transforms + 5e-9 * (1 + pairs) * grid * math.log2(grid)

    def bytes(self, series: Series, queries: int, keys: int, columns: int) -> float:
        pairs = math.ceil(columns / 2)
        points = 8.0 * (series.dimension + 2 * pairs) * _slices(max(queries, keys), series)[0].stop
        return points + 16.0 * (pairs + 1) * (2 * series.count) ** series.dimension

    def hypotheses(self, series: Series) -> tuple[Hypothesis, ...]:
        error = 4 * max(self.tolerance, NUFFT_FLOOR)
        return (
            Hypothesis(
                f"the nonuniform transforms of finufft err by at most {error:.1e} of the mass, "
                "rounding included",
                False,
            ),
        )

    def _forward(self, points: Tensor, strengths: Tensor, series: Series) -> Any:
        """Σ_j f_j e^{-iak·y_j} of pairs of real strengths as complex ones, (pairs, M, ...)."""
        total, columns = 0.0, strengths.shape[-1]
        for some in _slices(len(points), series):
            imaginary = torch.nn.functional.pad(strengths[some, 1::2], (0, columns % 2))
            paired = torch.complex(strengths[some, 0::2], imaginary).mT.contiguous().numpy()
            modes = (series.count,) * series.dimension
            total = total + self._call("1", points[some], paired, series, n_modes=modes, isign=-1)
        return total

    def _backward(self, points: Tensor, grid: Any, series: Series) -> Iterator[tuple[slice, Tensor]]:
        """Σ_k c_k e^{iak·x_i}, (pairs, ·), for some points at a time."""
        import numpy as np

        whole = np.ascontiguousarray(grid)
        for some in _slices(len(points), series):
            yield some, torch.from_numpy(self._call("2", points[some], whole, series, isign=1))

    def _call(self, kind: str, points: Tensor, data: Any, series: Series, **options: Any) -> Any:
        run = vars(_finufft())[f"nufft{series.dimension}d{kind}"]
        axes = [(series.step * points[:, i]).contiguous().numpy() for i in range(series.dimension)]
        options |= {"eps": max(self.tolerance, NUFFT_FLOOR), "nthreads": torch.get_num_threads()}
        found = run(*axes, data, **options)
        expected = series.dimension + 1 if kind == "1" else 2
        return found if found.ndim == expected else found[None]


def _slices(count: int, series: Series) -> list[slice]:
    """Points of one nonuniform transform: many for each point of its grid, and little memory."""
    size = max(1 << 17, 2 * (2 * series.count) ** series.dimension)
    return [slice(low, low + size) for low in range(0, count, size)]


def has_finufft() -> bool:
    """Whether finufft can be imported."""
    return importlib.util.find_spec("finufft") is not None


def _finufft() -> Any:
    try:
        import finufft
    except ImportError as error:
        raise MissingExtraError("finufft", "fast") from error
    return finufft


def gauss_transform(x: Tensor, y: Tensor, strengths: Tensor, transform: Transform, series: Series) -> Tensor:
    """Σ_j e^{-|x_i - y_j|²/2} f_j, (b, m, c), with derivatives of every order that are such sums again."""
    return _Convolve.apply(x, y, strengths, transform, series)


def gauss_fields(x: Tensor, y: Tensor, weights: Tensor, transform: Transform, series: Series) -> Tensor:
    """D(x) = Σ_j w_j e^{-|x - y_j|²/2} and ∇D = Σ_j w_j (y_j - x) e^{-|x - y_j|²/2}, (b, m, 1 + d)."""
    return _Fields.apply(x, y, weights, transform, series)


class _Convolve(torch.autograd.Function):
    """∂_x e^{-|x-y|²/2} = (y - x) e^{-|x-y|²/2}: every derivative is the same sum with other strengths."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, strengths: Tensor, transform: Transform, series: Series) -> Tensor:
        return transform.convolve(x, y, strengths, series)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, y, strengths, ctx.transform, ctx.series = inputs
        ctx.save_for_backward(x, y, strengths)
        ctx.save_for_forward(x, y, strengths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, strengths = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        return (*_pull(x, y, strengths, gradient, needed, ctx.transform, ctx.series), None, None)

    @staticmethod
    def jvp(ctx: Any, by_x: Tensor | None, by_y: Tensor | None, by_f: Tensor | None, *_: Any) -> Tensor:
        with forward_rule(ctx) as (x, y, strengths):
            return _push(x, y, strengths, by_x, by_y, by_f, ctx.transform, ctx.series)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _fold(_Convolve, info.batch_size, in_dims, inputs)


class _Fields(torch.autograd.Function):
    """[D, ∇D] = [K w, K(w y) - x K w], with the derivatives of the right side."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, weights: Tensor, transform: Transform, series: Series) -> Tensor:
        return transform.fields(x, y, weights, series)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, y, weights, ctx.transform, ctx.series = inputs
        ctx.save_for_backward(x, y, weights)
        ctx.save_for_forward(x, y, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weights = ctx.saved_tensors
        mass, slope = gradient[..., :1], gradient[..., 1:]
        strengths = torch.cat([weights.unsqueeze(-1), weights.unsqueeze(-1) * y], -1)
        sums = torch.cat([mass - (slope * x).sum(-1, keepdim=True), slope], -1)
        by_x, by_y, by_f = _pull(x, y, strengths, sums, (True, True, True), ctx.transform, ctx.series)
        assert by_x is not None
        assert by_y is not None
        assert by_f is not None
        density = gauss_transform(x, y, weights.unsqueeze(-1), ctx.transform, ctx.series)
        by_weights = by_f[..., 0] + (by_f[..., 1:] * y).sum(-1)
        by_y = by_y + weights.unsqueeze(-1) * by_f[..., 1:]
        return by_x - slope * density, by_y, by_weights, None, None

    @staticmethod
    def jvp(ctx: Any, by_x: Tensor | None, by_y: Tensor | None, by_w: Tensor | None, *_: Any) -> Tensor:
        with forward_rule(ctx) as (x, y, weights):
            w = weights.unsqueeze(-1)
            strengths = torch.cat([w, w * y], -1)
            changes = [None if by_w is None else torch.cat([by_w.unsqueeze(-1), by_w.unsqueeze(-1) * y], -1)]
            changes += [None if by_y is None else torch.cat([torch.zeros_like(w), w * by_y], -1)]
            present = [change for change in changes if change is not None]
            by_f = sum(present[1:], present[0]) if present else None
            moved = _push(x, y, strengths, by_x, by_y, by_f, ctx.transform, ctx.series)
            slope = moved[..., 1:] - x * moved[..., :1]
            if by_x is not None:
                slope = slope - by_x * gauss_transform(x, y, w, ctx.transform, ctx.series)
            return torch.cat([moved[..., :1], slope], -1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _fold(_Fields, info.batch_size, in_dims, inputs)


def _pull(
    x: Tensor,
    y: Tensor,
    strengths: Tensor,
    gradient: Tensor,
    needed: tuple[bool, ...],
    transform: Transform,
    series: Series,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The reverse derivatives of Σ_j k_ij f_j along g: with respect to x, y and f.

    Σ_j k_ij (g_i·f_j)(y_j - x_i) ,  Σ_i k_ij (g_i·f_j)(x_i - y_j) ,  Σ_i k_ij g_i .
    """
    width, by_x, by_y, by_f = strengths.shape[-1], None, None, None
    if needed[0]:
        sums = gauss_transform(x, y, _with_moments(strengths, y), transform, series)
        by_x = _contract_moments(gradient, sums, x, width)
    if needed[1] or needed[2]:
        back = _with_moments(gradient, x) if needed[1] else gradient
        sums = gauss_transform(y, x, back, transform, series)
        by_f = sums[..., :width]
        by_y = _contract_moments(strengths, sums, y, width) if needed[1] else None
    return by_x, by_y, by_f


def _with_moments(strengths: Tensor, points: Tensor) -> Tensor:
    """f_j and f_j y_j side by side, (b, n, c + c·d)."""
    return torch.cat([strengths, (strengths.unsqueeze(-1) * points.unsqueeze(-2)).flatten(-2)], -1)


def _contract_moments(factor: Tensor, sums: Tensor, points: Tensor, width: int) -> Tensor:
    """Σ_c g_ic (Σ_j k_ij f_jc y_j - x_i Σ_j k_ij f_jc)."""
    first = sums[..., width:].unflatten(-1, (width, -1))
    moved = (factor.unsqueeze(-1) * first).sum(-2)
    return moved - points * (factor * sums[..., :width]).sum(-1, keepdim=True)


def _push(
    x: Tensor,
    y: Tensor,
    strengths: Tensor,
    by_x: Tensor | None,
    by_y: Tensor | None,
    by_f: Tensor | None,
    transform: Transform,
    series: Series,
) -> Tensor:
    """The change of Σ_j k_ij f_j: Σ_j k_ij (f'_j + f_j (y_j - x_i)·(x'_i - y'_j))."""
    width, changed = strengths.shape[-1], torch.zeros((), dtype=x.dtype, device=x.device)
    if by_x is not None:
        sums = gauss_transform(x, y, _with_moments(strengths, y), transform, series)
        first = sums[..., width:].unflatten(-1, (width, -1))
        along = (first * by_x.unsqueeze(-2)).sum(-1)
        changed = changed + along - sums[..., :width] * (x * by_x).sum(-1, keepdim=True)
    if by_y is not None:
        own = strengths * (y * by_y).sum(-1, keepdim=True)
        moments = (strengths.unsqueeze(-1) * by_y.unsqueeze(-2)).flatten(-2)
        sums = gauss_transform(x, y, torch.cat([own, moments], -1), transform, series)
        first = sums[..., width:].unflatten(-1, (width, -1))
        changed = changed - sums[..., :width] + (first * x.unsqueeze(-2)).sum(-1)
    if by_f is not None:
        changed = changed + gauss_transform(x, y, by_f, transform, series)
    return changed


def _fold(function: Any, size: int, in_dims: tuple[int | None, ...], inputs: Any) -> tuple[Tensor, int]:
    """A batch under vmap as a batch of problems."""
    *tensors, transform, series = inputs
    whole = [
        (t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)
        for t, dim in zip(tensors, in_dims[:3], strict=True)
    ]
    found = function.apply(*whole, transform, series)
    return found.unflatten(0, (size, -1)), 0


def _chunk(series: Series, columns: int) -> int:
    """Queries at once: a few megabytes."""
    return max(16, min(2048, 2**21 // (columns * series.count ** max(1, series.dimension - 1))))


def _basis(points: Tensor, series: Series) -> list[Tensor]:
    """1, cos(ax), ..., sin(ax), ... of every coordinate, (b, n, 2·modes + 1): powers of e^{iax}, doubled."""
    found = []
    for axis in range(series.dimension):
        phase = series.step * points[..., axis]
        powers = torch.empty(*phase.shape, series.modes + 1, dtype=torch.complex128, device=points.device)
        powers[..., 0] = 1
        powers[..., 1] = torch.polar(torch.ones_like(phase), phase)
        known = 1
        while known < series.modes:
            more = min(known, series.modes - known)
            last = powers[..., known : known + 1]
            torch.mul(powers[..., 1 : 1 + more], last, out=powers[..., known + 1 : known + 1 + more])
            known += more
        parts = torch.view_as_real(powers)
        found.append(torch.cat([parts[..., 0], parts[..., 1:, 1]], -1))
    return found


def _slope(basis: Tensor, series: Series) -> Tensor:
    """The derivatives of the basis functions at the same points."""
    k = torch.arange(1, series.count, dtype=basis.dtype, device=basis.device)[: series.modes] * series.step
    cos, sin = basis[..., 1 : 1 + series.modes], basis[..., 1 + series.modes :]
    return torch.cat([torch.zeros_like(basis[..., :1]), -k * sin, k * cos], -1)


def _spread(points: Tensor, strengths: Tensor, series: Series) -> Tensor:
    """Σ_j f_j φ_k(y_j), times the coefficients of the kernel, (b, M, c, M^(d-1)) with M = 2·modes + 1.

    Sums of `CHUNK` points, then of √chunks of those, then of all: no number is rounded more than
    CHUNK + 2√chunks times.
    """
    (batch, count, columns), size = strengths.shape, series.count
    shape = (batch, size * columns, size ** (series.dimension - 1))
    inner, outer = strengths.new_zeros(shape), strengths.new_zeros(shape)
    group = max(1, math.isqrt(math.ceil(count / CHUNK)))
    for index, low in enumerate(range(0, count, CHUNK)):
        first, *others = _basis(points[:, low : low + CHUNK], series)
        weighed = first.unsqueeze(-1) * strengths[:, low : low + CHUNK].unsqueeze(-2)
        rest = torch.ones_like(first[..., :1])
        for basis in others:
            rest = basis if rest.shape[-1] == 1 else (rest.unsqueeze(-1) * basis.unsqueeze(-2)).flatten(-2)
        inner.baddbmm_(weighed.flatten(-2).mT, rest)
        if index % group == group - 1:
            outer += inner
            inner.zero_()
    outer += inner
    factor = series.coefficients().to(points.device)
    rest = torch.ones_like(factor[:1])
    for _ in range(series.dimension - 1):
        rest = (rest.unsqueeze(-1) * factor).flatten()
    return outer.unflatten(1, (size, columns)) * (factor[:, None, None] * rest)


def _contract(first: Tensor, others: list[Tensor], modes: Tensor) -> Tensor:
    """Σ_k c_k φ_k(x_i), (b, m, c), for the basis of each axis."""
    found = (first @ modes.flatten(-2)).unflatten(-1, modes.shape[-2:])
    if not others:
        return found.squeeze(-1)
    if len(others) == 1:
        return (found @ others[0].unsqueeze(-1)).squeeze(-1)
    size = others[0].shape[-1]
    inner = (found.unflatten(-1, (size, size)) @ others[1].unsqueeze(-2).unsqueeze(-1)).squeeze(-1)
    return (inner @ others[0].unsqueeze(-1)).squeeze(-1)


def _all_fields(basis: list[Tensor], modes: Tensor, series: Series) -> list[Tensor]:
    """The series and its derivatives along each axis, (b, m) each; products with the modes are shared."""
    modes, slopes = modes.squeeze(-2), [_slope(part, series) for part in basis]
    if series.dimension == 1:
        return [(part @ modes).squeeze(-1) for part in (basis[0], slopes[0])]
    along, across = basis[0] @ modes, slopes[0] @ modes
    if series.dimension == 2:
        return [
            (along * basis[1]).sum(-1),
            (across * basis[1]).sum(-1),
            (along * slopes[1]).sum(-1),
        ]
    size = series.count
    along, across = along.unflatten(-1, (size, size)), across.unflatten(-1, (size, size))
    both = (along @ torch.stack([basis[2], slopes[2]], -1)).unbind(-1)
    third = (across @ basis[2].unsqueeze(-1)).squeeze(-1)
    return [
        (both[0] * basis[1]).sum(-1),
        (third * basis[1]).sum(-1),
        (both[0] * slopes[1]).sum(-1),
        (both[1] * basis[1]).sum(-1),
    ]


def _along(values: Any, axis: int, series: Series) -> Any:
    """Numbers of frequencies along one axis of a grid."""
    return values.reshape([-1 if i == axis else 1 for i in range(series.dimension)])


def _gaussian_grid(series: Series) -> Any:
    """a/√(2π) e^{-(ak)²/2} on every axis, for finufft's order of modes."""
    half = series.coefficients()[: series.modes + 1].numpy().copy()
    half[1:] *= 0.5
    line = [*half[:0:-1], *half]
    whole = torch.tensor(line, dtype=torch.float64).numpy()
    found = _along(whole, 0, series)
    for axis in range(1, series.dimension):
        found = found * _along(whole, axis, series)
    return found
