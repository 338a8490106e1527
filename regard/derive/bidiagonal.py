"""Golub–Kahan bidiagonalization: the largest singular values of an operator from a few products with it
and with its transpose.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard import _check
from regard.derive.estimate import Estimate

if TYPE_CHECKING:
    from regard.derive.jacobian import Jacobian


def largest_singular_values(
    operator: Jacobian, count: int, tolerance: float, max_iterations: int, generator: torch.Generator | None
) -> Estimate:
    """The `count` largest singular values, from below, largest first (golub1965).

    J V = U B and Jᵀ U = V Bᵀ + β v eᵀ with B bidiagonal; the singular values of B approach those of J from
    below. The vectors v are orthogonalized against earlier ones: all of them for several values, which would
    else be found twice; for the largest alone the last ones are enough, and KEPT bytes of them are kept.
    Where vectors end (the operator has few singular values) a fresh one is drawn. All elements of a batch run
    together; each is an operator of its own.
    """
    limit = min(
        max_iterations, operator.size_in, operator.size_out + 1
    )  # one more vector than outputs may have a share in them
    if operator.size_in == 0 or operator.size_out == 0:
        nothing = torch.zeros(*operator.batch_shape, count, dtype=operator.dtype, device=operator.device)
        return Estimate(nothing, nothing.clone(), 0)
    tiny = 16 * torch.finfo(operator.dtype).eps
    space = _Space(operator, min(limit, 16), grows=count > 1)
    v = space.keep(space.draw_direction(generator), None)
    u = operator.mv(v)
    unit = safe_scale(u)  # squares of very small or large products leave the floating range
    left: Tensor | None = None
    diagonal: list[Tensor] = []
    above: list[Tensor] = []
    steps, start, worst = (
        0,
        0,
        torch.zeros(operator.batch_shape, dtype=operator.dtype, device=operator.device),
    )
    while True:
        steps += 1
        u = _rescale(u if steps == 1 else operator.mv(v), unit)
        u = u if left is None else torch.addcmul(u, left, operator.over_out(above[-1]), value=-1)
        alpha = operator.dot_out(u, u).sqrt()
        left = u / operator.over_out(_nonzero(alpha))
        diagonal.append(alpha)
        w, beta = space.orthogonalize(
            torch.addcmul(_rescale(operator.rmv(left), unit), v, operator.over_in(alpha), value=-1)
        )
        above.append(beta)
        ended = beta <= tiny * torch.maximum(diagonal[0], alpha)
        found = steps - start
        often = found >= min(count, 2) + 4 and found % 2 == 0  # looking costs as much as a small product
        look = steps >= count and (often or bool(ended.all()))
        if look or steps == limit:
            values, residuals = _values_and_residuals(diagonal, above, count)
            top = values[..., :1]
            settled = bool((residuals <= tolerance * top).all())
            if steps == limit or (
                settled and (count == 1 or _found_nothing_new(diagonal[start:], above[start:], values, start))
            ):
                break
            if settled:  # a Krylov space sees each value once: look for its copies from a fresh direction
                start, worst = steps, torch.maximum(worst, residuals.amax(-1))
                ended = torch.ones_like(ended)
        if bool(ended.any()):
            above[-1] = torch.where(ended, torch.zeros_like(beta), beta)
            other, length = space.orthogonalize(space.draw_direction(generator))
            w, beta = torch.where(operator.over_in(ended), other, w), torch.where(ended, length, beta)
        v = space.keep(w, beta)
    residuals = torch.maximum(residuals, worst.unsqueeze(-1))
    relative = torch.where(top > 0, residuals / _nonzero(top), torch.zeros_like(residuals))
    return Estimate(values / unit, relative, 2 * steps)


def _rescale(product: Tensor, unit: float) -> Tensor:
    """A product times the unit of `safe_scale`, without a copy where that is one."""
    return product if unit == 1 else product * unit


def safe_scale(product: Tensor) -> float:
    """A power of two that brings a product near one, where its squares would under- or overflow; else one."""
    size = float(product.abs().amax()) if product.numel() else 0.0
    few = 0.25 * math.log2(torch.finfo(product.dtype).max)
    if size == 0 or not math.isfinite(size) or abs(math.log2(size)) < few:
        return 1.0
    return 2.0 ** -round(math.log2(size))


def _found_nothing_new(diagonal: list[Tensor], above: list[Tensor], values: Tensor, start: int) -> bool:
    """Whether the last fresh direction led to nothing larger than the smallest value that is wanted."""
    if start == 0:
        return False
    latest = _values_and_residuals(diagonal, above, 1)[0]
    return bool((latest <= values[..., -1:] * (1 + 1e-6) + torch.finfo(values.dtype).tiny).all())


def _nonzero(value: Tensor) -> Tensor:
    """A divisor that is not zero."""
    return value.clamp_min(torch.finfo(value.dtype).tiny)


KEPT = 4 << 20
"""Bytes of earlier vectors that are kept for the largest singular value."""


class _Space:
    """The span of the vectors so far, in a buffer whose pages are touched only when they are used."""

    def __init__(self, operator: Jacobian, capacity: int, grows: bool) -> None:
        self._operator, self._grows = operator, grows
        size = operator.shape_in.numel() * operator.dtype.itemsize
        capacity = capacity if grows else max(2, min(capacity, KEPT // max(1, size)))
        self._vectors = torch.empty(
            capacity, *operator.shape_in, dtype=operator.dtype, device=operator.device
        )
        self._count = 0

    def draw_direction(self, generator: torch.Generator | None) -> Tensor:
        """A random unit vector."""
        shape = self._operator.shape_in
        drawn = torch.rand(
            shape, generator=generator, dtype=self._operator.dtype, device=self._operator.device
        ).sub_(0.5)
        return drawn / self._operator.over_in(self._operator.dot_in(drawn, drawn).sqrt())

    def keep(self, w: Tensor, length: Tensor | None) -> Tensor:
        """One more unit vector, w over its length; a view of it."""
        if self._count == len(self._vectors) and self._grows:
            self._vectors = torch.cat([self._vectors, torch.empty_like(self._vectors)])
        v = self._vectors[self._count % len(self._vectors)]  # the oldest makes room
        v.copy_(w) if length is None else torch.div(w, self._operator.over_in(_nonzero(length)), out=v)
        self._count += 1
        return v

    def orthogonalize(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of w outside the span, and its length; once more where little was left,
        because that loses digits.
        """
        for _ in range(3):
            w, taken = self._operator.project_out(self._vectors[: self._count], w)
            left = self._operator.dot_in(w, w)
            if bool((taken <= left).all()):
                break
        return w, left.sqrt()


def _values_and_residuals(diagonal: list[Tensor], above: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The largest singular values of the bidiagonal matrix,
    and their residuals β |last entry of the left vector|.
    """
    size = len(diagonal)
    band = torch.diag_embed(torch.stack(diagonal, -1))
    if size > 1:
        band.diagonal(1, -2, -1).copy_(torch.stack(above[:-1], -1))
    _check.decomposable(band)
    u, s, _ = torch.linalg.svd(band)
    found = min(count, size)
    return s[..., :found], above[-1].unsqueeze(-1) * u[..., -1, :found].abs()
