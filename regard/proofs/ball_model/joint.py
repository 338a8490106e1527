"""What is left of all tokens together, as one ellipsoid that has no columns: |Σ_i a_i·e_i| ≤ (aᵀGa)^{1/2} for
all a = (a_i) (M12).

A map J of all tokens makes JGJᵀ of it, a map of single tokens T_iG_ijT_jᵀ, and another set is added by (M1).
So nothing is ever factored: B with BBᵀ = G is a manner of speaking, |B_i|_F² = tr G_ii.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, near_largest_roots
from regard._upper import Upper, relative_error, root
from regard.proofs.ball_model.ellipsoids import SMALLEST, lifted, trace_roots, turned, widths
from regard.proofs.ball_model.groups import Groups, fresh_names
from regard.proofs.ball_model.updates import Map, lower_products, product_size, whole_of


@dataclass(frozen=True)
class Joint:
    """TGTᵀ with G (n d, n d), of which the blocks below the diagonal count, and T of single tokens (n, e, d),
    which is put off; None for no T. own (n, e, e): at least T_iG_iiT_iᵀ.
    """

    matrix: Tensor
    own: Tensor
    turn: Tensor | None = None

    beside = filled = None
    """As groups have it: nothing."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n, e, n d)."""
        return len(self.own), self.own.shape[-1], len(self.matrix)

    @property
    def ellipsoid(self) -> Tensor:
        """One that holds e_i, (n, e, e)."""
        return self.own

    @cached_property
    def columns(self) -> Tensor:
        """G as columns of tokens (n, d, n d), where no T is put off."""
        assert self.turn is None
        return self.matrix.unflatten(0, self.own.shape[:2])

    @cached_property
    def size(self) -> Upper:
        """At least |G|_F."""
        return computed_lengths(self.matrix.flatten())

    @cached_property
    def _base_sizes(self) -> Upper:
        """At least tr(G_ii)^{1/2}."""
        return Upper(
            self.matrix.diagonal().unflatten(0, (len(self.own), -1)).sum(-1).clamp_min(0.0).sqrt(),
            len(self.matrix) + 4,
        )

    @property
    def sizes(self) -> Upper:
        """At least |T_i|_F |B_i|_F, (n, 1)."""
        if self.turn is None:
            return self._base_sizes.unsqueeze(-1)
        return (computed_lengths(self.turn.flatten(-2)) * self._base_sizes).unsqueeze(-1)

    @property
    def made_of(self) -> Upper:
        """At least what images are made of, for each token: with |M| the size of a map, T is off by at most γ
        |M| of it.
        """
        whole = self.sizes.sum(-1)
        return root(self.shape[1]) * whole if self.turn is None else whole

    @property
    def whole_energy(self) -> float:
        """About the trace."""
        return float(self.own.diagonal(dim1=-2, dim2=-1).sum())

    @property
    def is_moving(self) -> Tensor:
        """Which tokens are not points, (n,)."""
        return (self.own != 0).flatten(1).any(-1)

    @property
    def longest(self) -> Upper:
        """At least the length of all e_i together."""
        return near_largest_roots(self.made().matrix)

    def reach(self, directions: Tensor) -> Upper:
        """At least |a·e_i| for directions (n or 1, e, m), (n, m)."""
        return widths(self.own, directions)

    def through(self, matrix: Map) -> Joint:
        """The image under maps of single tokens. Its own ellipsoids hold the rounded T, too: that is off by
        2γ |M|_F `made_of`, and |B_i|_F² ≤ tr Q.
        """
        turn = whole_of(matrix).expand(len(self.own), -1, -1) if self.turn is None else matrix @ self.turn
        whole = (trace_roots(self.own) + self.made_of) * product_size(matrix)
        error = relative_error(8 * self.shape[1] + 64) * whole.square()
        return Joint(self.matrix, lifted(turned(matrix, self.own), error), turn)

    def where(self, kept: Tensor) -> Joint:
        """Nothing for tokens where the mask (n, 1, 1) is false."""
        mask = kept.expand(-1, len(self.matrix) // len(self.own), -1).flatten()
        matrix = torch.where(mask.unsqueeze(-1) & mask, self.matrix, 0.0)
        return Joint(matrix, torch.where(kept, self.own, 0.0), self.turn)

    def made(self) -> Joint:
        """The same with no T put off."""
        return self if self.turn is None else full(self._below(1.0), self.own, self._off)

    def joined(self, shape: Tensor) -> Joint:
        """With ellipsoids (n, e, e) of single tokens: (Σs)(TGTᵀ/s + Σ_iQ_i/s_i) (M1)."""
        length = trace_roots(self.own).norm().bound.clamp_min(SMALLEST)
        traces = trace_roots(shape).bound.clamp_min(SMALLEST)
        weight = (Upper(length) + Upper(traces).sum(-1)).bound
        factor, times = weight / length, weight / traces
        blocks = factor * self.own + shape * times[:, None, None]
        sizes_of = Upper(factor, 1) * (computed_lengths(self.own.flatten(1)).norm() + self._reach)
        sizes_of = sizes_of + (Upper(times, 1) * computed_lengths(shape.flatten(1))).norm()
        error = Upper(factor, 1) * self._off + relative_error(8) * sizes_of
        return full(self._below(float(factor)), blocks, error)

    def _below(self, factor: float) -> Tensor:
        """The blocks of TGTᵀ below the diagonal, times a factor."""
        n, wide, size = self.shape
        if self.turn is None:
            return factor * self.matrix
        d, found = size // n, self.matrix.new_zeros(n * wide, n * wide)
        for i in range(1, n):
            rows = (factor * self.turn[i]) @ self.matrix[i * d : (i + 1) * d, : i * d]
            for j in range(i):
                block = rows[:, j * d : (j + 1) * d] @ self.turn[j].mT
                found[i * wide : (i + 1) * wide, j * wide : (j + 1) * wide] = block
        return found

    @property
    def _reach(self) -> Upper:
        """At least max|T_i|_F² |G|_F."""
        if self.turn is None:
            return self.size
        return computed_lengths(self.turn.flatten(-2)).amax().square() * self.size

    @property
    def _off(self) -> Upper:
        """At least how far all blocks below the diagonal and above it are off, as one matrix: each by at most
        2γ |T_i|_F |G_ij|_F |T_j|_F.
        """
        return relative_error(2 * self.shape[-1] // len(self.own) + 16) * self._reach

    def factored(self) -> Groups | None:
        """As one group: LLᵀ ≥ G for the Cholesky factor L of G + δ, which is backward stable; None where it
        has no square root in numbers.
        """
        one = self.made()
        n, wide, size = one.shape
        trace = Upper(one.matrix.diagonal().sum(), size)
        shift = (relative_error(8 * size + 128) * trace).bound
        gram = one.matrix.clone()
        gram.diagonal().add_(shift)
        upper, failed = torch.linalg.cholesky_ex(gram.mT, upper=True)  # by columns, as LAPACK has it
        factor = upper.mT
        lost = relative_error(4 * size + 16) * computed_lengths(factor.flatten()).square()
        lost = lost + relative_error(4) * trace
        if int(failed) or not float(lost) <= float(shift) < math.inf:
            return None
        filled = tuple((i + 1) * wide for i in range(n))  # a triangle of blocks
        names = fresh_names(size), fresh_names(1).expand(size)
        groups = Groups(factor.unflatten(0, (n, wide)), *names, filled=filled)
        around = lifted(one.own, Upper(2 * shift) + relative_error(8) * trace)
        return groups.with_ellipsoid(around)


def full(lower: Tensor, own: Tensor, error: Upper) -> Joint:
    """The blocks below the diagonal of `lower`, in whose place it is made, and `own` on the diagonal, with at
    least `error` more in every direction.
    """
    n, wide, _ = own.shape
    blocks = lifted(own, Upper(error.bound.expand(n)))
    for i in range(n):
        rows = slice(i * wide, (i + 1) * wide)
        lower[rows, rows] = blocks[i]
        lower[: i * wide, rows] = lower[rows, : i * wide].mT
    return Joint(lower, blocks)


def joint_of(groups: Groups, shape: Tensor) -> Joint:
    """All groups and the ellipsoids (n, d, d) of single tokens as one: (Σs)(Σ B_gB_gᵀ/s_g + Σ Q_i/s_i) by
    (M1).
    """
    flat, width = groups.columns.flatten(0, 1), shape.shape[-1]
    lengths = groups.lengths_of_all.clamp_min(SMALLEST)
    traces = trace_roots(shape).bound.clamp_min(SMALLEST)
    weight = Upper(torch.cat([lengths, traces])).sum(-1)
    scale = weight.bound / lengths
    known = groups.known_ellipsoid
    factor = float(scale) if len(scale) == 1 else 1.0
    left = flat if len(scale) == 1 else flat * scale[groups.index]
    lower = lower_products(left, flat, width, known is None, factor)
    if known is None:
        own = torch.stack([lower[i : i + width, i : i + width] for i in range(0, len(lower), width)])
    else:
        own = factor * known
    own = own + shape * (weight.bound / traces)[:, None, None]
    held = computed_lengths(own.flatten(1)).norm()  # what is known may be more than the columns are
    error = relative_error(2 * flat.shape[-1] + 32) * weight.square() + relative_error(4) * held
    return full(lower, own, error)
