"""Golub–Kahan bidiagonalization: the largest singular values of an operator from a few products with it and with its transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.derive.estimate import Estimate

if TYPE_CHECKING:
    from regard.derive.jacobian import Jacobian


def largest(operator: Jacobian, count: int, tolerance: float, max_iterations: int, generator: torch.Generator | None) -> Estimate:
    """The `count` largest singular values, from below, largest first (golub1965).

    J V = U B and Jᵀ U = V Bᵀ + β v eᵀ with B bidiagonal; the singular values of B approach those of J from below. The vectors v are
    orthogonalized against all earlier ones; where they end (the operator has few singular values) a fresh one is drawn.
    All elements of a batch run together; each is an operator of its own.
    """
    limit = min(max_iterations, operator.size_in, operator.size_out) if operator.size_in and operator.size_out else 0
    if limit == 0:
        nothing = torch.zeros(*operator.batch_shape, count, dtype=operator.dtype, device=operator.device)
        return Estimate(nothing, nothing.clone(), 0)
    tiny = 16 * torch.finfo(operator.dtype).eps
    space = _Space(operator, min(limit, 16))
    v = space.fresh(generator)
    space.keep(v)
    left: Tensor | None = None
    diagonal: list[Tensor] = []
    above: list[Tensor] = []
    steps = 0
    while True:
        steps += 1
        u = operator.mv(v)
        u = u if left is None else u - operator.over(above[-1]) * left
        alpha = operator.dot_out(u, u).sqrt()
        left = u / operator.over(torch.where(alpha > 0, alpha, torch.ones_like(alpha)))
        diagonal.append(alpha)
        w = space.orthogonal(operator.rmv(left) - operator.over(alpha) * v)
        beta = operator.dot_in(w, w).sqrt()
        scale = torch.stack(diagonal + above).amax(0)
        ended = beta <= tiny * scale
        beta = torch.where(ended, torch.zeros_like(beta), beta)
        above.append(beta)
        values, residuals = _triples(diagonal, above, count)
        top = values[..., :1]
        done = (residuals <= tolerance * top).all() if steps >= count else False
        if steps == limit or bool(done):
            break
        v = w / operator.over(torch.where(beta > 0, beta, torch.ones_like(beta)))
        if bool(ended.any()):
            other = space.orthogonal(space.fresh(generator))
            other = other / operator.over(operator.dot_in(other, other).sqrt())
            v = torch.where(operator.over(ended), other, v)
        space.keep(v)
    relative = torch.where(top > 0, residuals / torch.where(top > 0, top, torch.ones_like(top)), torch.zeros_like(residuals))
    return Estimate(values, relative, 2 * steps)


class _Space:
    """The span of the vectors so far, in a buffer whose pages are touched only when they are used."""

    def __init__(self, operator: Jacobian, capacity: int) -> None:
        self._operator = operator
        self._vectors = torch.empty(capacity, *operator.shape_in, dtype=operator.dtype, device=operator.device)
        self._count = 0

    def fresh(self, generator: torch.Generator | None) -> Tensor:
        """A random unit vector."""
        shape = self._operator.shape_in
        drawn = torch.randn(shape, generator=generator, dtype=self._operator.dtype, device=self._operator.device)
        return drawn / self._operator.over(self._operator.dot_in(drawn, drawn).sqrt())

    def keep(self, v: Tensor) -> None:
        """One more vector."""
        if self._count == len(self._vectors):
            self._vectors = torch.cat([self._vectors, torch.empty_like(self._vectors)])
        self._vectors[self._count] = v
        self._count += 1

    def orthogonal(self, w: Tensor) -> Tensor:
        """What is left of w outside the span; twice, because once loses digits."""
        for _ in range(2):
            w = self._operator.without(self._vectors[: self._count], w)
        return w


def _triples(diagonal: list[Tensor], above: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The largest singular values of the bidiagonal matrix, and their residuals β |last entry of the left vector|."""
    size = len(diagonal)
    band = torch.diag_embed(torch.stack(diagonal, -1))
    if size > 1:
        band = band + torch.diag_embed(torch.stack(above[:-1], -1), 1)
    u, s, _ = torch.linalg.svd(band)
    found = min(count, size)
    return s[..., :found], above[-1].unsqueeze(-1) * u[..., -1, :found].abs()
