"""Blocks of attention's Jacobian in closed form: J_ij = p_ij Dv_j + G_ij ⊗ ∂_y a(x_i, y_j) + 1{i=j} Σ_l G_il
⊗ ∂_x a(x_i, y_l).

p_i is the row of weights, G_il = ∂o_i/∂s_il the response of the output to one score (p_il (v_l - o_i) for
softmax), a the potential. For softmax and dot products this is W^T {P_ij (I + y_ij v_i^T) + 1{i=j} C_i A^T},
the differential of attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._heads import repeat_groups
from regard._types import over_scores
from regard._verb import Verb
from regard.attention import Attention
from regard.compute.application import problem_of
from regard.compute.engine import working_dtype
from regard.compute.problem import Problem
from regard.derive.bidiagonal import safe_scale
from regard.derive.jacobian import spectral_norms
from regard.lookups import Identity, Linear, Lookup, Table
from regard.measure import Measure
from regard.normalizers import Normalizer, Reference, Softmax
from regard.potentials import Bilinear, Dot, Potential
from regard.potentials.base import linear_terms

NUMBERS = 1 << 23
"""Numbers in the blocks that are held at once."""


class AttentionBlocks:
    """The closed forms for one declaration at one point; the context, where there is one, is held fixed."""

    def __init__(self, attention: Attention, x: Measure, context: Measure | None) -> None:
        kind = working_dtype(x.points.dtype)
        self._attention = attention
        self._fixed = context
        self.point = x.points.detach().to(kind).requires_grad_()
        with torch.enable_grad():
            source = x.replace(points=self.point)
            self.problem: Problem = problem_of(attention, source, context).to(kind)
            self._query_slopes = _slopes(self.problem.queries, self.point)
            self._key_slopes = [] if context is not None else _slopes(self.problem.keys, self.point)
        self.problem = pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, self.problem)
        self.batch = self.problem.batch_shape
        heads = self.batch[-1] if self.batch else 1
        moves = context is None
        self._values = (
            value_slopes.one(attention.lookup, self.point.detach(), x.marks, heads) if moves else None
        )

    def block(self, i: int, j: int) -> Tensor:
        """J_ij, (..., d_out, d_in)."""
        count, keys = self.problem.query_count, self.point.shape[-2]
        i, j = range(count)[i], range(keys)[j]
        return self._rows(slice(i, i + 1))[..., 0, j, :, :]

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Some rows of blocks at a time, (..., rows, n, d_out, d_in)."""
        for rows in self._tiles(self.problem.values.shape[-1] * self.point.shape[-1]):
            yield rows, self._rows(rows)

    def influence(self) -> Tensor:
        """|J_ij|₂ for all pairs."""
        fast = (
            self._fixed is None
            and isinstance(self._attention.lookup, (Identity, Linear))
            and _one_slope(self.problem.potential)
        )
        if not fast:
            found = [spectral_norms(blocks) for _, blocks in self.rows()]
        else:
            found = [self._shared_norms(rows) for rows in self._tiles(8 * self.problem.values.shape[-1])]
        return torch.cat(found, -2)

    def _tiles(self, width: int) -> list[slice]:
        pairs = max(1, self.batch.numel()) * max(1, self.problem.key_count) * max(1, width)
        rows = max(1, NUMBERS // pairs)
        return [
            slice(low, min(low + rows, self.problem.query_count))
            for low in range(0, self.problem.query_count, rows)
        ]

    def _law(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The weights (..., rows, n) and the responses G (..., rows, n, d_out)."""
        problem = self.problem
        queries = pytree.tree_map(lambda t: t[..., rows, :], problem.queries)
        scores = problem.potential.pair(queries, problem.keys)
        marks = problem.rows()[..., rows]
        allowed = problem.support.allows(marks, problem.columns())
        scores = scores.expand(*self.batch, *scores.shape[-2:])
        return respond.one(problem.normalizer, scores, Reference(problem.log_counts, allowed), problem.values)

    def _rows(self, rows: slice) -> Tensor:
        weights, response = self._law(rows)
        columns = slice(0, self.problem.key_count)
        by_query, by_key_features = self._pair_slopes(rows, columns)
        by_key = None if self._fixed is not None else self._by_key(by_key_features, columns)
        size = (
            *self.batch,
            rows.stop - rows.start,
            self.point.shape[-2],
            response.shape[-1],
            self.point.shape[-1],
        )
        blocks = torch.zeros(size, dtype=response.dtype, device=response.device)
        if by_key is not None:
            blocks += response.unsqueeze(-1) * by_key.unsqueeze(-2)
        if self._values is not None:
            blocks += weights.unsqueeze(-1).unsqueeze(-1) * self._values.unsqueeze(-4)
        own = torch.arange(rows.start, rows.stop, device=blocks.device)
        blocks[..., own - rows.start, own, :, :] += self._own_terms(rows, response, by_query)
        return blocks

    def _pair_slopes(self, rows: slice, columns: slice) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """∂a/∂feature of some pairs, (..., rows, n, c), for each feature of the queries and of the keys."""
        problem, count = self.problem, columns.stop - columns.start
        shape = (rows.stop - rows.start, count)

        def spread(side: int, cut: slice) -> Any:
            def one(t: Tensor) -> Tensor:
                some = (
                    t[..., cut, :].movedim(-2, 0).unsqueeze(1 - side).unsqueeze(-2)
                )  # (rows, 1, ..., 1, c) or (1, n, ..., 1, c)
                some = some.reshape(
                    *some.shape[:2], *(1,) * (len(self.batch) + 4 - some.ndim), *some.shape[2:]
                )
                some = some.expand(*shape, *self.batch, 1, t.shape[-1]).clone()
                return some.requires_grad_() if some.dtype.is_floating_point else some

            return pytree.tree_map(one, problem.queries if side == 0 else problem.keys)

        with torch.enable_grad():
            queries, keys = spread(0, rows), spread(1, columns)
            scores = problem.potential.pair(queries, keys)
        leaves = [[t for t in pytree.tree_leaves(side) if t.requires_grad] for side in (queries, keys)]
        both = leaves[0] + leaves[1]
        pull = torch.ones_like(scores)
        found = (
            torch.autograd.grad(scores, both, pull, allow_unused=True)
            if scores.requires_grad
            else (None,) * len(both)
        )
        moved: list[Tensor | None] = [
            None if g is None else g.squeeze(-2).movedim((0, 1), (-3, -2)) for g in found
        ]  # (..., rows, n, c)
        return moved[: len(leaves[0])], moved[len(leaves[0]) :]

    def _by_key(self, gradients: list[Tensor | None], columns: slice) -> Tensor | None:
        """∂_y a of some pairs, (..., rows, n, d_in)."""
        total: Tensor | None = None
        for gradient, slope in zip(gradients, self._key_slopes, strict=True):
            if gradient is not None and slope is not None:
                part = (gradient.transpose(-3, -2) @ slope[..., columns, :, :]).transpose(-3, -2)
                total = part if total is None else total + part
        return total

    def _own_terms(self, rows: slice, response: Tensor, gradients: list[Tensor | None]) -> Tensor:
        """Σ_l G_il ⊗ ∂_x a(x_i, y_l), (..., rows, d_out, d_in)."""
        total = response.new_zeros(*response.shape[:-2], response.shape[-1], self.point.shape[-1])
        for gradient, slope in zip(gradients, self._query_slopes, strict=True):
            if gradient is not None and slope is not None:
                total = total + (response.mT @ gradient) @ slope[..., rows, :, :]
        return total

    def _shared_norms(self, rows: slice) -> Tensor:
        """Where ∂_y a(x_i, y_j) = g_i for all j and the values are linear, J_ij = p B + G gᵀ is a matrix of
        the row plus one of rank one.

        With ĝ = g/|g| and c = B ĝ, J Jᵀ = p² (B Bᵀ - c cᵀ) + z zᵀ, z = |g| G + p c: one eigenproblem a row,
        then one secular equation a pair (golub1973, 5). Blocks on the diagonal have another term and are
        computed whole.
        """
        weights, response = self._law(rows)
        assert self._values is not None
        base = self._values[..., 0, :, :]  # the same for every token, (..., d_out, d_in)
        unit = safe_scale(base)
        base, response = base * unit, response * unit
        by_query, by_key = self._pair_slopes(rows, slice(0, self.problem.key_count))
        first = slice(0, 1)
        slope = self._by_key([None if g is None else g[..., first, :] for g in by_key], first)
        assert slope is not None
        slope = slope[..., 0, :]
        length = torch.linalg.vector_norm(slope, dim=-1, keepdim=True)
        along = (slope / length.clamp_min(torch.finfo(slope.dtype).tiny)) @ base.mT  # c, (..., rows, d_out)
        rest = (base @ base.mT).unsqueeze(-3) - along.unsqueeze(-1) * along.unsqueeze(-2)
        levels, basis = torch.linalg.eigh(rest)
        step = (length.unsqueeze(-1) * response + weights.unsqueeze(-1) * along.unsqueeze(-2)) @ basis
        squares = largest_root(
            levels.clamp_min(0).unsqueeze(-2) * weights.square().unsqueeze(-1), step.square()
        )
        norms = squares.clamp_min(0).sqrt()
        own = torch.arange(rows.start, rows.stop, device=norms.device)
        here = own - rows.start
        whole = weights[..., here, own, None, None] * base.unsqueeze(-3) + response[
            ..., here, own, :, None
        ] * slope.unsqueeze(-2)
        norms[..., here, own] = spectral_norms(whole + self._own_terms(rows, response, by_query))
        return norms / unit


def largest_root(levels: Tensor, squares: Tensor) -> Tensor:
    """The largest eigenvalue of diag(h) + z zᵀ, levels = h, squares = z²: h₁ + μ with Σ_k z_k² / (μ + h₁ -
    h_k) = 1, h₁ the largest level.

    Newton on 1/Σ, which is concave and increasing: from the left it never overshoots, and one term alone it
    solves in one step. It starts where the largest term is one, so no term is larger.
    """
    top = levels.amax(-1, keepdim=True)
    gaps = top - levels
    root = (squares - gaps).amax(-1).clamp_min(0)
    tiny = torch.finfo(root.dtype).tiny
    for _ in range(60):
        inverse = 1 / (root.unsqueeze(-1) + gaps).clamp_min(tiny)
        terms = squares * inverse
        total, slope = terms.sum(-1), (terms * inverse).sum(-1)
        step = torch.where(total > 1, (total - 1) * total / slope.clamp_min(tiny), torch.zeros_like(root))
        root = root + step
        if bool((step <= 4 * torch.finfo(root.dtype).eps * root).all()):
            break
    return top.squeeze(-1) + root


respond = Verb("respond")
"""respond.one(normalizer, scores, reference, values) -> weights (..., m, n) and G = ∂o/∂s (..., m, n, e)."""


@respond.rule(Softmax)
def _softmax(
    normalizer: Softmax, scores: Tensor, reference: Reference, values: Tensor
) -> tuple[Tensor, Tensor]:
    weights = normalizer.weights(scores, reference)
    mean = weights @ values
    response = weights.unsqueeze(-1) * (values.unsqueeze(-3) - mean.unsqueeze(-2))
    temperature = over_scores(normalizer.temperature)
    return weights, response / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)


@respond.rule(Normalizer)
def _any(
    normalizer: Normalizer, scores: Tensor, reference: Reference, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The transposed Jacobian of each row, applied to each column of the values."""
    weights, pull = torch.func.vjp(lambda s: normalizer.weights(s, reference), scores)[:2]
    columns = [
        pull(values[..., c].unsqueeze(-2).expand(weights.shape).contiguous())[0]
        for c in range(values.shape[-1])
    ]
    return weights, torch.stack(columns, -1) if columns else values.new_zeros(*weights.shape, 0)


value_slopes = Verb("value_slopes")
"""value_slopes.one(lookup, points, marks, heads) -> ∂v_j/∂y_j (..., n or 1, d_out, d_in), None where
values do not depend on points.
"""


@value_slopes.rule(Identity)
def _identity(lookup: Identity, points: Tensor, marks: Tensor | None, heads: int) -> Tensor:
    return torch.eye(points.shape[-1], dtype=points.dtype, device=points.device).unsqueeze(0)


@value_slopes.rule(Linear)
def _linear(lookup: Linear, points: Tensor, marks: Tensor | None, heads: int) -> Tensor:
    slope = lookup.w_v.detach().to(points.dtype).mT
    return (repeat_groups("w_v", slope, heads) if slope.ndim > 2 else slope).unsqueeze(-3)


@value_slopes.rule(Table)
def _table(lookup: Table, points: Tensor, marks: Tensor | None, heads: int) -> None:
    return None


@value_slopes.rule(Lookup)
def _lookup(lookup: Lookup, points: Tensor, marks: Tensor | None, heads: int) -> Tensor | None:
    leaf = points.detach().requires_grad_()
    with torch.enable_grad():
        values = lookup.values(leaf, marks)
    found = _slope(values, leaf)
    if found is None or found.ndim == 3:
        return found
    return repeat_groups("values", found.flatten(-2), heads).unflatten(-1, found.shape[-2:])


def _slopes(features: Any, leaf: Tensor) -> list[Tensor | None]:
    """∂feature/∂token of each floating feature, (..., tokens, c, d)."""
    return [
        _slope(t, leaf)
        for t in pytree.tree_leaves(features)
        if isinstance(t, Tensor) and t.dtype.is_floating_point
    ]


def _slope(feature: Tensor, leaf: Tensor) -> Tensor | None:
    """Features are functions of single tokens, so one backward pass gives the slope of one coordinate at
    all tokens at once.
    """
    if not feature.requires_grad:
        return None
    lead = feature.shape[:-2]
    own = (1,) * (len(lead) - leaf.ndim + 2) + tuple(
        leaf.shape[:-2]
    )  # the leaf's batch dimensions; it lacks the heads
    slopes = torch.zeros(*feature.shape, leaf.shape[-1], dtype=leaf.dtype, device=leaf.device)
    for head in itertools.product(
        *(range(size if mine == 1 else 1) for size, mine in zip(lead, own, strict=True))
    ):
        index = tuple(slice(None) if mine > 1 else position for position, mine in zip(head, own, strict=True))
        for c in range(feature.shape[-1]):
            unit = torch.zeros_like(feature)
            unit[(*index, slice(None), c)] = 1
            found = torch.autograd.grad(feature, leaf, unit, retain_graph=True)[0]
            slopes[(*index, slice(None), c)] = found.reshape(
                *(mine for mine in own if mine > 1), *leaf.shape[-2:]
            )
    return slopes


def _one_slope(potential: Potential) -> bool:
    """Whether ∂_y a(x, y) does not depend on y."""
    return all(isinstance(term, (Dot, Bilinear)) for term, _ in linear_terms(potential))
