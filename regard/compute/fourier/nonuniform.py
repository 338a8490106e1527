"""Sums of a series by nonuniform fast Fourier transforms."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._round import outward
from regard.certificate import Hypothesis
from regard.compute.fourier.series import Series
from regard.compute.fourier.transforms import Transform
from regard.errors import MissingExtraError

NUFFT_FLOOR = 1e-14
"""No nonuniform transform is asked for less than this relative error, or believed to have less."""


@dataclass(frozen=True, eq=False, repr=False)
class Finufft(Transform):
    """Nonuniform fast Fourier transforms of finufft (barnett2019): O(m + n) and a fast transform of the grid.

    Its authors give the tolerance as an aim, not as a bound, so what it adds is a hypothesis. CPU only.

    Examples:
        >>> from regard.engines import Finufft, Fourier
        >>> Fourier(1e-6, Finufft()).transform  # needs pip install finufft
        Finufft()
    """

    tolerance: float = 1e-14

    def grid(self, points: Tensor, strengths: Tensor, series: Series) -> Tensor:
        """Pairs of real columns as complex ones, (b, pairs, M, ...)."""
        gaussian = torch.from_numpy(_gaussian_grid(series))
        found = [self._forward(ys, fs, series) for ys, fs in zip(points, strengths, strict=True)]
        return torch.stack(found).mul_(gaussian)

    def values(self, points: Tensor, grid: Tensor, columns: int, series: Series) -> Tensor:
        found = points.new_empty(*points.shape[:-1], columns)
        for xs, modes, out in zip(points, grid, found, strict=True):
            for some, sums in self._backward(xs, modes.numpy(), series):
                out[some, 0::2] = sums.real.mT
                out[some, 1::2] = sums.imag[: columns // 2].mT
        return found

    def slopes(self, points: Tensor, grid: Tensor, series: Series) -> Tensor:
        found = points.new_empty(*points.shape[:-1], 1 + series.dimension)
        k = torch.arange(-series.modes, series.modes + 1, dtype=torch.float64).numpy()
        for xs, (modes,), out in zip(points, grid.numpy(), found, strict=True):
            slopes = [modes * _along(1j * series.step * k, axis, series) for axis in range(series.dimension)]
            fields = [modes, *slopes, *([0 * modes] if series.dimension % 2 == 0 else [])]
            pairs = [fields[i] + 1j * fields[i + 1] for i in range(0, len(fields), 2)]
            for some, sums in self._backward(xs, pairs, series):
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

    def _forward(self, points: Tensor, strengths: Tensor, series: Series) -> Tensor:
        """Σ_j f_j e^{-iak·y_j} of pairs of real strengths as complex ones, (pairs, M, ...)."""
        total: Any = 0.0
        columns = strengths.shape[-1]
        for some in _slices(len(points), series):
            imaginary = torch.nn.functional.pad(strengths[some, 1::2], (0, columns % 2))
            paired = torch.complex(strengths[some, 0::2], imaginary).mT.contiguous().numpy()
            modes = (series.count,) * series.dimension
            total = total + self._call("1", points[some], paired, series, n_modes=modes, isign=-1)
        return torch.from_numpy(total)

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
    """Points of one nonuniform transform: many for each point of its grid, and little memory beside all."""
    size = max(1 << 16, min(2 * (2 * series.count) ** series.dimension, count // 16))
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
