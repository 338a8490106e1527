"""All heads of a subject at one sequence: their joint Jacobian, and both ways to combine bounds of heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from regard._upper import Upper, exact, relative_error, stack, total
from regard.domains import Near
from regard.proofs.near.ellipsoids import HeadShape
from regard.proofs.near.head import LocalHead, LocalValues, narrow_value_matrix, value_matrix
from regard.proofs.subject import MultiHead

AT_ONCE = 4_000_000
"""Numbers in the matrices of heads that are looked at together."""


class LocalHeads:
    """All heads at one sequence.

    `separate` have their values before mixing, `folded` those after it; `residual`: x is added.
    """

    def __init__(self, subject: MultiHead, domain: Near) -> None:
        self.subject, self.domain = subject, domain
        self.residual = subject.residual
        self.mixing = subject.mixing
        self.heads = [LocalHead(head, domain) for head in subject.separate]
        self.n, self.d = self.heads[0].n, self.heads[0].d
        pairs = zip(self.heads, subject.separate, strict=True)
        self.separate = [LocalValues(local, value_matrix(head, self.d)) for local, head in pairs]
        self.folded: list[LocalValues] | None = None
        if subject.folded is not None:
            pairs = zip(self.heads, subject.folded, strict=True)
            self.folded = [LocalValues(local, narrow_value_matrix(head, self.d)) for local, head in pairs]
        self._parts: dict[tuple[int, ...], LocalHeads] = {}

    @property
    def joined(self) -> list[LocalValues]:
        """The values in the output: folded, or separate where heads are side by side."""
        return self.separate if self.folded is None else self.folded

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The matrix of each head to the output (d, e), as wide as the output where heads are mixed."""
        chosen = self.subject.separate if self.subject.folded is None else self.subject.folded
        return [head.matrix(self.d) for head in chosen]

    @property
    def width(self) -> int:
        """Of an output token."""
        widths = [matrix.shape[-1] for matrix in self.outputs]
        return sum(widths) if self.folded is None else widths[0]

    @cached_property
    def shapes(self) -> list[HeadShape]:
        """What the values of each head are in the output; heads that are not mixed are side by side."""
        widths = [values.matrix.center.shape[-1] for values in self.separate]
        apart = torch.eye(sum(widths), dtype=torch.float64).split(widths)
        mixers = apart if self.subject.w_o is None else self.subject.w_o
        trios = zip(self.separate, self.joined, mixers, strict=True)
        return [HeadShape(separate, folded, mixer, self.mixing) for separate, folded, mixer in trios]

    def with_rows(self, rows: slice) -> LocalHeads:
        """The same heads with some of their rows, which cost far less where tokens are wide or many;
        the last such part is kept.
        """
        queries = torch.arange(self.n)[rows]
        if len(queries) == self.n:
            return self
        key = tuple(queries.tolist())
        if key not in self._parts:
            self._parts.clear()
            self._parts[key] = self._with_rows(queries)
        return self._parts[key]

    def _with_rows(self, queries: Tensor) -> LocalHeads:
        part = copy.copy(self)
        part._parts = {}  # its own: in that of the whole it would hold itself, and wait for the collector
        part.heads = [local.with_rows(queries) for local in self.heads]
        part.separate = _with_heads(self.separate, part.heads)
        part.folded = None if self.folded is None else _with_heads(self.folded, part.heads)
        trios = zip(self.shapes, part.separate, part.joined, strict=True)
        part.shapes = [shape.with_rows(separate, folded) for shape, separate, folded in trios]
        return part

    # Bounds of heads together

    def combine(self, bound: Callable[[LocalValues, int], Upper]) -> Upper:
        """A bound of each head's values, together: the smaller of Σ_h b_h (folded) and |W_O| √Σ_h b_h²
        (separate).
        """
        joined = self.mixing * stack([bound(values, h) for h, values in enumerate(self.separate)]).norm(0)
        if self.folded is None:
            return joined
        return joined.minimum(total([bound(values, h) for h, values in enumerate(self.folded)]))

    def add(self, each: list[Upper]) -> Upper:
        """Bounds of what heads add to the output, from one for each;
        heads that are not mixed are side by side.
        """
        return stack(each).norm(0) if self.folded is None else total(each)

    # The Jacobian

    @cached_property
    def jacobian(self) -> Tensor:
        """∂F_i/∂x_j of all heads together (n, n, e, d), the residual included;
        heads that are not mixed are side by side in e.
        """
        every = torch.arange(self.n)
        return self._columns(every, every)

    def columns(self, tokens: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """The blocks of some rows and some tokens, (rows, tokens, e, d);
        those of a few alone where the whole is not there yet.
        """
        if "jacobian" in self.__dict__ or 2 * len(tokens) > self.n:
            return self.jacobian[rows][:, tokens]
        return self._columns(tokens, torch.arange(self.n)[rows])

    def column_grams(self, token: int) -> tuple[Tensor, Tensor]:
        """Σ_i J_ijᵀJ_ij of one column (d, d): that of its own row, and the sum over all others,
        some rows at a time.
        """
        column, rows = torch.tensor([token]), torch.arange(self.n)
        some = max(1, AT_ONCE // max(1, self.width * self.d))
        rest = torch.zeros(self.d, self.d, dtype=torch.float64)
        for others in rows[rows != token].split(some):
            blocks = self.columns(column, others)[:, 0].flatten(0, 1)
            rest += blocks.mT @ blocks
        own = self.columns(column, column)[0, 0]
        return own.mT @ own, rest

    def _columns(self, tokens: Tensor, rows: Tensor) -> Tensor:
        pairs = list(zip(self.heads, self.outputs, strict=True))
        if self.folded is None:
            blocks = torch.cat([_blocks([pair], tokens, rows) for pair in pairs], -2)
        else:
            some = max(1, AT_ONCE // max(1, pairs[0][1].numel()))
            blocks = _blocks(pairs[:some], tokens, rows)
            for first in range(some, len(pairs), some):
                blocks += _blocks(pairs[first : first + some], tokens, rows)
        if self.residual:
            blocks[rows.unsqueeze(-1) == tokens] += torch.eye(self.d, dtype=torch.float64)
        return blocks

    def push(self, tangents: Tensor) -> Tensor:
        """J t for several tangents at once, (n, d, b) to (n, e, b)."""
        pairs = zip(self.heads, self.outputs, strict=True)
        parts = [torch.einsum("idb,de->ieb", local.push(tangents), matrix) for local, matrix in pairs]
        found = torch.cat(parts, 1) if self.folded is None else torch.stack(parts).sum(0)
        return found + tangents if self.residual else found

    def pull(self, cotangents: Tensor) -> Tensor:
        """Jᵀu for several cotangents at once, (n, e, b) to (n, d, b)."""
        found = (
            cotangents.clone()
            if self.residual
            else torch.zeros(self.n, self.d, cotangents.shape[-1], dtype=torch.float64)
        )
        offset = 0
        for local, matrix in zip(self.heads, self.outputs, strict=True):
            mine = (
                cotangents if self.folded is not None else cotangents[:, offset : offset + matrix.shape[-1]]
            )
            offset += matrix.shape[-1]
            found += local.pull(torch.einsum("ieb,de->idb", mine, matrix))
        return found

    def jacobian_error(self, moves: Tensor) -> Upper:
        """What rounding of the blocks may hide of a row's linear move Σ_j J_ij d_j, |d_j| ≤ ρ_j, (n,).

        A block is P_ij (Vᵀ + Vᵀy v_ijᵀ), and Vᵀ Cov(x, c) more for j = i. Each of its factors is off by its
        own error, and sums and products by at most `relative` of the sizes that they are made of.
        """
        rho = exact(moves)
        found = exact(torch.zeros(self.n, dtype=torch.float64))
        for separate, values in zip(self.separate, self.joined, strict=True):
            found = found + _block_errors(separate.local, values, rho, self)
        return found + relative_error(2) * rho if self.residual else found


def _block_errors(local: LocalHead, values: LocalValues, rho: Upper, heads: LocalHeads) -> Upper:
    matrix, v, c = values.matrix, local.by_key, local.by_query
    wide = 2 * local.radius + local.y_error  # at least |y|
    steep = c.lengths().amax()
    relative = relative_error(
        local.law_roundings + 2 * local.n + 3 * local.d + heads.width + len(heads.heads) + 16
    )
    thick = matrix.length + matrix.error
    size = (local.law * (wide * local.alpha + 1)) @ rho.unsqueeze(-1)
    inexact = thick * relative * (size[..., 0] + 2 * wide * steep * rho)
    slope = (local.law * (local.y_error * local.alpha + wide * v.error)) @ rho.unsqueeze(-1)
    turned = 2 * (local.y_error * steep + wide * c.error) * rho
    known = matrix.error * (size[..., 0] + 2 * wide * steep * rho)
    return inexact + matrix.norm * (slope[..., 0] + turned) + known


def _with_heads(values: list[LocalValues], heads: list[LocalHead]) -> list[LocalValues]:
    return [LocalValues(local, value.matrix) for local, value in zip(heads, values, strict=True)]


def _blocks(pairs: list[tuple[LocalHead, Tensor]], columns: Tensor, rows: Tensor) -> Tensor:
    """Σ_h ∂(V_hᵀm_i)/∂x_j (rows, columns, e, d) = P_ij (Vᵀ + Vᵀy_ij v_ijᵀ) summed over heads,
    and Vᵀ Cov_i(x, c) more for j = i.
    """
    law = torch.stack([local.p[rows][:, columns] for local, _ in pairs], -1)  # (rows, columns, heads)
    away = (local.x.center[columns] - local.means.center[rows].unsqueeze(1) for local, _ in pairs)
    turns = torch.stack([y @ matrix for y, (_, matrix) in zip(away, pairs, strict=True)], -2) * law.unsqueeze(
        -1
    )
    keys = (local.by_key.center for local, _ in pairs)
    chosen = (v[rows] if v.shape[1] == 1 else v[rows][:, columns] for v in keys)
    slopes = torch.stack([v.expand(-1, len(columns), -1) for v in chosen], -2)
    matrices = torch.stack([matrix.mT for _, matrix in pairs])
    blocks = (law @ matrices.flatten(1)).unflatten(-1, matrices.shape[1:])
    blocks += turns.mT @ slopes
    at, own = (rows.unsqueeze(-1) == columns).nonzero().unbind(-1)
    for local, matrix in pairs:
        blocks[at, own] += matrix.mT @ local.covariance_in_query(rows[at])
    return blocks
