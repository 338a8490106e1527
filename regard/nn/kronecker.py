"""Jacobians up to what moves the weights: attention whose weights stay as they are is P ⊗ Mᵀ.

log det(I + P ⊗ Mᵀ) = Σ_ij log(1 + λ_i(P) λ_j(M)): a control variate for the series of J, whose mean is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._verb import Verb
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.lookups import Factored, Identity, Linear
from regard.maps import Affine, Compose, Heads
from regard.nonexpansive import IntoBall

kronecker = Verb("kronecker")
"""kronecker.one(map, x) -> (P, M): J is close to P ⊗ Mᵀ at x, P (..., n, n), M (d, e)."""


@kronecker.rule(object, Tensor)
def _unknown(map: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    name = type(map).__name__
    remedy = f"give control=False, or say it with @kronecker.rule({name}, Tensor)"
    raise ArgumentError(
        "control", f"is True, and the Jacobian of {name} is not close to a product P ⊗ M", remedy
    )


@kronecker.rule(Attention, Tensor)
def _attention(map: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = map.weights(x)
    lookup = map.lookup
    if isinstance(lookup, Identity):
        return rows, torch.eye(x.shape[-1]).to(x)
    if isinstance(lookup, (Linear, Factored)):
        matrix = lookup.w_v if isinstance(lookup, Linear) else lookup.w @ lookup.u
        if matrix.ndim == 2:
            return rows, matrix
    return _unknown(map, x)


@kronecker.rule(Heads, Tensor)
def _heads(map: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    if len(map.w_o) != 1:
        found = "is True, and a sum over several heads is not close to one product P ⊗ M"
        raise ArgumentError("control", found, "give control=False")
    lookup = map.attention.lookup
    values = lookup.w_v.reshape(-1, lookup.w_v.shape[-1]) if isinstance(lookup, Linear) else None
    rows = map.attention.weights(x if x.ndim == 2 else x.unsqueeze(-3))
    rows = rows.squeeze(-3) if rows.ndim > x.ndim else rows
    return rows, map.w_o[0] if values is None else values @ map.w_o[0]


@kronecker.rule(Affine, Tensor)
def _affine(map: Affine, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.eye(x.shape[-2]).to(x), map.w


@kronecker.rule(IntoBall, Tensor)
def _into_ball(map: IntoBall, x: Tensor) -> tuple[Tensor, Tensor]:
    """How much each token is shortened."""
    length = torch.linalg.vector_norm(x, dim=-1)
    tiny = torch.finfo(x.dtype).tiny
    share = torch.where(length > 0, torch.linalg.vector_norm(map(x), dim=-1) / length.clamp_min(tiny), 1.0)
    return torch.diag_embed(share.to(x)), torch.eye(x.shape[-1]).to(x)


@kronecker.rule(Compose, Tensor)
def _compose(map: Compose, x: Tensor) -> tuple[Tensor, Tensor]:
    rows, matrix = kronecker.one(map.maps[0], x)
    for before, inner in zip(map.maps[:-1], map.maps[1:], strict=True):
        x = before(x)
        more, then = kronecker.one(inner, x)
        rows, matrix = more @ rows, matrix @ then
    return rows, matrix
