"""Sums of a series by products of matrices, with every rounding counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._round import outward
from regard._upper import UNIT
from regard.certificate import Hypothesis
from regard.compute.fourier.series import Series
from regard.compute.fourier.transforms import Transform

CHUNK = 512
"""Points whose sums are one product of matrices; fewer are rounded less often, more are faster."""


@dataclass(frozen=True, eq=False, repr=False)
class Separable(Transform):
    """Products of matrices of cosines and sines, one for each axis: (m + n)(2·modes + 1)^d operations.

    Plain torch on any device, and every rounding is counted.

    Examples:
        >>> from regard.engines import Fourier, Separable
        >>> layer, x = regard.Attention(regard.Gaussian()), torch.rand(300, 1, dtype=torch.float64)
        >>> series = regard.apply(layer, x, engine=Fourier(1e-9, Separable()))
        >>> bool((series - layer(x)).abs().max() < 1e-9)
        True
    """

    def grid(self, points: Tensor, strengths: Tensor, series: Series) -> Tensor:
        return _spread(points, strengths, series)

    def values(self, points: Tensor, grid: Tensor, columns: int, series: Series) -> Tensor:
        rows, parts = _chunk(series, columns), []
        for low in range(0, points.shape[-2], rows):
            first, *others = _basis(points[:, low : low + rows], series)
            parts.append(_contract(first, others, grid))
        return torch.cat(parts, -2)

    def slopes(self, points: Tensor, grid: Tensor, series: Series) -> Tensor:
        rows = _chunk(series, 1)
        found = points.new_empty(*points.shape[:-1], 1 + series.dimension)
        for low in range(0, points.shape[-2], rows):
            some = slice(low, low + rows)
            basis = _basis(points[:, some], series)
            for axis, values in enumerate(_all_fields(basis, grid, series)):
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
