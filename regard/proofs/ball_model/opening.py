"""How ellipsoids of single tokens become groups, which tokens share, and their columns ellipsoids again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._enclosed import computed_lengths
from regard._upper import Upper, relative_error, total
from regard.proofs.ball_model.ellipsoids import SMALLEST, Sum, ball_shape, lifted, pushed, trace_roots
from regard.proofs.ball_model.groups import Groups, fresh_names, side_by_side


def opened(groups: Groups, shape: Tensor, most: int) -> tuple[Groups, Tensor]:
    """Ellipsoids (n, d, d) as groups that other tokens may share, and what is left of them: of all columns,
    old and new, the `most` longest stay groups.

    With Π = VVᵀ, e = Πe + (I - Π)e. Vᵀe lies in the ellipsoid of VᵀQV, which is no more than diag(λ) + δ.
    """
    n, width = shape.shape[:2]
    values, vectors = torch.linalg.eigh(shape)
    energy = torch.cat([groups.energy, values.clamp_min(0.0).flatten()])
    kept = torch.zeros(len(energy), dtype=torch.bool)
    kept[energy.argsort(descending=True)[:most]] = True
    old, new = kept[: len(groups.labels)], kept[len(groups.labels) :].unflatten(0, (n, width))
    basis = vectors * new.unsqueeze(-2)
    inner = basis.mT @ shape @ basis
    unit = relative_error(2 * width + 4) * width
    off = computed_lengths((inner - torch.diag_embed(values * new)).flatten(1)) + unit * computed_lengths(
        shape.flatten(1)
    )
    lengths = (Upper(values.clamp_min(0.0), 1) + off.unsqueeze(-1)).sqrt().bound
    fresh = _fresh(basis * lengths.unsqueeze(-2), new)
    left = Sum(n, width).shape(pushed(torch.eye(width, dtype=torch.float64) - basis @ basis.mT, shape))
    rounding = relative_error(width + 8) * width * computed_lengths(shape.flatten(1)).sqrt()
    left.ball(rounding + relative_error(4) * computed_lengths(lengths))
    groups.of(~old).merged_into(left)
    return side_by_side(groups.of(old), fresh), left.done()


def one_ball(columns: Tensor, beside: Tensor | None = None) -> Groups:
    """A single group with these columns (n, d, k), with fresh names."""
    count = columns.shape[-1]
    return Groups(columns, fresh_names(count), fresh_names(1).expand(count), beside=beside)


OPENED = 0.5
"""Ellipsoids of at least this part of the longest become columns; the others stay beside them."""
HIDDEN = 1e-9
"""What part of all weights that is given to what rounding changes in columns."""


def gathered(groups: Groups, shape: Tensor) -> Groups | None:
    """All groups and the ellipsoids (n, d, d) of single tokens in one ball (M11): the longest ellipsoids as
    columns, the others beside them. None where they have no square root in numbers.

    Parts p of which each is in a ball of its own, |w_p|² + ν_pi² ≤ 1, are in one together, if columns are
    multiplied by (W/s_p)^{1/2} and what is beside them by W/s_p, for W ≥ Σ s_p. What rounding changes in
    columns is a part, too.
    """
    n, width = shape.shape[:2]
    traces = trace_roots(shape).bound.clamp_min(SMALLEST)
    opening = traces >= OPENED * traces.amax()
    others = torch.linalg.vector_norm(torch.where(opening, 0.0, traces)).clamp_min(SMALLEST).reshape(1)
    lengths = _ball_lengths(groups)
    known = Upper(torch.cat([lengths, traces[opening], others])).sum(-1).bound
    hidden = HIDDEN * known
    weight = (Upper(known) + Upper(hidden)).bound
    roots = _roots(shape[opening] * (weight / traces[opening])[:, None, None])
    if roots is None:
        return None
    fresh = shape.new_zeros(n, width, len(roots), width)
    fresh[opening, :, torch.arange(len(roots))] = roots
    columns = torch.cat([groups.columns * (weight / lengths).sqrt()[groups.index], fresh.flatten(2)], -1)
    off = relative_error(8) * computed_lengths(columns.flatten(1))
    parts = [(torch.where(opening[:, None, None], 0.0, shape), weight / others)]
    parts += [] if groups.beside is None else [(groups.beside, weight / lengths)]
    beside = ball_shape(off * Upper(weight / hidden, 2).sqrt(), width)
    for part, factor in parts:
        beside.addcmul_(factor, part)
    made_of = total([Upper(factor) * computed_lengths(part.flatten(1)) for part, factor in parts])
    return one_ball(columns, lifted(beside, relative_error(8) * made_of))


def _ball_lengths(groups: Groups) -> Tensor:
    """About how long each group is in all tokens, with what is beside it."""
    lengths = groups.lengths_of_all
    if groups.beside is not None:
        lengths = (lengths.square() + trace_roots(groups.beside).bound.square().sum()).sqrt()
    return lengths.clamp_min(SMALLEST)


def _roots(shapes: Tensor) -> Tensor | None:
    """L (…, d, d) with LLᵀ no less than shapes that are rounded twice: the Cholesky factor of Q + δ."""
    width = shapes.shape[-1]
    trace = Upper(shapes.diagonal(dim1=-2, dim2=-1).sum(-1), width)
    shift = (relative_error(8 * width + 64) * trace).bound.clamp_min(1e-250)
    root, failed = torch.linalg.cholesky_ex(
        shapes + shift[:, None, None] * torch.eye(width, dtype=torch.float64)
    )
    lost = (
        relative_error(4 * width + 16) * computed_lengths(root.flatten(1)).square()
        + relative_error(8) * trace
    )
    if bool(failed.any()) or not bool((lost.bound <= shift).all()):
        return None
    return root


def closed(groups: Groups, shape: Tensor, most: int) -> tuple[Groups, Tensor]:
    """The `most` longest columns, and ellipsoids with all others: in the ball of a single group they cost
    nothing, |w|² + |w'|² + ν_i² ≤ 1.
    """
    if len(groups.labels) <= most:
        return groups, shape
    kept = torch.zeros(len(groups.labels), dtype=torch.bool)
    kept[groups.energy.argsort(descending=True)[:most]] = True
    cut = groups.of(~kept)
    if not groups.is_single:
        return groups.of(kept), cut.merged_into(Sum(*shape.shape[:2]).shape(shape)).done()
    return replace(groups.of(kept), beside=replace(cut, beside=groups.beside).ellipsoid), shape


def _fresh(roots: Tensor, kept: Tensor) -> Groups:
    """The kept columns of each token (n, d, d) as a group of its own."""
    n, width = roots.shape[:2]
    token, column = kept.nonzero().unbind(-1)
    columns = torch.zeros(n, width, len(token), dtype=torch.float64)
    columns[token, :, torch.arange(len(token))] = roots[token, :, column]
    return Groups(columns, fresh_names(len(token)), fresh_names(n)[token])
