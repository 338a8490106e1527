"""Readings: the numbers of each head, from weights alone and from a call of its layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Generator, Tensor

from regard.audits.adapters.base import Declared, Matrices, NotCovered
from regard.audits.checks.spectra import product_norm
from regard.audits.places import Place
from regard.audits.site import Site
from regard.derive import Estimate
from regard.derive.rows import row_statistics
from regard.measure import Measure
from regard.supports import Causal, Full, Support, Window
from regard.supports.base import conjuncts

ROWS = 256
"""How many queries are asked at a time which keys they see."""
TOLERANCE = 5e-3
"""The residual |Jᵀu - σv|/σ at which the norm of a Jacobian is taken."""


def of_weights(own: Matrices) -> dict[str, list[float]]:
    """|scale · W_Q W_Kᵀ|₂ and |W_V W_O|₂ of each head, from c × c matrices;
    NaN where a weight is not finite.
    """
    heads = len(own.w_o)
    w_q, w_k, w_v = (_spread(matrix, heads) for matrix in (own.w_q, own.w_k, own.w_v))
    qk = abs(own.scale) * _norm(w_q, w_k.mT)
    return {"qk_norm": qk.tolist(), "ov_norm": _norm(w_v, own.w_o).tolist()}


def of_call(declared: Declared) -> dict[str, list[float]]:
    """Mean entropy and largest logit of each head over the rows of all sequences; NaN where a token is not
    finite.

    Queries that see no key have no law, and padding is no token: both are left out.
    """
    attention, points, context, marks = _promote(declared)
    source = (
        points.unsqueeze(-3) if marks is None else Measure(points.unsqueeze(-3), marks=marks.unsqueeze(-2))
    )
    keys = points if context is None else context
    if not torch.isfinite(points).all() or not torch.isfinite(keys).all():
        nothing = [torch.nan] * len(declared.w_o)
        return {"entropy": nothing, "max_logit": nothing}
    found = row_statistics(attention, source, None if context is None else context.unsqueeze(-3))
    entropy, logits = (_by_head(values, len(declared.w_o)) for values in (found.entropy, found.max_logit))
    counted = logits != -torch.inf
    if context is None:
        counted = counted & ~_by_head(
            padding(attention.support, points, marks).expand_as(found.entropy), len(declared.w_o)
        )
    if not counted.any(-1).all():
        raise NotCovered("all tokens of the first sequences are padding, or see no key")
    means = entropy.where(counted, 0.0).sum(-1) / counted.sum(-1)
    return {"entropy": means.tolist(), "max_logit": logits.where(counted, -torch.inf).amax(-1).tolist()}


def padding(support: Support, points: Tensor, marks: Tensor | None) -> Tensor:
    """Which tokens of a sequence that attends to itself are hidden from every query of every head, (batch or
    1, 1, n).

    Where no token sees itself, as in a mask of the strict past, being hidden says nothing. Pairs are read a
    few rows at a time.
    """
    count = points.shape[-2]
    if all(isinstance(part, (Full, Causal, Window)) for part in conjuncts(support)):
        return torch.zeros(1, 1, count, dtype=torch.bool, device=points.device)
    places = torch.arange(count, device=points.device) if marks is None else marks.unsqueeze(-2)
    seen = torch.stack(
        [
            _visible_keys(support, places, rows)
            for rows in torch.arange(count, device=points.device).split(ROWS)
        ]
    )
    visible, itself = seen.any(0).any(-3).unbind(-2)
    return (~visible & itself.any(-1, keepdim=True)).unsqueeze(-2)


def first_sequences(declared: Declared, count: int) -> Declared:
    """The first elements of the batch; one is without a batch in its support, as adapters have it."""
    support, batch = declared.attention.support, len(declared.points)
    if batch > 1:  # tables of a support lead with the batch where there is more than one input
        support = pytree.tree_map(
            lambda part: _leading(part, count) if isinstance(part, Tensor) else part, support
        )
    part: dict[str, Any] = {
        name: _first(getattr(declared, name), count) for name in ("points", "context", "marks", "own")
    }
    return replace(declared, attention=declared.attention.replace(support=support), **part)


def keep(declared: Declared) -> Declared:
    """The same with memory of its own for the tokens, so that the rest of a batch can go;
    weights stay those of the model.
    """
    part: dict[str, Any] = {
        name: _copy(getattr(declared, name)) for name in ("points", "context", "marks", "own")
    }
    return replace(declared, **part)


def jacobian_norm(place: Place, declared: Declared, generator: Generator) -> Estimate:
    """The largest singular value of the derivative of a layer (heads, joined) at one sequence, from below,
    in float64.
    """
    site = Site(place.path, place.layer, place.kind, declared, None)
    found = site.jacobian().norm(tolerance=TOLERANCE, generator=generator)
    assert isinstance(found, Estimate)
    return found


def _visible_keys(support: Support, places: Tensor, rows: Tensor) -> Tensor:
    """Which keys some of these rows see, and which of these rows see themselves, (batch or 1, heads or 1, 2,
    n).
    """
    count = places.shape[-1]
    allowed = support.allows(places[..., rows], places)
    allowed = allowed.expand(*allowed.shape[:-2], len(rows), count)
    own = allowed & (torch.arange(count, device=rows.device) == rows.unsqueeze(-1))
    found = torch.stack([allowed.any(-2), own.any(-2)], -2)
    return found.reshape(*(1,) * (4 - found.ndim), *found.shape)


def _norm(left: Tensor, right: Tensor) -> Tensor:
    """The spectral norm of a product; decompositions fail on what is not finite, so that is left out."""
    finite = (left.isfinite().flatten(-2).all(-1) & right.isfinite().flatten(-2).all(-1)).cpu()
    found = torch.full(finite.shape, torch.nan, dtype=torch.float64)
    if finite.any():
        found[finite] = product_norm(left[finite], right[finite]).cpu()
    return found


def _spread(grouped: Tensor, heads: int) -> Tensor:
    """Grouped keys or values, once for each head that uses them."""
    return grouped.detach().repeat_interleave(heads // len(grouped), 0)


def _promote(declared: Declared) -> Any:
    """Attention, points, context and marks in one arithmetic of at least single precision:
    autocast mixes several.
    """
    double = declared.w_o.dtype == torch.float64
    target = torch.float64 if double else torch.float32

    def promote(part: Any) -> Any:
        return part.detach().to(target) if isinstance(part, Tensor) and part.dtype.is_floating_point else part

    return pytree.tree_map(promote, (declared.attention, declared.points, declared.context, declared.marks))


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Numbers (batch, h, n) as (h, batch · n)."""
    return values.expand(values.shape[0], heads, values.shape[-1]).transpose(0, 1).flatten(1)


def _leading(table: Tensor, count: int) -> Tensor:
    return table[0] if count == 1 else table[:count]


def _first(values: Tensor | None, count: int) -> Tensor | None:
    return None if values is None else values[:count].detach()


def _copy(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.clone()
